"""`windlass plan --fit`: the cheapest layout of a recipe that fits into given devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from windlass.cli.sizes import in_words
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.forecast.child import apart
from windlass.forecast.layouts import Devices, Layout, layouts
from windlass.forecast.trace import Trace


class Tried(NamedTuple):
    """A layout that was planned: its peak in bytes, or why the run refuses it."""

    layout: Layout
    peak: int | None
    refused: str | None

    def line(self, devices: Devices) -> str:
        """What is printed of it."""
        if self.peak is None:
            return f"  {self.layout.name:<34}refused: {self.refused}"[:80]
        fits = "fits" if self.peak <= devices.room else "does not fit"
        return f"  {self.layout.name:<34}{in_words(self.peak):>12}  {fits}"


def find_layout(
    traced: Callable[[tuple[str, ...]], Trace], devices: Devices, say: Callable[[str], None]
) -> tuple[Layout, Trace]:
    """Return the first layout that fits, and its trace. Each is looked at in a process of its own.

    Args:
        traced: overrides of the recipe -> the trace of its run.
        say: prints a line on each layout that was tried.

    Raises:
        ConfigError: none fits.
    """
    tried: list[Tried] = []
    for layout in layouts(devices.number):
        trace = None
        try:
            answer = apart(lambda words=layout.overrides: _look(traced, words))  # type: ignore[misc]
        except ModelError as error:
            answer = {"refused": str(error)}
        if "refused" in answer:
            found = Tried(layout, None, " ".join(answer["refused"].split()))
        else:
            trace = Trace.from_dict(answer)
            found = Tried(layout, trace.peak[1].total, None)
        tried.append(found)
        say(found.line(devices))
        if trace is not None and found.peak is not None and found.peak <= devices.room:
            return layout, trace
    raise ConfigError(
        Problem("--fit", f"{devices.number}x{devices.memory // 10**9}GB", _least(tried, devices))
    )


def _look(traced: Callable[[tuple[str, ...]], Trace], overrides: tuple[str, ...]) -> dict[str, Any]:
    """The trace of a layout, or why the run refuses it, as `refused`."""
    try:
        return traced(overrides).to_dict()
    except ConfigError as error:
        return {"refused": " ".join(map(str, error.problems))}


def _least(tried: list[Tried], devices: Devices) -> str:
    sizes = [(each.peak, each.layout.name) for each in tried if each.peak is not None]
    if not sizes:
        return f"the run refuses every layout: {tried[0].refused}"
    peak, name = min(sizes)
    return (
        f"no layout fits: the least is {in_words(peak)} of a rank ({name}), and tensors may take "
        f"{in_words(devices.room)}; use more devices, shorter rows or a smaller batch"
    )
