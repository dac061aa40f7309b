"""Lineage of an epoch: the checkpoint that it resumed from, and the epochs that it gave up.

Plain values, without torch. Every image's header, the epoch note of every node and the commit
record of a shared checkpoint carry the lineage of the epoch that wrote them, so that any surviving
part is enough to order checkpoints (``availability/coverage.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

from localckpt.errors import MismatchError

MOST_DIGITS = 19
"""Limit of the digits of each number in an identity."""

MOST_ANCESTORS = 8
"""Limit of the ancestors that a lineage names, the nearest ones; see :attr:`Lineage.is_cut`."""

MOST_GIVEN_UP = 8
"""Limit of the given-up epochs that a lineage names: those with the highest iterations."""

_LIMIT = 10**MOST_DIGITS

Origin = Literal["nothing", "elsewhere", "local", "shared"]
"""Source of an epoch's state. ``"nothing"``: nothing was loaded, and no source was declared;
``"elsewhere"``: a source without a lineage; ``"local"``: a checkpoint of the nodes; ``"shared"``: a
checkpoint on shared storage."""


def are_whole(numbers: Iterable[object]) -> bool:
    """Return whether numbers are whole, not negative, and have no more digits than allowed."""
    # type(), because isinstance(True, int) holds.
    return all(type(number) is int and 0 <= number < _LIMIT for number in numbers)


class EpochId(NamedTuple):
    """Identity of one start of the job.

    ``number`` is above that of every epoch known at the start; ``draw`` is random, for starts that
    cannot see each other's files.
    """

    number: int
    draw: int

    def __str__(self) -> str:
        return f"{self.number}-{self.draw:08x}"


class Point(NamedTuple):
    epoch: EpochId
    iteration: int

    def __str__(self) -> str:
        return f"iteration {self.iteration} of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Descent of one epoch, bounded in size however often the job was restarted.

    Attributes:
        epoch: The epoch.
        origin: Kind of the source that the epoch resumed from.
        resumed_at: Iteration that the epoch resumed from; -1 for the beginning. The epoch's own
            checkpoints have greater iterations, all its ancestors have no greater ones.
        ancestors: Points at which the epoch left its parent, the parent its own parent, and so on;
            the nearest first, at most :data:`MOST_ANCESTORS`.
        given_up: Epochs that the job went back from, each with its highest iteration that could
            have been loaded then. This epoch overrules their checkpoints from above ``resumed_at``
            up to that iteration. At most :data:`MOST_GIVEN_UP`; epochs left out are compared by
            iteration.
        is_cut: True if there are older ancestors than those named.

    Raises:
        MismatchError: The values are not those of a lineage.
    """

    epoch: EpochId
    origin: Origin = "nothing"
    resumed_at: int = -1
    ancestors: tuple[Point, ...] = ()
    given_up: tuple[Point, ...] = ()
    is_cut: bool = False

    def __post_init__(self) -> None:
        points = (*self.ancestors, *self.given_up)
        numbers = (*self.epoch, *(n for p in points for n in (*p.epoch, p.iteration)))
        is_beginning = type(self.resumed_at) is int and self.resumed_at == -1
        if not are_whole((*numbers, 0 if is_beginning else self.resumed_at)):
            raise MismatchError(
                f"a lineage has whole numbers of at most {MOST_DIGITS} digits, and {numbers!r:.200}"
                f" are none"
            )
        if len(self.ancestors) > MOST_ANCESTORS or len(self.given_up) > MOST_GIVEN_UP:
            raise MismatchError(
                f"a lineage names at most {MOST_ANCESTORS} ancestors and {MOST_GIVEN_UP} epochs "
                f"that were given up, not {len(self.ancestors)} and {len(self.given_up)}"
            )
        if self.origin not in get_args(Origin) or type(self.is_cut) is not bool:
            raise MismatchError(f"no epoch comes from {self.origin!r:.80}, cut {self.is_cut!r:.80}")

    def gives_up(self, epoch: EpochId, iteration: int) -> bool:
        """Return whether the job went back from a checkpoint to begin this epoch or an ancestor."""
        return self.resumed_at < iteration and any(
            of == epoch and iteration <= up_to for of, up_to in self.given_up
        )

    def descends_from(self, epoch: EpochId, iteration: int) -> bool:
        """Return whether a checkpoint of another epoch is one of the named ancestors."""
        return any(of == epoch and iteration <= left_at for of, left_at in self.ancestors)

    def left(self, iteration: int) -> Point:
        return Point(self.epoch, iteration)

    def to_json(self) -> list[Any]:
        """Encode as a list for JSON: about 20 bytes, and 20 for each point."""
        return [
            *self.epoch,
            get_args(Origin).index(self.origin),
            self.resumed_at,
            [[*point.epoch, point.iteration] for point in self.ancestors],
            [[*point.epoch, point.iteration] for point in self.given_up],
            int(self.is_cut),
        ]

    @classmethod
    def from_json(cls, fields: Any) -> Lineage:
        """Decode a list made by :meth:`to_json`; raises MismatchError for anything else."""
        try:
            number, draw, origin, resumed_at, ancestors, given_up, is_cut = fields
            if type(origin) is not int or origin < 0:
                raise ValueError("the origin is no number")
            return cls(
                EpochId(number, draw),
                get_args(Origin)[origin],
                resumed_at,
                tuple(Point(EpochId(n, d), iteration) for n, d, iteration in ancestors),
                tuple(Point(EpochId(n, d), iteration) for n, d, iteration in given_up),
                {0: False, 1: True}[is_cut],
            )
        except (TypeError, ValueError, LookupError) as error:
            raise MismatchError(f"{fields!r:.80} is no lineage: {error}") from error


@dataclass(frozen=True, slots=True)
class Resumed:
    """Source of an epoch's state: its iteration, -1 for none, and the lineage that it carries."""

    origin: Origin = "nothing"
    iteration: int = -1
    parent: Lineage | None = None


def unsaid(iteration: int, seen: Collection[Point]) -> Resumed:
    """Guess the source of the state of a job that loaded nothing and declared no source.

    If the first iteration that it saves is above all that could have been loaded (``seen``), the
    job continues from elsewhere; if not, it starts over, and gives up all of them.
    """
    newest = max((point.iteration for point in seen), default=-1)
    if newest == -1 or iteration <= newest:
        return Resumed()
    return Resumed("elsewhere", newest)


def begin_lineage(
    epoch: EpochId, resumed: Resumed, seen: Collection[Point], known: Mapping[EpochId, Lineage]
) -> Lineage:
    """Make the lineage of an epoch that is about to save for the first time; the same on all ranks.

    The number of the epoch is raised above those of the epochs in the lineage. Of the complete
    checkpoints that were ``seen`` on the nodes, those above the iteration of ``resumed`` could have
    been loaded, and are given up. ``known`` has the lineages of their epochs.
    """
    parent = resumed.parent
    gone = [point for point in seen if point.iteration > resumed.iteration]
    lineages = [parent, *(known.get(point.epoch) for point in seen)]
    # Epochs that these lineages gave up stay given up. Points below resumed.iteration have no
    # effect here (see gives_up), but may have one for an epoch that goes back further.
    inherited = [point for lineage in lineages if lineage for point in lineage.given_up]
    # The ancestors of given-up epochs are given up too, down to where the job resumes.
    for of in {point.epoch for point in gone} & known.keys():
        inherited += [p for p in known[of].ancestors if p.iteration > resumed.iteration]
    given_up: dict[EpochId, int] = {}
    for of, iteration in (*gone, *inherited):
        given_up[of] = max(iteration, given_up.get(of, -1))
    ancestors = [] if parent is None else [parent.left(resumed.iteration), *parent.ancestors]
    points = sorted(
        (Point(*item) for item in given_up.items()),
        key=lambda point: (point.iteration, point.epoch),
        reverse=True,
    )
    above = [point.epoch.number + 1 for point in (*ancestors[:1], *points)]
    return Lineage(
        epoch._replace(number=max(epoch.number, *above)) if above else epoch,
        resumed.origin,
        resumed.iteration,
        tuple(ancestors[:MOST_ANCESTORS]),
        tuple(points[:MOST_GIVEN_UP]),
        parent is not None and (parent.is_cut or len(ancestors) > MOST_ANCESTORS),
    )


class LineageKeeper(Protocol):
    """Local manager, as that of shared storage uses it; all ranks call alike."""

    def begin(self, from_iteration: int, *, lineage: Lineage | None = None) -> None: ...

    def lineage_of_save(self, iteration: int) -> Lineage: ...

    def lineage_of(self, iteration: int) -> Lineage | None:
        """Return the lineage of the newest complete checkpoint of an iteration."""

    def leave(self, points: Sequence[Point]) -> None:
        """Give up checkpoints on shared storage that the job goes back from."""
