"""What all tests share: one thread a process, no network, and a check that no test leaves its mess to the next."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading

# Before the first import of torch: several test processes share the cores, and more threads would only fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

# Bytecode is written whatever the shell says: the tests start thousands of processes, and each would compile what it
# imports of the package and of the tests; a test process compiles each file of tests with its assertions rewritten.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# A process that a message wakes does not interrupt the one that sent it: that one may still hold a lock for which a
# thread of gloo spins. It takes a tenth of the processor time of tests with ranks. Children inherit it.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# A save waits for the disk, a few milliseconds for each file, and the tests make thousands: their folders lie in memory
# where the system has enough of it.
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.large_pages import keep_large_pages

from windlass.core import logs
from windlass.core.threads import keep_inherited_garbage

ROOT = Path(__file__).resolve().parent.parent
_VERBOSITY, _PROPAGATES = logs.get_verbosity(), logging.getLogger("windlass").propagate
pytest_plugins = ["tests.durations", "tests.hub.fixtures", "tests.said"]

# Tests fork this process, which holds what the tests before them left.
os.register_at_fork(after_in_child=keep_inherited_garbage)

# A shell that starts the tests in the background makes them, and all that they start, deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A collection of garbage for each 700 new objects, Python's default, takes a tenth of the time of the test processes.
gc.set_threshold(10_000)

# No deadline: a busy machine is not a failure. CI draws the same examples in every run. `make test-all` takes "long".
settings.register_profile(
    "windlass", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25
)
settings.register_profile("ci", parent=settings.get_profile("windlass"), derandomize=True)
settings.register_profile("long", parent=settings.get_profile("windlass"), max_examples=100)
settings.load_profile("ci" if os.environ.get("CI") else "windlass")

# Written by libraries on import or at first use, not by us.
_FOREIGN = (
    "PYTEST_",
    "KMP_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "HYDRA_",
    "MKL_",
    "CUDA_MODULE_LOADING",
    "TORCHELASTIC_",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # by DeepSpeed, which peft, trl and transformers import if it is installed
)

# There is one of each in a process, from its first use on; the last ends when its loader is collected as garbage.
_LASTING = ("windlass-run-lock", "windlass-watchdog", "windlass-waiting", "tests-hub")
_ENDING = 30.0  # seconds that a thread has to end, after its test


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Launch files, prepared text and the size of the terminal are those of these tests, not the user's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("WINDLASS_HOME", str(tmp_path_factory.mktemp("home")))
        patched.setenv("COLUMNS", "80")  # whatever the width of the terminal in which the tests run
        patched.setenv("LINES", "24")
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data beside the repository (`../shared/data`); the test is skipped if there is none."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real data beside the repository (../shared/data)")
    return folder


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python does not look for cycles by itself, as in most of a short program."""
    # PyTorch's first optimizer of a process imports this, and leaves its frames in a cycle.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: to look for garbage among it takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests take minutes on an idle machine: the limit of all tests would end some of them on a busy one."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


_imported = 0  # modules whose objects are set aside


def _set_aside() -> None:
    """What imports and collection made lives as long as the tests: no collection of garbage has to look at it."""
    global _imported
    gc.collect()
    gc.freeze()
    _imported = len(sys.modules)


@pytest.fixture(scope="module", autouse=True)
def _late_imports() -> Iterator[None]:
    """Set aside what tests import as they run, too: it makes each collection of later tests take up to a second."""
    yield
    if len(sys.modules) > _imported + 500:
        _set_aside()


_LOGGING = "logging-plugin"
_LOGS = pytest.StashKey[object | None]()


def pytest_collection_finish(session: pytest.Session) -> None:
    _set_aside()
    # It adds two handlers to each of a hundred loggers and removes them, three times a test, which takes as long as all
    # else that pytest does. Without handlers of the root, `logging.basicConfig` would set some that stay.
    manager, root = session.config.pluginmanager, logging.getLogger()
    root.addHandler(logging.NullHandler())
    session.stash[_LOGS] = manager.unregister(name=_LOGGING)
    if len(session.items) > 1000:  # for a few tests it costs more than it saves
        keep_large_pages()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give what is logged to the tests that ask for it."""
    logs_plugin = item.session.stash[_LOGS]
    if logs_plugin is None or "caplog" not in getattr(item, "fixturenames", ()):
        return (yield)
    manager = item.config.pluginmanager
    manager.register(logs_plugin, _LOGGING)
    try:
        return (yield)
    finally:
        manager.unregister(logs_plugin)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}


def _threads_left(before: set[threading.Thread]) -> Iterator[str]:
    """Threads that go on after the test that started them: what they do would happen to another one."""
    if not _started_since(before):
        return
    gc.collect()  # the threads of a loader end with it
    for thread in _started_since(before):
        with contextlib.suppress(RuntimeError):  # it is listed, and has not started yet
            thread.join(_ENDING)
        if thread.is_alive():
            yield f"the thread {thread.name}"


def _started_since(before: set[threading.Thread]) -> list[threading.Thread]:
    # Those of other packages may stay open as long as the process. A server's threads are named after their function.
    ours = ("windlass", "tests")
    return [
        new
        for new in threading.enumerate()
        if new not in before
        and (new.name.startswith(ours) or new.name.endswith("(process_request_thread)"))
        and new.name not in _LASTING
    ]


def _left_behind(environment: dict[str, str], dtype: torch.dtype) -> Iterator[str]:
    now = _environment()
    for name in sorted(environment.keys() | now.keys()):
        if environment.get(name) != now.get(name):
            yield f"environment variable {name}: {environment.get(name)!r} became {now.get(name)!r}"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        yield "a process group"
    if torch.get_default_dtype() != dtype:
        yield f"default dtype {torch.get_default_dtype()}"
    if torch.are_deterministic_algorithms_enabled():
        yield "deterministic algorithms switched on"
    if torch.backends.cudnn.deterministic:
        yield "deterministic algorithms of cuDNN switched on"


def _put_back(environment: dict[str, str], dtype: torch.dtype) -> None:
    for name in _environment().keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_default_dtype(dtype)
    if torch.are_deterministic_algorithms_enabled():  # to switch them off imports the compiler
        torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def _forget_the_accelerator() -> None:
    """Every Accelerator publishes its state in the process; the next test is another script."""
    state = sys.modules.get("windlass.accelerator.ranks")
    if state is not None:
        for published in (state.PROCESS, state.LOOP, state.GRADIENTS):
            published.clear()


@pytest.fixture(autouse=True)
def _clean_hands() -> Iterator[None]:
    """Fails a test that leaves process-wide state changed, and puts it back for the next one."""
    environment, dtype, threads = _environment(), torch.get_default_dtype(), set(threading.enumerate())
    yield
    # Every Trainer sets them, also one of a module's fixture, which ran before this one.
    logs.set_verbosity(_VERBOSITY)
    logging.getLogger("windlass").propagate = _PROPAGATES
    _forget_the_accelerator()
    left = [*_left_behind(environment, dtype), *_threads_left(threads)]
    _put_back(environment, dtype)
    assert not left, "the test left behind: " + "; ".join(left)
