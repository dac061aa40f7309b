"""Words for an :class:`Explanation`: a table of who holds what, and sentences below it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from localckpt.availability.lineage_tree import tree
from localckpt.failure_texts import ranges
from localckpt.ids import Checkpoint
from localckpt.trust import resumed_in_vain

if TYPE_CHECKING:
    from localckpt.availability.explanation import Explanation, Standing

__all__ = ["text_of"]

_WIDTH = 100
_SHOWN = 12


def text_of(explanation: Explanation) -> str:
    """Describe what was found, for people."""
    keys = {node: _key(number) for number, node in enumerate(explanation.nodes)}
    lines = [f"{key:3} {node}" for node, key in keys.items()]
    for block in _matrix(explanation.checkpoints, keys):
        lines += ["", *block]
    lines += ["", *_verdict(explanation)]
    lines += [*_rejections(explanation, keys), *_losses(explanation, keys)]
    if explanation.drained:
        drained = ranges(checkpoint.iteration for checkpoint in explanation.drained)
        lines.append(f"Drained to shared storage, too: {drained}")
    # Earlier versions told nothing of their epochs.
    known = any(branch.origin is not None for branch in explanation.lineages)
    if known and sum(bool(branch.iterations) for branch in explanation.lineages) > 1:
        lines += ["Lineages:", *tree(explanation.lineages)]
    for node, files in explanation.bad.items():
        lines += [f"Not counted, on {keys[node]}: {file}" for file in files]
    return "\n".join(lines)


def _matrix(standings: Sequence[Standing], keys: Mapping[str, str]) -> list[list[str]]:
    """Lines of a table, in blocks that fit on a page. Ranks that do not differ share a column."""
    if not standings:
        return []
    ranks = range(max(len(s.holders) for s in standings))
    cells = [[_cell(s, rank, keys) for s in standings] for rank in ranks]
    left = [
        _padded(["iteration", *(str(s.checkpoint.iteration) for s in standings)]),
        _padded(["generation", *(str(s.checkpoint.generation) for s in standings)]),
        _padded(["complete", *("yes" if s.is_complete else "no" for s in standings)]),
    ]
    columns = [
        _padded([f"rank {ranges(numbers)}", *column])
        for column, numbers in groupby(ranks, key=lambda rank: cells[rank])
    ]
    blocks: list[list[list[str]]] = []
    for column in columns:
        if not blocks or sum(len(c[0]) + 2 for c in [*blocks[-1], column]) > _WIDTH:
            blocks.append([*left])
        blocks[-1].append(column)
    return [["  ".join(row).rstrip() for row in zip(*b, strict=True)] for b in blocks]


def _cell(standing: Standing, rank: int, keys: Mapping[str, str]) -> str:
    if rank >= len(standing.holders):
        return ""
    bad = [f"{keys[n]}!" for n in standing.damaged[rank] if n not in standing.holders[rank]]
    kinds = [standing.computed[rank]] if rank in standing.computed else []
    return "+".join([*(keys[node] for node in standing.holders[rank]), *bad, *kinds]) or "none"


def _padded(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) for cell in column]


def _verdict(explanation: Explanation) -> list[str]:
    if explanation.refusal is not None:
        return [f"A restart is refused: {explanation.refusal}"]
    if explanation.newest is None:
        what = "no checkpoint is complete" if explanation.checkpoints else "no node holds a shard"
        if any(standing.passed_over for standing in explanation.checkpoints):
            what = "what was complete was given up"
        return [f"A restart finds nothing to load: {what}."]
    loads = f"A restart loads {_named(explanation.newest)}."
    if not explanation.reshards:
        return [loads]
    least = explanation.least_nodes
    return [
        f"{loads} Of another number of ranks, it takes load(into=) of a manager with elastic=True, "
        f"or a Checkpointer. Nodes without a rank of the job are not read: it needs "
        + (f"{least} nodes at least." if least > 1 else "a node with its shards at least.")
    ]


def _rejections(explanation: Explanation, keys: Mapping[str, str]) -> list[str]:
    """Why checkpoints that look newer are not loaded."""
    lines = []
    newest = explanation.newest
    is_newer = True
    for standing in explanation.checkpoints:
        what = _named(standing.checkpoint, standing.is_by_name).capitalize()
        is_newer = is_newer and standing.checkpoint != newest
        if is_newer and standing.passed_over:
            lines.append(f"{what} is passed over: {standing.passed_over}.")
        elif is_newer and standing.is_complete:
            lines.append(f"{what} is newer, and would be taken only if there were no other.")
        elif is_newer:
            lines.append(f"{what} {'is newer, and ' if newest else ''}lacks:")
            lines += [
                f"  rank{'s'[: len(lack.ranks) > 1]} {ranges(lack.ranks)}: {lack.why}"
                + (f" ({_joined(lack.nodes, keys)})" if lack.nodes else "")
                for lack in standing.lacks
            ]
        elif newest is not None and standing.checkpoint.iteration > newest.iteration:
            lines.append(
                f"{what} is of an earlier attempt: the job went back, and saved iteration "
                f"{newest.iteration} later."
            )
        if standing.resumed and not standing.passed_over:
            why = resumed_in_vain(standing.resumed)
            lines.append(f"Of iteration {standing.checkpoint.iteration}: {why}.")
        if standing.mark and not standing.passed_over:
            told = f": {standing.mark.why}" if standing.mark.why else ""
            iteration = standing.checkpoint.iteration
            lines.append(f"Iteration {iteration} is marked {standing.mark.kind}{told}.")
        if (measured := standing.measured) is not None:
            lines.append(
                f"Iteration {standing.checkpoint.iteration} was saved with {measured.metric} "
                f"{measured.value:g}, by which the job keeps the best."
            )
    return lines


def _losses(explanation: Explanation, keys: Mapping[str, str]) -> list[str]:
    """Nodes that may be lost before the newest complete checkpoint is."""
    if explanation.newest is None:
        return []
    most, alone = explanation.survives_any, explanation.may_be_lost_alone
    if most:
        survived = "any one node" if most == 1 else f"any {most} nodes"
    elif alone:
        survived = f"one node only if it is {' or '.join(keys[node] for node in alone)}"
    else:
        survived = "no node"
    shown = [_joined(nodes, keys) for nodes in explanation.breaking[:_SHOWN]]
    more = len(explanation.breaking) - len(shown)
    return [
        f"Iteration {explanation.newest.iteration} survives the loss of {survived}. "
        f"It is lost together with {', or '.join(shown)}" + (f", or {more} more." if more else ".")
    ]


def _named(checkpoint: Checkpoint, is_by_name: bool = False) -> str:
    ranks = f"{checkpoint.world_size} rank{'s'[: checkpoint.world_size != 1]}"
    source = "by the names of its files" if is_by_name else ranks
    return f"iteration {checkpoint.iteration} (generation {checkpoint.generation}, {source})"


def _joined(nodes: Iterable[str], keys: Mapping[str, str]) -> str:
    return "+".join(keys[node] for node in nodes)


def _key(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    before, letter = divmod(number, 26)
    return (_key(before - 1) if before else "") + chr(ord("A") + letter)
