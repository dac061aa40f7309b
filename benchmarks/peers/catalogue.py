"""All peers by name, and those that cannot be measured, with the reason."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from benchmarks.peers.base import Peer

__all__ = [
    "DRAIN_PEERS",
    "GLOBAL_PEERS",
    "NOT_MEASURED",
    "OURS",
    "OURS_DRAIN",
    "OURS_GLOBAL",
    "PEERS",
    "peer_class",
]

OURS = "localckpt, thread"
PEERS = {
    OURS: "ours:OursThread",
    "torch.save": "plain_files:TorchSave",
    "safetensors": "plain_files:SafetensorsFile",
    "DCP save": "dcp:DcpSave",
    "DCP async_save, thread": "dcp:DcpThread",
    "DCP async_save, cached": "dcp:DcpCached",
    "DCP async_save, process": "dcp:DcpProcess",
    "NVRx local": "nvrx:NvrxLocal",
    "torchsnapshot take": "snapshots:SnapshotTake",
    "torchsnapshot async_take": "snapshots:SnapshotAsyncTake",
    "torch_checkpointing": "torch_checkpointing:TorchCheckpointing",
    "lm-resiliency (GEMINI)": "gemini:Gemini",
}
OURS_GLOBAL = "localckpt, global"
# In the format of torch.distributed.checkpoint.
GLOBAL_PEERS = {
    OURS_GLOBAL: "ours:OursGlobal",
    **{name: peer for name, peer in PEERS.items() if name.startswith("DCP")},
    "NVRx writer, process": "nvrx:NvrxWriter",
    "NVRx writer, forks": "nvrx:NvrxForkingWriter",
}
OURS_DRAIN = "localckpt, drain"
# What goes behind training to shared storage.
DRAIN_PEERS = {
    OURS_DRAIN: "ours:OursDrain",
    "localckpt, drain at 200 MB/s": "ours:OursPacedDrain",
    **{name: GLOBAL_PEERS[name] for name in (OURS_GLOBAL, "DCP async_save, thread")},
    **{name: GLOBAL_PEERS[name] for name in ("DCP async_save, process", "NVRx writer, process")},
}
NOT_MEASURED = {
    "ml-flashpoint": "not installable from a package registry alone: version 0.0.10 has no wheel, "
    "and building it clones abseil-cpp from its public repository",
}


def peer_class(name: str) -> type[Peer]:
    """Import a peer; what it needs may not be installed."""
    module, _, attribute = (PEERS | GLOBAL_PEERS | DRAIN_PEERS)[name].partition(":")
    return cast(type[Peer], getattr(import_module(f"benchmarks.peers.{module}"), attribute))
