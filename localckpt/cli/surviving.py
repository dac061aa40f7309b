"""``localckpt survive``: costs of redundancy schemes, and the losses of nodes that they survive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from localckpt.cli.drawing import PlotOption, picture
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

__all__ = ["draw", "survive"]

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
    equal: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="What of it all ranks have equal, as under DDP: saved once a node."
        ),
    ] = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Compare redundancy schemes: what each costs, and what it survives.

    replicas:K keeps K copies of each shard, its own included, in groups of K nodes; parity:M/G
    keeps M parities in groups of G nodes. It looks at no store: call it anywhere.
    """
    with one_line_errors():
        nbytes = None if shard_size is None else _parse_size(shard_size)
        given = [Scheme.parse(text) for text in scheme or ()] or usual_schemes(nodes)
        equal_nbytes = 0 if equal is None else _parse_size(equal)
        survivals = [
            survivability(nodes, ranks_per_node, s, nbytes, equal_nbytes=equal_nbytes)
            for s in dict.fromkeys(given)
        ]
        if plot is not None:
            draw(survivals, plot)
    if json:
        say_json(
            {
                "nodes": nodes,
                "ranks_per_node": ranks_per_node,
                "shard_nbytes": nbytes,
                "equal_nbytes": equal_nbytes,
                "schemes": [survival.to_json() for survival in survivals],
            }
        )
        return
    _say_schemes(survivals)
    if plot is not None:
        say(f"Drawn in {plot}.")


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
    lost = [f"{chance.lost} lost" for chance in first.chances]
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
        equal = f", of which all ranks have {size(first.equal_nbytes)} equal"
        what = f"shards of {size(first.shard_nbytes)}{equal if first.equal_nbytes else ''}"
        say("", f"The same costs for {what}:", "")
        _say_bytes(survivals)
    say("", _verdict(survivals))


def _say_bytes(survivals: Sequence[Survival]) -> None:
    names = ("scheme", "extra, rank", "extra, node", "sent, rank", "sent, node")
    rows = [
        (
            str(survival.scheme),
            *(
                _spread(*map(size, cost.in_bytes((nbytes or 0) * shards)))
                for cost, nbytes in (
                    (survival.extra_memory, survival.stored_nbytes),
                    (survival.bytes_sent, survival.sent_nbytes),
                )
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


def draw(survivals: Sequence[Survival], path: Path) -> None:
    """Write a PNG: how likely data is lost with how many nodes, and what each scheme costs."""
    with picture(path) as figure:
        chances, costs = figure.subplots(1, 2)
        _draw_chances(chances, survivals)
        _draw_costs(costs, survivals)
        first = survivals[0]
        figure.suptitle(f"{first.nodes} nodes of {first.ranks_per_node} ranks")


def _draw_chances(axis: Any, survivals: Sequence[Survival]) -> None:
    for survival in survivals:
        # A logarithm has no place for what never happens.
        possible = [chance for chance in survival.chances if chance.probability]
        axis.plot(
            [chance.lost for chance in possible],
            [chance.probability for chance in possible],
            marker="o",
            label=f"{survival.scheme}: surely survives {survival.survives_any}",
        )
    axis.set_yscale("log")
    axis.set_xticks([chance.lost for chance in survivals[0].chances])
    axis.set_xlabel("nodes lost at once")
    axis.set_title("Probability that data is lost", fontsize=11, loc="left")
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize=9)


def _draw_costs(axis: Any, survivals: Sequence[Survival]) -> None:
    height = 0.4
    for offset, colour, name, costs in (
        (-height / 2, "#0b6e4f", "extra memory", [s.extra_memory.mean for s in survivals]),
        (height / 2, "#9aa5b1", "sent per save", [s.bytes_sent.mean for s in survivals]),
    ):
        places = [place + offset for place in range(len(survivals))]
        bars = axis.barh(places, costs, height, color=colour, label=name)
        axis.bar_label(bars, [f"{cost:.3g}" for cost in costs], padding=3, fontsize=8)
    axis.set_yticks(range(len(survivals)), [str(survival.scheme) for survival in survivals])
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("shards, mean of all ranks")
    axis.set_title("What a rank pays", fontsize=11, loc="left")
    axis.legend(fontsize=9)
