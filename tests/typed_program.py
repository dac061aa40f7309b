"""A program that uses the package as its users do, for the type checker alone: ``make lint``.

An error that mypy does not find, in a line that expects one, is an error as well.
"""

from typing import assert_type

import localckpt
from localckpt import no_such_import  # type: ignore[attr-defined]  # noqa: F401


class MyManager(localckpt.LocalCheckpointManager):
    def say(self) -> str:
        return self.session_id


class MyQueue(localckpt.AsyncCallsQueue):
    pass


def train(state: dict[str, object]) -> None:
    replicas = localckpt.LazyCliqueReplicationStrategy.from_replication_params()
    assert_type(replicas, localckpt.LazyCliqueReplicationStrategy)
    with (
        replicas as entered,
        MyManager("/local", "run", entered) as manager,
        localckpt.InMemoryCheckpointManager() as in_memory,
        localckpt.GlobalCheckpointManager("/shared") as shared,
        MyQueue() as queue,
    ):
        assert_type(entered, localckpt.LazyCliqueReplicationStrategy)
        assert_type(manager, MyManager)
        assert_type(in_memory, localckpt.InMemoryCheckpointManager)
        assert_type(shared, localckpt.GlobalCheckpointManager)
        assert_type(queue, MyQueue)
        assert_type(manager.say(), str)
        assert_type(manager.find_latest(), int)
        assert_type(manager.load()[1], localckpt.CkptID)
        assert_type(manager.save(state, 1, is_async=True), localckpt.AsyncRequest)
        assert_type(manager.all_iterations(), list[int])
        assert_type(shared.load(into=state, iteration=2)[1], localckpt.CkptID)
        manager.sav(state, 2)  # type: ignore[attr-defined]
        manager.save(state, "2")  # type: ignore[call-overload]
        shared.save(state, 2, on_commit=3)  # type: ignore[arg-type]
    localckpt.no_such_name  # type: ignore[attr-defined]  # noqa: B018
    raise localckpt.NoSuchError("not there")  # type: ignore[attr-defined]
