"""Eight kinds of training loops, each with the lines that make it go on where it was.

The lines that a program gets for it end in ``# +``. The models are tiny, and the data are drawn;
``note`` is told of each loss. Run by `tests/checkpointer/test_loop.py`, which kills each
loop after every step.
"""

from __future__ import annotations

import argparse
import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import localckpt

__all__ = ["LOOPS"]

Note = Callable[[str, torch.Tensor], None]
EPOCHS = 2


def average_gradients(*models: torch.nn.Module) -> None:
    for gradient in [p.grad for model in models for p in model.parameters()]:
        assert gradient is not None
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def language_model(note: Note, **options: Any) -> None:
    """Steps without epochs: batches drawn ahead, accumulated gradients, the best loss so far."""
    text = torch.randint(16, (500,), generator=torch.Generator().manual_seed(1))
    model: Any = torch.nn.Sequential(
        torch.nn.Embedding(16, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 16)
    )
    model = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(len(text) - 1, (8,))
        return text[at], text[at + 1]

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    run = localckpt.Values(batch=draw(), best=math.inf)  # +
    state = {"model": model, "optimizer": optimizer, "run": run}  # +
    with localckpt.Checkpointer(state, **options) as checkpointer:  # +
        for step in range(checkpointer.resume(), 8):  # +
            if step % 3 == 0:
                with torch.no_grad():
                    run.best = min(run.best, loss_of(draw()))
                note(f"best before step {step}", run.best)
            for _ in range(2):
                loss = loss_of(run.batch)
                run.batch = draw()  # while the model is busy, as with a GPU
                (loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            note(f"step {step}", loss)
            if checkpointer.step(step):  # +
                break  # +


def word_language_model(note: Note, **options: Any) -> None:
    """Epochs over a text in order: a hidden state that goes on, a rate that falls by the best."""
    text = torch.randint(16, (2, 41), generator=torch.Generator().manual_seed(dist.get_rank()))
    embed, rnn, head = torch.nn.Embedding(16, 8), torch.nn.GRU(8, 8), torch.nn.Linear(8, 16)
    model = torch.nn.ModuleList([embed, rnn, head])

    def forward(at: int) -> torch.Tensor:
        seen, run.hidden = rnn(embed(text[:, at : at + 10].T), run.hidden.detach())
        return torch.nn.functional.cross_entropy(
            head(torch.dropout(seen, 0.1, train=model.training)).flatten(0, 1),
            text[:, at + 1 : at + 11].T.flatten(),
        )

    run = localckpt.Values(hidden=torch.zeros(1, 2, 8), best=math.inf, rate=1.0)  # +
    with localckpt.Checkpointer({"model": model, "run": run}, **options) as checkpointer:  # +
        checkpointer.resume()  # +
        for epoch in checkpointer.epochs(EPOCHS):  # +
            for at in checkpointer.batches(range(0, 40, 10)):  # +
                if checkpointer.batch == 0:  # +
                    run.hidden = torch.zeros(1, 2, 8)
                loss = forward(at)
                loss.backward()
                average_gradients(model)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(run.rate * parameter.grad)
                        parameter.grad = None
                note(f"epoch {epoch} at {at}", loss)
                checkpointer.step()  # +
            if checkpointer.stopped:  # +
                break  # +
            with torch.no_grad():
                loss = forward(0)
            run.best, run.rate = min(run.best, loss), run.rate / (1 if loss < run.best else 4)
            note(f"epoch {epoch}", run.best)


def gan(note: Note, **options: Any) -> None:
    """Epochs with two models and two optimizers, each of which draws random numbers."""
    nets = net_d, net_g = torch.nn.Linear(6, 1), torch.nn.Linear(4, 6)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
    data = TensorDataset(torch.randn(14, 6, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_size=4, shuffle=True)

    state = {"g": net_g, "d": net_d, "opt_d": optimizers[0], "opt_g": optimizers[1]}  # +
    with localckpt.Checkpointer(state, **options) as checkpointer:  # +
        checkpointer.resume()  # +
        for epoch in checkpointer.epochs(EPOCHS):  # +
            for (real,) in checkpointer.batches(loader):  # +
                fake = net_g(torch.randn(len(real), 4))
                for name, net, optimizer in zip("dg", nets, optimizers, strict=True):
                    if name == "d":
                        error = net_d(real).mean() - net_d(fake.detach()).mean()
                    else:
                        error = net_d(fake).mean()
                    optimizer.zero_grad()
                    error.backward()
                    average_gradients(net)
                    optimizer.step()
                    note(f"epoch {epoch} batch {checkpointer.batch} {name}", error)
                checkpointer.step()  # +
            if checkpointer.stopped:  # +
                break  # +
            note(f"samples of epoch {epoch}", net_g(torch.randn(2, 4)).sum())


def image_classifier(note: Note, **options: Any) -> None:
    """Epochs with a validation, a schedule by epochs and the best model, in DDP."""
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)),
        find_unused_parameters=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    pictures = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(pictures, pictures.argmax(1) % 3)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), drop_last=True)
    validation = DataLoader(data, batch_size=10)

    run = localckpt.Values(best=math.inf)  # +
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "run": run}  # +
    with localckpt.Checkpointer(state, **options) as checkpointer:  # +
        checkpointer.resume()  # +
        for epoch in checkpointer.epochs(EPOCHS):  # +
            model.train()
            for picture, kind in checkpointer.batches(loader):  # +
                noise = torch.randn_like(picture) / 10
                loss = torch.nn.functional.cross_entropy(model(picture + noise), kind)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                note(f"epoch {epoch} batch {checkpointer.batch}", loss)
                checkpointer.step()  # +
            if checkpointer.stopped:  # +
                break  # +
            model.eval()
            with torch.no_grad():
                losses = [torch.nn.functional.cross_entropy(model(p), k) for p, k in validation]
            scheduler.step()
            run.best = min(run.best, sum(losses, torch.zeros(())))
            note(f"epoch {epoch}", run.best)


def sharded(note: Note, **options: Any) -> None:
    """Steps on random data, with a model that FSDP2 shards."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    state = {"model": model, "optimizer": optimizer}  # +
    with localckpt.Checkpointer(state, **options) as checkpointer:  # +
        for step in range(checkpointer.resume(), 8):  # +
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note(f"step {step}", loss)
            if checkpointer.step(step):  # +
                break  # +


class Trainer:
    """Epochs in methods of a class, in DDP, and gradients accumulated over two batches."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self.model = DistributedDataParallel(torch.nn.Linear(6, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(1)))
        sampler: Any = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=0)

    def train(self, **options: Any) -> None:
        state = {"model": self.model, "optimizer": self.optimizer}  # +
        with localckpt.Checkpointer(state, **options) as self.checkpointer:  # +
            self.checkpointer.resume()  # +
            for epoch in self.checkpointer.epochs(EPOCHS):  # +
                self.train_epoch(epoch)

    def train_epoch(self, epoch: int) -> None:
        for (batch,) in self.checkpointer.batches(self.loader):  # +
            loss = self.model(batch * torch.rand(())).square().mean()
            loss.backward()
            self.note(f"epoch {epoch} batch {self.checkpointer.batch}", loss)
            if self.checkpointer.batch % 2 == 1:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.checkpointer.step()  # +


class Walk:
    """An environment: a walk with a random number generator of its own."""

    def __init__(self, seed: int) -> None:
        self.place, self.generator = 0.0, torch.Generator().manual_seed(seed)

    def move(self, by: float) -> float:
        self.place += by + torch.rand((), generator=self.generator).item() - 0.5
        return -abs(self.place)


def policy(note: Note, **options: Any) -> None:
    """Rollouts in environments, which go on from one update to the next."""
    model = torch.nn.Linear(1, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    envs = [Walk(10 * dist.get_rank() + number) for number in range(2)]

    def take(saved: bytes) -> None:  # +
        envs[:] = pickle.loads(saved)  # +

    held = (lambda: pickle.dumps(envs)), take  # +
    state = {"model": model, "optimizer": optimizer, "envs": held}  # +
    with localckpt.Checkpointer(state, **options) as checkpointer:  # +
        for update in range(checkpointer.resume(), 8):  # +
            losses = []
            for env in envs:
                choice = torch.distributions.Categorical(logits=model(torch.tensor([env.place])))
                action = choice.sample()
                losses.append(-choice.log_prob(action) * env.move(float(action) - 0.5))
            loss = torch.stack(losses).sum()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            note(f"update {update}", loss)
            if checkpointer.step(update):  # +
                break  # +


def reinforcement(note: Note, **options: Any) -> None:
    """The roles of a trainer that learns by reinforcement: actor, critic, reference, and rollouts.

    FSDP2 shards the actor. The engine that makes rollouts has a copy of its weights, and each rank
    learns from rollouts of its own that it keeps for a while.
    """
    actor, critic = torch.nn.Linear(4, 3), torch.nn.Linear(4, 1)
    reference, engine = copy.deepcopy(actor), copy.deepcopy(actor)
    fully_shard(actor, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in (actor, critic)]
    run = argparse.Namespace(replay=[], beta=0.1, draws=torch.Generator())
    run.draws.manual_seed(dist.get_rank())

    held = (lambda: vars(run)), (lambda saved: vars(run).update(saved))  # +
    state = {"actor": actor, "critic": critic, "reference": reference, "run": held}  # +
    state |= {"of actor": optimizers[0], "of critic": optimizers[1]}  # +
    with localckpt.Checkpointer(state, **options) as checkpointer:  # +
        for update in range(checkpointer.resume(), 8):  # +
            # At the beginning of an update, so that it need not be saved.
            engine.load_state_dict({k: v.full_tensor() for k, v in actor.state_dict().items()})
            with torch.no_grad():
                prompts = torch.randn(4, 4)
                choices = torch.multinomial(engine(prompts).softmax(-1), 1, generator=run.draws)
                run.replay = [
                    *run.replay[-2:],
                    (prompts, choices, choices.float() - prompts[:, :1]),
                ]
            number = torch.randint(len(run.replay), (), generator=run.draws)
            prompts, choices, rewards = run.replay[int(number)]
            advantages = rewards - critic(prompts)
            chance = actor(prompts).log_softmax(-1).gather(1, choices)
            drift = (chance - reference(prompts).log_softmax(-1).gather(1, choices)).mean()
            loss = (advantages.square() - chance * advantages.detach()).mean() + run.beta * drift
            loss.backward()
            average_gradients(critic)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            run.beta *= 1.5 if drift.item() > 0.01 else 0.9
            note(f"update {update}", loss)
            if checkpointer.step(update):  # +
                break  # +


LOOPS: dict[str, Callable[..., None]] = {
    "language_model": language_model,
    "word_language_model": word_language_model,
    "gan": gan,
    "image_classifier": image_classifier,
    "sharded": sharded,
    "trainer": lambda note, **options: Trainer(note).train(**options),
    "policy": policy,
    "reinforcement": reinforcement,
}
