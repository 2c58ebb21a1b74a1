"""Who divides: whatever the meaning and the split, the shares of an update add up to its one mean."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from windlass.core.errors import ModelError
from windlass.core.types import LossTerms
from windlass.data.update_batch import UpdateBatch
from windlass.engine.normalise import LoopNormaliser, Meaning, MicroBatch, UpdateNormaliser, _weigh
from windlass.metrics.evaluation import MeanLoss

losses = st.lists(st.floats(-1e3, 1e3), max_size=5)
# The losses of each target, for each micro-batch of each rank: some micro-batches have none.
updates = st.lists(st.lists(losses, min_size=1, max_size=3), min_size=1, max_size=3).filter(
    lambda ranks: len({len(rank) for rank in ranks}) == 1 and any(any(rank) for rank in ranks)
)


def update_of(denominator: float, *targets: float, samples: int = 1, everywhere: int = 0) -> UpdateBatch:
    """An update with micro-batches of so many targets, of `samples` each."""
    count = len(targets)
    return UpdateBatch(
        [None] * count, [[]] * count, 0, 0, False,
        targets=list(targets), samples=[samples] * count, denominator=denominator, total_samples=everywhere,
    )  # fmt: skip


def as_returned(meaning: Meaning, values: list[float], count: int, world: int) -> Tensor | LossTerms:
    """What a `compute_loss` of this meaning gives for these targets: like torch, NaN for the mean of none."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if meaning is Meaning.MICRO_MEAN:
        return tensor.mean()
    return tensor.sum() / count * (world if meaning is Meaning.SCALED else 1)


def share_of(normaliser: UpdateNormaliser) -> float:
    assert normaliser.share is not None
    return float(normaliser.share)


class Taking:
    """In the place of an executor: it keeps the loss that it is given."""

    loss: Tensor

    def backward(self, loss: Tensor) -> None:
        self.loss = loss

    def backward_aux(self, loss: Tensor) -> None:
        """A gradient of its own is not looked at here."""

    add_aux = backward_aux


def taken(normaliser: UpdateNormaliser, loss: Tensor | LossTerms) -> Tensor:
    """The scalar that an executor is given for `loss`: this rank's share times the number of ranks."""
    executor: Any = Taking()
    normaliser.backward(loss, executor)
    return cast(Tensor, executor.loss)


@given(ranks=updates, meaning=st.sampled_from(Meaning))
def test_shares_add_up_to_the_mean_of_the_update(ranks: list[list[list[float]]], meaning: Meaning) -> None:
    everything = [value for rank in ranks for micro in rank for value in micro]
    count, world = len(everything), len(ranks)
    shares, handed = 0.0, 0.0
    for rank in ranks:
        normaliser = UpdateNormaliser(world, meaning)
        update = update_of(count, *map(len, rank))
        for index, micro in enumerate(rank):
            normaliser.scope(update, index)
            given_to_backward = taken(normaliser, as_returned(meaning, micro, count, world))
            shares += share_of(normaliser)
            handed += float(given_to_backward) / world  # strategies average over ranks
    expected = math.fsum(everything) / count
    assert shares == pytest.approx(expected, rel=1e-12, abs=1e-9)
    assert handed == pytest.approx(expected, rel=1e-12, abs=1e-9)


@given(ranks=updates, weight=st.floats(0.1, 10.0))
def test_terms_add_up_once_rescaled(ranks: list[list[list[float]]], weight: float) -> None:
    """The weights are known only after the forwards: the engine corrects by guessed / true."""
    world, guessed = len(ranks), 7.0
    shares = auxiliary = 0.0
    micros = sum(len(rank) for rank in ranks)
    total = weight * sum(len(micro) for rank in ranks for micro in rank)
    for rank in ranks:
        everywhere = torch.tensor(total, dtype=torch.float64)
        normaliser = UpdateNormaliser(world, sum_on_device=lambda _, whole=everywhere: whole)
        update = update_of(guessed, *map(len, rank), everywhere=micros)
        for index, micro in enumerate(rank):
            normaliser.scope(update, index)
            value = torch.tensor(micro, dtype=torch.float64).sum() * weight
            taken(
                normaliser,
                LossTerms(value, weight * len(micro), {"aux": torch.tensor(2.0, dtype=torch.float64)}),
            )
            shares += share_of(normaliser)
        auxiliary += float(normaliser.parts["aux"])
    everything = [value for rank in ranks for micro in rank for value in micro]
    assert auxiliary == pytest.approx(2.0), "the mean over the update's samples"
    assert shares * guessed / total == pytest.approx(
        math.fsum(everything) / len(everything) + 2.0, rel=1e-9, abs=1e-9
    ), "terms that no weight of the targets touches"


def test_what_is_logged_of_a_narrow_loss_is_added_up_in_single_precision() -> None:
    normaliser, update = UpdateNormaliser(1), update_of(2.0, 1.0, 1.0)
    total = torch.zeros(())
    for index, value in enumerate((256.0, 1.0)):
        normaliser.scope(update, index)
        taken(normaliser, torch.tensor(value, dtype=torch.bfloat16))
        assert normaliser.share is not None
        total = total + normaliser.share
    assert (normaliser.share.dtype, total.dtype, float(total)) == (torch.float32, torch.float32, 128.5)


@pytest.mark.parametrize("meaning", Meaning)
@pytest.mark.parametrize("loss", [1.0, math.nan, math.inf])
def test_a_filler_weighs_nothing(meaning: Meaning, loss: float) -> None:
    normaliser, update = UpdateNormaliser(2, meaning), update_of(4.0, 0.0, samples=0, everywhere=4)
    normaliser.scope(update, 0)
    parameter = torch.tensor(loss, requires_grad=True)
    taken(normaliser, parameter).backward()
    assert share_of(normaliser) == 0.0
    assert parameter.grad is not None
    assert float(parameter.grad) == 0.0
    normaliser.scope(update, 0)
    taken(normaliser, LossTerms(torch.tensor(loss), 3.0, {"aux": torch.tensor(loss)}))
    assert share_of(normaliser) == 0.0
    assert float(normaliser.weight) == 0.0  # type: ignore[arg-type]
    normaliser.scope(update, 0)
    taken(normaliser, LossTerms(torch.tensor(loss), loss))  # of no targets: 0 / 0
    assert float(normaliser.weight) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [-3.0, math.nan, math.inf])
def test_a_weight_that_divides_nothing_is_refused(weight: float) -> None:
    """An estimate in its place would be a wrong loss without a word."""
    normaliser = UpdateNormaliser(1)
    normaliser.scope(update_of(2.0, 2.0), 0)
    taken(normaliser, LossTerms(torch.tensor(1.0), weight))
    with pytest.raises(ModelError, match=f"LossTerms of this update add up to {weight}"):
        _ = normaliser.total
    with pytest.raises(ModelError, match=f"LossTerms of this update add up to {weight}"):
        LoopNormaliser(1, lambda value: value).apply(LossTerms(torch.tensor(1.0), torch.tensor(weight)))


def test_a_mean_over_no_targets_is_nan_but_its_share_is_zero() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.full((3,), -100))
    assert math.isnan(loss.item())
    normaliser = UpdateNormaliser(1)
    normaliser.scope(update_of(6.0, 0.0), 0)
    taken(normaliser, loss).backward()
    assert share_of(normaliser) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any(), "a NaN loss of weight zero must leave the gradients at zero"


@given(loss=st.floats(), factor=st.floats(1e-6, 1e6))
def test_weighing_never_hides_a_value_that_counts(loss: float, factor: float) -> None:
    got = float(_weigh(torch.tensor(loss, dtype=torch.float64), factor))
    expected = loss * factor
    assert got == expected or (math.isnan(got) and math.isnan(expected))
    assert float(_weigh(torch.tensor(loss, dtype=torch.float64), 0.0)) == 0.0


def test_several_backwards_of_one_step_are_added() -> None:
    normaliser = UpdateNormaliser(1)
    normaliser.scope(update_of(4.0, 2.0), 0)
    assert normaliser.share is None
    taken(normaliser, torch.tensor(1.0))
    taken(normaliser, torch.tensor(3.0))
    assert share_of(normaliser) == 2.0


def test_parts_do_not_leak_into_the_next_update() -> None:
    normaliser = UpdateNormaliser(1)
    for _ in range(2):
        normaliser.scope(update_of(2.0, 2.0), 0)
        taken(normaliser, LossTerms(torch.tensor(1.0), 2.0, {"aux": torch.tensor(3.0)}))
        assert float(normaliser.parts["aux"]) == 3.0
        assert float(normaliser.weight) == 2.0  # type: ignore[arg-type]


# --- a loop of the user's own -----------------------------------------------------------------------------------------


@given(updates=st.lists(st.lists(losses.filter(bool), min_size=2, max_size=2), min_size=1, max_size=4))
def test_terms_of_a_loop_are_corrected_to_the_weight_of_their_update(
    updates: list[list[list[float]]],
) -> None:
    """The first update guesses from its first micro-batch, the others from the update before."""
    normaliser = LoopNormaliser(1, lambda value: value)
    for update in updates:
        gradient = torch.zeros((), dtype=torch.float64)
        for index, micro in enumerate(update):
            total = torch.tensor(micro, dtype=torch.float64).sum()
            normaliser.scope(MicroBatch(2, last=index == 1, accumulates=True))
            gradient = gradient + normaliser.apply(LossTerms(total, len(micro)))
            factor = normaliser.correction()
            assert (factor is None) == (index == 0)
            gradient = gradient if factor is None else gradient * factor
        everything = [value for micro in update for value in micro]
        expected = math.fsum(everything) / len(everything)
        assert float(gradient) == pytest.approx(expected, rel=1e-12, abs=1e-9)


@given(samples=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), steps=st.integers(1, 3))
def test_plain_losses_of_a_loop_count_by_their_samples(samples: list[int], steps: int) -> None:
    """Each rank's mean is of its own samples; strategies average over ranks. The mean over nothing is NaN."""
    world, everywhere = len(samples), sum(samples)
    handed = 0.0
    for rank, count in enumerate(samples):
        normaliser = LoopNormaliser(world, lambda value: value)
        mean = torch.full((count,), float(rank), dtype=torch.float64).mean()
        normaliser.scope(MicroBatch(steps, True, count, everywhere))
        handed += float(normaliser.apply(mean)) / world
    expected = sum(rank * count for rank, count in enumerate(samples)) / everywhere / steps
    assert handed == pytest.approx(expected, rel=1e-12)


def test_a_term_that_was_named_later_is_checked_too() -> None:
    terms = LossTerms(torch.tensor(1.0), 2.0, {"aux": torch.tensor(3.0)})
    terms.aux["loss"] = torch.tensor(3.0)
    normaliser = UpdateNormaliser(1)
    normaliser.scope(update_of(2.0, 2.0), 0)
    with pytest.raises(ModelError, match="reports use that name"):
        taken(normaliser, terms)
    with pytest.raises(ModelError, match="reports use that name"):
        MeanLoss().add(terms, 2.0, 1)


def test_what_an_update_of_a_run_must_not_mix() -> None:
    terms, plain = LossTerms(torch.ones(()), 1.0), torch.ones(())
    for one, other in ((terms, plain), (plain, terms)):
        normaliser = UpdateNormaliser(1)
        update = update_of(2.0, 1.0, 1.0)
        normaliser.scope(update, 0)
        taken(normaliser, one)
        normaliser.scope(update, 1)
        with pytest.raises(ModelError, match="one update was given LossTerms"):
            taken(normaliser, other)
        normaliser.scope(update_of(2.0, 2.0), 0)
        taken(normaliser, other)  # another update may be of the other kind


def test_what_a_loop_must_not_mix() -> None:
    terms, plain = LossTerms(torch.ones(()), 1.0), torch.ones(())
    first, last = MicroBatch(2, False, accumulates=True), MicroBatch(2, True, accumulates=True)
    for one, other in ((terms, plain), (plain, terms)):
        normaliser = LoopNormaliser(1, lambda value: value)
        normaliser.scope(first)
        normaliser.apply(one)
        normaliser.scope(last)
        with pytest.raises(ModelError, match="one update was given LossTerms"):
            normaliser.apply(other)
    normaliser = LoopNormaliser(1, lambda value: value)
    with pytest.raises(ModelError, match="put auxiliary terms into the sum"):
        normaliser.apply(LossTerms(plain, 1.0, {"aux": plain}))
    normaliser.scope(MicroBatch(2, False))
    with pytest.raises(ModelError, match="within `with accelerator"):
        normaliser.apply(terms)
