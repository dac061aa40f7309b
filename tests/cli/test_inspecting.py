"""``localckpt inspect`` shows any file as far as it can be read, and runs nothing that is in it."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from localckpt.ids import Generation, ShardIdentity
from tests.cli.commands import call, run
from tests.faults.images import flip
from tests.state_dict.states import Call, bits, image_of, with_pickle

_IDENTITY = ShardIdentity("run", Generation(3, 7), 1200, 5, 8)


def test_a_shard_tells_whose_it_is_and_where_each_tensor_lies(tmp_path: Path) -> None:
    state = {
        "model": {"weight": torch.randn(30, 7), "bias": torch.randn(7).to(torch.bfloat16)},
        "step": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "note": "no tensor",
    }
    path = tmp_path / "shard.safetensors"
    path.write_bytes(image_of(state, _IDENTITY))

    answer, told = run("inspect", path), call("inspect", path, "--json").json()

    assert (answer.status, answer.err) == (0, "")
    for line in ("session     'run'", "iteration   1200", "generation  3.7", "rank        5 of 8"):
        assert line in answer.out.splitlines()
    assert told["kind"] == "shard"
    assert told["identity"] == {
        "session": "run",
        "epoch": 3,
        "sequence": 7,
        "iteration": 1200,
        "rank": 5,
        "world_size": 8,
    }
    content = path.read_bytes()
    tensors = {t["name"]: t for t in told["tensors"]}
    expected = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    expected |= {"step": state["step"], "empty": state["empty"]}
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        t = tensors[name]
        assert content[t["offset"] : t["offset"] + t["nbytes"]] == bits(tensor)
        assert t["shape"] == list(tensor.shape)
        assert t["dtype"] == {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
        assert name in answer.out
    assert told["tensors_nbytes"] == 30 * 7 * 4 + 7 * 2 + 4
    bad = Path(f"{path}.dirty")
    bad.write_bytes(flip(content, tensors["step"]["offset"], 0))
    spoiled = call("inspect", bad)
    assert spoiled.status == 1
    assert "It is being written, or will be" in spoiled.out
    assert "it claims to be " in spoiled.out


def test_any_other_safetensors_file_is_shown_and_said_to_be_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.zeros(3, 5), "b": torch.ones(2, dtype=torch.int64)}
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    (tmp_path / "link").symlink_to(path)

    answer, told = call("inspect", tmp_path / "link"), call("inspect", path, "--json").json()

    assert answer.status == 0
    assert "a safetensors file, and no shard of localckpt" in answer.out
    assert "format: pt" in answer.out
    assert told["kind"] == "safetensors"
    assert told["identity"] is None
    assert {t["name"]: (t["dtype"], t["shape"]) for t in told["tensors"]} == {
        "a": ("F32", [3, 5]),
        "b": ("I64", [2]),
    }
    path.write_bytes(path.read_bytes() + b"x")
    assert "and its header describes" in call("inspect", path).out


@pytest.mark.fault("hostile-file")
def test_no_command_unpickles_anything(store: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    hostile = Call(os.mkdir, str(marker))
    identity = ShardIdentity("run", Generation(9, 1), 9, 0, 1)
    path = store / "session-run" / "0" / "hostile.safetensors"
    path.write_bytes(with_pickle(pickle.dumps(hostile), identity))

    answers = [run("inspect", path), call("inspect", path, "--json")]
    answers += [call(command, store) for command in ("ls", "verify", "explain", "clean")]

    assert [answer.status for answer in answers] == [0] * 6
    assert not marker.exists()
    pickle.loads(pickle.dumps(hostile))
    assert marker.exists()


_NONSENSE = {
    "empty": b"",
    "zeros": bytes(9000),
    "long": (1 << 40).to_bytes(8, "little") + b"{}",
    "deep": (8 << 20).to_bytes(8, "little") + b"[" * (8 << 20),
    "big": (20_000).to_bytes(8, "little") + b'{"a":' + b"9" * 9000 + b"}" + b" " * 10_994,
    "ours": (40).to_bytes(8, "little") + b'{"__metadata__":{"format":"localckpt-6"}}',
    "null": (4).to_bytes(8, "little") + b"null",
    "inf": (58).to_bytes(8, "little")
    + b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}1234',
    "ones": b"\xff" * 4096,
    "quotes": (100).to_bytes(8, "little") + b'{"\\"' + b'\\"' * 50_000,
}


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("what", _NONSENSE)
def test_nonsense_is_told_as_such(what: str, store: Path) -> None:
    path = store / "session-run" / "0" / "nonsense.safetensors"
    path.write_bytes(_NONSENSE[what])

    for answer, status in ((call("inspect", path), 1), (call("ls", store), 0)):
        assert (answer.status, answer.err) == (status, "")
        assert str(path) in answer.out


_rows = st.lists(st.none() | st.integers() | st.text() | st.lists(st.integers(), max_size=3))


@given(
    st.binary(max_size=300)
    | st.dictionaries(
        st.sampled_from(["__metadata__", "__skeleton__", "__digests__", "a"]) | st.text(),
        st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "format"]),
            _rows | st.text() | st.just("F32") | st.just("localckpt-6") | st.floats(),
        )
        | _rows,
    ).map(lambda entries: json.dumps(entries).encode())
)
def test_no_header_makes_it_fail_without_a_line_that_says_why(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(100))

    for options in ([], ["--json"]):
        answer = call("inspect", path, *options)

        assert answer.status in (0, 1)
        assert answer.out


@pytest.mark.fault("hostile-file")
def test_names_in_a_file_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(image_of({"\x1b]0;title\x07\x1b[2J": torch.zeros(3)}, _IDENTITY))

    answers = [call("inspect", path), call("inspect", path, "--json")]

    assert all("\x1b" not in answer.out and "\x07" not in answer.out for answer in answers)
    assert "\\x1b]0;title" in answers[0].out
