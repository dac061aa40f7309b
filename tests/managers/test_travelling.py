"""An image that still travels to other ranks is not overwritten by the next save."""

from __future__ import annotations

from pathlib import Path

from localckpt.ids import Generation, ShardIdentity
from localckpt.managers.capture import StateCapture
from localckpt.options import Options
from localckpt.state_dict.basic import wrapped
from localckpt.storage.directory import DirectoryStore
from tests.managers.jobs import context_of, state_of


def test_a_buffer_is_used_again_when_its_image_is_written_and_has_arrived(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, "run", 0, 5.0)
    capture = StateCapture(context_of(store, Options(timeout=5.0)))
    first, second, third = (
        ShardIdentity("run", Generation(1, number), number, 0, 1) for number in (1, 2, 3)
    )
    sent, _ = capture.capture(wrapped(state_of(0, 1)), first, is_sent=True)
    sent.await_digests()
    store.commit([sent])
    assert sent.source is not None
    before = bytes(sent.source.read(0, sent.nbytes))

    later, _ = capture.capture(wrapped(state_of(0, 2)), second, is_sent=False)

    assert bytes(sent.source.read(0, sent.nbytes)) == before
    assert sent.buffer is not later.buffer
    buffers = [sent.buffer, later.buffer]
    sent.end_hold("replication")
    store.commit([later])
    last, _ = capture.capture(wrapped(state_of(0, 3)), third, is_sent=False)
    assert last.buffer in buffers
    store.commit([last])
    capture.close()
    store.close()
