"""The site has each name and page once and fetches nothing elsewhere; the tests named are there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

import localckpt
from tests.docs.blocks import ROOT
from tests.faults.table import FAULTS, GUARANTEES, rows_below

_DOCS = ROOT / "docs"
_HOOKS = runpy.run_path(str(_DOCS / "site_hooks.py"))


def test_the_reference_has_every_public_name_once() -> None:
    pages = [page.read_text() for page in (_DOCS / "api").glob("*.md")]

    homes = r"megatron\.|cli\.survival\.|replication\.loss_chances\."
    named = re.findall(rf"(?m)^::: localckpt\.(?:{homes})?(\w+)$", "\n".join(pages))

    assert sorted(named) == sorted({*localckpt.__all__, *localckpt._HOMES_BESIDE} - {"__version__"})


def test_the_navigation_has_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(_DOCS)) for page in _DOCS.rglob("*.md")]

    named = re.findall(r"[\w/]+\.md", str(yaml.safe_load(text)["nav"]))

    assert sorted(named) == sorted(pages)


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())

    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_a_page_that_fetches_from_another_host_ends_the_build_and_a_link_does_not(
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.html"
    page.write_text('<a href="https://x.example"></a><link rel="canonical" href="https://x">')
    _HOOKS["on_post_build"]({"site_dir": str(tmp_path)})
    for fetching in (
        '<script src="https://cdn.example/x.js"></script>',
        "<img src=//pictures.example/x.png>",
        '<link href="https://fonts.example/css" rel="stylesheet">',
    ):
        page.write_text(f"<p>one</p>{fetching}")
        with pytest.raises(RuntimeError, match=r"page\.html: "):
            _HOOKS["on_post_build"]({"site_dir": str(tmp_path)})


def test_the_faults_of_the_document_are_those_of_the_tests() -> None:
    rows = rows_below("| fault |")

    assert [row[0] for row in rows] == list(FAULTS.values())
    assert all(then for _, then, _ in rows)
    counts = [count for _, _, count in rows]
    assert all(re.fullmatch(r"\d{1,3}(,?\d{3})*", count) for count in counts), counts


def test_every_test_that_the_document_names_is_there() -> None:
    names = re.findall(r"`((?:\w+/)*test_\w+\.py)`", GUARANTEES.read_text())

    assert len(names) > 8
    paths = [ROOT / "tests" / name.removeprefix("tests/") for name in names]
    assert [str(path) for path in paths if not path.is_file()] == []
