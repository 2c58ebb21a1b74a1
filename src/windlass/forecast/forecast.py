"""What a trace says of a run: memory of a rank, traffic, disk, and time on a named device."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from windlass.core.mesh import AXES, Mesh
from windlass.dist.imagined import MACHINE
from windlass.forecast.meter import ACTIVATIONS, KINDS, SAVED, Instant, Owner
from windlass.forecast.trace import Trace
from windlass.metrics.device_peaks import NETWORK, Board
from windlass.metrics.predictions import Errors, errors_of, write_prediction

SCHEMA = "windlass-plan/1"
_OWNERS = 10


class Link(NamedTuple):
    """What a rank sends over one axis in an update."""

    axis: str
    ranks: int
    collectives: int
    nbytes: int
    within: bool


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of an update on a rank, by a roofline: no kernel is faster than its products and its memory allow."""

    compute: float  # kernels one after the other
    exchange: float  # collectives one after the other

    @property
    def update(self) -> float:
        """The least seconds of an update: exchanges run beside kernels."""
        return max(self.compute, self.exchange)


@dataclass(frozen=True, slots=True)
class Forecast:
    """A run before it starts, on one of its ranks."""

    trace: Trace  # of an update
    # Name and figures of the device; None: the memory is that of the process
    device: tuple[str, Board] | None = None

    @property
    def mesh(self) -> Mesh:
        return Mesh(**self.trace.facts["mesh"])

    @property
    def copy(self) -> int:
        """Bytes of host memory that a save in the background copies to."""
        return self.trace.saved["here"] if self.trace.facts["copies"] else 0

    @property
    def peak(self) -> int:
        """The largest memory of the rank: of its device, or of the process if that is the device."""
        return self.trace.peak[1].total + (0 if self.device else self.copy)

    def keep(self) -> None:
        """Record the prediction for the run of this plan, if the folder of such records can be written."""
        first = self.trace.facts.get("peaks", [[0, self.trace.peak[1].total]])[0][1]
        copy = 0 if self.device else self.copy
        with contextlib.suppress(OSError):
            write_prediction(self.trace.facts["key"], self.trace.facts["family"], first + copy)

    def errors(self) -> Errors | None:
        """How far predictions for this family of models were off in the runs that were measured."""
        return errors_of(self.trace.facts["family"])

    def owners(self) -> dict[Owner, int]:
        """Bytes at the peak by owner, largest first."""
        held = dict(self.trace.peak[1].owners)
        if self.copy and not self.device:
            held[Owner(SAVED, "")] = self.copy
        return dict(sorted(held.items(), key=lambda item: -item[1]))

    def kinds(self) -> dict[str, tuple[int, int]]:
        """For each kind of memory, bytes at the peak and at most."""
        at_peak: Counter[str] = Counter()
        for owner, nbytes in self.owners().items():
            at_peak[owner.kind] += nbytes
        found = {}
        for kind in KINDS:
            most = self.trace.at_most(lambda owner, kind=kind: owner.kind == kind)  # type: ignore[misc]
            if kind == SAVED:
                most = self.copy
            if most:
                found[kind] = at_peak[kind], most
        return found

    def activations(self) -> dict[str, int]:
        """Bytes of activations by module, at the moment that has most of them; largest first."""
        by_moment = [
            {owner.place: n for owner, n in held.owners.items() if owner.kind == ACTIVATIONS}
            for held in self.trace.peaks.values()
        ]
        most = max(by_moment, key=lambda places: sum(places.values()))
        return dict(sorted(most.items(), key=lambda item: -item[1]))

    def links(self) -> list[Link]:
        """What a rank sends in an update, by the axes of the ranks that take part."""
        found: dict[tuple[str, int, bool], tuple[int, int]] = {}
        for sent, times in self.trace.sent.items():
            axis = self._axis(sent.ranks)
            within = sent.ranks[0] // MACHINE == sent.ranks[-1] // MACHINE
            number, nbytes = found.get((axis, len(sent.ranks), within), (0, 0))
            found[axis, len(sent.ranks), within] = number + times, nbytes + times * sent.nbytes
        return sorted(
            (
                Link(axis, ranks, number, nbytes, within)
                for (axis, ranks, within), (number, nbytes) in found.items()
            ),
            key=lambda link: -link.nbytes,
        )

    def _axis(self, ranks: tuple[int, ...]) -> str:
        mesh = self.mesh
        varied = [axis for axis in AXES if len({mesh.index(axis, rank) for rank in ranks}) > 1]
        return " x ".join(varied)

    def time(self) -> Time | None:
        """Seconds of an update; None without a device."""
        if self.device is None:
            return None
        board = self.device[1]
        compute = sum(
            times * self._seconds(work.dtype, work.flops, work.nbytes, board)
            for work, times in self.trace.work.items()
        )
        exchange = sum(
            link.nbytes / (1e9 * (board.link if link.within else NETWORK)) for link in self.links()
        )
        # Numbers of kernels that follow from two traces may be negative for some sizes.
        return Time(max(compute, 0.0), exchange)

    def _seconds(self, dtype: str, flops: int, nbytes: int, board: Board) -> float:
        names = {"fp32": ("tf32", "fp32") if self.trace.facts["tf32"] else ("fp32",)}.get(
            dtype, (dtype, "fp32")
        )
        # A dtype for which the board has no rate is multiplied in fp32.
        rate = next((board.rates[name] for name in names if name in board.rates), board.rates["fp32"])
        # A `Board` has 10^12 operations and 10^9 bytes a second.
        return max(flops / (rate * 1e12), nbytes / (board.bandwidth * 1e9))

    @property
    def disk(self) -> int:
        """Bytes of a checkpoint, over all ranks."""
        return self.trace.saved["weights"] + self.trace.saved["optimizer state"]

    def to_dict(self) -> dict[str, Any]:
        """As `--json` prints it; docs/parallelism.md describes the keys."""
        facts, time, errors = self.trace.facts, self.time(), self.errors()
        moment = self.trace.peak[0]
        return {
            "schema": SCHEMA,
            "model": {key: facts[key] for key in ("model", "family", "parameters")},
            "world": self.mesh.size(),
            "mesh": {axis: self.mesh.along(axis) for axis in AXES},
            "update": {key: facts[key] for key in ("samples", "positions", "accumulation", "steps")},
            "device": None if self.device is None else self.device[0],
            "memory": {
                "peak": self.peak,
                "moment": words_of(moment),
                "at_peak": {kind: now for kind, (now, _) in self.kinds().items()},
                "largest": {kind: most for kind, (_, most) in self.kinds().items()},
                "owners": [
                    {"kind": owner.kind, "place": owner.place, "bytes": n}
                    for owner, n in list(self.owners().items())[:_OWNERS]
                ],
                "activations": self.activations(),
            },
            "links": [link._asdict() for link in self.links()],
            "disk": {"checkpoint": self.disk},
            "save": {"copy": self.copy},
            "ranks": [{"rank": rank, "peak": n} for rank, n in facts.get("peaks", ())],
            "errors": None if errors is None else errors._asdict(),
            "time": None if time is None else {**asdict(time), "update": time.update},
        }


def words_of(moment: Instant) -> str:
    """A moment in words: "backward of model.layers.*.mlp (last layer)"."""
    stage, colon, _ = moment.stage.partition(": backward")
    if stage == "optimizer step" or "micro-batch" not in stage:
        return stage
    direction = "backward" if colon else "forward"
    part = f" ({moment.part} layer)" if moment.part in ("first", "last") else ""
    later = ", after the first micro-batch" if stage.startswith("later") else ""
    return f"{direction} of {moment.place or 'the loss'}{part}{later}"
