"""Work in a forked process: what it changes is gone with it, and its result comes back as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from windlass.core.errors import ConfigError, ModelError, Problem, WindlassError
from windlass.core.job_signals import end_with_parent, handled_later
from windlass.core.threads import keep_inherited_garbage


class Child:
    """A process that has begun `work`; `result` waits for it. There is none where `can_fork` is False.

    A context manager, at whose end the process has ended: of several at a time others still compute if one raises, and
    would wait for ever for a reader of their answer.
    """

    can_fork = hasattr(os, "fork")

    def __init__(self, work: Callable[[], Any]) -> None:
        reader, writer = os.pipe()
        # The forked process has a copy of what is buffered, and may print it too.
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with handled_later():
            # No handler's exception (Ctrl-C) may come between the fork and this assignment: no caller would know
            # the process.
            self._pid = os.fork()
            if self._pid == 0:
                os.close(reader)
                _answer(work, writer, parent)
        os.close(writer)
        self._pipe = os.fdopen(reader, "rb")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def result(self) -> Any:
        """What `work` returned. Raises its ConfigError, or a ModelError with the message of what else it raised."""
        text = self._pipe.read()
        if not text:
            raise ModelError("the process that looked at the model ended without an answer")
        answer = json.loads(text)
        if "problems" in answer:
            raise ConfigError([Problem(*each) for each in answer["problems"]])
        if "error" in answer:
            raise ModelError(answer["error"])
        return answer["value"]


def apart(work: Callable[[], Any]) -> Any:
    """What `work` returns, which is run in a process of its own if there can be one."""
    if not Child.can_fork:
        return work()
    with Child(work) as child:
        return child.result()


def _answer(work: Callable[[], Any], writer: int, parent: int) -> None:
    """Write the result of `work`, and end the process, without what a process does at its end."""
    try:
        end_with_parent(parent)
        keep_inherited_garbage()
        # The threads of OpenMP are not in a forked process, which would wait for them in its first parallel loop.
        torch.set_num_threads(1)
        answer = _answer_of(work)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(answer, default=str).encode())
    finally:  # whatever is raised is not for the code that waits for the answer, of which this process has a copy
        os._exit(0)


def _answer_of(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except ConfigError as error:
        return {"problems": [(each.field, each.value, each.fix) for each in error.problems]}
    except WindlassError as error:
        return {"error": str(error)}
    except BaseException as error:
        if "WINDLASS_TRACEBACK" in os.environ:
            traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
