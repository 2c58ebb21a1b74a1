"""The plan of a run as text, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.cli.command_line import amount, in_words
from windlass.cli.screen import duration
from windlass.forecast.forecast import Forecast, words_of
from windlass.forecast.meter import SAVED

_WIDTH = 80
_OWNERS, _MODULES = 10, 5


def plan_lines(forecast: Forecast, what: str) -> Iterator[str]:
    facts = forecast.trace.facts
    yield f"{facts['model']} of {what}: {facts['parameters']:,} parameters"[:_WIDTH]
    yield from _update(forecast)
    yield ""
    yield from memory_lines(forecast)
    yield ""
    yield f"peak: {words_of(forecast.trace.peak[0])}"[:_WIDTH]
    for owner, nbytes in list(forecast.owners().items())[:_OWNERS]:
        place = f" of {owner.place}" if owner.place else ""
        yield f"  {in_words(nbytes):>10}  {owner.kind}{place}"[:_WIDTH]
    yield ""
    yield "most activations, by module:"
    for place, nbytes in list(forecast.activations().items())[:_MODULES]:
        yield f"  {in_words(nbytes):>10}  {place or 'the loss'}"[:_WIDTH]
    yield ""
    yield from _outside(forecast)


def memory_lines(forecast: Forecast) -> Iterator[str]:
    """Yield the lines on the memory of a rank."""
    yield f"{'memory of a rank':<26}{'at the peak':>14}{'at most':>14}"
    for kind, (now, most) in forecast.kinds().items():
        yield f"  {kind:<24}{in_words(now):>14}{in_words(most):>14}"
    limit = "" if forecast.device is None else f"of {forecast.device[1].memory} GB"
    yield f"  {'together':<24}{in_words(forecast.peak):>14}{limit:>14}".rstrip()


def _update(forecast: Forecast) -> Iterator[str]:
    facts, mesh = forecast.trace.facts, forecast.mesh
    if mesh.size() > 1:
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh.used().items())
        yield f"{mesh.size():,} ranks: {axes}"
    count = facts["accumulation"]
    yield (
        f"an update of a rank: {count} micro-batch{'es' if count > 1 else ''} of "
        f"{amount(facts['samples'], 'sample')}, {amount(facts['positions'], 'position')}"
    )
    if (peaks := facts.get("peaks")) is not None:
        rank, _ = max(peaks, key=lambda each: each[1])
        stages = ", ".join(map(str, facts["stages"]))
        yield f"shown is rank {rank} (stage {stages}), the largest; rank 0 takes {in_words(peaks[0][1])}"
    if facts["layers"] is not None:
        yield f"{facts['layers'][1]} layers in {facts['layers'][0]}, of which few were run: the others add the same"


def _outside(forecast: Forecast) -> Iterator[str]:
    for link in forecast.links():
        where = f"{link.axis} ({link.ranks:,} ranks)"
        sent = f"{in_words(link.nbytes)} in {amount(link.collectives, 'collective')} an update"
        yield f"{'sent over':<10}{where}: {sent}"[:_WIDTH]
    yield f"{'disk':<10}{in_words(forecast.disk)} per checkpoint"
    if forecast.copy:
        yield f"{'host':<10}{in_words(forecast.copy)} for the {SAVED} in the background"
    if (errors := forecast.errors()) is not None:
        runs = f"{forecast.trace.facts['family']} in {amount(errors.runs, 'run')}"
        yield f"{'error':<10}of plans for {runs}: {errors.least:+.1%} to {errors.most:+.1%}"
    time = forecast.time()
    if time is not None:
        assert forecast.device is not None
        yield f"{'time':<10}at least {_seconds(time.update)} an update on {forecast.device[0]}"[:_WIDTH]
        yield f"{'':<10}computing {_seconds(time.compute)}, exchanging {_seconds(time.exchange)} beside it"
        steps = forecast.trace.facts["steps"]
        yield f"{'':<10}{duration(steps * time.update)} for {amount(steps, 'update')}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
