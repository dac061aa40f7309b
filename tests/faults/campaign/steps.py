"""The steps of the campaign: what the job does, and what happens to it."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from tests.faults.campaign.campaign import Blow, Campaign, Settled
from tests.faults.campaign.nodes import damage, swap
from tests.faults.campaign.oracle import require
from tests.faults.campaign.survey import session_files

__all__ = [
    "break_directory",
    "crash",
    "crash_and_restart_at_once",
    "damage_alive",
    "damage_at_rest",
    "fill_node",
    "go_back",
    "kill_in_load",
    "kill_in_save",
    "look_again",
    "lose_node",
    "move_ranks",
    "node_away",
    "node_of_old",
    "poll",
    "restart",
    "restart_on_full_node",
    "restart_twice",
    "save",
    "save_behind_training",
    "settle_all",
    "shut_down",
    "stop_in_save",
    "swap_files",
]

# What there is in a rank's folder after it has left.
_STAYS = (".safetensors", ".corrupt", ".notes")

# While the job runs.


def save(c: Campaign) -> None:
    settle_all(c)
    c.settle(c.save())


def save_behind_training(c: Campaign) -> None:
    for _ in range(1 + int(2 * c.choice.random())):
        c.begin()
    c.say(f"{len(c.under_way)} under way")


def settle_all(c: Campaign) -> None:
    if c.under_way:
        c.settle(*c.finalize())


def poll(c: Campaign) -> None:
    c.settle(*c.finalize(blocking=False))


def look_again(c: Campaign) -> None:
    settle_all(c)
    newest = c.iteration
    c.resume(c.look())
    # A manager saves nothing below what it has saved, whatever it loads.
    c.iteration = max(newest, c.iteration)


def kill_in_save(c: Campaign) -> None:
    blow = _blow(c)
    c.settle(*_save_in_some_way(c, blow))
    _end_after_loss(c)


def stop_in_save(c: Campaign) -> None:
    blow = _blow(c, signal.SIGSTOP)
    c.settle(*_save_in_some_way(c, blow))
    _end_after_loss(c)


def kill_in_load(c: Campaign) -> None:
    settle_all(c)
    c.resume(c.look(), load=c.choice.random() < 0.7, blow=_blow(c))
    _end_after_loss(c)


def fill_node(c: Campaign) -> None:
    (node,) = (node for node in c.nodes if node.can_fill)
    c.had_trouble = True
    with node.full():
        saves = _save_in_some_way(c, why_not=["a node is full"])
    c.settle(*saves)
    save(c)


def break_directory(c: Campaign) -> None:
    node = c.nodes[_rank(c)]
    c.had_trouble = True
    c.say(node.name)
    c.untidy.add(node.name)
    with node.broken():
        saves = _save_in_some_way(c, why_not=["a directory is gone"])
    c.settle(*saves)
    save(c)


def damage_alive(c: Campaign) -> None:
    _damage_some(c, ["flip", "zeros"])


def crash(c: Campaign) -> None:
    """All ranks at once; what they had started may finish."""
    c.end(spare_workers=c.choice.random() < 0.5)


def crash_and_restart_at_once(c: Campaign) -> None:
    """What the old ranks had started may still be writing."""
    c.end(spare_workers=True, wait=False)
    c.start()
    c.await_orphans()
    c.nothing_shared_left()


def shut_down(c: Campaign) -> None:
    settle_all(c)
    c.judge(c.ask("close"))
    c.end(leave=True)
    c.nothing_shared_left()
    for rank, node in enumerate(c.nodes):
        there = [] if node.name in c.untidy else session_files(node.store, [""])
        left = [p for p in there if p.name.endswith(".dirty")]
        left += [p for p in there if p.parent.name == str(rank) and not p.name.endswith(_STAYS)]
        require(not left, "I6", f"closing left {', '.join(map(str, left))}")


# While it does not.


def restart(c: Campaign) -> None:
    c.start()
    c.nothing_shared_left()
    if c.choice.random() < 0.5:
        c.await_copies()


def restart_twice(c: Campaign) -> None:
    c.start_and_kill(0.8 * c.fraction())
    restart(c)


def go_back(c: Campaign) -> None:
    """The user starts from something older, and does not load the newest."""
    c.start(load=False)
    c.nothing_shared_left()
    c.iteration = max(0, c.iteration - 1 - int(6 * c.choice.random()))
    save(c)


def restart_on_full_node(c: Campaign) -> None:
    (node,) = (node for node in c.nodes if node.can_fill)
    with node.full():
        c.start_in_vain("a node is full")
    restart(c)


def lose_node(c: Campaign) -> None:
    node = c.nodes[_rank(c)]
    c.say(node.name)
    with c.harm():
        node.lose()


def node_away(c: Campaign) -> None:
    node = c.nodes[_rank(c)]
    with c.harm():
        if node.is_away:
            c.say(f"{node.name} comes back")
            node.come_back()
        else:
            c.say(f"{node.name} leaves")
            node.send_away()


def node_of_old(c: Campaign) -> None:
    node = c.nodes[_rank(c)]
    if node.is_kept:
        c.say(f"{node.name} is as it was")
        with c.harm():
            node.go_back()
    else:
        c.say(f"{node.name} is remembered")
        node.keep()


def move_ranks(c: Campaign) -> None:
    c.look()
    c.choice.shuffle(c.nodes)
    c.say(" ".join(node.name for node in c.nodes))


def damage_at_rest(c: Campaign) -> None:
    _damage_some(c, ["flip", "zeros", "cut"])


def swap_files(c: Campaign) -> None:
    paths = session_files(c.nodes[_rank(c)].store, [".safetensors"])
    if len(paths) > 1:
        with c.harm():
            first, second = swap(paths, c.choice)
        c.say(f"{first.name} and {second.name}")


def _rank(c: Campaign) -> int:
    return int(c.setup.world_size * c.choice.random())


def _blow(c: Campaign, sig: signal.Signals = signal.SIGKILL) -> Blow:
    blow = Blow(_rank(c), 1.2 * c.fraction(), sig)
    c.say(f"{sig.name} to rank {blow.rank} at {blow.moment:.2f}")
    return blow


def _save_in_some_way(
    c: Campaign, blow: Blow | None = None, why_not: Sequence[str] = ()
) -> list[Settled]:
    """One more save, at once or behind training; a blow hits it in one of its phases."""
    way = c.choice.choice(["at once", "behind training", "finalize"])
    c.say(way)
    before: list[Settled] = []
    if way == "at once":
        if c.under_way:
            before = c.finalize(why_not=why_not)
        return [*before, c.save(blow=blow, why_not=why_not)]
    hit_first = blow if way == "behind training" else None
    begun = c.begin(blow=hit_first, why_not=why_not)
    if begun.error is not None:
        before = [begun]
    if hit_first is not None:
        return [*before, *c.finalize(why_not=why_not, lost=[hit_first.rank])]
    return [*before, *c.finalize(why_not=why_not, blow=blow)]


def _end_after_loss(c: Campaign) -> None:
    """Those who live leave after an error, or are killed."""
    in_peace = c.choice.random() < 0.5
    if in_peace:
        c.judge(c.ask("give_up"))
    c.end(leave=in_peace)


def _damage_some(c: Campaign, ways: Sequence[str]) -> None:
    survey = c.look()
    standing = sorted(
        (copy for copy in survey.copies if c.oracle.must_stand(copy)),
        key=lambda copy: (copy.version, copy.owner, copy.node),
    )
    with c.harm():
        for _ in range(1 + int(3 * c.choice.random())):
            which, where, way = c.choice.random(), c.choice.random(), c.choice.choice(ways)
            if standing:
                # The newest more often than others.
                copy = standing[int(which**0.5 * len(standing))]
                damage(copy.path, way, where)
                c.say(f"{way} at {where:.3f} of {copy.node}: rank {copy.owner}, {copy.version}")
