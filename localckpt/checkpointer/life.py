"""Life of a :class:`Checkpointer`: what it makes, aborts, joins again and closes; not its loop."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import localckpt
from localckpt.availability.retention import node_rules, rules
from localckpt.checkpointer.arguments import (
    check_arguments,
    check_timeout,
    judge_arguments,
    texts_of,
    worded,
)
from localckpt.checkpointer.cadence import Pulse
from localckpt.checkpointer.epochs import Epochs
from localckpt.checkpointer.live import LiveState
from localckpt.checkpointer.parts import TrainingState, combined_check
from localckpt.checkpointer.resume import Resumption
from localckpt.checkpointer.stopping import LastSave, StopRequests
from localckpt.checkpointer.tiers import NodeManager, NodeTier, SharedTier
from localckpt.errors import (
    AbortedError,
    CheckpointingException,
    PeerLostError,
    SameMachineReplicationException,
)
from localckpt.events.event import Outcome
from localckpt.events.jsonl import JsonLines
from localckpt.events.stream import EventStream
from localckpt.global_tier.manager import GlobalCheckpointManager
from localckpt.managers.local import InMemoryCheckpointManager, LocalCheckpointManager
from localckpt.managers.manager import agreed_session
from localckpt.ranks.ranks import Ranks, refused_together
from localckpt.replication.strategies import CliqueReplicationStrategy, ReplicationStrategy
from localckpt.storage.names import default_root, local_path, session_name, shared_path
from localckpt.storage.owner import Owner
from localckpt.threads import Latch, Task

logger = logging.getLogger(__name__)

# So often ranks that wait for storage look whether the job is to stop.
_LOOK_S = 1.0


class Life:
    """Ranks, tiers and threads of one checkpointer, made for the arguments ``given`` to it.

    Ranks and tiers are others after :meth:`join_ranks`; then :meth:`begin` follows.
    """

    def __init__(
        self, given: Mapping[str, Any], rewind: Callable[[], None], is_stopped: Callable[[], bool]
    ) -> None:
        with refused_together("checkpointer"):
            check_timeout(given["timeout_s"])
        self.ranks = Ranks("checkpointer", timeout_s=given["timeout_s"])
        self.epochs = Epochs(rewind, is_stopped, self.ranks.world_size)
        # Not the state, which is to be freed once rejoin() is given another one.
        self.given = {name: value for name, value in given.items() if name != "state"}
        self.tiers: list[NodeTier | SharedTier] = []
        self.shared: SharedTier | None = None
        self._strategy: ReplicationStrategy | None = None
        self.pulses: tuple[Pulse, ...] = ()
        self.closing = Latch()
        self._is_listening = False
        self.live = LiveState()

        def check_all() -> dict[str, str]:
            check_arguments(given)
            drops = given["on_resize"] == "drop"
            self.state = TrainingState(
                *(given["state"], self.epochs),
                rng=given["rng"],
                private=given["private"] or {},
                drop=drops,
            )
            return texts_of(given)

        with ExitStack() as undo:
            undo.callback(self.ranks.close)
            # What one rank's arguments are refused for is an error on all ranks at once.
            self.ranks.decide("make a checkpointer", check_all, judge_arguments)
            self.given["safe_globals"] = tuple(given["safe_globals"])
            is_read_only, local, session = given["read_only"], given["local"], given["session_id"]
            is_shared_by_programs = given["memory"] and local is None
            self._names_itself = is_shared_by_programs and not session and not is_read_only
            self._session = agreed_session(self.ranks) if self._names_itself else session
            events = given["events"]
            if events is None and is_read_only:
                events = ()
            if events is None:
                root = default_root() if local is None else local_path(local)
                events = [JsonLines(root / "events", below=session_name(self._session))]
            # Held back, since nothing is to be made before the managers have claimed their places.
            self.events = EventStream(events, rank=self.ranks.rank, is_held=True)
            undo.callback(self.events.close)
            # By the clock that counts from the machine's boot.
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            age_s -= Owner.me().started / os.sysconf("SC_CLK_TCK")
            self._begin_run(time.monotonic() - age_s)
            self._make_tiers(undo)
            signals, file, ask = given["stop_signals"], given["stop_file"], given["stop_when"]
            if is_read_only:
                signals, file, ask = (), None, None
            self.stop_requests = StopRequests(
                signals, None if file is None else local_path(file), ask, self._note_signal
            )
            undo.pop_all()
        self.events.release()

    def _begin_run(self, began: float) -> None:
        """Record that this process, or its work with other ranks, began."""
        made, self._began = time.monotonic(), began
        places = {name: self.given[name] for name in ("local", "shared")}
        details = {
            "world_size": self.ranks.world_size,
            "pid": os.getpid(),
            "process_start": self.events.clock_time(began),
            "version": localckpt.__version__,
            "session": self._session,
            **{n: None if path is None else str(shared_path(path)) for n, path in places.items()},
        }
        self.events.emit("run_began", began=made, ended=made, details=details)
        self.events.add("start", began, made)

    def _options(self, *names: str) -> dict[str, Any]:
        """Return options of the managers of both tiers, and those of some names."""
        given = self.given
        return {
            **{name: given[name] for name in ("safe_globals", "read_only", *names)},
            "timeout": given["timeout_s"],
            "events": self.events,
            "max_attempts": None if given["read_only"] else given["max_attempts"],
        }

    def _with_redundancy(self) -> NodeManager:
        """Make the nodes' manager with the redundancy asked for, or else what the nodes allow."""
        given, factor = self.given, self.given["replication_factor"]
        self._strategy = None
        if given["repl_strategy"] is not None:
            return self._node_manager(given["repl_strategy"])
        if factor == 1 or (factor is None and self.ranks.world_size == 1):
            return self._node_manager(None)
        strategy = CliqueReplicationStrategy.from_replication_params(
            replication_factor=factor or 2, timeout_s=self.ranks.timeout_s
        )
        try:
            manager = self._node_manager(strategy)
        except BaseException as error:
            strategy.close()
            if factor or not isinstance(error, SameMachineReplicationException):
                raise
            # The same on all ranks, and all make the other one.
            logger.info("no copies on other nodes: %s", error)
            return self._node_manager(None)
        self._strategy = strategy
        return manager

    def _node_manager(self, strategy: ReplicationStrategy | None) -> NodeManager:
        if self.tiers:
            manager = self.nodes.manager
            manager.rejoin_with(strategy, is_new=True, guard=self.given["guard"])
            return manager
        given, divides = self.given, self.given["divide_replicated"]
        options = {
            **self._options("guard", "check_replicas", "on_divergence", "iteration_file"),
            "staging_limit": given["staging_limit"],
            "retention": node_rules(given["keep_last"], given["retention"]),
            "check": combined_check(self.state.parts, given["check"], finite=given["finite"]),
            "divide_replicated": given["check"] is None if divides is None else divides,
            "elastic": True,
            "private": self.state.rules,
        }
        session, local = self._session, given["local"]
        if given["memory"]:
            return InMemoryCheckpointManager(session, strategy, root=local, **options)
        return LocalCheckpointManager(local, session, strategy, **options)

    def _shared_manager(self, local: NodeManager) -> GlobalCheckpointManager:
        if self.shared is not None:
            self.shared.manager.rejoin()
            return self.shared.manager
        given = self.given
        kept = rules(given["shared_keep_last"], given["shared_retention"], "shared_")
        root, session, options = given["shared"], given["session_id"], self._options()
        return GlobalCheckpointManager(root, session, retention=kept, local=local, **options)

    def _make_tiers(self, undo: ExitStack) -> None:
        """Make the tiers; their managers are those that there were, if there were any."""
        given, timeout_s = self.given, self.ranks.timeout_s
        most = given["max_failures"] if given["on_error"] == "warn" else 1
        manager = self._with_redundancy()
        if self._strategy is not None:
            undo.callback(self._strategy.close)
        self.nodes = NodeTier(manager, timeout_s, most)
        undo.callback(self.nodes.close, is_in_step=False)
        self.tiers[:1] = [self.nodes]
        if given["shared"] is not None:
            manager_there = self._shared_manager(manager)
            self.shared = SharedTier(manager_there, self.nodes, timeout_s, most)
            self.tiers[1:] = [self.shared]
            undo.callback(self.shared.close, is_in_step=False)

    def begin(self) -> None:
        """Begin to work with the ranks and tiers as they are now."""
        tiers, grace_s = (self.nodes, self.shared, self.ranks), self.given["grace_s"]
        quiet, live = self.given["quiet"], self.live
        self.resumption = Resumption(*tiers, self.events, quiet, self._began, live)
        grace_s = self.ranks.timeout_s if grace_s is None else grace_s
        self.last_save = LastSave(*tiers, self.events, grace_s)
        self._is_hand_raised, self._next_look = False, 0.0
        for tier in self.tiers:
            # No save is to begin that waits for storage; the last has its time.
            tier.manager.is_to_stop = lambda: not self.last_save.has_begun and self.is_to_stop()
        self.nodes.is_to_stop = self.is_to_stop

    # Ranks that join again.

    def leave_ranks(self) -> None:
        """Free what belongs to the group of ranks that there was. May be called twice."""
        for tier in self.tiers:
            tier.leave()
        if self._strategy is not None:
            self._strategy.close()
        for pulse in self.pulses:
            pulse.close(is_in_step=False)
        self.ranks.close()

    def join_ranks(self, state: Any, called: float, left_after: int | None) -> None:
        """Do what a new object does on the other ranks, in the same order."""
        given = self.given
        if given["repl_strategy"] is not None:
            # It is made before the checkpointer.
            given["repl_strategy"].rejoin()
        self.ranks = Ranks("checkpointer", timeout_s=self.ranks.timeout_s)

        def take_state() -> dict[str, str]:
            if state is not None:
                self.state.give(state)
            return texts_of(given)

        with ExitStack() as undo:
            undo.callback(self.ranks.abandon)
            self.ranks.decide("make a checkpointer", take_state, judge_arguments)
            if self._names_itself:
                agreed_session(self.ranks, self.nodes.manager.session_id)
            self.epochs.rejoin(self.ranks.world_size)
            # The managers are not closed after an error, but joined again.
            self._make_tiers(ExitStack())
            left = AbortedError("the process joins the ranks again")
            self.events.emit("run_ended", began=called, ended=called, step=left_after, error=left)
            self.events.begin_run(self.ranks.rank)
            self._begin_run(called)
            undo.pop_all()

    # Requests to stop.

    def is_to_stop(self) -> bool:
        """Return whether some rank is asked to stop, which ends waits for storage."""
        if not self._is_hand_raised and time.monotonic() >= self._next_look:
            if is_asked := self.stop_requests.why() is not None:
                self.ranks.raise_hand()
            self._is_hand_raised = is_asked or self.ranks.is_hand_raised()
            self._next_look = time.monotonic() + _LOOK_S
        return self._is_hand_raised

    def take_back_attempt(self) -> None:
        for tier in self.tiers:
            tier.manager.take_back_attempt()

    def _note_signal(self, received: signal.Signals) -> None:
        # What follows other signals is done in a thread.
        if received is signal.SIGINT:
            self.take_back_attempt()

    def listen(self) -> None:
        """Begin to do in a thread what follows a signal, which may wait for storage."""
        if not self._is_listening:
            self._is_listening = True
            Task(self._listen).start("localckpt-stop", daemon=True)

    def _listen(self) -> None:
        asked = self.stop_requests.asked
        asked.wait(None, self.closing)
        if not asked.is_set():
            return
        try:
            self.ranks.raise_hand()
        except PeerLostError as error:
            logger.warning(
                "other ranks do not hear of a signal before the next pulse: %s", error.text
            )
        # A launcher sends SIGTERM to the first rank, too, when another one has crashed. That one
        # has notes of its own on its node, and none on shared storage.
        self.nodes.manager.take_back_attempt()

    # The end.

    def abort(self) -> None:
        """End all waits, from any thread; see :meth:`Checkpointer.abort`."""
        self.ranks.cut_off()
        for part in (*self.pulses, *self.tiers):
            part.abort()

    def end(self, close: Callable[[], None]) -> None:
        """Call what closes all; for a job that is asked to stop in the time that is left."""
        try:
            if self.last_save.has_begun:
                self.last_save.end(close)
            else:
                close()
        finally:
            # Here, in the main thread.
            self.stop_requests.close()

    def close(
        self,
        error: BaseException | None,
        step: int | None,
        outcome: Outcome | None,
        *,
        is_in_step: bool,
    ) -> None:
        """Free everything; after an error nothing else is raised in its place."""
        self.closing.set()
        ended = partial(self.events.emit, "run_ended", step=step, outcome=outcome, error=error)
        try:
            with ExitStack() as closing:
                for close in (self.events.close, ended, self.ranks.close):
                    closing.callback(close)
                if self._strategy is not None:
                    closing.callback(self._strategy.close)
                for part in (*self.tiers, *self.pulses):
                    closing.callback(part.close, is_in_step=is_in_step)
                closing.callback(self.live.close)
        except CheckpointingException as failed:
            if error is None:
                raise
            logger.error("%s", worded(failed, "close"))
