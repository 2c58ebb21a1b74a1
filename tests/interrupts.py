"""Ctrl-C at each line of a module."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class InterruptAt:
    """Within a `with` block Ctrl-C comes at a line of a module, the n-th that is run; it ends the block, and no more.

    Attributes:
        came: as many lines were run.
    """

    def __init__(self, module: ModuleType, line: int) -> None:
        self._file, self._left, self.came = module.__file__, line, False

    def __enter__(self) -> InterruptAt:
        sys.settrace(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self._file or self.came:
            return None
        self._left -= event == "line"
        if self._left < 0:
            self.came = True
            raise KeyboardInterrupt
        return self
