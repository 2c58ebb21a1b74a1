"""`windlass checkpoint prune`: remove all checkpoints but the newest and the best."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from windlass.checkpoint.retention import Retention, metric_of, surplus
from windlass.checkpoint.run_lock import RunLock
from windlass.checkpoint.store import Store
from windlass.checkpoint.survey import notes_of
from windlass.cli.checkpoint_listing import is_one_checkpoint, local_path
from windlass.cli.command_line import in_words
from windlass.core.errors import CheckpointError
from windlass.core.output import one_line, say, say_json


def prune_command(options: argparse.Namespace) -> int:
    """Remove complete checkpoints that are not to be kept, and print them; return the exit code.

    The newest and the best of the run, which a resumed run needs, are always kept, and damaged ones are not touched.
    """
    keep_last, keep_best, dry_run = options.keep_last, options.keep_best, options.dry_run
    if keep_last is None and keep_best is None:
        raise CheckpointError("set what to keep: --keep-last N, --keep-best N or both")
    store = Store(local_path(options.folder))
    if is_one_checkpoint(store.root):
        raise CheckpointError(f"{store.root} is one checkpoint: name its folder, {store.root.parent}")
    whole = store.whole()
    if not whole:
        raise CheckpointError(f"{store.root} has no complete checkpoints")
    notes = notes_of(whole)
    if keep_best is not None and all(metric_of(info) is None for info in whole):
        raise CheckpointError(f"no checkpoint in {store.root} has a metric; use --keep-last")
    policy = Retention(last=keep_last, best=keep_best, greater_is_better=notes.greater_is_better)
    going = surplus(whole, policy, [] if notes.best is None else [store.root / notes.best])
    with nullcontext() if dry_run else RunLock(store.root):
        for info in going:
            if not dry_run:
                store.remove(info.path)
            done = "would be removed" if dry_run else "removed"
            if not options.json:
                say(f"{one_line(info.path)}: {done}, {in_words(info.nbytes)}")
    if options.json:
        named = [{"path": info.path, "step": info.step, "bytes": info.nbytes} for info in going]
        say_json({"removed": not dry_run, "complete": len(whole), "checkpoints": named})
        return 0
    freed = in_words(sum(info.nbytes for info in going))
    say(f"{len(going)} of {len(whole)} complete checkpoints, {freed}")
    return 0
