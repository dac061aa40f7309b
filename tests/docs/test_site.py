"""The site names every public name once, and every page."""

from __future__ import annotations

import re

import yaml

import localckpt
from tests.docs.blocks import ROOT

_DOCS = ROOT / "docs"


def test_the_reference_has_every_public_name_once() -> None:
    pages = [page.read_text() for page in (_DOCS / "api").glob("*.md")]

    named = [
        name for page in pages for name in re.findall(r"^::: localckpt\.(\S+)$", page, re.MULTILINE)
    ]

    assert sorted(named) == sorted(set(localckpt.__all__) - {"__version__"})


def test_the_navigation_has_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(_DOCS)) for page in _DOCS.rglob("*.md")]

    named = re.findall(r"[\w/]+\.md", str(yaml.safe_load(text)["nav"]))

    assert sorted(named) == sorted(pages)


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())

    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []
