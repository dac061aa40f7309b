"""Two replicas under torchft, of which one is killed, and gets its state from the other."""

import argparse
import multiprocessing
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from localckpt.integrations.torchft import ImageTransport

DEADLINE_S = 60.0


def train(replica: int, lighthouse: str, steps: int, main: Connection) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    # A replica that comes back begins with other weights, and is given those of the others.
    model = torch.nn.Linear(8, 1)
    adamw = torch.optim.AdamW(model.parameters())

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=DEADLINE_S)),
        min_replica_size=2,
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        checkpoint_transport=ImageTransport(),
        replica_id=f"replica-{replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adamw)
    while manager.current_step() < steps:
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        main.send(manager.current_step())
    main.send(xxhash.xxh3_64_hexdigest(bytes(model.weight.detach().view(torch.uint8).flatten())))
    # The other replica may still be in its last step.
    main.recv()
    manager.shutdown(wait=False)


def main(steps: int, kill_at: int) -> None:
    context = multiprocessing.get_context("spawn")
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, heartbeat_timeout_ms=1000)

    def start(replica: int) -> tuple[Any, Connection]:
        here, there = context.Pipe()
        process = context.Process(target=train, args=(replica, lighthouse.address(), steps, there))
        process.start()
        return process, here

    def hear(replica: int) -> Any:
        if not replicas[replica][1].poll(DEADLINE_S):
            raise TimeoutError(f"replica {replica} has made no step for {DEADLINE_S:g} s")
        return replicas[replica][1].recv()

    replicas = [start(0), start(1)]
    try:
        while hear(1) < kill_at:
            pass
        replicas[1][0].kill()
        replicas[1][0].join()
        replicas[1] = start(1)
        print(f"replica 1 was killed after step {kill_at}, and is back at step {hear(1)}")
        ends = []
        for replica in (0, 1):
            while isinstance(end := hear(replica), int):
                pass
            ends.append(end)
        print(f"after step {steps} their weights are {'equal' if ends[0] == ends[1] else ends}")
        for process, connection in replicas:
            connection.send("end")
            process.join(DEADLINE_S)
    finally:
        for process, _ in replicas:
            process.kill()
            process.join()
        lighthouse.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=5, help="step after which one is killed")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.kill_at)
