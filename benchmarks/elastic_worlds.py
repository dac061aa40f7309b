"""What it takes to plan a load on fewer ranks than thousands that saved.

One process stands for the job: it makes what every rank would tell of a Llama 3 405B with AdamW
whose tensors are sharded over all ranks, and then does what the root does with it. Eight ranks are
on a node. The job's key-value store, which brings what is told from rank to rank, is not measured.
Beside it is what torch.distributed.checkpoint's metadata and load planner would take for the same.
"""

from __future__ import annotations

import gc
import json
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from benchmarks.report import Report
from benchmarks.setup import Options
from localckpt.availability.reshard import Keys, TensorGroup
from localckpt.global_tier.metadata import StorageInfo
from localckpt.ids import Checkpoint, Generation
from localckpt.managers.elastic_judge import ElasticJudge, ValueImages
from localckpt.ranks.values import Message
from localckpt.ranks.verdict import PerRank
from localckpt.state_dict.boxes import Region
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.state_dict.targets import STRICT

__all__ = ["measure"]

_WORLDS = (1024, 768), (4096, 3072), (16384, 12288)
_RANKS_A_NODE = 8
_GOAL_S, _GOAL_KB = 10.0, 8.0
_HEAD = 128256
_LAYERS, _WIDTH, _INNER, _OF_KEYS = 126, 16384, 53248, 1024
_LAYER = {
    **dict.fromkeys(("wq", "wo"), (_WIDTH, _WIDTH)),
    **dict.fromkeys(("wk", "wv"), (_OF_KEYS, _WIDTH)),
    **dict.fromkeys(("w1", "w3"), (_INNER, _WIDTH)),
    "w2": (_WIDTH, _INNER),
    **dict.fromkeys(("attention_norm", "ffn_norm"), (_WIDTH,)),
}
_MODEL = {
    **{f"layers.{n}.{name}": shape for n in range(_LAYERS) for name, shape in _LAYER.items()},
    **dict.fromkeys(("tok_embeddings", "output"), (_HEAD, _WIDTH)),
    "norm": (_WIDTH,),
}
_PARTS = "model", "optimizer.exp_avg", "optimizer.exp_avg_sq"
# What ranks tell together: the tensors of one shape.
_TABLES = [
    Keys("bfloat16", shape, tuple(sorted(f"{part}.{name}" for part in _PARTS for name in of_shape)))
    for shape in dict.fromkeys(_MODEL.values())
    for of_shape in [[name for name, its in _MODEL.items() if its == shape]]
]
# Their names are digests of all keys.
_NAMED = {keys.name: keys for keys in _TABLES}
_ROUNDS = 3
# torch's metadata has an object for each part of a tensor: of so many parts it is measured.
_SAMPLED = 80_000


def measure(_: Options) -> Report:
    """Median times of the root, and what it gets and gives."""
    report = Report("elastic-worlds")
    for saved_by, wanted_by in _WORLDS:
        job = _Job(saved_by, wanted_by)
        plans = [job.plan() for _ in range(_ROUNDS)]
        report.fact(
            f"{saved_by:,} to {wanted_by:,} ranks: the root plans",
            median(plan.seconds for plan in plans),
            "s",
            f"{plans[0].takes:,} parts of {len(_PARTS) * len(_MODEL):,} tensors",
            _GOAL_S,
        )
        kilobytes = plans[0].nbytes / wanted_by / 1e3
        megabytes, told = plans[0].nbytes / 1e6, plans[0].told_nbytes / 1e6
        note = f"{megabytes:.3g} MB in all; all ranks tell {told:.3g} MB"
        report.fact("it tells a rank", kilobytes, "kB", note, _GOAL_KB)
        step = max(1, saved_by * len(_PARTS) * len(_MODEL) // _SAMPLED)
        megabytes, seconds = _with_torch(saved_by, wanted_by, step)
        note = f"on every rank; both measured with one tensor in {step}"
        report.fact("torch's metadata of the same", megabytes, "MB", "pickled, for every rank")
        report.fact("torch's load planner", seconds, "s", note)
    return report


def _with_torch(saved_by: int, wanted_by: int, step: int) -> tuple[float, float]:
    """Return the MB of torch's metadata of all tensors, and the seconds in which a rank plans."""
    names = [(f"{part}.{name}", shape) for part in _PARTS for name, shape in _MODEL.items()]
    described = {
        key: TensorStorageMetadata(
            TensorProperties(torch.bfloat16),
            torch.Size(shape),
            [_chunk(shape, rank, saved_by) for rank in range(saved_by)],
        )
        for key, shape in names[::step]
    }
    places = {
        MetadataIndex(key, chunk.offsets, number): StorageInfo(f"__{number}_0.distcp", 0, 1)
        for key, tensor in described.items()
        for number, chunk in enumerate(tensor.chunks)
    }
    nbytes = len(pickle.dumps(Metadata(dict(described), storage_data=places)))
    began = time.process_time()
    for key, tensor in described.items():
        wanted = _chunk(tensor.size, wanted_by // 2, wanted_by)
        create_read_items_for_chunk_list(key, tensor, [wanted])
    seconds = time.process_time() - began
    scale = len(names) / len(described)
    return nbytes * scale / 1e6, seconds * scale


def _chunk(shape: Sequence[int], rank: int, count: int) -> ChunkStorageMetadata:
    runs = [runs[0] for runs in _rows(shape, rank, count)]
    offsets, sizes = zip(*runs, strict=True)
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


@dataclass
class _Plan:
    seconds: float
    takes: int
    nbytes: int
    told_nbytes: int


@dataclass
class _Job:
    """A job that restarts with fewer ranks, and what these tell."""

    saved_by: int
    wanted_by: int

    def __post_init__(self) -> None:
        self.nodes = [f"{rank // _RANKS_A_NODE:032x}" for rank in range(self.wanted_by)]
        middles = ((2 * shard + 1) * self.wanted_by for shard in range(self.saved_by))
        self.readers = {s: middle // (2 * self.saved_by) for s, middle in enumerate(middles)}
        self.described = [json.dumps(report) for report in self._describe()]
        self.told = [
            json.dumps({"tables": _TABLES if rank == 0 else [], "digests": []})
            for rank in range(self.wanted_by)
        ]

    def plan(self) -> _Plan:
        """Do what the root does."""
        gc.collect()
        began = time.process_time()
        held = {shard: [self.nodes[reader]] for shard, reader in self.readers.items()}
        checkpoint = Checkpoint(Generation(1234, 2**60), 10**7, self.saved_by)
        places = self.nodes, self.readers, held
        images = ValueImages(checkpoint.shard(0, ""), SafeGlobals())
        judge = ElasticJudge(checkpoint, {}, *places, STRICT, images)
        asked = judge.compare([json.loads(text) for text in self.described])
        nbytes = _nbytes_of(asked)
        plan = judge.plan([Message(json.loads(told), b"[]") for told in self.told])
        nbytes += _nbytes_of(plan)
        seconds = time.process_time() - began
        takes = sum(len(part["takes"]) for part in plan.parts.values())
        return _Plan(seconds, takes, nbytes, sum(map(len, [*self.described, *self.told])))

    def _describe(self) -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = [
            {
                "rules": [],
                "places": [],
                "shared": [],
                "wanted": _groups(rank, self.wanted_by, ""),
                "saved": [],
            }
            for rank in range(self.wanted_by)
        ]
        sections = {name: f"{n:032x}" for n, name in enumerate(("model", "optimizer", "step"))}
        for shard, reader in self.readers.items():
            groups = _groups(shard, self.saved_by, str(shard))
            reports[reader]["saved"].append([shard, groups, sections, {}])
        return reports


def _groups(rank: int, count: int, equal_on: str) -> list[TensorGroup]:
    return [
        TensorGroup(name, _rows(keys.shape, rank, count), equal_on) for name, keys in _NAMED.items()
    ]


def _rows(shape: Sequence[int], rank: int, count: int) -> Region:
    size = -(-shape[0] // count)
    low, high = (min(shape[0], part * size) for part in (rank, rank + 1))
    return (((low, high - low),), *(((0, side),) for side in shape[1:]))


def _nbytes_of(verdict: PerRank) -> int:
    return sum(len(json.dumps(part)) for part in (verdict.common, *verdict.parts.values()))
