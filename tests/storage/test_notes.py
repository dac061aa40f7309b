"""Notes of a rank's folder: one file, changed as a whole, also by a signal handler."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from localckpt.ids import Checkpoint, Generation
from localckpt.lineage import EpochId, Lineage
from localckpt.own_folders import make_own_folders
from localckpt.storage.notes import Notes, NotesFile, read_notes
from localckpt.storage.rank_folder import RankFolder
from localckpt.trust import Trust, Trusts

_CHECKPOINT, _OTHER = (Checkpoint(Generation(1, n), n, 2) for n in (10, 20))


def _failed(notes: NotesFile) -> int:
    return notes.trusts()[_CHECKPOINT].failed_starts


def test_a_start_counts_once_its_process_is_gone(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        NotesFile(tmp_path).count_start(_CHECKPOINT, 1, 3)
        os._exit(0)
    os.waitpid(pid, 0)
    notes = NotesFile(tmp_path)

    assert _failed(notes) == 2
    notes.count_start(_CHECKPOINT, 2, 3)
    assert _failed(notes) == 2
    notes.take_back_start(_CHECKPOINT)
    assert _failed(notes) == 2
    notes.forget_starts()
    assert notes.trusts() == {}
    # Of nothing there are no notes.
    assert list(tmp_path.iterdir()) == []


def test_one_file_holds_all_and_is_the_users_alone(tmp_path: Path) -> None:
    notes, lineage = NotesFile(tmp_path), Lineage(EpochId(3, 7))
    notes.change(lambda _: Notes(3, lineage))
    notes.note_trust(_CHECKPOINT, mark="bad", why="NaN")
    notes.note_trust(_CHECKPOINT, is_drained=True)
    notes.keep_metrics({_OTHER: ("loss", 0.5)}, [])

    assert [path.name for path in tmp_path.iterdir()] == [".notes"]
    assert stat.S_IMODE((tmp_path / ".notes").stat().st_mode) == 0o600
    assert read_notes(tmp_path) == Notes(
        3,
        lineage,
        Trusts(
            {
                _CHECKPOINT: Trust(mark="bad", why="NaN", is_drained=True),
                _OTHER: Trust(metric=("loss", 0.5)),
            }
        ),
    )
    notes.keep_metrics({}, [_OTHER.iteration])
    assert read_notes(tmp_path).noted[_OTHER].metric == ("loss", 0.5)
    notes.keep_metrics({}, [])
    assert _OTHER not in read_notes(tmp_path).noted


def test_progress_ends_the_count_in_folders_that_no_rank_writes_any_more(tmp_path: Path) -> None:
    first, second = (RankFolder(tmp_path / "node", "run", rank, 5.0) for rank in (1, 2))
    left = NotesFile(first.session / "0")
    make_own_folders(first.session, "0")
    for folder in (first, second):
        folder.begin_epoch(1, [folder.owner], 5.0)
    for notes in (left, first, second):
        notes.count_start(_CHECKPOINT, 2, 3)

    second.forget_starts()
    assert [_noted(path) for path in (first.session / "0", first.path, second.path)] == [2, 2, 0]
    first.forget_starts()
    assert [_noted(path) for path in (first.session / "0", first.path)] == [0, 0]


def _noted(folder: Path) -> int:
    return read_notes(folder).noted[_CHECKPOINT].failed_starts


def test_what_a_handler_takes_back_in_the_middle_of_a_change_follows_it(tmp_path: Path) -> None:
    notes = NotesFile(tmp_path)
    notes.count_start(_CHECKPOINT, 0, 3)

    def change(noted: Notes) -> Notes:
        before = signal.signal(signal.SIGUSR2, lambda *_: notes.take_back_start(_CHECKPOINT))
        signal.raise_signal(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, before)
        return noted.but(_OTHER, mark="good")

    notes.change(change)

    noted = read_notes(tmp_path)
    assert (noted.noted, noted.starts) == ({_OTHER: Trust(mark="good")}, {})


def test_only_drains_of_complete_checkpoints_stay_noted(tmp_path: Path) -> None:
    notes = NotesFile(tmp_path)
    checkpoints = [Checkpoint(Generation(1, n), n, 8) for n in range(40)]
    notes.note_trust(checkpoints[0], mark="good")

    for n, drained in enumerate(checkpoints):
        notes.note_drained(drained, checkpoints[max(0, n - 1) : n + 1])

    assert read_notes(tmp_path).noted == {
        checkpoints[0]: Trust(mark="good"),
        **dict.fromkeys(checkpoints[-2:], Trust(is_drained=True)),
    }


@pytest.mark.fault("hostile-file")
@pytest.mark.parametrize("text", ["[7", "7", "[" * 3000, '{"epoch": 1' + "0" * 100_000 + "}"])
def test_damaged_notes_count_for_nothing_and_the_log_says_so(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".notes").write_text(text)

    assert read_notes(tmp_path) == Notes()
    assert f"{tmp_path / '.notes'} is damaged" in caplog.text
    NotesFile(tmp_path).note_trust(_CHECKPOINT, mark="good")
    assert read_notes(tmp_path).noted == {_CHECKPOINT: Trust(mark="good")}
