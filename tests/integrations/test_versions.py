"""Frameworks that are older than what their plug-ins work with are refused, before their import."""

from __future__ import annotations

import pickle
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localckpt import CheckpointingException
from localckpt.integrations import versions
from localckpt.integrations.versions import OLDEST, UnsupportedVersionError

_ROOT = Path(__file__).parents[2]
_PLUG_INS = {name: name for name in OLDEST if name != "megatron-core"}


def _pins(name: str) -> dict[str, str]:
    lines = (_ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def _install(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions, "version", version)


@pytest.mark.parametrize("framework", _PLUG_INS)
def test_a_plug_in_refuses_an_older_framework_before_it_is_imported(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(monkeypatch, **{framework: "0.0.9"})

    # The frameworks cannot be imported here: another error would be that of their import.
    with pytest.raises(UnsupportedVersionError) as raised:
        import_module(f"localckpt.integrations.{framework}")

    error = raised.value
    assert (error.framework, error.installed) == (framework, "0.0.9")
    assert f"{framework} 0.0.9 is installed" in str(error)
    assert f"pip install '{framework}>={OLDEST[framework]}'" in str(error)


def test_the_stand_in_for_nvrx_refuses_an_older_megatron_core_and_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvrx = import_module("localckpt.integrations.nvrx")
    _install(monkeypatch, **{"megatron-core": "0.12.3"})

    with pytest.raises(CheckpointingException, match=r"megatron-core 0\.12\.3 is installed"):
        nvrx.install()

    assert not nvrx.is_installed()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.lists(st.integers(0, 30)))
def test_releases_are_compared_by_their_numbers(installed: list[int], oldest: list[int]) -> None:
    longest = max(len(installed), len(oldest))
    padded = [numbers + [0] * (longest - len(numbers)) for numbers in (installed, oldest)]
    texts = [".".join(map(str, numbers)) for numbers in (installed, oldest)]

    assert (versions._release(texts[0]) < versions._release(texts[1])) == (padded[0] < padded[1])


class _Framework:
    def load(self) -> None:
        self._load_checkpoint()

    _load = _load_checkpoint = load


def test_a_method_that_a_plug_in_overrides_and_nobody_calls_is_refused() -> None:
    versions.require_called("torchtitan", _Framework, "_load_checkpoint")

    with pytest.raises(UnsupportedVersionError, match=r"_load, _save, which .*=0\.3") as raised:
        versions.require_called("torchtitan", _Framework, "_load", "_save", "_load_checkpoint")

    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), vars(copy)) == (str(raised.value), vars(raised.value))


def test_what_is_refused_what_is_tested_and_what_is_told_is_the_same() -> None:
    newest = _pins("constraints-integrations.txt")
    oldest = newest | _pins("constraints-integrations-oldest.txt")
    page = (_ROOT / "docs" / "dependencies.md").read_text()

    assert versions.NEWEST.items() <= newest.items()
    for framework, version in OLDEST.items():
        assert oldest[framework] == version
        assert f"| `{framework}` | {newest[framework]} | {version}" in page
