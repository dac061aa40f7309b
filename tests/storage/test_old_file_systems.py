"""ext2 and ext3, which cannot reserve space: saves work there, and a full disk is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from localckpt.errors import StorageError
from localckpt.storage.directory import DirectoryStore
from localckpt.storage.write import write_shard
from tests.faults.loop_disk import old_disk
from tests.storage.shards import assert_loads, everything, found, identity, names, save, staged


@pytest.mark.fault("unusable-store")
@pytest.mark.parametrize("kind", ["ext2", "ext3"])
def test_saves_work_on_it_and_files_are_used_again(
    kind: str, tmp_path: Path, shm_roots: Callable[[int], list[Path]]
) -> None:
    with old_disk(kind, shm_roots(1)[0] / "disk", tmp_path / "disk"):
        store = DirectoryStore(tmp_path / "disk" / "node", "run", 0, 5.0)
        for iteration, nbytes in ((1, 100_000), (2, 1_000_000), (3, 300_001)):
            save(store, identity(iteration), nbytes)
            assert_loads(store, identity(iteration), nbytes)
            store.prune(everything, [])

        save(store, identity(4))
        job = staged(store, identity(5), 40_000_000)
        with pytest.raises(StorageError, match="No space left"):
            write_shard(job)

        assert names(store.folder) == {"safetensors", "owner"}
        assert found(store) == {identity(4)}
        save(store, identity(6))
        assert found(store) == {identity(4), identity(6)}
        store.close()
