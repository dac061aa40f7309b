"""DeepSpeed's engine with local checkpoints: its own calls save to the nodes, and resume from them.

What ``save_checkpoint`` would write to several files is one shard of the rank, captured in the call
and saved behind training. ``load_checkpoint`` is given the files of the newest complete checkpoint.
"""

from __future__ import annotations

from localckpt.integrations.versions import at_least

with at_least("deepspeed"):
    from localckpt.integrations.deepspeed.checkpoints import LocalCheckpoints, install

__all__ = ["LocalCheckpoints", "install"]
