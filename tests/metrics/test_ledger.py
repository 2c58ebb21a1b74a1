"""What a run has seen since it last reported, and the watch over values that are not finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.dist.launch import on_ranks
from tests.trainer import losses_ranks
from torch import Tensor

from windlass.metrics.ledger import FiniteWatch, Ledger

CPU = torch.device("cpu")
numbers = st.floats(-1e6, 1e6, width=32)
updates = st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=12)


def alone(value: Tensor) -> Tensor:
    return value


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def filled(rows: list[tuple[float, float, bool]]) -> Ledger:
    ledger = Ledger(CPU, alone)
    for loss, part, applied in rows:
        ledger.add(scalar(loss), scalar(abs(loss)), {"part": scalar(part)}, applied)
    return ledger


@given(first=updates, second=updates)
def test_a_report_is_the_mean_since_the_last_one(
    first: list[tuple[float, float, bool]], second: list[tuple[float, float, bool]]
) -> None:
    ledger = filled([])
    for rows in (first, second):
        for loss, part, applied in rows:
            ledger.add(scalar(loss), scalar(abs(loss)), {"part": scalar(part)}, applied)
        assert ledger.pending == bool(rows)
        report = ledger.read()
        if not rows:
            assert report == {}
            continue
        assert report.pop("grad_norm") == abs(rows[-1][0])
        applied_rows = [row for row in rows if row[2]]
        if not applied_rows:
            mean = math.fsum(row[0] for row in rows) / len(rows)
            assert report == {"loss": pytest.approx(mean, rel=1e-12, abs=1e-9)}, "shown as it was"
            continue
        for column, name in enumerate(("loss", "part")):
            mean = math.fsum(row[column] for row in applied_rows) / len(applied_rows)
            assert report[name] == pytest.approx(mean, rel=1e-12, abs=1e-9)
        assert not ledger.pending
    both = first + second
    assert ledger.skipped == sum(not applied for _, _, applied in both)
    taken = [row[0] for row in both if row[2]]
    mean = math.fsum(taken) / len(taken) if taken else 0.0
    assert ledger.mean_loss() == pytest.approx(mean, rel=1e-12, abs=1e-9)


@given(rows=updates, cut=st.integers(0, 12))
def test_a_ledger_goes_on_where_it_was_saved(rows: list[tuple[float, float, bool]], cut: int) -> None:
    whole, resumed = filled(rows), Ledger(CPU, alone)
    saved = filled(rows[:cut]).state_dict()
    resumed.load_state_dict(saved)
    for loss, part, applied in rows[cut:]:
        resumed.add(scalar(loss), scalar(abs(loss)), {"part": scalar(part)}, applied)
    assert resumed.read() == whole.read()
    assert resumed.mean_loss() == whole.mean_loss()
    assert resumed.skipped == whole.skipped


def test_a_skipped_update_does_not_poison_the_mean() -> None:
    ledger = filled([(1.0, 1.0, True), (math.nan, math.nan, False), (3.0, 1.0, True)])
    assert ledger.read() == {"loss": 2.0, "part": 1.0, "grad_norm": 3.0}
    ledger.add(scalar(math.nan), scalar(math.nan), {}, applied=False)
    assert math.isnan(ledger.read()["loss"]), "nothing else to report, so it is reported as it was"
    assert (ledger.skipped, ledger.mean_loss()) == (2, 2.0)


def test_a_saved_state_is_not_the_running_one() -> None:
    ledger = filled([(1.0, 1.0, True)])
    saved = ledger.state_dict()
    ledger.add(scalar(5.0), scalar(5.0), {"part": scalar(5.0)}, True)
    assert float(saved["loss"]) == 1.0
    assert float(saved["parts"]["part"]) == 1.0


def test_shares_are_summed_over_ranks_but_the_norm_is_not() -> None:
    ledger = Ledger(CPU, lambda shares: shares * 2)
    ledger.add(scalar(1.5), scalar(7.0), {"part": scalar(0.5)}, True)
    assert ledger.read() == {"loss": 3.0, "part": 1.0, "grad_norm": 7.0}


@pytest.mark.dist
def test_a_part_that_only_the_batch_of_one_rank_has_counts_by_its_name(tmp_path: Path) -> None:
    for (everywhere, weights), (on_one, others) in on_ranks(2, losses_ranks.parts_on_one_rank, tmp_path):
        assert on_one == pytest.approx(everywhere)
        assert everywhere["size"] > 0.0 < everywhere["other"]
        assert others == pytest.approx(weights)


def test_small_losses_are_not_lost_in_long_sums() -> None:
    """In float32 the sum would stop to grow at 2^24."""
    ledger = Ledger(CPU, alone)
    ledger.add(scalar(2.0**25), scalar(0.0), {}, True)
    for _ in range(64):
        ledger.add(scalar(1.0), scalar(0.0), {}, True)
    assert ledger.read()["loss"] * 65 == 2.0**25 + 64


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_are_reported_as_they_are(value: float) -> None:
    report = filled([(1.0, value, True)]).read()
    assert report["part"] == value or math.isnan(report["part"])
    assert not math.isfinite(report["part"])


@given(loss=st.floats(width=32), norm=st.floats(width=32))
def test_the_watch_judges_at_once_on_the_cpu(loss: float, norm: float) -> None:
    watch = FiniteWatch(CPU)
    found = watch.add(scalar(loss), scalar(norm), "tag")
    if math.isfinite(loss) and math.isfinite(norm):
        assert found is None
    else:
        assert found is not None
        assert found[0] == "tag"
        assert all(
            a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(found[1:], (loss, norm), strict=True)
        )
    assert watch.flush() is None


def test_the_watch_reads_bf16() -> None:
    bad = torch.tensor(math.nan, dtype=torch.bfloat16)
    assert FiniteWatch(CPU).add(bad, bad, 1) is not None
    assert FiniteWatch(CPU).add(torch.ones((), dtype=torch.bfloat16), scalar(1.0), 1) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_watch_is_one_update_late_on_an_accelerator() -> None:
    watch = FiniteWatch(torch.device("cuda"))
    good, bad = torch.ones((), device="cuda"), torch.full((), math.nan, device="cuda")
    assert watch.add(good, bad, 1) is None
    found = watch.add(good, good, 2)
    assert found is not None
    assert found[0] == 1
    assert watch.flush() is None
