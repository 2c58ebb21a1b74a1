"""Figures are sums over targets, and survive a restart on another number of ranks."""

from __future__ import annotations

import torch

from windlass.core.events import TrainerControl, TrainerState
from windlass.finetuning.mean_figures import MeanFigures, Sums, UpdateBorders

NAMES = ("entropy", "mean_token_accuracy", "aux_loss")
Batch = tuple[Sums, torch.Tensor]


def batch(entropy: float, correct: int, targets: int, tokens: int, aux: float | None = None) -> Batch:
    values = {
        NAMES[0]: (entropy, targets),
        NAMES[1]: (correct, targets),
        NAMES[2]: (aux or 0, aux is not None),
    }
    sums = {name: (torch.tensor(float(a)), torch.tensor(float(b))) for name, (a, b) in values.items()}
    return sums, torch.tensor(tokens)


def figures(*, adopts: bool = True, counts: bool = True) -> MeanFigures:
    return MeanFigures(NAMES, torch.device("cpu"), lambda sums: sums, adopts, counts=counts)


def update(made: MeanFigures, *batches: Batch) -> None:
    made.begin_update()
    for one in batches:
        made.add(*one, training=True)
    made.end_update()


def test_means_are_over_targets() -> None:
    made = figures()
    update(made, batch(6.0, 1, 2, 5), batch(2.0, 3, 6, 7))
    made.add(*batch(9.0, 1, 1, 100), training=False)
    assert made.read(training=True) == {"entropy": 1.0, "mean_token_accuracy": 0.5, "num_tokens": 12}
    assert made.read(training=True) == {}
    assert made.read(training=False) == {"entropy": 9.0, "mean_token_accuracy": 1.0, "num_tokens": 12}


def test_batches_outside_of_updates_are_not_counted() -> None:
    made = figures()
    made.add(*batch(6.0, 1, 2, 5), training=True)
    assert made.read(training=True) == {}


def test_an_update_that_is_tried_again_is_counted_once() -> None:
    made = figures()
    borders, about = UpdateBorders(made), (None, TrainerState(), TrainerControl())
    borders.on_step_begin(*about)
    made.add(*batch(6.0, 1, 2, 5), training=True)
    borders.on_log(*about, logs={"micro_batch_too_large": 4})
    for _ in range(2):
        made.add(*batch(3.0, 1, 1, 3), training=True)
    borders.on_step_end(*about)
    assert made.read(training=True) == {"entropy": 3.0, "mean_token_accuracy": 1.0, "num_tokens": 6}


def test_the_balance_of_experts_is_a_mean_over_batches() -> None:
    made = figures()
    update(made, *(batch(1.0, 1, 1, 1, aux) for aux in (1.0, 2.0)))
    assert made.read(training=True)["aux_loss"] == 1.5


def test_a_restart_keeps_the_sums() -> None:
    made, again = figures(), figures()
    update(made, batch(6.0, 1, 2, 5))
    again.load_state_dict(made.state_dict())
    assert again.read(training=True) == made.read(training=True)


def test_one_rank_adopts_the_sums_of_all() -> None:
    states = []
    for tokens in (5, 7):
        made = figures()
        update(made, batch(2.0, 1, 2, tokens))
        states.append(made.state_dict())
    first, second = figures(), figures(adopts=False)
    first.adopt(states)
    second.adopt(states)
    assert first.read(training=True) == {"entropy": 1.0, "mean_token_accuracy": 0.5, "num_tokens": 12}
    assert second.read(training=True) == {}


def test_ranks_that_share_their_batches_count_once() -> None:
    states = []
    for counts in (True, False):
        made = figures(counts=counts)
        update(made, batch(2.0, 1, 2, 5))
        states.append(made.state_dict())
        assert bool(made.read(training=True)) == counts
    alone = figures()
    alone.adopt(states)
    assert alone.read(training=True) == {"entropy": 1.0, "mean_token_accuracy": 0.5, "num_tokens": 5}
