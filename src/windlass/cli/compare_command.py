"""`windlass compare`: the first updates of a script with its own libraries, and on this engine."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import __version__
from windlass.cli.command_line import CommandParser, add_script, answer, check_script
from windlass.core.activity import Activity
from windlass.core.errors import ConfigError, Problem, WindlassError
from windlass.core.optional import version_of
from windlass.core.output import table
from windlass.core.outside import load_outside

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-5
"""Relative difference up to which two fp32 results of the same sum, taken in another order, are called rounding."""

QUANTITIES = ("rows", "rates", "loss", "norm", "digests")
"""What is compared in each update, in the order in which a difference of one passes into the next."""


@dataclass(frozen=True)
class ScriptRecord:
    """What `recorder.py` wrote of one run."""

    # `rows`, `rates`, `loss`, `norm`, `digests`, `seconds` and `pause` of each update
    updates: list[dict[str, Any]]
    # Growth of the process's peak since the first forward, in bytes; None if there was no forward
    memory: int | None
    unread: list[str]  # arguments that the script set and the library did not read
    weights: Path  # the file of the trained parameters after the last update; absent if no module was called
    device_memory: int | None = None

    @property
    def sees_rows(self) -> bool:
        """Return False if no row was seen: the script computes with parts of its model, and not by calling it."""
        return any(rows for update in self.updates for rows in update["rows"])

    @property
    def seconds(self) -> float:
        """Fastest update after the first, which warms up: other work on the machine makes updates slower only."""
        return float(min(update["seconds"] for update in self.updates[1:] or self.updates))

    @property
    def pause(self) -> float | None:
        """Longest time between two updates: of a save, an evaluation or the log."""
        return max((update["pause"] for update in self.updates if update["pause"] is not None), default=None)


@dataclass(frozen=True)
class FirstDifference:
    """The first update, from 1, in which a quantity differs, and by how much."""

    update: int
    own: Any
    ours: Any

    @property
    def is_rounding(self) -> bool:
        """Return True if two numbers differ no more than the order of a sum explains."""
        numbers = isinstance(self.own, float) and isinstance(self.ours, float)
        return numbers and math.isclose(self.own, self.ours, rel_tol=ROUNDING)


def differences(own: ScriptRecord, ours: ScriptRecord) -> dict[str, FirstDifference]:
    """Return the first difference of each quantity that has one."""
    found: dict[str, FirstDifference] = {}
    for number, (one, other) in enumerate(zip(own.updates, ours.updates, strict=False), 1):
        for name in QUANTITIES:
            # As text, in which NaN equals NaN: `==` finds two runs with the same bits to differ. Sorted, since
            # libraries group parameters in other orders.
            texts = {json.dumps(values[name], sort_keys=True) for values in (one, other)}
            if len(texts) > 1 and name not in found:
                found[name] = FirstDifference(number, one[name], other[name])
    return found


def same_rows_otherwise(own: ScriptRecord, ours: ScriptRecord) -> bool:
    """Return True if both runs trained on the same rows, in another order or in other micro-batches."""
    counts = [
        Counter(row for update in record.updates for rows in update["rows"] for row in rows)
        for record in (own, ours)
    ]
    return counts[0] == counts[1]


def farthest_weight(own: ScriptRecord, ours: ScriptRecord) -> tuple[str, float] | None:
    """Return the parameter that differs most after the last update, and by how much; None if none differs, or the
    runs made other numbers of updates.
    """
    if len(own.updates) != len(ours.updates) or not (own.weights.is_file() and ours.weights.is_file()):
        return None
    from safetensors.torch import load_file

    one, other = (load_file(record.weights) for record in (own, ours))
    apart = {
        name: _farthest(one[name].double(), other[name].double())
        for name in one.keys() & other.keys()
        if one[name].shape == other[name].shape and one[name].numel()
    }
    name = max(apart, key=lambda it: (apart[it], it), default=None)
    return None if name is None or not apart[name] else (name, apart[name])


def _farthest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two elements; infinite if one of them alone is not a number."""
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0.0).max())


def reason(found: dict[str, FirstDifference], same_rows: bool, sees_rows: bool = True) -> str:
    """Return the sentence that explains the first difference by what differs before it.

    Args:
        same_rows: both runs trained on the same rows, in whatever order.
        sees_rows: rows were seen at all.
    """
    if not found:
        return "same bits in every update"
    name, first = min(found.items(), key=lambda it: (it[1].update, QUANTITIES.index(it[0])))
    at = f"from update {first.update}"
    match name:
        case "rows" if same_rows:
            return f"{at} the same rows come in another order or in other batches; what follows differs with them"
        case "rows":
            return f"{at} the model gets other rows; what follows differs with them"
        case "rates":
            return (
                f"{at} the learning rate differs ({first.own} and {first.ours}); what follows differs with it"
            )
        case "digests":
            return (
                f"{at} the weights differ by rounding: rows, rate, loss and gradient norm have the same bits"
            )
    word = {"loss": "loss", "norm": "gradient norm"}[name]
    if first.is_rounding:
        return f"{at} the {word} differs by rounding (relative {ROUNDING:g} at most): the same sum in another order"
    if not sees_rows:
        return (
            f"{at} the {word} differs by a factor of {_factor(first)}; the rows are not known, since the script calls "
            "parts of its model, or trains it in evaluation mode: they may differ, as sampled ones do"
        )
    before = "rows and weights are the same" if name == "loss" else "rows, weights and loss are the same"
    return (
        f"{at} the {word} differs by a factor of {_factor(first)} although {before}: it is divided, weighted or "
        "clipped in another way"
    )


def _factor(first: FirstDifference) -> str:
    numbers = isinstance(first.own, float) and isinstance(first.ours, float)
    return f"{first.ours / first.own:.6g}" if numbers and first.own else "unknown size"


SCHEMA = "windlass-compare/1"
RECORDER = Path(__file__).parent / "comparing" / "recorder.py"
PEERS = ("trl", "transformers", "accelerate")
"""Packages whose versions are printed beside the results of the script's own libraries."""

_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_HELP = """\
Run the first updates of a script twice, with the libraries that it imports and on Windlass's engine (`windlass run`),
and compare rows, learning rate, loss, gradients, weights, time and memory. One process; the script is not changed.

Both runs begin from the same seed, take rows in the order of the dataset, and have no dropout, so that what differs is
not chance. A Trainer writes into a temporary folder, saves after the second update, and reports to no tracker.
"""


def compare_command(words: Sequence[str]) -> int:
    options = build_parser().parse_args(words)
    check_script(options.script)
    if options.updates < 1:
        raise ConfigError(Problem("--updates", options.updates, "must be at least 1"))
    answered = load_outside("imports of other libraries").environment(os.environ)
    # In processes of their own, one after the other: side by side each would make the other slower.
    with tempfile.TemporaryDirectory(prefix="windlass-compare-") as folder:
        own = _run(options, Path(folder) / "own", os.environ, "its own libraries")
        ours = _run(options, Path(folder) / "windlass", {**os.environ, **answered}, "Windlass")
        farthest, made = farthest_weight(own, ours), (len(own.updates), len(ours.updates))
    # Without the updates that only one of them made.
    own, ours = (replace(one, updates=one.updates[: min(made)]) for one in (own, ours))
    found = differences(own, ours)
    why = reason(found, same_rows_otherwise(own, ours), own.sees_rows or ours.sees_rows)
    versions = ", ".join(f"{name} {version}" for name in PEERS if (version := version_of(name)) is not None)
    lines = [
        f"{min(made)} updates of {options.script}\nown: {versions}; Windlass {__version__}\n",
        *table([("", "own", "Windlass", "difference"), *_rows(own, ours, found)]),
        "\n" + textwrap.fill(f"First difference: {why}.", 80),
    ]
    if made[0] != made[1]:
        lines.append(
            f"The script ended after {made[0]} updates with its own libraries, and after {made[1]} with Windlass"
        )
    if farthest is not None:
        lines.append(f"Largest difference of the weights at the end: {farthest[1]:.1e}, in {farthest[0]}")
    for name, record in (("its own libraries", own), ("Windlass", ours)):
        if record.unread:
            lines.append(f"Arguments that were set and that {name} did not read: {', '.join(record.unread)}")
    facts = {"schema": SCHEMA, "script": options.script, **_facts(own, ours, found, why, farthest)}
    facts["updates_made"] = {"own": made[0], "windlass": made[1]}
    return answer(options, facts, lines)


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass compare", description=_HELP, example="windlass compare train.py --learning_rate 3e-4"
    )
    add = parser.add_argument
    add("--updates", type=int, default=5, metavar="N", help="optimizer updates of each run (default: 5)")
    add("--own-order", action="store_true", help="keep each library's order of the samples")
    add(
        "--dropout", action="store_true", help="keep dropout; each library draws it from other random numbers"
    )
    add("--json", action="store_true", help=f"as one JSON object of the form {SCHEMA}")
    add_script(parser)
    return parser


def _run(
    options: argparse.Namespace, folder: Path, environment: Mapping[str, str], name: str
) -> ScriptRecord:
    """Run the script once in a process of its own, and read what the recorder wrote."""
    folder.mkdir()
    settings = {
        "updates": options.updates,
        "folder": str(folder),
        "own_order": options.own_order,
        "dropout": options.dropout,
    }
    (folder / "settings.json").write_text(json.dumps(settings), "utf-8")
    command = [
        sys.executable,
        str(RECORDER),
        str(folder / "settings.json"),
        options.script,
        *options.arguments,
    ]
    with Activity(f"running {options.script} with {name}"), open(folder / "log", "wb") as output:
        code = subprocess.run(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    written = folder / "record.json"
    if code or not written.is_file():
        log = (folder / "log").read_text("utf-8", "replace").strip()
        # From the traceback on: what a script printed before may be thousands of lines.
        last = log[max(log.rfind("Traceback (most recent"), 0) :].splitlines()[-15:]
        raise WindlassError("\n".join([f"{options.script} with {name} ended with exit code {code}:", *last]))
    record = json.loads(written.read_text("utf-8"))
    if not record["updates"]:
        raise WindlassError(
            f"{options.script} with {name} ended without an update of a PyTorch optimizer; give it the arguments with "
            "which it trains"
        )
    return ScriptRecord(**record, weights=folder / "weights.safetensors")


def _rows(
    own: ScriptRecord, ours: ScriptRecord, found: dict[str, FirstDifference]
) -> Iterator[tuple[str, str, str, str]]:
    pairs = list(zip(own.updates, ours.updates, strict=False))
    counts = [
        sum(len(rows) for update in record.updates for rows in update["rows"]) for record in (own, ours)
    ]
    if any(counts):
        yield "rows", str(counts[0]), str(counts[1]), _apart(found.get("rows"))
    else:
        yield "rows", "-", "-", "not seen: parts of the model are called, or it is in evaluation mode"
    for name, key in (("learning rate", "rates"), ("loss", "loss"), ("clipped norm", "norm")):
        last = [
            _number(update[key][0] if key == "rates" and update[key] else update[key]) for update in pairs[-1]
        ]
        yield f"{name}, last", last[0], last[1], _apart(found.get(key))
    yield "weights", "", "", _apart(found.get("digests"))
    yield _times("time per update", own.seconds, ours.seconds)
    if own.pause and ours.pause:
        yield _times("longest pause", own.pause, ours.pause)
    if own.memory and ours.memory:
        memory = [f"{record.memory / 2**20:.0f} MiB" for record in (own, ours) if record.memory]
        yield "memory growth", memory[0], memory[1], f"x {ours.memory / own.memory:.2f}"


def _times(name: str, own: float, ours: float) -> tuple[str, str, str, str]:
    """A row of two times, in the unit in which the shorter one is at least 1."""
    unit, size = next((each for each in _UNITS if min(own, ours) >= each[1]), _UNITS[-1])
    return f"{name}, {unit}", f"{own / size:.3g}", f"{ours / size:.3g}", f"x {ours / own:.2f}"


def _apart(difference: FirstDifference | None) -> str:
    if difference is None:
        return "none, same bits"
    size = ""
    if isinstance(difference.own, float) and isinstance(difference.ours, float) and difference.own:
        size = f" (relative {abs(difference.ours - difference.own) / abs(difference.own):.1e})"
    return f"from update {difference.update}{size}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "-"


def _facts(
    own: ScriptRecord,
    ours: ScriptRecord,
    found: dict[str, FirstDifference],
    why: str,
    farthest: tuple[str, float] | None,
) -> dict[str, Any]:
    names = {"rates": "learning_rate", "norm": "gradient_norm", "digests": "weights"}
    return {
        "first_difference": why,
        "rows_seen": own.sees_rows or ours.sees_rows,
        "from_update": {names.get(name, name): one.update for name, one in found.items()},
        "farthest_weight": None if farthest is None else {"name": farthest[0], "difference": farthest[1]},
        "own": _figures(own),
        "windlass": _figures(ours),
    }


def _figures(record: ScriptRecord) -> dict[str, Any]:
    kept = ("rows", "rates", "loss", "norm", "seconds", "pause")
    return {
        "updates": [{name: update[name] for name in kept} for update in record.updates],
        "seconds": record.seconds,
        "longest_pause": record.pause,
        "memory_growth": record.memory,
        "device_memory": record.device_memory,
        "set_and_not_read": record.unread,
    }
