"""`windlass checkpoint diff`: the differences between two checkpoints."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict
from math import inf, isnan

from windlass.checkpoint.compare import Comparison, Difference, compare
from windlass.checkpoint.stored import open_folder
from windlass.cli.checkpoint_listing import local_path
from windlass.core.output import one_line, say, say_json

_LISTED = 5  # differences of one file; more are counted


def diff_command(options: argparse.Namespace) -> int:
    """Print the differences; return 0 if there are none, else 1."""
    found = compare(open_folder(local_path(options.first)), open_folder(local_path(options.second)))
    if options.json:
        say_json(asdict(found))
    else:
        _print(found)
    return 0 if found.same else 1


def _print(found: Comparison) -> None:
    for where, group in itertools.groupby(found.differences, key=lambda difference: difference.where):
        for line in _in_short(list(group)):
            say(one_line(f"{where}: {line}"))
    count = len(found.differences)
    result = "nothing differs" if found.same else f"{count} difference{'' if count == 1 else 's'}"
    listed = "" if count <= _LISTED else " (--json lists them)"
    say(f"{result}{listed}; {found.equal_tensors} tensors have equal bits")


def _in_short(differences: list[Difference]) -> Iterator[str]:
    """Yield lines on what differs in one place: many tensors, and the rows of a list, as their number."""
    tensors = [one for one in differences if one.largest is not None]
    if len(tensors) > _LISTED:
        most = max(tensors, key=lambda one: inf if isnan(one.largest or 0) else one.largest or 0)
        yield f"{len(tensors)} tensors differ, most of all {most.name}: {most.what}"
        differences = [one for one in differences if one.largest is None]
    rows: dict[str, list[str]] = {}
    for one in differences:
        name, _, inside = one.name.partition("/")
        row, _, column = inside.partition("/")
        if row.isdigit() and column:
            rows.setdefault(name, []).append(row)
    rows = {name: found for name, found in rows.items() if len(found) > _LISTED}
    single = [one for one in differences if one.name.partition("/")[0] not in rows]
    for one in single[:_LISTED]:
        yield f"{one.name}: {one.what}" if one.name else one.what
    if len(single) > _LISTED:
        yield f"{len(single) - _LISTED} more"
    for name, found in rows.items():
        yield f"{name}: different in {len(set(found))} of its rows"
