"""Start a program that imports NVRx with this package in NVRx's place.

::

    python -m localckpt.integrations.nvrx run pretrain_gpt.py --save ...
    python -m localckpt.integrations.nvrx run -m torch.distributed.run --nproc-per-node 8 train.py
    export PYTHONPATH=$(python -m localckpt.integrations.nvrx path):$PYTHONPATH

``run`` sets the same variable, so processes that the program starts have it, too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SITE = Path(__file__).parent / "site"
"""Folder with the ``sitecustomize`` module, which Python imports when it starts."""


def main(arguments: list[str]) -> int:
    """Run a command, and return its exit status."""
    if arguments == ["path"]:
        sys.stdout.write(f"{SITE}\n")
        return 0
    if len(arguments) > 1 and arguments[0] == "run":
        path = [str(SITE), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        sys.stdout.flush()
        sys.stderr.flush()
        # Exec keeps the process, so that the program gets all signals and sets the exit status.
        os.execv(sys.executable, [sys.executable, *arguments[1:]])
    sys.stderr.write(f"{__doc__}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
