"""`windlass plan --fit`: the cheapest layout of a recipe that fits into given devices."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from windlass.cli.command_line import in_words
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.forecast.child import apart
from windlass.forecast.layouts import Cost, Devices, Layout
from windlass.forecast.meter import (
    ACTIVATIONS,
    AVERAGE,
    BUCKETS,
    COPIES,
    GRADIENTS,
    LOGITS,
    STATE,
    TEMPORARY,
    WEIGHTS,
)
from windlass.forecast.size import Size
from windlass.forecast.trace import Trace

_DIVIDED = {
    **dict.fromkeys((WEIGHTS, GRADIENTS, STATE, AVERAGE), "state"),
    **dict.fromkeys((ACTIVATIONS, LOGITS, TEMPORARY), "activations"),
    **dict.fromkeys((BUCKETS, COPIES), "gathered"),
}
_WIDTH = 80


class Looks(NamedTuple):
    """How layouts are looked at; both raise the ConfigError of the run.

    Attributes:
        trace: the trace of a run of this layout.
        check: raises what such a run is refused with, and computes nothing.
    """

    trace: Callable[[Layout], Trace]
    check: Callable[[Layout], None]


@dataclass(frozen=True, slots=True)
class Tried:
    """A layout that was planned."""

    layout: Layout
    peak: int | None  # bytes of a rank; None of an estimate
    held: dict[str, int]  # bytes at the peak, by what divides them

    def least(self, other: Layout) -> int:
        """What `other` needs at least: no more of this one's memory than it divides further is saved.

        The largest of some stages says nothing of another number of stages, whose layers are others.
        """
        mine = self.layout
        if mine.mesh.pipeline not in (1, other.mesh.pipeline):
            return 0
        kinds = ["state"]
        if mine.recomputed >= other.recomputed:
            kinds += ["activations", "gathered"] if mine.sharded == other.sharded else ["activations"]
        return sum(self._part(kind, other) for kind in kinds)

    def _part(self, kind: str, other: Layout) -> int:
        mine, its = self.layout.divisors[kind], other.divisors[kind]
        return self.held.get(kind, 0) * min(mine, its) // its


def find_layout(
    looks: Looks,
    priced: Sequence[tuple[Cost, Layout]],
    size: Size,
    devices: Devices,
    say: Callable[[str], None],
) -> tuple[Layout, Trace]:
    """Return the cheapest layout that fits, and its trace. Each is looked at in a process of its own.

    Args:
        priced: layouts, the cheapest first.
        say: prints a line on what was tried or passed over.

    Raises:
        ConfigError: none fits.
    """
    search = _Search(looks, size, devices, say)
    for number, (cost, layout) in enumerate(priced):
        trace = search.look(layout, cost.seconds / priced[0][0].seconds)
        if trace is not None:
            search.say_passed(len(priced) - number - 1)
            return layout, trace
    search.say_passed(0)
    raise ConfigError(Problem("--fit", f"{devices.number}x{devices.memory // 10**9}GB", search.least()))


def _held(trace: Trace) -> dict[str, int]:
    """Bytes at the peak, by what divides them."""
    moment, peak = trace.peak
    held: Counter[str] = Counter()
    for owner, nbytes in peak.owners.items():
        kind = _DIVIDED.get(owner.kind, "")
        if owner.kind == TEMPORARY and "micro-batch" not in moment.stage:
            kind = "state"  # an optimizer's, of as many parameters as a rank updates
        held[kind] += nbytes
    # What no axis divides is the same in every layout, and excludes none.
    del held[""]
    return dict(held)


class _Search:
    def __init__(self, looks: Looks, size: Size, devices: Devices, say: Callable[[str], None]) -> None:
        self._looks, self._devices, self._say = looks, devices, say
        self._tried = [Tried(Layout(), None, {"state": size.held})]
        # What a run refuses whatever else a layout asks for, and why.
        self._refused: dict[frozenset[str], str] = {}
        self._skipped: Counter[frozenset[str]] = Counter()
        self._too_large = 0

    def look(self, layout: Layout, cost: float) -> Trace | None:
        """The trace of a layout that fits; None for any other. `cost` is relative to that of the cheapest."""
        for asked in self._refused:
            if asked <= _asked(layout):
                self._skipped[asked] += 1
                return None
        if max(each.least(layout) for each in self._tried) > self._devices.room:
            self._too_large += 1
            return None
        try:
            trace = Trace.from_dict(apart(lambda: self._looks.trace(layout).to_dict()))
        except (ConfigError, ModelError) as error:
            self._blame(layout, error)
            text = f"{layout.name}: refused: {_reason(error)}"
            for line in textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="      "):
                self._say(line)
            return None
        peak = trace.peak[1].total
        self._tried.append(Tried(layout, peak, _held(trace)))
        fits = peak <= self._devices.room
        self._say(
            f"  {layout.name:<42}{cost:>8.2f}{in_words(peak):>13}  {'fits' if fits else 'does not fit'}"
        )
        return trace if fits else None

    def _blame(self, layout: Layout, refusal: ConfigError | ModelError) -> None:
        """Ask the run about each axis of what it refused by itself, so that no other layout is planned in vain."""
        parts = list(layout.parts()) or [Layout()]
        if len(parts) == 1 and parts[0].mesh.size() == layout.mesh.size():
            self._remember(parts[0], refusal)
            return
        before = len(self._refused)
        for part in parts:
            try:
                apart(lambda part=part: self._looks.check(part))  # type: ignore[misc]
            except (ConfigError, ModelError) as error:
                self._remember(part, error)
        if len(self._refused) == before:
            self._refused[_asked(layout)] = _reason(refusal)

    def _remember(self, part: Layout, refusal: ConfigError | ModelError) -> None:
        # What is wrong with the model is so for each size of the axis.
        of_model = isinstance(refusal, ConfigError) and {each.field for each in refusal.problems} == {"model"}
        words = {word for word in part.asked if not of_model or " " not in word}
        self._refused[frozenset(words)] = _reason(refusal)

    def say_passed(self, dearer: int) -> None:
        """Print why no other layout was planned."""
        room = in_words(self._devices.room)
        if self._too_large:
            self._say(f"  {self._too_large:,} more need above {room} by what those took")
        for asked, count in self._skipped.items():
            self._say(f"  {count:,} more with {_named(asked)}, refused as above"[:_WIDTH])
        if dearer:
            self._say(f"  {dearer:,} more cost as much or more")

    def least(self) -> str:
        """Why none fits."""
        sizes = [(each.peak, each.layout.name) for each in self._tried if each.peak is not None]
        if not sizes:
            alone = in_words(self._tried[0].held["state"] / self._devices.number)
            if why := next(iter(self._refused.values()), ""):
                return f"the run refuses every layout that could fit: {why}"
            return f"weights and gradients alone take {alone} of a rank at least; use more devices"
        peak, name = min(sizes)
        return (
            f"no layout fits: the least is {in_words(peak)} of a rank ({name}), and tensors may take "
            f"{in_words(self._devices.room)}; use more devices, shorter rows or a smaller batch"
        )


def _asked(layout: Layout) -> frozenset[str]:
    """What of a layout a run may refuse. Among how many ranks samples are divided belongs to it, such as those of one
    batch for all, and is not a part that could be checked by itself.
    """
    ranks = layout.mesh.replicate * layout.mesh.shard
    return layout.asked | ({f"samples over {ranks} ranks"} if ranks > 1 else set())


def _named(asked: frozenset[str]) -> str:
    """Without the names of axes whose sizes are there too; what one process is refused with, any axes are."""
    named = (word for word in asked if not any(each.startswith(f"{word} ") for each in asked))
    return " x ".join(sorted(named)) or "any axes"


def _reason(error: ConfigError | ModelError) -> str:
    lines: Sequence[object] = error.problems if isinstance(error, ConfigError) else [error]
    return " ".join(" ".join(map(str, lines)).split())
