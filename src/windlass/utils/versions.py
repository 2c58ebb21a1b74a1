"""Compare versions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib import metadata
from typing import Any

from torch.torch_version import TorchVersion

from windlass import __version__
from windlass.core.optional import DISTRIBUTION

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Return the result of a comparison of versions. Raises ValueError for an unknown operation.

    Args:
        library_or_version: name of an installed package, or a parsed version.
        operation: one of >, >=, ==, !=, <=, <.
        requirement_version: the version to compare with.
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"operation={operation!r}: must be one of {', '.join(_OPERATIONS)}")
    version = library_or_version
    if type(version) is str:
        own = version in ("windlass", DISTRIBUTION)  # a source tree on the path has no metadata
        version = __version__ if own else metadata.version(version)
    return bool(_OPERATIONS[operation](TorchVersion(str(version)), requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return the result of comparing the installed PyTorch with `version`."""
    return compare_versions("torch", operation, version)
