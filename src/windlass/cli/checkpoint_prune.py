"""`windlass checkpoint prune`: remove checkpoints that need not be kept."""

from __future__ import annotations

from contextlib import nullcontext

from windlass.checkpoint.retention import Retention, metric_of, surplus
from windlass.checkpoint.run_lock import RunLock
from windlass.checkpoint.store import Store
from windlass.checkpoint.survey import notes_of
from windlass.cli.checkpoint_listing import is_one_checkpoint, local_path
from windlass.cli.estimate_memory import in_words
from windlass.core.errors import CheckpointError
from windlass.core.output import one_line, say


def prune_command(folder: str, keep_last: int | None, keep_best: int | None, dry_run: bool) -> int:
    """Remove all whole checkpoints but those that are to be kept, and say which; returns the exit code.

    The newest stays in any case, and so does the best of the run, which a resumed run would look for. A damaged one
    is left alone.

    Raises:
        CheckpointError: nothing says what to keep, there are no checkpoints, or nothing is known of which are the best.
        FolderInUse: a run writes to the folder. OSError: one cannot be removed.
    """
    if keep_last is None and keep_best is None:
        raise CheckpointError("say what to keep: --keep-last N, --keep-best N or both")
    store = Store(local_path(folder))
    if is_one_checkpoint(store.root):
        raise CheckpointError(
            f"{store.root} is one checkpoint: name the folder it lies in, {store.root.parent}"
        )
    whole = store.whole()
    if not whole:
        raise CheckpointError(f"{store.root} holds no whole checkpoints")
    notes = notes_of(whole)
    if keep_best is not None and all(metric_of(info) is None for info in whole):
        raise CheckpointError(f"no checkpoint in {store.root} says how it was evaluated; use --keep-last")
    policy = Retention(last=keep_last, best=keep_best, greater_is_better=notes.greater_is_better)
    going = surplus(whole, policy, [] if notes.best is None else [store.root / notes.best])
    with nullcontext() if dry_run else RunLock(store.root):
        for info in going:
            if not dry_run:
                store.remove(info.path)
            say(
                f"{one_line(info.path)}: {'would be removed' if dry_run else 'removed'}, {in_words(info.nbytes)}"
            )
    freed = in_words(sum(info.nbytes for info in going))
    say(f"{len(going)} of {len(whole)} whole checkpoints, {freed}")
    return 0
