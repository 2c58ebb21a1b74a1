"""This process's place among the others, and decorators that select processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from windlass.core.output import STDOUT
from windlass.dist.gang import Gang

Function = Callable[..., Any]


class Ranks:
    """This process's place among the others: the base of `Accelerator` and of the state singletons."""

    _gang: Gang

    @property
    def num_processes(self) -> int:
        return self._gang.size

    @property
    def process_index(self) -> int:
        return self._gang.rank

    @property
    def local_process_index(self) -> int:
        return self._gang.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """True on the first process of the job."""
        return self._gang.world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """True on the first process of each machine."""
        return self._gang.world.is_local_main

    @property
    def is_last_process(self) -> bool:
        return self._gang.rank == self._gang.size - 1

    @property
    def use_distributed(self) -> bool:
        """True if there is more than one process."""
        return self._gang.size > 1

    @property
    def should_save_model(self) -> bool:
        """True on the process that writes the files of `save_model`. All of them take part in gathering the weights."""
        return self.is_main_process

    def wait_for_everyone(self) -> None:
        """Return once every process has called this."""
        self._gang.barrier()

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Context: the main process runs the body first, then the others."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Context: the main process of each machine runs the body first, then the others of that machine."""
        return self._first(self.is_local_main_process)

    @contextlib.contextmanager
    def _first(self, mine: bool) -> Iterator[None]:
        if not mine:
            self._gang.barrier()
        try:
            yield
        finally:
            if mine:
                self._gang.barrier()

    # --- decorators ---------------------------------------------------------------------------------------------------

    def on_main_process(self, function: Function) -> Function:
        """Decorator: run the function on the main process only; it returns None elsewhere."""
        return self._only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Decorator: run the function on the main process of each machine only; it returns None elsewhere."""
        return self._only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorator: run the function on the last process only; it returns None elsewhere."""
        return self._only(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorator: run the function on the process of this index only; it returns None elsewhere."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Function | None = None, local_process_index: int | None = None
    ) -> Function:
        """Decorator: run the function on the process of this index on each machine; it returns None elsewhere."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(lambda: self.local_process_index == local_process_index, function)

    def _only(self, here: Callable[[], bool], function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if here() else None

        return run

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine."""
        if self.is_local_main_process:
            print(*args, **{"file": STDOUT, **kwargs})
