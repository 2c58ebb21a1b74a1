"""A process that has imported everything and has one thread, from which the ranks of tests are forked.

Each launch of its own imports torch and transformers once more for the launcher and for every rank, which took longer
than most tests do. It reads one request a line from standard input and answers each with one line:

    {"world": 2, "script": "...", "is_module": false, "arguments": [...], "said": "file for the output",
     "environ": {...}, "cwd": "...", "timeout": 200}
    {"codes": [0, 0], "late": false}

A world of 0 is one process without the variables of a launcher. The script is a file, or the name of a module; with
"call" it is not run: the function that this file has with its arguments is called, and its result put beside it. With
"told", a file to read from, in place of world and timeout, the answer is `{"pid": 7}`, at once; to `{"wait": 7}` it is
`{"code": 0}`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pickle
import pkgutil
import runpy
import select
import signal
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from tests.dist.launch import started_by
from tests.large_pages import keep_large_pages

from windlass.core import started
from windlass.core.tracebacks import report_uncaught

GRACE = 30.0  # seconds between SIGTERM and SIGKILL for the ranks that are left when one has failed
_LOOKS = 0.2  # seconds between two looks at the time, while a request is under way
_TICK = 0.005  # and at the processes, where the system does not tell that one has ended


def main() -> None:
    warm_up()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def warm_up() -> None:
    """Import what trainings import on their way."""
    gc.disable()  # all of it stays
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow would start a thread
    import accelerate
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import transformers

    import windlass

    # Names that their packages load when they are first asked for.
    _ = windlass.Accelerator, windlass.Trainer, accelerate.Accelerator
    _ = transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerFast
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer imports the compiler
    # The types of their fields are read when the first is made, which takes as long as a small training.
    _ = windlass.TrainingArguments(), windlass.Seq2SeqTrainingArguments(), windlass.SFTConfig()
    _ = windlass.DPOConfig(), windlass.KTOConfig(), windlass.RewardConfig()
    for module in pkgutil.walk_packages(windlass.__path__, "windlass."):
        if module.name != "windlass.__main__":
            importlib.import_module(module.name)
    # How files name the weights of every model, which is computed at the first save.
    transformers.conversion_mapping.get_checkpoint_conversion_mapping("llama")
    # Each takes longer than a small training.
    for optional in ("datasets", "matplotlib.backends.backend_agg", "matplotlib.figure", "peft", "pytest"):
        with contextlib.suppress(ImportError):
            importlib.import_module(optional)
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    assert threads == 1, f"{threads} threads: a fork could inherit a lock that no thread releases"
    # What the imports would do at the end of every rank takes as long as a small training, and is of no use there.
    atexit.unregister(torch._dynamo.utils.dump_compile_times)
    for finalizer in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.enable()
    gc.freeze()
    keep_large_pages()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if "told" in request:
        return {"pid": _fork(0, {**request, "world": 0}, {})}
    if "wait" in request:
        return {"code": _code_of(request["wait"])}
    return _run_to_the_end(request)


def _code_of(pid: int) -> int:
    """Wait for a process. Nothing is kept by its id, which another process may get after it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run_to_the_end(request: dict[str, Any]) -> dict[str, Any]:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    pids = [_fork(rank, request, meeting) for rank in range(max(1, request["world"]))]
    try:
        codes, late = _wait(pids, time.monotonic() + request["timeout"])
    finally:
        _signal(pids, signal.SIGKILL)  # each led a session: what it started ends with it
    return {"codes": [codes[pid] for pid in pids], "late": late}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fork(rank: int, request: dict[str, Any], meeting: dict[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        _redirect(request.get("told", os.devnull), request["said"])
        os.chdir(request["cwd"])
        started.FOLDER = request["cwd"]
        os.environ.clear()
        os.environ.update(request["environ"])
        if request["world"]:
            world = str(request["world"])
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
            os.environ.update({**meeting, **own})
        code = _run(rank, request)
    finally:
        os._exit(code)


def _redirect(told: str, said: str) -> None:
    inputs, output = os.open(told, os.O_RDONLY), os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(inputs, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if os.isatty(output):  # as the streams of an interpreter that was started there are
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _run(rank: int, request: dict[str, Any]) -> int:
    """Run the script as the main program, or the call, its end included; return the exit code."""
    code, script, is_module = 0, request["script"], request["is_module"]
    sys.argv = [script, *request["arguments"]]
    sys.path[0] = os.getcwd() if is_module else str(Path(script).parent)
    try:
        if "call" in request:
            function, arguments = pickle.loads(Path(request["call"]).read_bytes())
            Path(f"{request['call']}.{rank}").write_text(json.dumps(function(*arguments)))
        elif is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        shown = error.__traceback__ and error.__traceback__.tb_next
        report_uncaught(type(error), error, shown)
        code = 1
    # What an interpreter does at its end, and `os._exit` does not.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _wait(pids: list[int], deadline: float) -> tuple[dict[int, int], bool]:
    """Exit codes, negative for a signal; and whether any had to be ended because time was up.

    As a launcher does, it ends the others when one fails. Time is also up when the tests that asked have ended.
    """
    parent, codes = os.getppid(), dict[int, int]()
    kill_at: float | None = None
    late = False
    alive = pids
    while alive:
        _until_one_ends(alive)
        for pid in alive:
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
        now = time.monotonic() if os.getppid() == parent else deadline
        alive = [pid for pid in pids if pid not in codes]
        if kill_at is None and any(codes.values()):
            kill_at = now + GRACE
            _signal(alive, signal.SIGTERM)
        if alive and (now >= deadline or (kill_at is not None and now >= kill_at)):
            late = late or now >= deadline
            _kill_all(alive)
    return codes, late


def _until_one_ends(pids: list[int]) -> None:
    """Wait a short while at most, since time may be up. To look again and again took as long as many forks."""
    try:
        files = [os.pidfd_open(pid) for pid in pids]
    except (AttributeError, OSError):  # another system than Linux, or one that refuses it
        time.sleep(_TICK)
        return
    select.select(files, (), (), _LOOKS)
    for file in files:
        os.close(file)


def _kill_all(pids: list[int]) -> None:
    """Kill them and what they started in sessions of its own, as launchers do."""
    for pid in [pid for rank in pids for pid in (rank, *started_by(rank))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


if __name__ == "__main__":
    main()
