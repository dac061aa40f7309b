"""Branches of a state: large containers of tensors, whose pickles are kept from save to save.

In a branch are dicts, lists, tuples, literals, plain tensors and DTensors, and nothing else. Passes
of C look through all values of a level at once, so a save spends no Python on each tensor. What is
around the branches is pickled by every save.
"""

from __future__ import annotations

import logging
import operator
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any, NamedTuple

import torch

from localckpt.errors import CheckpointingException
from localckpt.state_dict.containers import LEAVES, joined
from localckpt.state_dict.global_view import named, paths_of
from localckpt.state_dict.skeleton import SkeletonPickler, Taken
from localckpt.state_dict.tensor_table import Properties, kind_of

logger = logging.getLogger(__name__)

_LARGE = 64
# They are kept from save to save, twice.
_MOST_LITERALS_NBYTES = 1 << 20
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MAPPINGS = (dict, OrderedDict)
_CONTAINERS = (*_MAPPINGS, list, tuple)
# Instructions of a pickle that make an empty container.
_EMPTY: dict[type, bytes] = dict(zip(_CONTAINERS, (b"}", b"}", b"]", b")"), strict=True))

_local_tensor = operator.attrgetter("_local_tensor")
_spec = operator.attrgetter("_spec")
_mesh = operator.attrgetter("_spec.mesh")


class SharedValueError(Exception):
    """A container or a tensor of a branch has a second place in the state."""


class Branch(NamedTuple):
    """One branch of a state as it is now.

    ``outline`` is all that the paths of its tensors and their order depend on: its own path, the
    ranks of the marker around it, and level by level the classes, sizes and keys. ``literals`` is a
    pickle, in which 1, 1.0 and True differ, and 0.0 and -0.0.
    """

    root: Any
    outline: list[Any]
    literals: bytes
    tensors: list[torch.Tensor]
    dtensors: list[Any]


class Branches:
    """Branches of a state as it is now, and the ids of all that is in them but their roots."""

    def __init__(self) -> None:
        self.found: list[Branch] = []
        self.inside: set[int] = set()
        # A DTensor exists only where its module is imported, which takes long.
        dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        self._dtensors = () if dtensor is None else (dtensor,)
        self._kinds = LEAVES.union(_TENSORS, self._dtensors, _CONTAINERS)

    def take(self, root: Any, keys: Iterable[Any], marked: Sequence[int] | None) -> bool:
        """Add a container, if it is a branch; raises SharedValueError."""
        if type(root) not in _CONTAINERS or len(root) < _LARGE:
            return False
        outline: list[Any] = [joined(keys), marked]
        literals, tensors, dtensors = list[Any](), list[Any](), list[Any]()
        inside, count, values, is_below = set[int](), 0, [root], False
        while values:
            kinds, below = list(map(type, values)), list[Any]()
            outline.append(kinds)
            present = set(kinds)
            if not present <= self._kinds:
                return False
            for kind in (*_CONTAINERS, *_TENSORS, *self._dtensors):
                if kind not in present:
                    continue
                of_kind = map(partial(operator.is_, kind), kinds)
                those = values if len(present) == 1 else list(compress(values, of_kind))
                # Nobody can tell whether two tuples are one, but by what is in them.
                if is_below and kind not in (*_TENSORS, tuple):
                    inside.update(map(id, those))
                    count += len(those)
                if kind in self._dtensors:
                    dtensors += those
                    those = list(map(_local_tensor, those))
                    if not {*_TENSORS}.issuperset(map(type, those)):
                        return False
                if kind not in _CONTAINERS:
                    tensors += those
                    continue
                outline.append(list(map(len, those)))
                if kind in _MAPPINGS:
                    outline.append(list(chain.from_iterable(those)))
                    if not {str, int}.issuperset(map(type, outline[-1])):
                        return False
                below += chain.from_iterable(
                    map(kind.values, those) if kind in _MAPPINGS else those
                )
                if kind is OrderedDict:
                    below += map(vars, those)
            if len(inside) < count or id(root) in inside:
                return False
            literals += compress(values, map(LEAVES.__contains__, kinds))
            values, is_below = below, True
        pickled = pickle.dumps(literals, pickle.HIGHEST_PROTOCOL)
        # Attributes of tensors are values, too.
        if len(pickled) > _MOST_LITERALS_NBYTES or any(map(vars, chain(tensors, dtensors))):
            return False
        inside.update(map(id, tensors))
        if len(inside) < count + len(tensors):
            once = dict(zip(map(id, tensors), tensors, strict=True))
            numbers = {of: number for number, of in enumerate(once)}
            outline.append(list(map(numbers.__getitem__, map(id, tensors))))
            tensors = [*once.values()]
        if id(root) in self.inside or not self.inside.isdisjoint(inside):
            raise SharedValueError
        fewer, self.inside = sorted((self.inside, inside), key=len)
        self.inside |= fewer
        self.found.append(Branch(root, outline, pickled, tensors, dtensors))
        return True

    def tensors(self) -> list[torch.Tensor]:
        return [*chain.from_iterable(branch.tensors for branch in self.found)]

    def dtensors(self) -> list[Any]:
        return [*chain.from_iterable(branch.dtensors for branch in self.found)]


class _Fragments(NamedTuple):
    """Pickles of branches, which serve until their literals change.

    A skeleton begins with the ``meshes`` of DTensors, and makes all branches before the rest, which
    refers to the n-th as value ``roots[n]`` of ``remembered``, and to the specs of several DTensors
    by ``specs``. In ``stand_ins`` are as many values, of which branches are empty, for a check of
    the rest alone.
    """

    meshes: bytes = b""
    pickled: bytes = b""
    roots: tuple[int, ...] = ()
    specs: tuple[tuple[int, Any], ...] = ()
    remembered: int = 0
    stand_ins: bytes = b""
    has_objects: bool = False


class Structure:
    """All that a save has found of a state but its tensors, for saves of others that are like it.

    States are like each other if only values differ: those of tensors, and literals and objects.
    """

    def __init__(self, *, is_told: bool) -> None:
        """Begin without a state; ``is_told`` if parts of global tensors matter."""
        self._is_told = is_told

    def divide(self, state: Any, taken: Taken) -> Taken:
        """Divide a state, which is taken, into branches and what is around; take it so."""
        try:
            return self._divide(state, taken, has_branches=True)
        except (SharedValueError, CheckpointingException, LookupError) as error:
            logger.debug("every save pickles all of the state: %r", error)
            return self._divide(state, taken, has_branches=False)

    def _look_at(self, state: Any) -> tuple[Branches, Mapping[int, str], list[Any]]:
        """Return a state's branches, and the names and the outlines of tellers around them."""
        branches = Branches()
        names, tellers = named(state, branches.take if self._has_branches else None)
        return branches, names, [t.outline() for t in tellers] if self._is_told else []

    def _divide(self, state: Any, taken: Taken, *, has_branches: bool) -> Taken:
        self._has_branches = has_branches
        branches, names, self._told = self._look_at(state)
        self._outlines = [branch.outline for branch in branches.found]
        self._literals = [branch.literals for branch in branches.found]
        numbers = {id(tensor): number for number, tensor in enumerate(taken.tensors)}
        self._numbers = [numbers[id(tensor)] for tensor in branches.tensors()]
        self._places, self._fragments = [*numbers.values()], _Fragments()
        if branches.found:
            around, _ = self._pickle(state, branches, None)
            # Arrays, and parts of sparse tensors, are other objects in each pickle.
            mine = [numbers.get(id(tensor)) for tensor in around.tensors]
            others = sorted({*self._places}.difference(self._numbers, mine), reverse=True)
            self._places = [others.pop() if number is None else number for number in mine]
            taken, self._fragments = self._pickle(state, branches, None)
        places = [*self._places, *self._numbers]
        if sorted(places) != [*numbers.values()]:
            raise SharedValueError
        self._order = sorted(numbers.values(), key=places.__getitem__)
        self._around = self._described(taken.tensors, names)
        self._specs = _parts_of_specs(branches.dtensors())
        self._wrappers = Properties(branches.dtensors(), are_wrappers=True)
        return self._ordered(taken, branches)

    def take_again(self, state: Any) -> Taken | None:
        """Take a state like the last one; ``None`` for another, or one that cannot be taken.

        The properties of its tensors are not compared.
        """
        try:
            branches, names, told = self._look_at(state)
            if [branch.outline for branch in branches.found] != self._outlines:
                return None
            literals = [branch.literals for branch in branches.found]
            known = self._fragments if literals == self._literals else None
            taken, fragments = self._pickle(state, branches, known)
        except (SharedValueError, CheckpointingException):
            # The caller takes it as a whole, which raises the error with its place in the state.
            return None
        specs = _parts_of_specs(branches.dtensors())
        if (
            len(taken.tensors) != len(self._places)
            or self._described(taken.tensors, names) != self._around
            or told != self._told
            or fragments.meshes != self._fragments.meshes
            or len(specs) != len(self._specs)
            or not all(map(operator.is_, specs, self._specs))
            or not self._wrappers.hold_of(branches.dtensors())
        ):
            return None
        self._literals, self._fragments = literals, fragments
        return self._ordered(taken, branches)

    def _described(self, around: Sequence[torch.Tensor], names: Mapping[int, str]) -> list[Any]:
        # Tensors in branches have no attributes, so their classes tell their kinds.
        return [*paths_of(around, names), *map(kind_of, around)]

    def _ordered(self, around: Taken, branches: Branches) -> Taken:
        tensors = [*around.tensors, *branches.tensors()]
        return around._replace(tensors=list(map(tensors.__getitem__, self._order)))

    def _pickle(
        self, state: Any, branches: Branches, known: _Fragments | None
    ) -> tuple[Taken, _Fragments]:
        """Pickle a state; the tensors returned are those around its branches."""
        pickler = _AroundPickler(branches, self._places)
        of_dtensors = list(map(_mesh, branches.dtensors()))
        by_id = dict(zip(map(id, of_dtensors), of_dtensors, strict=True))
        meshes = pickler.dumped([*by_id.values()], pickle.POP) if by_id else b""
        memo = pickler.memo.copy()
        if known is None or known.meshes != meshes:
            numbers = dict(zip(map(id, branches.tensors()), self._numbers, strict=True))
            known = _fragments(branches, numbers, meshes, memo)
        # To the spec of a single DTensor nothing can refer.
        shared = map(id, (spec for _, spec in known.specs))
        branches.inside |= set(map(id, map(_spec, branches.dtensors()))).difference(shared)
        values: list[Any] = [object() for _ in range(known.remembered)]
        roots = (branch.root for branch in branches.found)
        for number, value in (*zip(known.roots, roots, strict=True), *known.specs):
            values[number] = value
        made = range(len(memo), known.remembered)
        pickler.memo = memo | {id(values[number]): (number, values[number]) for number in made}
        body = pickler.dumped(state, pickle.STOP)
        if len(pickler.met) < len(branches.found):
            raise SharedValueError
        skeleton = b"".join((meshes, known.pickled, body))
        checked = b"".join((meshes, known.stand_ins, body))
        has_objects = pickler.has_objects or known.has_objects
        return Taken(skeleton, pickler.tensors, has_objects, checked), known


class _AroundPickler(SkeletonPickler):
    """Pickler of what is around branches; raises where it comes upon what is in one."""

    def __init__(self, branches: Branches, places: Sequence[int]) -> None:
        super().__init__()
        self._branches, self._places = branches, places
        self._roots = {id(branch.root) for branch in branches.found}
        self.met: set[int] = set()

    def persistent_id(self, obj: Any) -> int | None:
        if id(obj) in self._branches.inside:
            raise SharedValueError
        if id(obj) in self._roots:
            self.met.add(id(obj))
        return super().persistent_id(obj)

    def number_of(self, tensor: torch.Tensor) -> int:
        return self._places[super().number_of(tensor)]


class _BranchPickler(SkeletonPickler):
    """Pickler of branches, whose tensors have numbers."""

    def __init__(self, numbers: Mapping[int, int]) -> None:
        super().__init__()
        self._by_id = numbers

    def number_of(self, tensor: torch.Tensor) -> int:
        return self._by_id[id(tensor)]


def _fragments(
    branches: Branches, numbers: Mapping[int, int], meshes: bytes, memo: dict[int, Any]
) -> _Fragments:
    """Pickle branches; ``numbers`` are those of their tensors, and ``memo`` is of the meshes."""
    pickler = _BranchPickler(numbers)
    pickler.memo = memo
    parts, roots, made = list[bytes](), list[int](), [b""] * len(memo)
    # Others refer to the texts, the classes and the tuples of a first one.
    times = Counter(map(id, map(_spec, branches.dtensors())))
    firsts = {id(dtensor._spec): dtensor for dtensor in reversed(branches.dtensors())}
    if shared := [first for of, first in firsts.items() if times[of] > 1]:
        parts.append(pickler.dumped(shared, pickle.POP))
    numbered = pickler.memo.copy()
    for branch in branches.found:
        root = branch.root
        member = next(iter(root.values() if isinstance(root, dict) else root))
        if type(member) not in LEAVES and type(member) not in _TENSORS:
            parts.append(pickler.dumped(member, pickle.POP))
        # Nothing in a branch is there twice, and without a memo nothing counts its values.
        pickler.fast = True
        parts.append(pickler.dumped(root, pickle.MEMOIZE) + pickle.POP)
        pickler.fast = False
        memo = pickler.memo.copy()
        roots.append(len(memo))
        made += [pickle.NONE] * (len(memo) - len(made)) + [_EMPTY[type(root)]]
        pickler.memo = memo | {id(root): (len(memo), root)}
    stand_ins = b"".join(value + pickle.MEMOIZE + pickle.POP for value in made if value)
    by_number = tuple((numbered[id(spec)][0], spec) for spec in map(_spec, shared))
    made_of = meshes, b"".join(parts), tuple(roots), by_number, len(made), stand_ins
    return _Fragments(*made_of, pickler.has_objects)


def _parts_of_specs(dtensors: Sequence[Any]) -> list[Any]:
    """Return all that describes DTensors, to compare by identity: ``==`` ignores classes."""
    specs = list(map(_spec, dtensors))
    distinct = dict(zip(map(id, specs), specs, strict=True)).values()
    # A hash is computed when it is first wanted.
    parts = [p for spec in distinct for name, p in vars(spec).items() if name != "_hash"]
    return [*specs, *map(operator.attrgetter("layout"), dtensors), *map(type, distinct), *parts]
