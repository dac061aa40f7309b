"""What every test has: directories that play nodes, and a check that nothing is left behind.

All temporary files of the run, also those of its ranks, go into one directory of its own, and all
of its processes carry its name in their environment, so that what is left can be told from what
belongs to someone else.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.choice import Choice
from tests.faults.table import FaultTable
from tests.programs import run
from tests.scenarios import Job

T = TypeVar("T")

_TESTS = Path(__file__).parent
_SHARED_MEMORY = Path("/dev/shm")
_RUN = "LOCALCKPT_TEST_RUN"
_SYSTEMS_DIRECTORY = "LOCALCKPT_TEST_SYSTEMS_DIRECTORY"
# A worker process may still be finishing the save that a killed rank had handed to it.
_GRACE_S = float(os.environ.get("LOCALCKPT_TEST_GRACE_S", "10"))

_TORCHS_OWN = "torchs-own"
# Files that take half a minute or more. One worker runs a file, so at the end of a run all others
# would wait for the one that began last.
_LONGEST = (
    *("faults/test_power_cut.py", "faults/test_network.py", "faults/test_refused.py"),
    *("checkpointer/test_rejoin.py", "checkpointer/test_live.py", "checkpointer/test_loop.py"),
    *("global_tier/test_object_stores.py", "integrations/test_nvrx.py", "upstream/test_queues.py"),
    *("managers/parity/test_parity_loss.py", "faults/test_campaign.py", "test_dcp.py"),
    *("faults/test_killed.py", "managers/test_elastic_values.py", "global_tier/test_two_tiers.py"),
    *("managers/test_wiped_folders.py", "async_save/test_callers.py", "managers/test_elastic.py"),
    *("test_refused_together.py", "state_dict/test_branches.py", "test_changed_groups.py"),
    *("checkpointer/test_loader_workers.py", "managers/test_behind_training.py"),
    *("faults/test_hostile_store.py", "docs/test_code.py", "faults/test_damage_everywhere.py"),
    *("test_nothing_left.py", "test_restarts.py", "integrations/test_torchtitan.py"),
    *("async_save/test_exits.py", "global_tier/test_trailer.py", "integrations/test_ray.py"),
    *("integrations/test_lightning.py", "integrations/test_transformers.py"),
    *("integrations/test_deepspeed.py", "integrations/test_accelerate.py"),
)

_our_temporary_directory = pytest.StashKey[Path]()
_environment_before = pytest.StashKey[str | None]()
_shared_memory_before = pytest.StashKey[set[str]]()
_left = pytest.StashKey[list[str]]()


# Examples of a property in a plain run, which draws others each time, and in the long forms.
_EXAMPLES, _EXAMPLES_IN_LONG_FORM = 30, 300


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("localckpt")
    group.addoption(
        "--faults",
        action="store_true",
        help="only tests of faults and long forms, and their table",
    )
    group.addoption(
        "--integrations",
        action="store_true",
        help="all that runs in a framework, of which there is one example each without this",
    )
    group.addoption("--seed", type=int, help="of the random campaign of faults")
    group.addoption("--steps", type=int, help="how many steps the random campaign takes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first."""
    order = {_TESTS / name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(_LONGEST)))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(*names): makes these faults of tests/faults/table.py")
    config.addinivalue_line("markers", "long: run with --faults only")
    config.addinivalue_line("markers", "framework: run with --integrations or --faults only")
    config.addinivalue_line("markers", "example: of a framework, run at all times")
    config.addinivalue_line("markers", "rows(n): run n of the rows only, without --faults")
    option = config.getoption
    config.pluginmanager.register(FaultTable(option("--faults")))
    config.pluginmanager.register(Choice(option("--integrations") or option("--faults")))
    # torch's stores look up a name for the address of each connection, for log messages only. It
    # takes seconds where no name server answers.
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    # How long an example takes says how busy the machine is.
    settings.register_profile(
        "localckpt",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        max_examples=_EXAMPLES_IN_LONG_FORM if option("--faults") else _EXAMPLES,
    )
    settings.load_profile("localckpt")
    # A shell starts a command in the background with SIGINT ignored, and processes inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Python makes and removes this one by itself, each worker's when it ends, so it must not be in
    # the directory that we look into and remove.
    tempfile.tempdir = os.environ.setdefault(_SYSTEMS_DIRECTORY, tempfile.gettempdir())
    multiprocessing_util.get_temp_dir()
    tempfile.tempdir = None
    if not _leads(config):
        return
    run = uuid.uuid4().hex[:12]
    directory = Path(tempfile.mkdtemp(prefix=f"localckpt-tests-{run}-"))
    config.stash[_our_temporary_directory] = directory
    config.stash[_environment_before] = os.environ.get("TMPDIR")
    config.stash[_shared_memory_before] = _shared_memory_names()
    os.environ[_RUN] = run
    # Tensors of tests are small: more threads would but spin between one operation and the next.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch makes it for any DTensor, and leaves it.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / _TORCHS_OWN)
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports torch and makes some thousand tests, of which nothing is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _leads(config):
        return
    tempfile.tempdir = None
    before = config.stash[_environment_before]
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before
    shutil.rmtree(config.stash[_our_temporary_directory], ignore_errors=True)


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layouts of images that are computed during the test."""
    made: list[Any] = []
    image = importlib.import_module("localckpt.state_dict.image")
    lay_out = image.lay_out

    def note(slots: Any) -> Any:
        made.append(lay_out(slots))
        return made[-1]

    monkeypatch.setattr(image, "lay_out", note)
    return made


@pytest.fixture(autouse=True)
def no_import_hook_is_left() -> Iterator[None]:
    """Fails a test that changes what the tests after it import."""
    yield

    ours = [hook for hook in sys.meta_path if type(hook).__module__.startswith("localckpt")]
    for hook in ours:
        sys.meta_path.remove(hook)
    assert not ours


@pytest.fixture(scope="session", autouse=True)
def children_are_reaped() -> Iterator[None]:
    """Fails the run, after its last test, when the process of the tests has zombies."""
    yield

    zombies = _until_empty(lambda: [c for c in psutil.Process().children() if _is_zombie(c)])
    if zombies:
        pytest.fail("not reaped: " + ", ".join(f"{child.pid}" for child in zombies), pytrace=False)


# Whoever ends the workers does so before.
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run when its tests left something."""
    config = session.config
    if not _leads(config):
        return
    directory, before = config.stash[_our_temporary_directory], config.stash[_shared_memory_before]
    config.stash[_left] = _until_empty(lambda: _left_behind(directory, before))
    if config.stash[_left]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left := config.stash.get(_left, []):
        terminalreporter.section("the tests left behind", red=True)
        for told in left:
            terminalreporter.write_line(told)


@pytest.fixture
def node_dirs(tmp_path: Path) -> Callable[[int], list[Path]]:
    """``node_dirs(n)`` makes n empty directories that play the disks of n nodes."""

    def make(count: int) -> list[Path]:
        return [Path(tempfile.mkdtemp(prefix="node-", dir=tmp_path)) for _ in range(count)]

    return make


@pytest.fixture
def shm_roots() -> Iterator[Callable[[int], list[Path]]]:
    """``shm_roots(n)`` makes n empty directories in shared memory, removed after the test."""
    made: list[Path] = []

    def make(count: int) -> list[Path]:
        prefix = f"localckpt-test-{os.environ[_RUN]}-"
        new = [Path(tempfile.mkdtemp(prefix=prefix, dir=_SHARED_MEMORY)) for _ in range(count)]
        made.extend(new)
        return new

    yield make

    for directory in made:
        shutil.rmtree(directory)


@pytest.fixture
def nodes_of(
    node_dirs: Callable[[int], list[Path]], shm_roots: Callable[[int], list[Path]]
) -> Callable[[str, int], list[Path]]:
    """``nodes_of(kind, n)`` makes n empty nodes for stores of a kind, ``"memory"`` or another."""
    return lambda kind, count: (shm_roots if kind == "memory" else node_dirs)(count)


@pytest.fixture
def job(nodes_of: Callable[[str, int], list[Path]]) -> Iterator[Callable[..., Job]]:
    """``job(nodes=2, ...)`` begins the history of a job on empty nodes; see tests/scenarios.py."""
    begun: list[Job] = []

    def begin(nodes: int, kind: str = "disk", **settings: Any) -> Job:
        made = Job(nodes_of(kind, nodes), kind=kind, **settings)
        begun.append(made)
        return made

    yield begin

    assert not any(made.pending for made in begun), "a history ends with run() or files()"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """``small_disk(options)`` mounts a tmpfs, such as ``size=8m``, and returns its directory."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("needs root, to mount a small file system")
        path = tmp_path / f"small-{len(mounted)}"
        path.mkdir()
        done = run("mount", "-t", "tmpfs", "-o", options, "localckpt-test", path)
        if done.returncode:
            pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount

    for path in mounted:
        run("umount", "--lazy", path).check_returncode()


def _left_behind(directory: Path, shared_memory_before: set[str]) -> list[str]:
    names = _shared_memory_names() - shared_memory_before
    left = [f"shared memory: {name}" for name in sorted(names) if not _is_of_another_run(name)]
    left += [
        f"temporary file: {path}"
        for path in sorted(directory.iterdir())
        if not path.name.startswith(("pytest-of-", _TORCHS_OWN)) and not _is_of_torch(path)
    ]
    return left + [f"process: {told}" for told in _processes_of_this_run()]


def _is_of_torch(path: Path) -> bool:
    # Up to some version torch makes one when it is imported, which a forked process leaves.
    return any(path.glob("_remote_module_*"))


def _shared_memory_names() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.glob("*localckpt*")}


def _is_of_another_run(name: str) -> bool:
    # No test makes a directory of a benchmark, which may be run meanwhile.
    if name.startswith("localckpt-bench-"):
        return True
    if name.startswith("localckpt-test-"):
        return os.environ[_RUN] not in name
    # The name of a staging buffer tells the process that made it, and when it started.
    maker = re.search(r"-(\d+)-\d+\.[0-9a-f]+\.(\d+|lock)$", name)
    try:
        run = psutil.Process(int(maker[1])).environ().get(_RUN) if maker else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return run is not None and run != os.environ[_RUN]


def _processes_of_this_run() -> list[str]:
    me = os.getpid()
    told = []
    for process in psutil.process_iter():
        try:
            if process.pid == me or process.environ().get(_RUN) != os.environ[_RUN]:
                continue
            command = " ".join(process.cmdline())
            # Python's own helpers live until the test process exits; what they forked may not.
            helper = "multiprocessing.forkserver" in command or "resource_tracker" in command
            if not (helper and process.ppid() == me):
                told.append(f"{process.pid} ({process.status()}) {command[:200]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return told


def _leads(config: pytest.Config) -> bool:
    return not hasattr(config, "workerinput")


def _until_empty(left: Callable[[], list[T]]) -> list[T]:
    deadline = time.monotonic() + _GRACE_S
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def can_attach() -> None:
    """Skips where a process cannot have itself traced by another."""
    if shutil.which("strace") is None or os.geteuid() != 0:
        pytest.skip("needs strace, and root, which alone may attach to any process")
    if run("strace", "-o", os.devnull, "true").returncode:
        pytest.skip("processes may not be traced here")


@pytest.fixture
def long_form(pytestconfig: pytest.Config) -> bool:
    """Whether a test may take minutes, to run every case instead of a selection."""
    return bool(pytestconfig.getoption("--faults"))
