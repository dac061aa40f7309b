"""What the demo trains: a small GPT on English bytes, with AdamW's state sharded over the ranks.

Nothing in this file knows of checkpoints.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

__all__ = ["GPT", "ShardedAdamW", "Text"]

VOCABULARY = 256
CONTEXT = 64
WIDTH = 256
LAYERS = 4
HEADS = 4
DROPOUT = 0.1
BATCH = 2


class GPT(nn.Module):
    """A transformer over bytes, 3.3 million parameters, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def shard(self) -> GPT:
        """Shard the parameters of every layer over all ranks."""
        for block in self.blocks:
            fully_shard(block)
        fully_shard(self)
        return self

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of predicting ``targets``, both int64 of shape (batch, length)."""
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(self.dropout(x))))
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attention.transpose(1, 2).reshape(batch, length, WIDTH)))
        hidden = F.gelu(self.up(self.norm2(x)))
        result: Tensor = x + self.dropout(self.down(hidden))
        return result


class ShardedAdamW:
    """AdamW of which each rank keeps one equal piece: its weights and their two moments.

    All ranks compute gradients of the whole model on their own text, the gradients are averaged,
    each rank updates its piece, and the pieces are gathered into everyone's model. So no rank can
    go on with another's state, and none is enough to rebuild the model.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        rank, self._world_size = dist.get_rank(), dist.get_world_size()
        parameters = list(model.parameters())
        piece = -(-sum(p.numel() for p in parameters) // self._world_size)
        self._weights = torch.zeros(piece * self._world_size)
        self._gradients = torch.zeros_like(self._weights)
        start = 0
        for p in parameters:
            stop = start + p.numel()
            self._weights[start:stop] = p.detach().flatten()
            p.data = self._weights[start:stop].view_as(p)
            p.grad = self._gradients[start:stop].view_as(p)
            start = stop
        mine = slice(rank * piece, (rank + 1) * piece)
        self._own = nn.Parameter(self._weights[mine].clone())
        self._own.grad = self._gradients[mine]
        self._adamw = torch.optim.AdamW([self._own], lr=lr)

    def step(self) -> None:
        """Apply the mean of all ranks' gradients, and clear them."""
        dist.all_reduce(self._gradients)
        self._gradients /= self._world_size
        self._adamw.step()
        self._gradients.zero_()
        self._gather_weights()

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self._own.detach(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back this rank's piece, and the model's weights from all ranks' pieces."""
        with torch.no_grad():
            self._own.copy_(state["weights"])
        self._adamw.load_state_dict(state["adamw"])
        self._gather_weights()

    def _gather_weights(self) -> None:
        pieces = list(self._weights.chunk(self._world_size))
        dist.all_gather(pieces, self._own.detach())


class Text:
    """One rank's share of the Python manual, read in windows; ``position`` is where it stands."""

    def __init__(self, rank: int, world_size: int, batch: int = BATCH) -> None:
        manual = "".join(topics[name] for name in sorted(topics)).encode()
        share = len(manual) // world_size
        own = bytearray(manual[rank * share : (rank + 1) * share])
        self._bytes = torch.frombuffer(own, dtype=torch.uint8)
        self._batch = batch
        self.position = 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 of shape (batch, length)."""
        last_start = len(self._bytes) - CONTEXT - 1
        starts = self.position + torch.arange(self._batch) * (last_start // self._batch)
        windows = (starts % last_start)[:, None] + torch.arange(CONTEXT + 1)
        self.position += CONTEXT
        tokens = self._bytes[windows].long()
        return tokens[:, :-1], tokens[:, 1:]

    def batch_at(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step, as :meth:`next_batch`."""
        self.position = step * CONTEXT
        return self.next_batch()
