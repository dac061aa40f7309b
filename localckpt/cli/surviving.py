"""``localckpt survive``: costs of redundancy schemes, and the losses of nodes that they survive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated

import typer

from localckpt.cli.output import (
    JsonOption,
    counted,
    one_line_errors,
    say,
    say_json,
    say_table,
    size,
)
from localckpt.cli.survival import Scheme, Survival, survivability, usual_schemes
from localckpt.errors import CheckpointingException

_POWERS = {None: 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?(?:([kmgt])(i?))?b?", re.IGNORECASE)


def survive(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes in the job: what is lost as a whole.")],
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each.")],
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCHEME",
            help="none, replicas:K or parity:M/G; again for more. By default, the usual ones.",
            show_default=False,
        ),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="What one rank saves, such as 12GB: tells costs in bytes too."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare redundancy schemes: what each costs, and what it survives.

    replicas:K keeps K copies of each shard, its own included, in groups of K nodes; parity:M/G
    keeps M parities in groups of G nodes. It looks at no store: call it anywhere.
    """
    with one_line_errors():
        nbytes = None if shard_size is None else _parse_size(shard_size)
        given = [Scheme.parse(text) for text in scheme or ()] or usual_schemes(nodes)
        survivals = [survivability(nodes, ranks_per_node, s, nbytes) for s in dict.fromkeys(given)]
    if json:
        say_json(
            {
                "nodes": nodes,
                "ranks_per_node": ranks_per_node,
                "shard_nbytes": nbytes,
                "schemes": [survival.to_json() for survival in survivals],
            }
        )
        return
    _say_schemes(survivals)


def _parse_size(text: str) -> int:
    """Bytes, of a text such as ``12GB`` or ``1.5GiB``."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise CheckpointingException(
            f"{text!r} is no size: give a number of bytes, with k, M, G or T before B for powers "
            f"of 1000 and Ki, Mi, Gi or Ti for powers of 1024, such as 12GB"
        )
    number, unit, binary = found.groups()
    power = _POWERS[unit and unit.lower()]
    nbytes = int(Decimal(number) * (1024 if binary else 1000) ** power)
    if not nbytes:
        raise CheckpointingException(f"{text!r} is no size of a shard: give one byte or more")
    return nbytes


def _say_schemes(survivals: Sequence[Survival]) -> None:
    first = survivals[0]
    say(
        f"{counted(first.nodes, 'node')} of {counted(first.ranks_per_node, 'rank')}. Costs are "
        f"those of a rank, in shards; chances are those of losing data",
        "when so many nodes, drawn at random, are lost at once.",
        "",
    )
    lost = [f"{number} lost" for number in range(1, len(first.loss) + 1)]
    names = ("scheme", "groups of nodes", "extra memory", "sent per save", *lost)
    rows = [
        (
            str(survival.scheme),
            ", ".join(f"{count} of {members}" for members, count in survival.groups),
            *(
                _spread(_number(cost.mean), _number(cost.largest))
                for cost in (survival.extra_memory, survival.bytes_sent)
            ),
            *map(_chance, survival.loss),
        )
        for survival in survivals
    ]
    say_table(names, rows, right=names[2:])
    if first.shard_nbytes is not None:
        say("", f"The same costs for shards of {size(first.shard_nbytes)}:", "")
        _say_bytes(survivals, first.shard_nbytes)
    say("", _verdict(survivals))


def _say_bytes(survivals: Sequence[Survival], nbytes: int) -> None:
    names = ("scheme", "extra, rank", "extra, node", "sent, rank", "sent, node")
    rows = [
        (
            str(survival.scheme),
            *(
                _spread(*map(size, cost.in_bytes(nbytes * shards)))
                for cost in (survival.extra_memory, survival.bytes_sent)
                for shards in (1, survival.ranks_per_node)
            ),
        )
        for survival in survivals
    ]
    say_table(names, rows, right=names[1:])


def _spread(mean: str, largest: str) -> str:
    return mean if mean == largest else f"{mean} (some {largest})"


def _number(shards: float) -> str:
    return f"{shards:.3g}" if shards < 1000 else f"{shards:.0f}"


def _chance(probability: float) -> str:
    """Never and always are said only of what is certain."""
    if probability in (0, 1):
        return "always" if probability else "never"
    percent = 100 * probability
    return f"{percent:#.3g} %" if percent >= 0.001 else "<0.001 %"


def _verdict(survivals: Sequence[Survival]) -> str:
    """Name the losses that each scheme surely survives."""
    by_number: dict[int, list[str]] = {}
    for survival in survivals:
        by_number.setdefault(survival.survives_any, []).append(str(survival.scheme))
    parts = []
    for number, names in sorted(by_number.items(), reverse=True):
        loss = f"any {counted(number, 'node')}" if number else "no node"
        parts.append(f"of {loss} with {', '.join(names)}")
    return f"Surely survived is the loss {'; '.join(parts)}."
