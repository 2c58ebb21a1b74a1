"""Numbers that ranks exchange in calls of theirs, which must be the same on all of them.

A script that makes such a call on one process only (`if accelerator.is_main_process: accelerator.save_state(..)`) has
that process exchange with others that are in another call: one would take what the other means for something else, or
both would wait for more. So each exchange begins with what it is of, and ranks that differ in it all raise an error.
"""

from __future__ import annotations

import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.core.errors import RankMismatchError
from windlass.dist.differences import differences

# Bytes of a message about a rank's call and line.
_LONGEST = 120
_ANY = 0
# Frames of these lie between the script and the package: decorators, hooks, `runpy`.
_BETWEEN = ("<", sysconfig.get_path("stdlib"))
_INSTALLED = ("site-packages", "dist-packages")


def in_same_call(kind: str, number: int, group: Any, call: str = "") -> list[int]:
    """Every rank's number, in the order of ranks in `group`. Collective.

    Args:
        kind: of the exchange.
        call: a name for all calls of the script that may meet here; by default each meets itself alone.

    Raises:
        RankMismatchError: on all ranks: they are in different calls, or in exchanges of different kinds. A rank that
            handles an error may be in any call: it tells the others.
    """
    called, line = _call_of_script()
    handles_error = sys.exception() is not None
    own = torch.tensor([number, _code(kind), _ANY if handles_error else _code(call or called)])
    answers = [answer.tolist() for answer in _gathered(own, group)]
    kinds, calls = {answer[1] for answer in answers}, {answer[2] for answer in answers} - {_ANY}
    if len(kinds) > 1 or len(calls) > 1:
        text = f"{called} at {line}".encode()[:_LONGEST].ljust(_LONGEST)
        places = _gathered(torch.frombuffer(bytearray(text), dtype=torch.uint8), group)
        said = [{"call": bytes(place.tolist()).decode(errors="replace").strip()} for place in places]
        raise RankMismatchError(differences(said, dist.get_process_group_ranks(group)))
    return [answer[0] for answer in answers]


def _gathered(own: Tensor, group: Any) -> list[Tensor]:
    parts = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return parts


def _code(text: str) -> int:
    return zlib.crc32(text.encode()) + 1


def _call_of_script() -> tuple[str, str]:
    """The function of this package that the script has called, and the script's file and line."""
    called, frame = "", sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if frame.f_globals.get("__name__", "").partition(".")[0] == "windlass":
            called = code.co_qualname
        elif not _is_between(code.co_filename):
            return called, f"{Path(code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return called, "an unknown line"


def _is_between(file: str) -> bool:
    return file.startswith(_BETWEEN) or any(part in file for part in _INSTALLED)
