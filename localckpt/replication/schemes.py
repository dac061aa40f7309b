"""The redundancy schemes whose pieces are not copies of shards, by the kind of their pieces.

Nobody has to import a scheme, since a job may read pieces that its own redundancy does not make:
the class is found by name, in the table of this package or in the entry points of another.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import localckpt
from localckpt.errors import MismatchError

if TYPE_CHECKING:
    from localckpt.replication.redundancy import RecoveryScheme

ENTRY_POINTS = "localckpt.schemes"
"""Group of the entry points: each is named as a kind, and its value is ``module:class``."""


class _Schemes(Mapping[str, "RecoveryScheme"]):
    def __getitem__(self, kind: str) -> RecoveryScheme:
        # Looking through all that is installed takes a restart longer than looking at the nodes.
        return _scheme(kind, localckpt.SCHEMES_BY_KIND.get(kind) or _installed()[kind])

    def __iter__(self) -> Iterator[str]:
        return iter(_installed() | localckpt.SCHEMES_BY_KIND)

    def __len__(self) -> int:
        return len(_installed() | localckpt.SCHEMES_BY_KIND)


SCHEMES: Mapping[str, RecoveryScheme] = _Schemes()
"""The scheme of each kind of piece beside shards, imported when a piece of its kind is found."""


@cache
def _installed() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}


@cache
def _scheme(kind: str, home: str) -> RecoveryScheme:
    try:
        scheme: RecoveryScheme = pkgutil.resolve_name(home)()
    except (ImportError, AttributeError) as error:
        raise MismatchError(
            f"pieces of the kind {kind!r} are computed by {home}, which cannot be imported: "
            f"{error}. Install what it needs on every node, or remove the package that names it; "
            f"nothing was changed"
        ) from error
    return scheme
