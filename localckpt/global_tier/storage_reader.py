"""torch's file system reader, with one read of the metadata for all ranks and fast, verified data.

It reads checkpoints of any writer of torch's format. Files that this package has written are
verified block by block as they are read; the values go from there straight into their tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from localckpt.errors import CheckpointingException, CorruptShardError, PeerLostError
from localckpt.global_tier.metadata import METADATA_NAME, StorageInfo, read_metadata
from localckpt.global_tier.read_items import FileReads, ItemRead, LoadContext
from localckpt.memory.gpu_copies import await_training
from localckpt.ranks.deadline import within
from localckpt.ranks.failure import Failure
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.failures import storage_errors
from localckpt.storage.names import local_path


class CachedMetadataFileSystemReader(FileSystemReader):
    """Reader of a checkpoint of torch.distributed.checkpoint's format.

    Args:
        path: The checkpoint's directory.
        concurrent_bytes: How many bytes this rank reads at once at most, beside the tensors that
            they go to; an item that is larger, and cannot be read in pieces, goes alone.
        process_group: The ranks that load together; ``None`` for all.
        share_metadata: One rank reads the metadata for all, which all ask for together; else each
            reads it itself.
        safe_globals: Classes that the metadata, and tensors of other classes than torch's, may
            name.
        save_id: The save that all files must belong to, and be verified against.
        metadata_digest: The hash of the metadata of that save.
        timeout_s: How long the ranks wait for the metadata, in seconds.
        _extension_registry: torch's stream transforms, as compression.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        concurrent_bytes: int = 32_000_000_000,
        process_group: dist.ProcessGroup | None = None,
        share_metadata: bool = True,
        safe_globals: Iterable[Any] = (),
        save_id: str | None = None,
        metadata_digest: int | None = None,
        timeout_s: float = 300.0,
        _extension_registry: Any = None,
    ) -> None:
        if concurrent_bytes < 1:
            raise CheckpointingException(
                f"concurrent_bytes is {concurrent_bytes}; it must be above 0"
            )
        super().__init__(local_path(path), _extension_registry)
        self._concurrent_bytes = concurrent_bytes
        self._process_group = process_group
        self._share = share_metadata
        self.safe_globals = tuple(safe_globals)
        self._save_id = save_id
        self._metadata_digest = metadata_digest
        self._timeout_s = timeout_s
        self._metadata: Metadata | None = None
        self.nbytes_read = 0
        """Bytes of data files that the last load read on this rank."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another checkpoint."""
        super().reset(checkpoint_id and local_path(checkpoint_id))
        self._metadata = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read what the checkpoint holds. All ranks call it, unless the metadata is not shared.

        Raises:
            StorageError: It cannot be read; the same on every rank.
            CorruptShardError: It is damaged, or names what a file may not.
            PeerLostError: The rank that reads it did not answer in time.
        """
        if kwargs.get("rank") is not None:
            # What each rank has written for itself alone, without the others.
            self._metadata = self._parse(self._read(Path(self._get_metadata_path(kwargs["rank"]))))
        if self._metadata is None:
            shared = self._share and dist.is_available() and dist.is_initialized()
            shared = shared and dist.get_world_size(self._process_group) > 1
            self._metadata = self._parse(self._shared() if shared else self._read())
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan names into the planner's tensors.

        Raises:
            CorruptShardError: A file is damaged, or of another save.
            StorageError: A file cannot be read.
        """
        reads = FileReads(Path(self.path), self._concurrent_bytes, self._save_id)
        context = LoadContext(planner, self.read_metadata(), self.transforms, self.safe_globals)
        items = [
            ItemRead(context, request, info)
            for request, info in zip(plan.items, self._places(plan), strict=True)
            if request.type == LoadItemType.BYTE_IO or 0 not in request.lengths
        ]
        # What training has queued on them must not come after what is loaded.
        await_training({item.device for item in items}, self._timeout_s)
        reads.read(items)
        self.nbytes_read = reads.nbytes
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _places(self, plan: LoadPlan) -> list[StorageInfo]:
        """Places of a plan's items in their files.

        They are compared with the sizes of the files before memory is made: forged metadata may
        name any place.
        """
        sizes: dict[str, int] = {}
        places = []
        for request in plan.items:
            index = request.storage_index
            info = self.storage_data.get(index)
            if info is None:
                raise CorruptShardError(
                    f"the metadata of {self.path} does not say where {index.fqn} lies"
                )
            path = Path(self.path) / info.relative_path
            if info.relative_path not in sizes:
                with storage_errors("read", path):
                    sizes[info.relative_path] = path.stat().st_size
            if info.offset + info.length > sizes[info.relative_path]:
                raise CorruptShardError(
                    f"{path} is cut short: it has {sizes[info.relative_path]} bytes, and "
                    f"{index.fqn} lies from {info.offset} to {info.offset + info.length}"
                )
            places.append(info)
        return places

    def _read(self, path: Path | None = None) -> bytes:
        path = path or Path(self.path) / METADATA_NAME
        with storage_errors("read", path):
            data = path.read_bytes()
        if self._metadata_digest not in (None, xxhash.xxh3_64_intdigest(data)):
            raise CorruptShardError(f"{path} is damaged, or belongs to another save")
        return data

    def _shared(self) -> bytes:
        group = self._process_group
        shared: list[Any] = [None]
        if dist.get_rank(group) == 0:
            try:
                shared = [self._read()]
            except CheckpointingException as error:
                shared = [Failure.of(error).to_json()]
        first = 0 if group is None else dist.get_global_rank(group, 0)

        def share() -> None:
            dist.broadcast_object_list(shared, first, group)

        try:
            if "cpu" in str(dist.get_backend_config(group)):
                within(self._timeout_s, share)
            else:
                # A GPU belongs to the thread that chose it, and NCCL has a deadline of its own.
                share()
        except (TimeoutError, RuntimeError) as error:
            raise PeerLostError(
                f"rank {first} has not told what the metadata of {self.path} is ({error}). "
                f"Nothing was changed"
            ) from error
        if isinstance(shared[0], list):
            failure = Failure.from_json(shared[0])
            raise replace(failure, text=f"rank {first}: {failure.text}").error()
        return cast(bytes, shared[0])

    def _parse(self, data: bytes) -> Metadata:
        try:
            return read_metadata(data, SafeGlobals(self.safe_globals))
        except CorruptShardError as error:
            raise CorruptShardError(f"the metadata of {self.path} is damaged: {error}") from error
