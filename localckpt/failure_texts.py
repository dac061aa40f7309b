"""Texts of failures, as they go to other ranks, and as the texts of many ranks are joined.

A rank's text goes to every other rank, so it is never long; a text that many ranks have is given
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from localckpt.errors import CheckpointingException

__all__ = ["described", "ranks_named", "said_by", "short", "with_class", "with_short_texts"]

# Characters of a text that goes to other ranks.
_LONGEST_TEXT = 4000

_MOST_TEXTS = 8
_MOST_RANGES = 16
_CUT = " (cut)"


def short(text: str, longest: int = _LONGEST_TEXT) -> str:
    """Cut a text to the length that goes to other ranks."""
    return text if len(text) <= longest else f"{text[: longest - len(_CUT)]}{_CUT}"


def described(error: BaseException) -> str:
    """Return the text of an error, with its class unless it is one of localckpt's own."""
    is_own = isinstance(error, CheckpointingException) and str(error)
    return short(str(error)) if is_own else with_class(error)


def with_class(error: BaseException) -> str:
    """An error's class and text; some have no text."""
    kind = type(error).__name__
    return short(f"{kind}: {error}" if str(error) else kind)


def with_short_texts(record: Any, longest: int = _LONGEST_TEXT) -> Any:
    """A JSON record in which each text is short."""
    if isinstance(record, str):
        return short(record, longest)
    if isinstance(record, list | tuple):
        return [with_short_texts(item, longest) for item in record]
    if isinstance(record, dict):
        return {key: with_short_texts(value, longest) for key, value in record.items()}
    return record


def said_by(texts: Mapping[int, str]) -> str:
    """Join the texts of ranks: each text once, after the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks.setdefault(texts[rank].rstrip("."), []).append(rank)
    parts = [f"{ranks_named(those)}: {text}" for text, those in ranks.items()]
    if len(parts) > _MOST_TEXTS:
        others = [rank for those in list(ranks.values())[_MOST_TEXTS:] for rank in those]
        parts[_MOST_TEXTS:] = [f"{ranks_named(others)}: others, told in the logs of those ranks"]
    return "; ".join(parts)


def ranks_named(ranks: Iterable[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 0 to 7 and 9``."""
    ordered = sorted(set(ranks))
    starts = [r for before, r in pairwise([ordered[0] - 2, *ordered]) if r != before + 1]
    ends = [r for r, after in pairwise([*ordered, ordered[-1] + 2]) if after != r + 1]
    parts: list[str] = []
    for start, end in zip(starts, ends, strict=True):
        if end - start > 1:
            parts.append(f"{start} to {end}")
        else:
            parts += map(str, range(start, end + 1))
    if len(parts) > _MOST_RANGES:
        parts = [*parts[:_MOST_RANGES], "others"]
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"rank{'s'[: len(ordered) != 1]} {listed}"
