"""System calls on one folder that fail on purpose, below everything that Windlass or Python make of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What network file systems, and systems that are short of something, answer.
ERRNOS = [
    getattr(errno, name)
    for name in (
        "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH", "ENODEV", "ENXIO", "EAGAIN", "EMFILE", "ENFILE",
        "ESTALE", "EINTR", "EACCES", "EPERM", "ENOENT", "ENOSPC", "EDQUOT", "EIO", "EROFS", "EREMOTEIO",
    )
    if hasattr(errno, name)
]  # fmt: skip
BY_PATH = (
    "open",
    "stat",
    "lstat",
    "listdir",
    "scandir",
    "mkdir",
    "replace",
    "rename",
    "unlink",
    "rmdir",
    "statvfs",
)
BY_DESCRIPTOR = ("write", "fsync")
OPERATIONS = (*BY_PATH, *BY_DESCRIPTOR)


class FailingSystem:
    """Within the body the calls of one operation fail that are made on `root`, or files below it, and counted.

    Args:
        at: from which call on, from 1; 0: none.
        times: how many.
    """

    def __init__(self, root: Path, operation: str, number: int, at: int = 0, times: int = 1) -> None:
        self._root, self._operation, self._number = str(root), operation, number
        self._at, self._times, self.count = at, times, 0
        self._descriptors: set[int] = set()
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> FailingSystem:
        for name in {self._operation, "open"}:
            self._originals[name] = getattr(os, name)
            setattr(os, name, self._wrapped(name, self._originals[name]))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(os, name, original)

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any = ".", *arguments: Any, **options: Any) -> Any:
            if name == self._operation and self._concerns(target):
                self.count += 1
                if 0 < self._at <= self.count < self._at + self._times:
                    raise OSError(self._number, os.strerror(self._number), str(target))
            result = original(target, *arguments, **options)
            if name == "open":
                self._descriptors.discard(result)
                if self._concerns(target):
                    self._descriptors.add(result)
            return result

        return call

    def _concerns(self, target: Any) -> bool:
        if isinstance(target, int):
            return target in self._descriptors
        return os.fspath(target).startswith(self._root)
