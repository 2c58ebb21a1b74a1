"""`windlass plan --fit`: the cheapest layout of a recipe that fits into given devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
            trace = Trace.from_dict(apart(lambda words=layout.overrides: traced(words).to_dict()))  # type: ignore[misc]
            found = Tried(layout, trace.peak[1].total, None)
        except ModelError as error:
            found = Tried(layout, None, _in_one_line(error))
        tried.append(found)
        say(found.line(devices))
        if trace is not None and found.peak is not None and found.peak <= devices.room:
            return layout, trace
    raise ConfigError(
        Problem("--fit", f"{devices.number}x{devices.memory // 10**9}GB", _least(tried, devices))
    )


def _in_one_line(error: ModelError) -> str:
    """The message, without the line that counts problems."""
    lines = str(error).splitlines()
    problems = [line.strip().removeprefix("- ") for line in lines if line.strip().startswith("- ")]
    return " ".join(" ".join(problems or lines).split())


def _least(tried: list[Tried], devices: Devices) -> str:
    sizes = [(each.peak, each.layout.name) for each in tried if each.peak is not None]
    if not sizes:
        return f"the run refuses every layout: {tried[0].refused}"
    peak, name = min(sizes)
    return (
        f"no layout fits: the least is {in_words(peak)} of a rank ({name}), and tensors may take "
        f"{in_words(devices.room)}; use more devices, shorter rows or a smaller batch"
    )
