"""Installation of the import hook when Python starts, before the next ``sitecustomize`` runs."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

from localckpt.integrations.nvrx.finder import install

install()

_HERE = os.path.dirname(os.path.abspath(__file__))
_NEXT = PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if os.path.abspath(path) != _HERE]
)
if _NEXT is not None and _NEXT.loader is not None:
    _NEXT.loader.exec_module(module_from_spec(_NEXT))
