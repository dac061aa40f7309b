"""``localckpt export``, ``get`` and ``diff``: tensors of a checkpoint, outside of its job."""

from __future__ import annotations

import importlib
import json as json_texts
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localckpt.cli.output import (
    BAD,
    JsonOption,
    counted,
    one_line_errors,
    say,
    say_json,
    say_table,
    size,
)
from localckpt.errors import CheckpointingException, StorageError
from localckpt.storage.failures import storage_errors

if TYPE_CHECKING:
    from localckpt.cli.opened import SavedCheckpoint

_SHOWN = 10
_WIDTH = 160

Directories = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR",
        readable=False,
        help="Stores of nodes, roots on shared storage, or folders of such.",
        show_default=False,
    ),
]
Iteration = Annotated[
    int | None, typer.Option(help="Which one; what a restart would load by default.")
]
Session = Annotated[str | None, typer.Option(help="The job's session, if there are several.")]
Rank = Annotated[
    int | None,
    typer.Option(help="Whose values are meant where each rank has saved its own."),
]
Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", metavar="MODULE.CLASS", help="A class of the state: imported, and trusted."
    ),
]


def export(
    directories: Directories,
    out: Annotated[Path, typer.Option(help="The file to write: NAME.safetensors.")],
    part: Annotated[
        str | None,
        typer.Option(help="Only tensors below this name, without it in their keys: model."),
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option(help="Only tensors of such keys; a pattern as *.weight.")
    ] = None,
    max_file_size: Annotated[
        float, typer.Option(min=0.0, help="In GB: more than that goes to several files.")
    ] = 5.0,
    iteration: Iteration = None,
    session: Session = None,
    rank: Rank = None,
    allow: Allowed = None,
    json: JsonOption = False,
) -> None:
    """Write the tensors of a checkpoint to a safetensors file.

    They are whole, whatever had sharded them. Where they are more than --max-file-size they go to
    several files with an index beside, as Hugging Face's from_pretrained reads them. No file that
    is there is overwritten.
    """
    with one_line_errors(), _opened(directories, iteration, session, rank, allow) as checkpoint:
        names = _chosen(checkpoint, part, keys or [])
        files = _divided(checkpoint, names, int(max_file_size * 1e9))
        written = _write(checkpoint, files, out)
        nbytes = sum(checkpoint.describe(key).nbytes for key in names)
        if json:
            told = {"tensors": len(names), "nbytes": nbytes, "files": [*map(str, written)]}
            say_json({"iteration": checkpoint.iteration, "from": checkpoint.where, **told})
            return
        say(
            f"{_named(checkpoint)}: {counted(len(names), 'tensor')} ({size(nbytes)}) written to "
            f"{', '.join(map(str, written))}"
        )
        if left := len(checkpoint) - len(names):
            say(f"not asked for: {counted(left, 'tensor')}")
        if values := checkpoint.value_keys:
            more = [", ..."][: len(values) > _SHOWN]
            say("no tensors, so not written: " + "".join([", ".join(values[:_SHOWN]), *more]))


def get(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR... [KEY]", readable=False, show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(help="Write the tensor to this .npy file.")] = None,
    iteration: Iteration = None,
    session: Session = None,
    rank: Rank = None,
    allow: Allowed = None,
    json: JsonOption = False,
) -> None:
    """Print one tensor or value of a checkpoint.

    Or write the tensor to a file of numpy. What comes last is its key, unless that is a directory:
    then all keys are listed.
    """
    *stores, last = directories
    key = None if last.is_dir() or not stores else str(last)
    if key is None:
        stores = directories
    with one_line_errors(), _opened(stores, iteration, session, rank, allow) as checkpoint:
        if key is None:
            _list(checkpoint, is_json=json)
            return
        is_tensor = key in checkpoint
        if not is_tensor and key not in checkpoint.value_keys:
            near = [k for k in (*checkpoint, *checkpoint.value_keys) if key in k][:_SHOWN]
            raise CheckpointingException(
                f"iteration {checkpoint.iteration} has no {key!r}"
                + (f"; it has {', '.join(near)}" if near else ", nor a key with that in it")
            )
        value: Any = checkpoint[key] if is_tensor else checkpoint.value(key)
        if out is not None:
            if not is_tensor:
                raise CheckpointingException(f"{key!r} is no tensor: --out writes tensors")
            _write_array(value, out)
        elif not is_tensor:
            say_json({"key": key, "value": repr(value)}) if json else say(repr(value))
        elif json:
            fields = {"key": key, "dtype": _dtype(value), "shape": list(value.shape)}
            say_json({**fields, "values": value.tolist()})
        else:
            say(f"{key}: {_dtype(value)} {list(value.shape)}", *str(value).splitlines())


def diff(
    one: Annotated[Path, typer.Argument(metavar="A", readable=False, show_default=False)],
    other: Annotated[Path, typer.Argument(metavar="B", readable=False, show_default=False)],
    iteration: Annotated[
        int | None, typer.Option(help="Of A; what a restart would load by default.")
    ] = None,
    other_iteration: Annotated[
        int | None, typer.Option(help="Of B; what a restart would load by default.")
    ] = None,
    session: Session = None,
    rank: Rank = None,
    allow: Allowed = None,
    json: JsonOption = False,
) -> None:
    """Compare the tensors of two checkpoints.

    That is: keys, shapes, dtypes, and the largest difference of values. A and B are stores, roots
    on shared storage, or folders of these, and may be the same. The exit status is 1 if something
    differs.
    """
    with (
        one_line_errors(),
        _opened([one], iteration, session, rank, allow) as a,
        _opened([other], other_iteration, session, rank, allow) as b,
    ):
        only = {"A": [k for k in a if k not in b], "B": [k for k in b if k not in a]}
        rows = [row for key in a if key in b and (row := _difference(key, a, b)) is not None]
        same = sum(key in b for key in a) - len(rows)
        if json:
            told = {"only_in_a": only["A"], "only_in_b": only["B"], "different": rows}
            iterations = {"iteration": a.iteration, "other_iteration": b.iteration}
            say_json({**iterations, "same": same, **told})
        else:
            say(f"A   {_named(a)}", f"B   {_named(b)}", "")
            if rows:
                names = ("tensor", "A", "B", "largest difference")
                cells = [(r["key"], r["a"], r["b"], _largest(r)) for r in rows]
                say_table(names, cells, names[3:], _WIDTH)
            for side, found in only.items():
                say(*(f"only in {side}: {key}" for key in found))
            say(f"{counted(same, 'tensor')} bit for bit the same, {len(rows)} different")
    raise typer.Exit(BAD if rows or any(only.values()) else 0)


@contextmanager
def _opened(
    directories: Sequence[Path],
    iteration: int | None,
    session: str | None,
    rank: int | None,
    allow: Sequence[str] | None,
) -> Iterator[SavedCheckpoint]:
    # Not at the top: it imports torch, which other commands do without.
    from localckpt.cli.opened import open_checkpoint

    with open_checkpoint(
        *directories,
        iteration=iteration,
        session=session,
        rank=rank,
        safe_globals=[_imported(name) for name in allow or ()],
    ) as checkpoint:
        yield checkpoint


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise CheckpointingException(f"--allow {name} cannot be imported: {error}") from error


def _named(checkpoint: SavedCheckpoint) -> str:
    return f"iteration {checkpoint.iteration} of {checkpoint.where}"


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _list(checkpoint: SavedCheckpoint, *, is_json: bool) -> None:
    described = {key: checkpoint.describe(key) for key in checkpoint}
    rows = [(key, _dtype(told), list(told.shape)) for key, told in described.items()]
    if is_json:
        tensors = [{"key": k, "dtype": dtype, "shape": shape} for k, dtype, shape in rows]
        told = {"world_size": checkpoint.world_size, "tensors": tensors}
        say_json({"iteration": checkpoint.iteration, **told, "values": checkpoint.value_keys})
        return
    say(f"{_named(checkpoint)}, saved by {counted(checkpoint.world_size, 'rank')}", "")
    say_table(("tensor", "dtype", "shape"), [(k, d, str(s)) for k, d, s in rows], (), _WIDTH)
    if checkpoint.value_keys:
        say("", "values: " + ", ".join(checkpoint.value_keys))


def _chosen(
    checkpoint: SavedCheckpoint, part: str | None, patterns: Sequence[str]
) -> dict[str, str]:
    """Names that tensors get in the file, by their keys."""
    below = "" if part is None else f"{part}."
    names = {
        key: key.removeprefix(below)
        for key in checkpoint
        if key.startswith(below)
        and (not patterns or any(fnmatchcase(key, pattern) for pattern in patterns))
    }
    if not names:
        first = sorted({key.partition(".")[0] for key in checkpoint})
        raise CheckpointingException(
            f"no tensor is chosen; the parts of iteration {checkpoint.iteration} are "
            f"{', '.join(first)}, and `localckpt get DIR` lists all keys"
        )
    return names


def _divided(
    checkpoint: SavedCheckpoint, names: Mapping[str, str], most_nbytes: int
) -> list[dict[str, str]]:
    files: list[dict[str, str]] = []
    left = 0
    for key, name in names.items():
        nbytes = checkpoint.describe(key).nbytes
        if not files or nbytes > left:
            files.append({})
            left = most_nbytes
        files[-1][key] = name
        left -= nbytes
    return files


def _write(
    checkpoint: SavedCheckpoint, files: Sequence[Mapping[str, str]], out: Path
) -> list[Path]:
    """Write each file under another name first, so that what bears its name is whole."""
    if out.suffix != ".safetensors":
        raise CheckpointingException(f"--out {out}: give a name that ends with .safetensors")
    count = len(files)
    paths = [out]
    if count > 1:
        parts = range(1, count + 1)
        paths = [out.with_name(f"{out.stem}-{n:05d}-of-{count:05d}.safetensors") for n in parts]
    index = out.with_name(f"{out.name}.index.json")
    for path in paths if count == 1 else [*paths, index]:
        with storage_errors("look at", path):
            is_there = path.exists()
        if is_there:
            raise StorageError(
                f"{path} is there already, and was left as it is: remove it, or give another name"
            )
    for path, names in zip(paths, files, strict=True):
        _write_tensors(checkpoint, names, path)
    if count == 1:
        return paths
    weights = {
        name: path.name for path, names in zip(paths, files, strict=True) for name in names.values()
    }
    nbytes = sum(checkpoint.describe(key).nbytes for names in files for key in names)
    text = json_texts.dumps({"metadata": {"total_size": nbytes}, "weight_map": weights}, indent=2)
    with _new_file(index) as path:
        path.write_text(f"{text}\n")
    return [*paths, index]


def _write_tensors(checkpoint: SavedCheckpoint, names: Mapping[str, str], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # What Hugging Face's readers ask for.
    metadata = {"format": "pt", "localckpt.iteration": str(checkpoint.iteration)}
    tensors = {name: checkpoint[key].contiguous() for key, name in names.items()}
    with _new_file(path) as new:
        try:
            save_file(tensors, new, metadata)
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointingException(
                f"safetensors cannot hold a tensor of {path.name}: {error}. Leave it out, --keys"
            ) from error
        except SafetensorError as error:
            raise StorageError(f"{path} cannot be written: {error}") from error


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yield another name to write to; it becomes ``path``, or is removed after an error."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with storage_errors("write", path):
            new.touch()
            mode = new.stat().st_mode
            yield new
            # safetensors makes its files their owner's alone.
            new.chmod(mode)
            new.rename(path)
    finally:
        new.unlink(missing_ok=True)


def _write_array(tensor: Any, out: Path) -> None:
    import numpy
    import torch

    if out.suffix != ".npy":
        raise CheckpointingException(f"--out {out}: give a name that ends with .npy")
    if tensor.is_floating_point() and tensor.itemsize < 4 and tensor.dtype != torch.float16:
        say(f"numpy has no {_dtype(tensor)}: written as float32, which holds each of its values")
        tensor = tensor.float()
    with _new_file(out) as new, new.open("wb") as file:
        numpy.save(file, tensor.resolve_conj().resolve_neg().numpy())


def _difference(key: str, a: SavedCheckpoint, b: SavedCheckpoint) -> dict[str, Any] | None:
    """What differs of a tensor; ``None`` if nothing does."""
    import torch

    from localckpt.memory.tensor_bytes import flat_bytes

    described = [checkpoint.describe(key) for checkpoint in (a, b)]
    texts = [f"{_dtype(told)} {list(told.shape)}" for told in described]
    row: dict[str, Any] = {"key": key, "a": texts[0], "b": texts[1], "largest": None}
    if texts[0] != texts[1]:
        return row
    one, other = a[key].contiguous(), b[key].contiguous()
    if torch.equal(flat_bytes(one), flat_bytes(other)):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    row["largest"] = float((one.to(wide) - other.to(wide)).abs().max())
    return row


def _largest(row: Mapping[str, Any]) -> str:
    return "-" if row["largest"] is None else f"{row['largest']:.3g}"
