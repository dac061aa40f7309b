"""Data loaders: the place of a loop in their data, and the batches after a number of them."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from localckpt.checkpointer.parts import RandomPart
from localckpt.errors import MismatchError
from localckpt.state_dict.replicated import without_marker

logger = logging.getLogger(__name__)

_WAY_OUT = (
    "Go on with the loader and the number of ranks that it was saved with, or from the last step "
    "of an epoch, resume(step=...)"
)


Places = dict[str, tuple[Any, int]]


def places_loaded(parts: Mapping[str, Any]) -> Places:
    """Note the loaders among the parts whose loaded place no iterator has taken, and the places.

    The first iterator of a StatefulDataLoader takes the place that was loaded, whoever makes it: a
    look at a batch before the loop leaves the loop at the beginning of the epoch.
    """
    loaders = {key: without_marker(part) for key, part in parts.items()}
    return {
        key: (loader, _batches_in(loader.next_iter_state))
        for key, loader in loaders.items()
        if is_torchdatas(loader) and loader.next_iter_state is not None
    }


def warn_of_lost_places(places: Places) -> None:
    for key, (loader, count) in places.items():
        if loader.next_iter_state is not None or count == length_of(loader):
            continue
        if (now := _batches_in(loader.state_dict())) <= count:
            logger.warning(
                "%r is a StatefulDataLoader that was resumed after batch %d, and it is now "
                "after batch %d: the first iter(loader) since resume(), such as one to "
                "look at a batch, has taken its place, and the loop has begun the epoch "
                "anew. Make one iterator, or go through it by batches()",
                *(key, count, now),
            )


def _batches_in(state: Mapping[str, Any]) -> int:
    """Return the number of batches that a StatefulDataLoader had given at a state of its own."""
    if "_snapshot" in state:
        return int(state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"])
    return int(state.get("_num_yielded", 0))


class _Rest:
    """Indices of a sampler without the first ones."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> _Rest:
        self._left = iter(self._sampler)
        return self

    def skip(self) -> None:
        count, self._count = self._count, 0
        for _ in islice(self._left, count):
            pass

    def __next__(self) -> Any:
        self.skip()
        return next(self._left)


def is_unstarted(batches: Any) -> bool:
    is_generator = inspect.isgenerator(batches)
    return is_generator and inspect.getgeneratorstate(batches) == inspect.GEN_CREATED


def without_first(loader: Any, count: int, *, by_index: bool) -> Iterator[Any]:
    """Batches of a loader after the first ones, which are not loaded where that is exact."""
    if (without_first := getattr(loader, "without_first", None)) is not None:
        return iter(without_first(count))
    if isinstance(loader, Sequence):
        return islice(loader, count, None)
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if is_plain and not isinstance(loader.dataset, IterableDataset):
        if loader.num_workers == 0 or by_index:
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            rest = _Rest(getattr(loader, name), count)
            # Whose attributes cannot be set, and whose workers stay with it.
            copied = copy.copy(loader)
            vars(copied).update({name: rest, "_iterator": None})
            left: Iterator[Any] = iter(copied)
            rest.skip()
            return left
        logger.info(
            "%d batches of the epoch are loaded once more by the workers, whose random numbers "
            "are the same only then; batches(loader, by_index=True) leaves them out",
            count,
        )
    left = iter(loader)
    drawn = sum(1 for _ in islice(left, count))
    if drawn < count:
        raise MismatchError(
            f"the loader has {drawn} batches, and {count} were given in this epoch before the "
            f"checkpoint was saved. {_WAY_OUT}"
        )
    return left


def is_torchdatas(loader: Any) -> bool:
    """Return whether a loader is a StatefulDataLoader, without an import of torchdata."""
    return hasattr(loader, "next_iter_state")


def length_of(loader: Any) -> int | None:
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def facts_of(loader: Any, world_size: int) -> dict[str, Any]:
    """Return what a place in the data of a loader is worth nothing without."""
    found = samplers_of(loader)
    dealt = next((s for s in found.values() if isinstance(s, DistributedSampler)), None)
    sizes = [getattr(thing, "batch_size", None) for thing in found.values()]
    dataset = getattr(loader, "dataset", loader)
    return {
        "ranks": world_size,
        "batches": length_of(loader),
        "samples": length_of(dataset),
        "batch_size": next((size for size in sizes if isinstance(size, int)), None),
        "dealt": dealt and [dealt.num_replicas == world_size, dealt.shuffle, dealt.seed],
    }


def batches_given(loaded: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """Return the number of batches of a rank that were given, as its loader counts them now.

    The place is a number of samples of the job, where a sampler deals them out to the ranks in one
    order for any number of ranks.
    """
    saved, count = loaded["facts"], int(loaded["batches"])
    if count == 0 or loaded["is_over"] or count == saved["batches"]:
        return count
    where = f"the checkpoint was saved by {saved['ranks']} ranks in epoch {loaded['epoch']} after"
    other = [name for name in ("samples", "dealt") if saved[name] != now[name]]
    is_resized = saved["ranks"] != now["ranks"]
    is_dealt = bool(saved["dealt"] and now["dealt"] and saved["dealt"][0] and now["dealt"][0])
    if other and not (is_resized and other == ["dealt"]):
        raise MismatchError(
            f"{where} {count} batches of other data: {_described(saved)} then, and "
            f"{_described(now)} now. {_WAY_OUT}"
        )
    if not is_resized and saved["batch_size"] == now["batch_size"]:
        return count
    sizes = [saved["batch_size"], now["batch_size"]]
    if None in sizes or (is_resized and not (is_dealt and saved["dealt"] == now["dealt"])):
        raise MismatchError(
            f"{where} {count} batches of {_described(saved)}, which are other batches of the "
            f"loader that is given, {_described(now)} on {now['ranks']} ranks: only those of a "
            f"DistributedSampler are in one order for any number of ranks. {_WAY_OUT}"
        )
    # Of a sampler that does not deal, each rank has all samples.
    ranks = [facts["ranks"] if is_dealt else 1 for facts in (saved, now)]
    samples = count * sizes[0] * ranks[0]
    if samples % (sizes[1] * ranks[1]):
        raise MismatchError(
            f"{where} {samples} samples, which are no whole number of batches of {sizes[1]} "
            f"samples on {now['ranks']} ranks. {_WAY_OUT}"
        )
    return int(samples // (sizes[1] * ranks[1]))


def _described(facts: Mapping[str, Any]) -> str:
    count = "an unknown number of" if facts["samples"] is None else facts["samples"]
    dealt = ""
    if facts["dealt"]:
        dealt = ", dealt by a DistributedSampler(shuffle={1}, seed={2})".format(*facts["dealt"])
    return f"{count} samples in batches of {facts['batch_size'] or 'unknown size'}{dealt}"


class EpochPosition:
    """Position in the data of a framework that leaves out batches itself."""

    def __init__(self) -> None:
        self._samplers: dict[str, Any] = {}
        # States of all generators at the beginning of the epoch to go on in.
        self._entry: dict[str, Any] = {}
        self._is_within_epoch = False
        self._is_resumed = False

    def enter_epoch(self, loader: Any) -> None:
        self._samplers = samplers_of(loader)
        if not self._is_resumed:
            self._entry = entry_of(self._samplers)
            return
        restore_entry(self._samplers, self._entry)
        # At the end of an epoch there is nothing to leave out.
        self._is_resumed = self._is_within_epoch

    def enter_step(self) -> bool:
        """Begin a step; whether it is the first one of an epoch that was resumed within."""
        is_resumed, self._is_resumed = self._is_resumed, False
        return is_resumed

    def end_step(self, *, is_last_of_epoch: bool) -> None:
        self._is_within_epoch = not is_last_of_epoch
        if is_last_of_epoch:
            self._entry = entry_of(self._samplers)

    def state_dict(self) -> dict[str, Any]:
        return {"entry": self._entry, "is_within_epoch": self._is_within_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entry = dict(state["entry"])
        self._is_within_epoch = state["is_within_epoch"]
        self._is_resumed = True


def samplers_of(loader: Any) -> dict[str, Any]:
    """A data loader and its samplers, by their paths from the loader."""
    found: dict[str, Any] = {}
    looking, seen = {"loader": loader}, set[int]()
    while looking:
        path, thing = looking.popitem()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        found[path] = thing
        for name in ("sampler", "batch_sampler"):
            if (inner := getattr(thing, name, None)) is not None:
                looking[f"{path}.{name}"] = inner
    return found


def entry_of(samplers: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the order of the epoch that begins now is drawn from."""
    return {
        "random": RandomPart().state_dict(),
        "generators": states_of(samplers),
        # Accelerate's sampler draws each epoch from the seed that its process began with.
        "seeds": {
            path: sampler.initial_seed
            for path, sampler in samplers.items()
            if isinstance(getattr(sampler, "initial_seed", None), int)
        },
    }


def restore_entry(samplers: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
    """Have the order of an epoch drawn again from what :func:`entry_of` returned."""
    RandomPart().load_state_dict(entry["random"])
    for path, seed in entry["seeds"].items():
        if path in samplers:
            samplers[path].initial_seed = seed
    restore_generators(samplers, entry["generators"])


def states_of(samplers: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the states of the generators of loaders and samplers, by their paths."""
    return {path: generator.get_state() for path, generator in _generators_of(samplers).items()}


def restore_generators(samplers: Mapping[str, Any], states: Mapping[str, torch.Tensor]) -> None:
    """Have generators go on from the states that :func:`states_of` returned."""
    generators = _generators_of(samplers)
    for path, state in states.items():
        if path in generators:
            generators[path].set_state(state)


def _generators_of(samplers: Mapping[str, Any]) -> dict[str, torch.Generator]:
    found: dict[str, torch.Generator] = {}
    for path, thing in samplers.items():
        for name in ("generator", "synchronized_generator"):
            generator = getattr(thing, name, None)
            if isinstance(generator, torch.Generator) and generator not in found.values():
                found[f"{path}.{name}"] = generator
    return found
