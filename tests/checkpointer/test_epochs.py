"""A loop over epochs goes on where it was, with every kind of loader, or says why it cannot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
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
    WeightedRandomSampler,
)

import localckpt
from tests.checkpointer.lives import lives

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
    "in order": lambda: DataLoader(_Noisy(), 4, drop_last=True),
    "with a generator": lambda: DataLoader(
        _Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "with replacement": lambda: DataLoader(
        _Noisy(), 4, sampler=WeightedRandomSampler([1.0] * 14, 14)
    ),
    "by a batch sampler": lambda: DataLoader(
        _Noisy(), batch_sampler=BatchSampler(SubsetRandomSampler(range(13)), 4, drop_last=False)
    ),
    "without batches": lambda: DataLoader(
        _Noisy(), batch_size=None, sampler=SubsetRandomSampler(range(4))
    ),
    "dealt": lambda: DataLoader(_Noisy(), 4, sampler=DistributedSampler(_Noisy(), 1, 0)),
    "in workers": lambda: DataLoader(_Noisy(), 4, shuffle=True, num_workers=2),
    "a stream": lambda: DataLoader(_Stream(), 4),
    "a stream in workers": lambda: DataLoader(_Stream(), 4, num_workers=2),
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
