"""Hooks of the site: drop roles of docstrings, refuse pages that fetch from other hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROLE = re.compile(r":(?:class|meth|func|mod|attr|exc|data):(?=<code>)")
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^\s"'>]+"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*"""
    r"""\bhref=["']?(?:https?:)?//[^\s"'>]+"""
)


def on_page_content(html: str, **_: Any) -> str:
    """Drop the roles in front of names, which Markdown does not know."""
    return _ROLE.sub("", html)


def on_post_build(config: Mapping[str, Any]) -> None:
    """Refuse a site whose pages load scripts, styles, fonts or pictures from other hosts.

    Raises:
        RuntimeError: It names each page and what it fetches.
    """
    site = Path(config["site_dir"])
    fetched = [
        f"{page.relative_to(site)}: {found[0]}"
        for page in sorted(site.rglob("*.html"))
        for found in _FETCHED.finditer(page.read_text())
    ]
    if fetched:
        raise RuntimeError("the site must stand on its own; " + "\n".join(fetched))
