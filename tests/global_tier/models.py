"""What tests of checkpoints on shared storage share: states, models, drains, and hooks on files."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as dtensor_spec
from torch.distributed.tensor.placement_types import _StridedShard

from localckpt import AsyncCallsQueue, GlobalCheckpointManager
from localckpt.global_tier import staging
from localckpt.global_tier.folders import CommitRecord, Folder, SharedCheckpoint
from localckpt.global_tier.images import SharedImages
from localckpt.global_tier.metadata import METADATA_NAME, read_metadata
from localckpt.global_tier.places import FilePlace
from localckpt.state_dict.basic import unwrapped
from localckpt.state_dict.reader import ImageReader
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.waiting import wait_until
from tests.global_tier.states import blank
from tests.managers.jobs import assert_same, make_manager
from tests.ranks import run_ranks

MAX_S = 20.0
"""Timeout of managers and meetings where no timeout is to be seen."""


def run_sharded(fn: Callable[..., Any], world_size: int, root: Path, *args: Any) -> list[Any]:
    """As :func:`run_ranks`, with time for what takes longer."""
    return run_ranks(fn, world_size, root, *args, timeout_s=100.0)


def manager_on(root: Path, session_id: str = "", **options: Any) -> GlobalCheckpointManager:
    return GlobalCheckpointManager(root, session_id, **({"timeout": MAX_S} | options))


def kept_in_image(folder: Path, rank: int) -> Any:
    """The state of a rank as its image in a drained checkpoint has it."""
    folder = FilePlace(folder)
    record = CommitRecord.read(folder / "localckpt.json")
    assert record is not None
    metadata = read_metadata((folder / METADATA_NAME).read_bytes(), SafeGlobals())
    found = SharedCheckpoint(Folder(folder.parent, record.iteration, record.epoch), record)
    images = SharedImages(found, metadata.storage_data)
    identity = images.identity(rank)
    with closing(images.open(identity)) as source:
        return unwrapped(ImageReader(source, SafeGlobals(), identity).restore())


def misdescribed(kind: str, mesh: DeviceMesh) -> DTensor:
    """A DTensor on a mesh of 2 x 2, whose parts are not those that torch describes."""
    whole = torch.arange(40.0).reshape(8, 5)
    row, column = mesh.get_coordinate() or (0, 0)
    if kind == "partial":
        return DTensor.from_local(whole, mesh, [Partial(), Replicate()], run_check=False)
    if kind == "order":
        found = DTensor.from_local(whole, mesh, [Replicate()] * 2, run_check=False)
        order = (dtensor_spec.ShardOrderEntry(0, (1, 0)),)
        spec = dtensor_spec.DTensorSpec(
            mesh, (Shard(0), Shard(0)), found._spec.tensor_meta, shard_order=order
        )
        first = 2 * (2 * column + row)
        return DTensor(whole[first : first + 2].clone(), spec, requires_grad=False)
    if kind == "runs":
        strided = [_StridedShard(0, split_factor=2), Replicate()]
        mine = whole.view(4, 2, 5)[row::2].reshape(4, 5)
        return DTensor.from_local(mine, mesh, strided, run_check=False)
    number = 2 * row + column
    first, count = ((0, 3), (3, 1), (4, 2), (6, 2))[number]
    return DTensor.from_local(
        *(whole[first : first + count].clone(), mesh, [Shard(0), Shard(0)]),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


MISDESCRIBED = {
    "partial": "it has a Partial placement",
    "order": "its shard_order is not the order of the dimensions of its mesh",
    "runs": "this rank has several runs of its rows or columns",
    "rows": "its placements give a local tensor of shape [2, 5], and it has one of [",
}
"""Kinds of :func:`misdescribed`, and what is said of them."""
if not hasattr(dtensor_spec, "ShardOrderEntry"):
    # Earlier releases of torch know no order.
    del MISDESCRIBED["order"]


def state_of(iteration: int, rank: int) -> dict[str, Any]:
    """A state like no other's: some of it is the same on all ranks, some is one rank's alone."""
    shared = torch.Generator().manual_seed(iteration)
    own = torch.Generator().manual_seed(1000 * iteration + rank + 1)
    return {
        "shared": {"weight": torch.randn(37, 11, generator=shared), "note": f"saved {iteration}"},
        f"own of {rank}": {
            "weight": torch.randn(1000 + rank, generator=own),
            "half": torch.randn(3, 5, generator=own).to(torch.bfloat16),
            "step": torch.tensor(float(iteration)),
            "empty": torch.zeros(0, 4),
            "losses": [1.5, {"at": iteration}],
        },
    }


def gathered(state: Any) -> Any:
    """A state with all values of each tensor; all ranks of the tensors' meshes call it."""
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(gathered(value) for value in state)
    return state.full_tensor() if isinstance(state, DTensor) else state


def loaded_by(
    manager: GlobalCheckpointManager, rank: int, iteration: int | None = None
) -> tuple[int, dict[str, Any]]:
    """What the manager loads into a blank state of the form of :func:`state_of`."""
    state = blank(state_of(0, rank))
    return manager.load(into=state, iteration=iteration)[1].iteration, state


def assert_loads(manager: GlobalCheckpointManager, rank: int, iteration: int) -> None:
    """Load that iteration, which is the newest, and compare."""
    assert manager.find_latest() == iteration
    found, state = loaded_by(manager, rank)
    assert found == iteration
    assert_same(state, state_of(iteration, rank))


class Unpicklable:
    """Object that can be saved when the save is planned, and not when it is copied."""

    def __init__(self) -> None:
        self._is_planned = False

    def __reduce__(self) -> Any:
        self._is_planned = not self._is_planned
        if not self._is_planned:
            raise RuntimeError("this cannot be pickled")
        return OrderedDict, ()


def fsdp_model(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of no dimension that many ranks divide, sharded by FSDP2, and its optimizer.

    Some of its parameters have fewer rows than a mesh of 8 has ranks.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 13))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps, with gradients that depend on the parameters alone."""
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.sin(10 * parameter.detach())
        optimizer.step()
        optimizer.zero_grad()


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a trainer saves of them."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save_numbers(manager: GlobalCheckpointManager, *iterations: int) -> None:
    """Save nine times its number at each iteration."""
    for iteration in iterations:
        manager.save({"w": torch.full((9,), float(iteration))}, iteration, is_async=False)


def checkpoints_in(root: Path) -> list[str]:
    """Names of the directories that stand where checkpoints do."""
    return sorted(path.name for path in root.iterdir() if path.name.startswith("iteration_"))


def leftovers_in(root: Path) -> list[str]:
    """Names of all that is there but checkpoints, and the two files that tell who saves."""
    known = {*checkpoints_in(root), ".localckpt.lock", ".localckpt.owner"}
    return sorted(path.name for path in root.iterdir() if path.name not in known)


def at_each_open(part: str, act: Callable[[], None]) -> None:
    """From now on do this whenever this process opens a file with ``part`` in its name."""
    _at("open", part, act)


def at_each_rename(part: str, act: Callable[[], None]) -> None:
    """From now on do this whenever this process gives a file a name with ``part`` in it."""
    _at("os.rename", part, act)


def _at(event: str, part: str, act: Callable[[], None]) -> None:
    # Python calls it in the thread that is about to make the call, which waits for it.
    place = 1 if event == "os.rename" else 0

    def hook(name: str, args: tuple[Any, ...]) -> None:
        if name != event or isinstance(args[place], int):
            # Files are opened by their descriptors, too.
            return
        if part in Path(os.fsdecode(args[place])).name:
            act()

    sys.addaudithook(hook)


WAIT_S = 60.0
"""Far longer than any drain of the tests takes."""


class Job:
    """Managers of both tiers, and a queue for promotions, of one rank."""

    def __init__(
        self,
        root: Path,
        on_shared: dict[str, Any] | None = None,
        node: Path | None = None,
        **options: Any,
    ) -> None:
        self._open = ExitStack()
        if "repl_strategy" in options:
            self._open.enter_context(options["repl_strategy"])
        rank = dist.get_rank() if dist.is_initialized() else 0
        node = node or root / f"node{rank}"
        self.nodes = self._open.enter_context(make_manager("disk", node, **options))
        usual = {"root": root / "shared", "events": options.get("events"), "local": self.nodes}
        self.shared: GlobalCheckpointManager = self._open.enter_context(
            manager_on(**(usual | (on_shared or {})))
        )
        self.queue = self._open.enter_context(AsyncCallsQueue(timeout_s=WAIT_S))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def begin(self, iteration: int, **options: Any) -> None:
        self.queue.schedule_async_request(self.nodes.promote(iteration, to=self.shared, **options))

    def promote(self, iteration: int, **options: Any) -> None:
        self.begin(iteration, **options)
        self.queue.wait_until_finished()


@contextmanager
def small_files() -> Iterator[None]:
    """Drains write files of 1 MiB."""
    before = staging.FILE_NBYTES
    staging.FILE_NBYTES = 1 << 20  # type: ignore[misc]
    try:
        yield
    finally:
        staging.FILE_NBYTES = before  # type: ignore[misc]


def await_files(root: Path, count: int, of_rank: str = "") -> None:
    """Wait until a drain has begun so many data files, of one rank or of all."""
    pattern = f".iteration*/__{of_rank}*.distcp"
    assert wait_until(lambda: len(list(root.glob(pattern))) >= count, WAIT_S)
