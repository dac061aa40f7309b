"""A loop over epochs goes on where it was, with every kind of loader, or says why it cannot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

import localckpt
from tests.checkpointer.loops import lives
from tests.ranks import logged, node_store, on_ranks, run_ranks
from tests.upstream.environment import import_upstream, needs

_DATA = torch.arange(14.0)


class _Noisy(Dataset[torch.Tensor]):
    """Samples with noise that is drawn where they are loaded; counts what was loaded here."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return len(_DATA)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        return _DATA[index] + torch.rand(()) + random.random()


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(_DATA)


class _OfItsOwn:
    """A loader with a state of its own, which draws the order as it begins."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.left:
            self.left = torch.randperm(5).tolist()
        while self.left:
            yield _DATA[self.left.pop()]

    def __len__(self) -> int:
        return 5

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])


class _Anew:
    """A loader that can only be gone through from its beginning."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(_DATA[torch.randperm(14)].split(4))


_LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(_Noisy(), 4, shuffle=True),
    "with a generator": lambda: DataLoader(
        _Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "by a batch sampler": lambda: DataLoader(
        _Noisy(), batch_sampler=BatchSampler(SubsetRandomSampler(range(13)), 4, drop_last=False)
    ),
    "without batches": lambda: DataLoader(
        _Noisy(), batch_size=None, sampler=SubsetRandomSampler(range(4))
    ),
    "dealt": lambda: DataLoader(_Noisy(), 4, sampler=DistributedSampler(_Noisy(), 1, 0)),
    "in workers": lambda: DataLoader(_Noisy(), 4, shuffle=True, num_workers=1, drop_last=True),
    "a stream": lambda: DataLoader(_Stream(), 4),
    "a list": lambda: list(_DATA.split(4)),
    "of its own": _OfItsOwn,
    "anew": _Anew,
}


def _train(
    note: Callable[[str, Any], None],
    make_loader: Callable[[], Any],
    looks: bool = False,
    accumulates: int = 1,
    count: int = 2,
    **options: Any,
) -> None:
    """Two epochs with a schedule; ``looks`` draws a batch before the loop."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = localckpt.Values(total=0.0)
    loader = make_loader()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "run": run}
    with localckpt.Checkpointer(state, **options) as checkpointer:
        step = checkpointer.resume()
        if looks:
            next(iter(loader))
        for epoch in checkpointer.epochs(count):
            for batch in checkpointer.batches(loader):
                loss = model(batch.reshape(-1, 1) / 14).square().mean() + torch.rand(())
                loss.backward()
                note(f"{epoch} {checkpointer.batch} {batch.sum().item().hex()}", loss)
                if checkpointer.batch % accumulates == accumulates - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    run.total += loss.item()
                    if checkpointer.step():
                        break
                    step += 1
            optimizer.zero_grad()
            scheduler.step()
            run.total /= 2
            note(f"after {epoch} {random.random()}", run.total + torch.rand(()))
            if epoch == 0:
                checkpointer.save(step - 1)
    note("weight", model.weight)


@pytest.mark.parametrize("kind", _LOADERS)
def test_a_loop_over_epochs_goes_on_bit_for_bit_after_each_step(kind: str, tmp_path: Path) -> None:
    program = partial(_train, make_loader=_LOADERS[kind], looks=kind != "of its own")

    expected, found, count = lives(0, program, tmp_path, "nodes")

    assert found == expected
    assert count > 6


@needs("torchdata")
@on_ranks(1, nodes=1, init_group=False, timeout_s=170)
def test_a_stateful_loader_goes_on_by_its_own_state_and_a_look_before_a_plain_loop_is_warned_of(
    rank: int,
) -> None:
    make = import_upstream("torchdata.stateful_dataloader").StatefulDataLoader
    for how, options in {
        "shuffled": {"shuffle": True},
        "dealt": {"sampler": DistributedSampler(_DATA, 1, 0)},
    }.items():
        program = partial(_train, make_loader=partial(make, _DATA, 4, **options), looks=True)
        expected, found, count = lives(0, program, node_store() / how, "nodes")
        assert found == expected
        assert count > 6

    warned = logged()
    for looks in (False, False, True):
        loader = make(_DATA, 2)
        state = {"model": torch.nn.Linear(1, 1), "loader": loader}
        local = node_store() / "plain"
        with localckpt.Checkpointer(state, local=local, max_attempts=None) as checkpointer:
            first = checkpointer.resume()
            if looks:
                next(iter(loader))
            for _, step in zip(loader, range(first, first + 2), strict=False):
                checkpointer.step(step)
    (lost,) = [text for text in warned if "has taken its place" in text]
    assert lost.startswith("'loader' is a StatefulDataLoader")


def _go(checkpointer: localckpt.Checkpointer, *loaders: Any, ends: bool = False) -> None:
    """One epoch, or two, over a loader each."""
    for _, loader in zip(checkpointer.epochs(2), loaders, strict=False):
        for _ in checkpointer.batches(loader):
            checkpointer.step()
            if ends:
                break


def _in_an_epoch(checkpointer: localckpt.Checkpointer, *calls: str) -> None:
    for _ in checkpointer.epochs(1):
        for call in calls:
            list(checkpointer.batches([1])) if call == "batches" else getattr(checkpointer, call)()


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (
            lambda c: _in_an_epoch(c, "batches", "batches"),
            r"batches\(\) was called in an epoch, after its batches.* once in each epoch",
        ),
        (lambda c: _in_an_epoch(c, "resume"), r"resume\(\) was called in the loop over epochs"),
        (lambda c: _in_an_epoch(c, "step"), r"step\(\) was called in an epoch, before its batches"),
        (lambda c: next(c.batches([1])), r"batches\(\) was called outside of epochs"),
        (lambda c: _go(c, iter([1, 2])), "was given a list_iterator, .* give it the loader itself"),
        (lambda c: _go(c, [1, 2], [1, 2], ends=True), r"epoch 0 was left by break after step\(\)"),
    ],
)
def test_a_loop_that_could_not_be_resumed_is_an_error(
    use: Callable[[localckpt.Checkpointer], None], told: str, tmp_path: Path
) -> None:
    with localckpt.Checkpointer({"v": torch.nn.Linear(1, 1)}, local=tmp_path) as checkpointer:
        checkpointer.resume()

        with pytest.raises(localckpt.CheckpointingException, match=told):
            use(checkpointer)


def test_a_longer_run_goes_on_and_an_epoch_may_be_empty_or_left_before_a_step(
    tmp_path: Path,
) -> None:
    seen = []
    for count in (1, 1, 3):
        with localckpt.Checkpointer({"v": torch.nn.Linear(1, 1)}, local=tmp_path) as checkpointer:
            first = checkpointer.resume()
            for epoch in checkpointer.epochs(count):
                for batch in checkpointer.batches([] if epoch == 1 else range(4)):
                    if checkpointer.batch == 3:
                        break
                    seen.append((first, epoch, batch))
                    checkpointer.step()

    assert seen == [(0, 0, n) for n in range(3)] + [(3, 2, n) for n in range(3)]


def test_the_epoch_of_a_checkpoint_that_does_not_tell_it_is_asked_for(tmp_path: Path) -> None:
    for is_new in (False, True):
        with localckpt.Checkpointer({"v": torch.nn.Linear(1, 1)}, local=tmp_path) as checkpointer:
            checkpointer.resume()
            if not is_new:
                checkpointer.step(0)
                continue
            with pytest.raises(localckpt.MismatchError, match=r"epochs\(5, first=...\)"):
                next(checkpointer.epochs(5))
            assert list(checkpointer.epochs(5, first=3)) == [3, 4]


def _seen(rank: int, _: int, size: int, shuffle: bool, steps: int, shared: Path | None) -> Any:
    """Samples that a rank is given in so many steps of an epoch, or the error."""
    data = TensorDataset(torch.arange(24))
    loader = DataLoader(data, size, sampler=DistributedSampler(data, shuffle=shuffle))
    seen: list[int] = []
    with localckpt.Checkpointer(
        {"v": torch.nn.Linear(1, 1)}, local=node_store(), shared=shared, replication_factor=1
    ) as checkpointer:
        checkpointer.resume()
        try:
            for _ in checkpointer.epochs(1):
                for number, (batch,) in enumerate(checkpointer.batches(loader)):
                    if number == steps:
                        return seen
                    seen += batch.tolist()
                    checkpointer.step()
        except localckpt.MismatchError as error:
            return str(error)
    return seen


@pytest.mark.parametrize(
    ("tier", "loaded", "told"),
    [
        ("nodes", (4, 2, True), ""),
        ("shared", (1, 4, True), ""),
        ("nodes", (3, 4, True), "16 samples, which are no whole number of batches of 4"),
        ("nodes", (2, 4, False), "24 samples in batches of 4, dealt by a Distributed"),
    ],
)
def test_the_place_is_one_of_the_job_on_other_ranks_and_with_other_batches(
    tier: str, loaded: tuple[int, int, bool], told: str, tmp_path: Path
) -> None:
    # The nodes are lost with all that they have, or there is nothing but them.
    nodes = [tmp_path / tier, tmp_path / "nodes"]
    shared = tmp_path / "common" if tier == "shared" else None
    before = run_ranks(_seen, 2, 4, True, 2, shared, store_per_node=nodes[:1])

    after = run_ranks(_seen, loaded[0], *loaded[1:], 100, shared, store_per_node=nodes[1:])

    if told:
        assert all(told in text for text in after)
    else:
        assert sorted(chain(*before, *after)) == list(range(24))
