"""What ranks exchange in calls of theirs, which must be the same on all of them.

A script that makes such a call on one process only (`if accelerator.is_main_process: accelerator.save_state(..)`) has
that process exchange with others that are in another call: one would take what the other means for something else, or
both would wait for more. So what an exchange is of travels with its first number, and ranks that differ in it all raise
an error.
"""

from __future__ import annotations

import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from windlass.core.errors import RankMismatchError
from windlass.dist.differences import differences

# Bytes of a message about a rank's call and line.
_LONGEST = 120
_KINDS = ("values", "vote", "barrier")
# Bits of the code of a call, and of one with its kind: twice the latter and an answer are one number.
_CALL_BITS, _CODE_BITS = 29, 31
_ANY_CALL, _CODE = (1 << _CALL_BITS) - 1, (1 << _CODE_BITS) - 1
# Frames of these lie between the script and the package: decorators, hooks, `runpy`.
_BETWEEN = ("<", sysconfig.get_path("stdlib"))
_INSTALLED = ("site-packages", "dist-packages")


def in_same_call(kind: str, ok: bool, group: Any, call: str = "") -> bool:
    """True if every rank in `group` passed True. Collective: one `all_reduce` of one number.

    Args:
        kind: of the exchange.
        call: a name for all calls of the script that may meet here; by default each meets itself alone.

    Raises:
        RankMismatchError: on all ranks: they are in different calls, or in exchanges of different kinds. A rank that
            handles an error may be in any call: it tells the others.
    """
    called, line = _call_of_script()
    code = _KINDS.index(kind) << _CALL_BITS | zlib.crc32((call or called).encode()) & _ANY_CALL
    either = 0 if sys.exception() is None else _ANY_CALL
    # A bit that is 1 on all ranks stays 1 in the code, and one that is 0 on all of them in its complement.
    found = torch.tensor([ok << 2 * _CODE_BITS | (code | either) << _CODE_BITS | (code ^ _CODE) | either])
    dist.all_reduce(found, op=dist.ReduceOp.BAND, group=group)
    answer = int(found)
    if (answer >> _CODE_BITS | answer) & _CODE != _CODE:
        raise _mismatch(f"{called} at {line}", group)
    return bool(answer >> 2 * _CODE_BITS)


def _mismatch(place: str, group: Any) -> RankMismatchError:
    own = torch.frombuffer(bytearray(place.encode()[:_LONGEST].ljust(_LONGEST)), dtype=torch.uint8)
    places = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(places, own, group=group)
    said = [{"call": bytes(place.tolist()).decode(errors="replace").strip()} for place in places]
    return RankMismatchError(
        differences(said, dist.get_process_group_ranks(group)),
        "the ranks of the job are in different calls",
        "A call that ranks make together is made by all of them: not under `if accelerator.is_main_process:`.",
    )


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
