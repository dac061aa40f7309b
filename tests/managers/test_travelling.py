"""An image that still travels to other ranks is not overwritten by the next save."""

from __future__ import annotations

from pathlib import Path

from localckpt.ids import Generation, ShardIdentity
from localckpt.managers.stored import StoreShelf
from localckpt.state_dict.basic import wrapped
from localckpt.state_dict.safe_globals import SafeGlobals
from localckpt.storage.disk import DiskStore
from localckpt.storage.write import write_shards
from tests.managers.jobs import state_of


def test_a_buffer_is_used_again_when_its_image_is_written_and_has_arrived(tmp_path: Path) -> None:
    shelf = StoreShelf(DiskStore(tmp_path, "run", 0, 5.0), SafeGlobals(), 5.0)
    first, second, third = (
        ShardIdentity("run", Generation(1, number), number, 0, 1) for number in (1, 2, 3)
    )
    staged = shelf.stage(wrapped(state_of(0, 1)), first, travels=True)
    shelf.wait_sealed()
    write_shards([staged.payload])
    assert staged.source is not None
    before = bytes(staged.source.read(0, staged.nbytes))

    later = shelf.stage(wrapped(state_of(0, 2)), second, travels=False)

    assert bytes(staged.source.read(0, staged.nbytes)) == before
    assert staged.payload.buffer.view.obj is not later.payload.buffer.view.obj
    staged.source.close()
    write_shards([later.payload])
    last = shelf.stage(wrapped(state_of(0, 3)), third, travels=False)
    assert last.payload.buffer in (staged.payload.buffer, later.payload.buffer)
    write_shards([last.payload])
    shelf.close()
