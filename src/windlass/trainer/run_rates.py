"""The speed of a run between two reports, its use of the device, and where the time went."""

from __future__ import annotations

import statistics
import time

import torch

from windlass.core.run_clock import Interval, run_clock
from windlass.metrics.device_peaks import device_peak
from windlass.metrics.speed import count_flops
from windlass.metrics.stage_memory import (
    device_bytes,
    device_peak_bytes,
    process_peak_bytes,
    resident_bytes,
)
from windlass.trainer.run_context import RunContext

_MEMORY_SECONDS = 1.0  # between two readings of the process's memory, which are files of the system


class RunRates:
    """Counts what a run does between two reports.

    A rate is a count divided by the time in training: start-up, evaluations, saves and uploads are left out.
    """

    def __init__(self, context: RunContext) -> None:
        self._clock, self._device = run_clock(), context.session.device
        self._ranks, self._rank = context.all_ranks.size, context.all_ranks.rank
        self._counts_tokens = context.plan.reports.tokens != "no"
        model = context.files.model
        self._flops = count_flops(model)
        peak = device_peak(self._device, _dtype(context, model))
        self._peak = None if peak is None or self._flops is None else peak * self._ranks
        self._reported = (0.0, 0.0, 0.0)
        self._interval = Interval({}, 0.0, 0.0)
        self._memory: dict[str, float] = {}
        self._memory_at = float("-inf")

    def end_interval(self) -> list[float]:
        """End the interval of a report. Return what this rank sends to the others: its own work, at its place."""
        self._interval = self._clock.interval()
        if self._ranks == 1:
            return []
        return [self._interval.own if rank == self._rank else 0.0 for rank in range(self._ranks)]

    def take(self, own: list[float], counts: tuple[float, float, float]) -> dict[str, float]:
        """Return the values of the interval, and begin the next one.

        Args:
            own: the seconds that each rank worked by itself; empty with one rank.
            counts: the samples, tokens and positions of this session up to now, over all ranks.
        """
        samples, tokens, positions = (
            now - before for now, before in zip(counts, self._reported, strict=True)
        )
        self._reported = counts
        seconds, training = self._interval.seconds, self._interval.training
        values: dict[str, float] = {}
        if training > 0:
            values["samples_per_second"] = round(samples / training, 3)
            if self._counts_tokens:
                values["tokens_per_second"] = round(tokens / training, 3)
            if self._peak is not None and self._flops is not None and positions:
                flops = self._flops.of(positions, samples)
                values["mfu"] = round(flops / training / self._peak, 4)
            values["data_wait"] = round(seconds.get("data", 0.0) / training, 4)
            if own:
                values |= _slowest(own, training)
        spent = {f"{kind}_seconds": round(value, 4) for kind, value in seconds.items()}
        return {**values, **spent, **self._in_use()}

    def _in_use(self) -> dict[str, float]:
        now = time.monotonic()
        if now - self._memory_at >= _MEMORY_SECONDS:
            found = {
                "memory_process_gib": resident_bytes(),
                "peak_memory_process_gib": process_peak_bytes(),
                "memory_device_gib": device_bytes(self._device),
                "peak_memory_device_gib": device_peak_bytes(self._device),
            }
            self._memory = {
                name: round(value / 2**30, 3) for name, value in found.items() if value is not None
            }
            self._memory_at = now
        return self._memory


def _slowest(own: list[float], training: float) -> dict[str, float]:
    """Return the rank that worked longest, and how much longer than the median one, as a share of the time."""
    rank = max(range(len(own)), key=own.__getitem__)
    return {
        "slowest_rank": rank,
        # The lower median is the time of one rank: between two ranks a mean would show half of the wait.
        "slowest_rank_wait": round((own[rank] - statistics.median_low(own)) / training, 4),
    }


def _dtype(context: RunContext, model: torch.nn.Module) -> str:
    """The dtype of matrix products, as the peaks of devices name it."""
    plan = context.plan.precision
    if plan.word != "no":
        return plan.word
    weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    halves = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    # The one way to read it that is right however it was set: torch has two, and refuses its older one after the newer.
    is_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return halves.get(weights, "tf32" if is_tf32 else "fp32")
