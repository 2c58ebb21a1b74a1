"""What one update of a model did, as numbers that add up over layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from windlass.forecast.meter import Instant, Owner, Peak
from windlass.forecast.work import Sent, Work

_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class Trace:
    """One update on one rank."""

    peaks: dict[Instant, Peak]  # the bytes held at the peak of each moment, by owner
    # Number of kernels of each size. Those of two traces are subtracted, so it may be negative.
    work: Counter[Work]
    sent: Counter[Sent]  # number of collectives of each size
    # Bytes of a checkpoint over all ranks, by what is in it
    saved: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # what describes the run: numbers and words

    def with_layers(self, more: Trace, times: int) -> Trace:
        """This trace with `times` the layers that `more` has beyond it."""
        empty = Peak(0, {})
        peaks = {}
        for moment in self.peaks.keys() | more.peaks.keys():
            one, two = self.peaks.get(moment, empty), more.peaks.get(moment, empty)
            owners = _added(one.owners, two.owners, times)
            peaks[moment] = Peak(sum(owners.values()), owners)
        return Trace(
            peaks,
            Counter(_added(self.work, more.work, times)),
            Counter(_added(self.sent, more.sent, times)),
            # What no layer has stays in it as 0.
            {name: _line(self.saved, more.saved, name, times) for name in self.saved},
            {**self.facts, "parameters": _line(self.facts, more.facts, "parameters", times)},
        )

    @property
    def peak(self) -> tuple[Instant, Peak]:
        """The moment of the update at which most memory is held."""
        # Of equal peaks always the same one: `with_layers` goes through a set, in any order.
        return max(self.peaks.items(), key=lambda item: (item[1].total, item[0]))

    def at_most(self, kinds: Callable[[Owner], bool]) -> int:
        """The largest memory of these owners at the peak of any moment."""
        return max(sum(n for owner, n in held.owners.items() if kinds(owner)) for held in self.peaks.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON can carry it."""
        peaks = [
            [list(moment), [[*owner, n] for owner, n in held.owners.items()]]
            for moment, held in self.peaks.items()
        ]
        return {
            "peaks": peaks,
            "work": [[*work, n] for work, n in self.work.items()],
            "sent": [[sent.name, list(sent.ranks), sent.nbytes, n] for sent, n in self.sent.items()],
            "saved": self.saved,
            "facts": self.facts,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trace:
        """From what `to_dict` returned."""
        peaks = {}
        for moment, entries in data["peaks"]:
            owners = {Owner(kind, place): n for kind, place, n in entries}
            peaks[Instant(*moment)] = Peak(sum(owners.values()), owners)
        return cls(
            peaks,
            Counter({Work(dtype, flops, nbytes): n for dtype, flops, nbytes, n in data["work"]}),
            Counter({Sent(name, tuple(ranks), nbytes): n for name, ranks, nbytes, n in data["sent"]}),
            dict(data["saved"]),
            dict(data["facts"]),
        )


def _added(one: Mapping[_K, int], two: Mapping[_K, int], times: int) -> dict[_K, int]:
    keys = dict.fromkeys((*one, *two))
    sums = {key: one.get(key, 0) + times * (two.get(key, 0) - one.get(key, 0)) for key in keys}
    return {key: value for key, value in sums.items() if value}


def _line(one: Mapping[str, Any], two: Mapping[str, Any], name: str, times: int) -> int:
    return int(one[name] + times * (two[name] - one[name]))
