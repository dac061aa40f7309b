"""Matching of the tensors of a state that is loaded into with the saved tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from localckpt.errors import MismatchError
from localckpt.memory.tensor_bytes import is_flat
from localckpt.state_dict.boxes import Box
from localckpt.state_dict.global_view import Job, boxes_of, named
from localckpt.state_dict.regions import Region, whole
from localckpt.state_dict.skeleton import collection_paused, find_tensors
from localckpt.state_dict.tensor_table import ARRAY, TableEntry, build_table, packed, structures

__all__ = ["Targets", "find_targets"]

_SHOWN_DIFFERENCES = 10
_MAKE_NEW = "Call load() without into= to get new tensors"


@dataclass(frozen=True)
class Targets:
    """Tensors that are to be filled.

    Attributes:
        tensors: Distinct tensors, in the order in which the state's skeleton numbers them, without
            those of device meshes.
        names: ``id(tensor)`` to the tensor's path in the state, where known.
        optional: Beginnings of paths; a saved tensor with such a path may be missing here.
        boxes: ``id(tensor)`` to the part of a global tensor that the tensor is, where known.
        dtensors: ``id(tensor)`` to the DTensor that has the tensor as its local tensor, where its
            part of a global tensor is known.
    """

    tensors: list[torch.Tensor]
    names: dict[int, str]
    optional: tuple[str, ...] = ()
    boxes: dict[int, Box] = field(default_factory=dict)
    dtensors: dict[int, Any] = field(default_factory=dict)

    def match(
        self, saved: Sequence[TableEntry], boxes: Mapping[int, Box], of_meshes: Container[int]
    ) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor]]:
        """Find the given tensor for each saved tensor.

        Args:
            saved: The saved tensors.
            boxes: By the number of a saved tensor, the part of a global tensor that it is.
            of_meshes: Numbers of the saved tensors that belong to device meshes.

        Returns:
            For each saved tensor the given one, or ``None`` if a new one is needed (arrays, tensors
            of meshes, and optional tensors that are missing); and for each slot of a given tensor
            its target.

        Raises:
            MismatchError: The saved tensors differ from the given ones; the error lists them.
        """
        numbers = [
            number
            for number, entry in enumerate(saved)
            if entry.kind != ARRAY and number not in of_meshes
        ]
        entries = [saved[number] for number in numbers]
        names = self._names_for(saved, numbers)
        found: Sequence[torch.Tensor | None] = self.tensors
        if self.optional:
            found = self._find_by_name(entries, names)
            entries = [e for e, tensor in zip(entries, found, strict=True) if tensor is not None]
        targets = _by_slot(entries, [tensor for tensor in found if tensor is not None], names)
        of_numbers = dict(zip(numbers, found, strict=True))
        given = [of_numbers.get(number) for number in range(len(saved))]
        self._require_same_places(given, boxes)
        return given, targets

    def _names_for(self, saved: Sequence[TableEntry], numbers: Sequence[int]) -> dict[int, str]:
        """Return the names, with those that tensors without a path have in an image.

        They have only their order, so where some are missing, the others get names that no saved
        tensor has: one must never take the values of another.

        Args:
            saved: The saved tensors.
            numbers: Numbers of those that are not made anew.
        """
        unnamed = [tensor for tensor in self.tensors if id(tensor) not in self.names]
        if not unnamed:
            return self.names
        if len(numbers) == len(self.tensors):
            of_numbers = zip(numbers, self.tensors, strict=True)
            return {id(tensor): f"tensor.{number}" for number, tensor in of_numbers} | self.names
        there: Sequence[int] = [
            number
            for number in numbers
            if (saved[number].slot or "").removeprefix("shared:") == f"tensor.{number}"
        ]
        if len(there) != len(unnamed):
            there = range(len(saved), len(saved) + len(unnamed))
        of_unnamed = zip(there, unnamed, strict=True)
        return self.names | {id(tensor): f"tensor.{number}" for number, tensor in of_unnamed}

    def dtensors_of(self, tensors: Iterable[torch.Tensor | None]) -> dict[int, Any]:
        """Return those of ``dtensors`` whose local tensors are among some tensors."""
        return {id(t): self.dtensors[id(t)] for t in tensors if id(t) in self.dtensors}

    def are_sharded_otherwise(self, saved: Sequence[TableEntry], boxes: Mapping[int, Box]) -> bool:
        """Return whether some are other parts of their global tensors than what was saved of these.

        Tensors that a box says nothing of are whole. Of tensors whose global shape is another one,
        or that only one side has, nothing is said.

        Args:
            saved, boxes: As for :meth:`match`.
        """
        there: dict[tuple[str, tuple[int, ...]], list[Region]] = {}
        for number, entry in enumerate(saved):
            box = boxes.get(number)
            shape = entry.shape if box is None else box.shape
            key = (entry.slot or "") if box is None else box.key
            there.setdefault((key, shape), []).append(whole(shape) if box is None else box.runs)
        for tensor in self.tensors:
            own = self.boxes.get(id(tensor))
            shape = tuple(tensor.shape) if own is None else own.shape
            key = self.names.get(id(tensor), "") if own is None else own.key
            regions = there.get((key, shape))
            if regions and (whole(shape) if own is None else own.runs) not in regions:
                return True
        return False

    def _require_same_places(
        self, given: Sequence[torch.Tensor | None], boxes: Mapping[int, Box]
    ) -> None:
        """Refuse tensors that are other parts of their global tensors than the saved ones.

        Their shapes may be equal, as where the ranks stand in another order in the device mesh.
        """
        lines = []
        for number, saved in boxes.items():
            own = self.boxes.get(id(given[number]))
            if own is not None and not own.is_at(saved):
                key = f" {own.key}" if own.key != saved.key else ""
                lines.append(f"{saved.key}: saved as {saved.place}, given as{key} {own.place}")
        if lines:
            raise _mismatch(
                lines,
                "Shard it over the ranks as it was when it was saved, in the same order, or make "
                "the manager with elastic=True",
            )

    def _find_by_name(
        self, saved: Sequence[TableEntry], names: Mapping[int, str]
    ) -> list[torch.Tensor | None]:
        table = build_table(self.tensors, names)
        of_slot: dict[str | None, list[torch.Tensor]] = {}
        for entry, tensor in zip(table.entries, self.tensors, strict=True):
            of_slot.setdefault(entry.slot, []).append(tensor)
        uses = Counter(entry.slot for entry in saved)
        wrong = [
            f"{name}: saved, not given"
            for name in uses
            if name not in of_slot
            and not (name or "").removeprefix("shared:").startswith(self.optional)
        ]
        # Tensors that share a slot are given all together, or not at all.
        wrong += [
            f"{name}: given, not saved so" for name, of in of_slot.items() if uses[name] != len(of)
        ]
        if wrong:
            raise _mismatch(wrong)
        remaining = {name: iter(of) for name, of in of_slot.items()}
        return [next(remaining[e.slot]) if e.slot in remaining else None for e in saved]


@collection_paused()
def find_targets(state: Any, optional: tuple[str, ...] = ()) -> Targets:
    """Find the tensors of a state that is to be filled.

    Args:
        state: The state.
        optional: Beginnings of paths; a saved tensor with such a path may be missing in the state.

    Raises:
        CheckpointingException: The state holds a value that cannot have been saved.
    """
    tensors = find_tensors(state)
    found = named(state, tensors)
    # Places are compared, and not the ranks that have them.
    boxes = boxes_of(found.tellers, tensors, Job(0, ()))
    by_id = {id(tensors[number]): box for number, box in boxes.items()}
    dtensors = _by_local_tensor(t.value for t in found.tellers if t.kind == "DTensor")
    of_boxes = {local: dtensors[local] for local in by_id if local in dtensors}
    return Targets(tensors, found.names, optional, by_id, of_boxes)


def _by_local_tensor(dtensors: Iterable[Any]) -> dict[int, Any]:
    """Return DTensors by the ``id()`` of their local tensors; none that have one in common."""
    found: dict[int, Any] = {}
    for dtensor in dtensors:
        local = id(dtensor._local_tensor)
        found[local] = dtensor if found.get(local, dtensor) is dtensor else None
    return {local: dtensor for local, dtensor in found.items() if dtensor is not None}


def _by_slot(
    saved: Sequence[TableEntry], tensors: Sequence[torch.Tensor], names: Mapping[int, str]
) -> dict[str, torch.Tensor]:
    """Return the target of each slot of an image.

    Args:
        saved: The saved tensors.
        tensors: The given ones.
        names: ``id(tensor)`` to the name of a given tensor.

    Raises:
        MismatchError: The saved tensors differ from the given ones; the error lists them.
    """
    # A short cut that nearly always applies, since a restart waits for this.
    if (targets := _plain_targets(saved, tensors, names)) is not None:
        return targets
    table = build_table(tensors, names)
    _require_same_structure(saved, table.entries)
    targets = {
        # With the saved strides, since the given tensor may have its dimensions in another
        # order in memory.
        slot.name: source._replace(strides=saved[source.number].strides).value(
            tensors[source.number]
        )
        for slot, source in zip(table.slots, table.sources, strict=True)
    }
    _require_apart(targets)
    return targets


def _plain_targets(
    saved: Sequence[TableEntry], tensors: Sequence[torch.Tensor], names: Mapping[int, str]
) -> dict[str, torch.Tensor] | None:
    """Return the targets if all tensors are alike and none share bytes; ``None`` if not."""
    if len(saved) != len(tensors) or len({entry.slot for entry in saved}) < len(saved):
        return None
    targets = {}
    for entry, tensor in zip(saved, tensors, strict=True):
        if (
            entry.slot is None
            or entry.slot != names.get(id(tensor))
            or entry.shape != tensor.shape
            or entry.torch_dtype() is not tensor.dtype
            or tensor.is_meta
        ):
            return None
        target = packed(tensor, entry.strides)
        if not is_flat(target) or target.numel() < tensor.numel():
            return None
        targets[entry.slot] = target
    return None if find_overlaps(targets.items()) else targets


def _require_apart(targets: dict[str, torch.Tensor]) -> None:
    """Refuse targets that share memory, as numpy arrays can: each would overwrite another."""
    flat = [(name, target) for name, target in targets.items() if is_flat(target)]
    if overlaps := find_overlaps(flat):
        one, other = overlaps[0]
        raise MismatchError(
            f"the state to load into differs from the saved one, and was left as it is: {one} and "
            f"{other} were saved apart, and those given share memory. Call load() without into= to "
            f"get new tensors"
        )


def find_overlaps(flat: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, str]]:
    """Return the names of flat tensors that share bytes, in pairs that connect all of them."""
    runs = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + nbytes, name)
        for name, tensor in flat
        if not tensor.is_meta and (nbytes := tensor.nbytes)
    )
    found = []
    end, last = 0, ""
    for start, stop, name in runs:
        if start < end:
            found.append((last, name))
        if stop >= end:
            end, last = stop, name
    return found


def _require_same_structure(saved: Sequence[TableEntry], given: Sequence[TableEntry]) -> None:
    saved_structures, given_structures = structures(saved), structures(given)
    if saved_structures == given_structures:
        return
    there = {e.slot: (e, s) for e, s in zip(given, given_structures, strict=True)}
    here = {e.slot: (e, s) for e, s in zip(saved, saved_structures, strict=True)}
    lines = [f"{name}: saved, not given" for name in here if name not in there]
    lines += [f"{name}: given, not saved" for name in there if name not in here]
    lines += [
        f"{name}: saved as {e.dtype} {list(e.shape)}, given as {there[name][0].dtype} "
        f"{list(there[name][0].shape)}"
        for name, (e, structure) in here.items()
        if name in there and structure != there[name][1]
    ]
    raise _mismatch(lines or ["the tensors stand in another order"])


def _mismatch(lines: list[str], advice: str = _MAKE_NEW) -> MismatchError:
    more = len(lines) - _SHOWN_DIFFERENCES
    shown = "; ".join(lines[:_SHOWN_DIFFERENCES])
    return MismatchError(
        f"the state to load into differs from the saved one, and was left as it is: {shown}"
        + (f"; and {more} more" if more > 0 else "")
        + f". {advice}"
    )
