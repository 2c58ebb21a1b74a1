"""`windlass checkpoint diff`: the differences between two checkpoints."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict

from windlass.checkpoint.compare import Comparison, compare
from windlass.checkpoint.stored import open_folder
from windlass.cli.checkpoint_listing import local_path
from windlass.core.output import one_line, say

_SHOWN = 20  # differences of one file


def diff_command(options: argparse.Namespace) -> int:
    """Print the differences; return 0 if there are none, else 1."""
    found = compare(open_folder(local_path(options.first)), open_folder(local_path(options.second)))
    if options.json:
        say(json.dumps(asdict(found), indent=2))
    else:
        _print(found)
    return 0 if found.same else 1


def _print(found: Comparison) -> None:
    for where, group in itertools.groupby(found.differences, key=lambda difference: difference.where):
        listed = list(group)
        for difference in listed[:_SHOWN]:
            place = f"{where}: {difference.name}" if difference.name else where
            say(one_line(f"{place}: {difference.what}"))
        if len(listed) > _SHOWN:
            say(f"{where}: {len(listed) - _SHOWN} more differ; --json lists them all")
    count = len(found.differences)
    result = "nothing differs" if found.same else f"{count} difference{'' if count == 1 else 's'}"
    say(f"{result}; {found.equal_tensors} tensors have equal bits")
