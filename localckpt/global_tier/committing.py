"""What follows a save behind training: each rank writes, and the first commits when all have."""

from __future__ import annotations

import logging
import pickle

from torch.distributed.checkpoint.metadata import Metadata
from torch.profiler import record_function

from localckpt.errors import CheckpointingException
from localckpt.global_tier.planning import Written
from localckpt.global_tier.root import CheckpointRoot
from localckpt.global_tier.rounds import Meeting
from localckpt.global_tier.save import SaveUnderWay
from localckpt.global_tier.torch_dcp import FORMAT_VERSION
from localckpt.global_tier.write import write_files
from localckpt.global_tier.writer import FileSystemWriterAsync

__all__ = ["Committing"]

logger = logging.getLogger(__name__)


class Committing:
    """Brings one manager's saves to their end, on this rank; a thread of each does.

    Args:
        root: Where checkpoints are.
        meeting: Of all ranks.
        writer: Has staged what this rank writes.
        session_id: The training run.
    """

    def __init__(
        self,
        root: CheckpointRoot,
        meeting: Meeting,
        writer: FileSystemWriterAsync,
        session_id: str,
    ) -> None:
        self._root = root
        self._meeting = meeting
        self._writer = writer
        self._plans = writer.plans
        self._session_id = session_id
        self._pickled: tuple[Metadata, bytes] | None = None

    def carry_out(self, save: SaveUnderWay) -> None:
        """Write, meet the others, and commit or give up together.

        Raises:
            CheckpointingException: Some rank could not write, or the first could not commit; the
                same on every rank. Or it is committed, and ``on_commit`` failed.
            PeerLostError: Some rank did not come in time.
        """
        try:
            with self._plans.kept_if_all_is_well():
                told = self._meeting.hold(
                    f"save iteration {save.iteration}",
                    lambda: self._write(save),
                    lambda said: [self._commit(save, said)],
                    name=f"{self._session_id}/{save.iteration}/{save.begun.save_id}",
                )
        except BaseException:
            if self._meeting.is_coordinator and not save.committed:
                self._root.give_up(save.begun)
            raise
        save.committed = True
        if self._meeting.is_coordinator:
            self._root.retire(save.begun)
        if told:
            raise CheckpointingException(told.decode())

    def _write(self, save: SaveUnderWay) -> bytes:
        if isinstance(save.staging_error, Exception):
            raise save.staging_error
        if save.staging_error is not None:
            raise CheckpointingException("it was interrupted") from save.staging_error
        if self._meeting.is_coordinator:
            self._root.sweep(save.begun)
        with record_function("localckpt.global.write"):
            results = self._writer.results(write_files(save.writes))
        logger.info("wrote %s", save.tell_written())
        files = {write.path.name: write.nbytes for write in save.writes}
        return self._plans.say_written(Written(results, files))

    def _commit(self, save: SaveUnderWay, said: list[bytes]) -> bytes:
        """On the first rank: what all are told beside that it is committed."""
        written, as_before = self._plans.hear_written(said)
        files = {name: nbytes for part in written for name, nbytes in part.files.items()}
        metadata = self._pickle_metadata(save, written, as_before)
        self._root.commit(save.begun, metadata, files, self._meeting.world_size)
        save.committed = True
        try:
            if save.on_commit is not None:
                save.on_commit()
        except Exception as error:  # noqa: BLE001 - raised on every rank
            what = f"iteration {save.iteration} is committed, but on_commit failed: {error!r}"
            return what.encode()
        return b""

    def _pickle_metadata(
        self, save: SaveUnderWay, written: list[Written], as_before: bool
    ) -> bytes:
        """What the checkpoint holds, and where; made anew when anything of it has changed."""
        assert save.metadata is not None, "the first rank has planned"
        if not (as_before and self._pickled and self._pickled[0] is save.metadata):
            save.metadata.version = FORMAT_VERSION
            save.metadata.storage_data = {
                result.index: result.storage_data for part in written for result in part.results
            }
            self._pickled = (save.metadata, pickle.dumps(save.metadata))
        return self._pickled[1]
