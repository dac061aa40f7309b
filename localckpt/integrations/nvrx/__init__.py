"""NVIDIA Resiliency Extension's checkpointing modules, answered for by this package.

:func:`install` comes before the first import of NVRx's checkpointing, or of Megatron-Core, which
imports it. ``python -m localckpt.integrations.nvrx run`` starts a program that is not changed.
"""

from __future__ import annotations

from localckpt.integrations.nvrx.finder import install, is_installed

__all__ = ["install", "is_installed"]
