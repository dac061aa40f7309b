"""Short texts of failures, for other ranks, and joined texts and names of many ranks.

Every rank receives every other rank's text, so each is cut to a limit, and a text that several
ranks share is given once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from localckpt.errors import CheckpointingException, MismatchError

# Limit of a text that is sent to other ranks, in characters.
_LONGEST_TEXT = 4000

_MOST_TEXTS = 8
_MOST_RANGES = 16
_CUT = " (cut)"


class Mismatches:
    """What several comparisons found, to be raised as one error."""

    def __init__(self) -> None:
        self._found: list[MismatchError] = []

    def note(self, error: MismatchError) -> None:
        self._found.append(error)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context of a comparison; a MismatchError that it raises is noted."""
        try:
            yield
        except MismatchError as error:
            self.note(error)

    def raise_all(self) -> None:
        """Raise a MismatchError with all that was noted, if anything was; one advice a topic."""
        if not self._found:
            return
        first = next((error for error in self._found if error.topic), self._found[0])
        others = [e.text if e.topic == first.topic else str(e) for e in self._found]
        texts = dict.fromkeys([first.text, *others])
        if len(texts) == 1:
            raise first
        raise MismatchError(". Besides, ".join(texts)).advised(first.topic, first.advice)


def short(text: str, longest: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= longest else f"{text[: longest - len(_CUT)]}{_CUT}"


def described(error: BaseException) -> str:
    """Return an error's text, preceded by its class unless localckpt raised it."""
    is_own = isinstance(error, CheckpointingException) and _text(error)
    return short(_text(error)) if is_own else with_class(error)


def with_class(error: BaseException) -> str:
    """Return an error's class and text, or the class alone if there is no text."""
    kind, text = type(error).__name__, _text(error)
    return short(f"{kind}: {text}" if text else kind)


def _text(error: BaseException) -> str:
    # The object that the program calls has words of its own for the advice.
    return error.text if isinstance(error, CheckpointingException) else str(error)


def shown(manager: Any, session_id: str, place: object = None) -> str:
    where = "" if place is None else f" in {str(place)!r}"
    mode = ", read only" if manager.read_only else ""
    rank = f"rank {manager.rank} of {manager.world_size}"
    return f"<{type(manager).__name__} of session {session_id!r}{where}, {rank}{mode}>"


def with_short_texts(record: Any, longest: int = _LONGEST_TEXT) -> Any:
    if isinstance(record, str):
        return short(record, longest)
    if isinstance(record, list | tuple):
        return [with_short_texts(item, longest) for item in record]
    if isinstance(record, dict):
        return {key: with_short_texts(value, longest) for key, value in record.items()}
    return record


def said_by(texts: Mapping[int, str]) -> str:
    """Join the texts of ranks: each different text once, after the ranks that share it."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks.setdefault(texts[rank].rstrip("."), []).append(rank)
    parts = [f"{ranks_named(those)}: {text}" for text, those in ranks.items()]
    if len(parts) > _MOST_TEXTS:
        others = [rank for those in list(ranks.values())[_MOST_TEXTS:] for rank in those]
        parts[_MOST_TEXTS:] = [f"{ranks_named(others)}: others, told in the logs of those ranks"]
    return "; ".join(parts)


def ranks_named(ranks: Iterable[int]) -> str:
    runs = runs_of(ranks)
    parts: list[str] = []
    for start, end in runs:
        if end - start > 1:
            parts.append(f"{start} to {end}")
        else:
            parts += map(str, range(start, end + 1))
    if len(parts) > _MOST_RANGES:
        parts = [*parts[:_MOST_RANGES], "others"]
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"{'rank' if is_one else 'ranks'} {listed}"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers in short: ``0-7,9``."""
    return ",".join(
        f"{start}-{end}" if start < end else f"{start}" for start, end in runs_of(numbers)
    )


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        start = runs.pop()[0] if runs and runs[-1][1] == number - 1 else number
        runs.append((start, number))
    return runs
