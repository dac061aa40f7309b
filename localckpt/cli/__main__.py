"""``python -m localckpt.cli``: the same as ``localckpt``."""

from __future__ import annotations

from localckpt.cli import main

main()
