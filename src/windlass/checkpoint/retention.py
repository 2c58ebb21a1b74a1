"""Which checkpoints are kept. Runs only after a new one stands."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from windlass.checkpoint.manifest import CheckpointInfo
from windlass.checkpoint.store import Store


def surplus(
    whole: list[CheckpointInfo], limit: int | None, protected: Iterable[Path]
) -> list[CheckpointInfo]:
    """Those of the whole checkpoints (in order of their commits) that may go.

    `limit` counts the protected ones (the best, the one just written) too, so the newest fill what they leave;
    the newest always stays, so with a limit of 1 best and last may both remain. None or 0: nothing goes.
    """
    if not limit or limit < 0 or not whole:
        return []
    names = {_lasting_name(path) for path in protected}
    kept = {info.path for info in whole if _lasting_name(info.path) in names}
    kept.add(whole[-1].path)
    for info in reversed(whole):
        if len(kept) >= limit:
            break
        kept.add(info.path)
    return [info for info in whole if info.path not in kept]


def _lasting_name(path: Path) -> str:
    """A checkpoint has another name between the two renames of its replacement, and gets its own back."""
    return path.name.removeprefix("replaced-")


def prune(store: Store, limit: int | None, protected: Iterable[Path]) -> list[Path]:
    """Remove surplus checkpoints; gives what was removed. A damaged one neither counts nor is removed: it is
    evidence.

    Raises:
        OSError: the disk refused.
    """
    whole = store.whole()
    removed = []
    for info in surplus(whole, limit, protected):
        store.remove(info.path)
        removed.append(info.path)
    return removed
