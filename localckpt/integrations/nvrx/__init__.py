"""Replacement for the checkpointing modules of the NVIDIA Resiliency Extension (NVRx).

Call :func:`install` before the first import of NVRx's checkpointing, or of Megatron-Core, which
imports it; or start an unmodified program by ``python -m localckpt.integrations.nvrx run``.
"""

from __future__ import annotations

from localckpt.integrations.nvrx.finder import install, is_installed

__all__ = ["install", "is_installed"]
