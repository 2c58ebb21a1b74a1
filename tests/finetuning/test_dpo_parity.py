"""Losses, gradients, figures and prepared rows of `DPOTrainer` are TRL's, in one process and single precision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.preferences import SHORT, moved, pairs, settings, talks

from windlass.finetuning.dpo_config import DPOConfig
from windlass.finetuning.dpo_objective import UpdateLoss, scores
from windlass.finetuning.dpo_trainer import DPOTrainer

pytest.importorskip("transformers")
pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

CASES: list[dict[str, Any]] = [
    {"loss_type": [name]}
    for name in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
                 "apo_down", "discopop", "sft", "sigmoid_norm")
] + [
    {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},
    {"loss_type": ["robust"], "label_smoothing": 0.1},
    {"loss_type": ["aot"], "label_smoothing": 0.2},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    {"loss_type": ["sigmoid"], "f_divergence_type": "forward_kl"},
    {"loss_type": ["sigmoid"], "f_divergence_type": "js_divergence"},
    {"loss_type": ["ipo"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    {"loss_type": ["sigmoid"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
    {"loss_type": ["sigmoid"], "ld_alpha": 0.4},
    {"loss_type": ["sigmoid", "ipo"], "use_weighting": True},
    {"loss_type": ["discopop"], "discopop_tau": 0.1, "beta": 0.2},
]  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A trainer of each library on the same model, reference and rows."""
    folder, rows = tmp_path_factory.mktemp("both"), small.table(pairs())
    theirs = trl.DPOTrainer(
        moved(small.model()), small.model(), trl.DPOConfig(str(folder), **{**SHORT, "max_length": 8}),
        train_dataset=rows, processing_class=small.tokenizer(),
    )  # fmt: skip
    ours = DPOTrainer(
        moved(small.model()), small.model(), settings(folder, max_length=8),
        train_dataset=rows, processing_class=small.tokenizer(),
    )  # fmt: skip
    return theirs, ours


def test_rows_and_batches_are_theirs(both: tuple[Any, Any]) -> None:
    theirs, ours = both
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    wanted = [{name: row[name] for name in names} for row in theirs.train_dataset]
    assert list(ours.train_dataset) == wanted
    batches = theirs.data_collator(wanted), ours.data_collator(wanted)
    assert batches[0].keys() == batches[1].keys()
    for name, values in batches[0].items():
        assert torch.equal(values, batches[1][name]), name


@pytest.mark.parametrize("explicit", [True, False])
def test_rows_of_conversations_are_theirs(tmp_path: Path, explicit: bool) -> None:
    rows, made = small.table(talks(5, explicit=explicit)), []
    for library, arguments in ((trl.DPOTrainer, trl.DPOConfig), (DPOTrainer, DPOConfig)):
        trainer = library(
            small.model(), small.model(1), arguments(str(tmp_path), **SHORT), train_dataset=rows,
            processing_class=small.tokenizer(),
        )  # fmt: skip
        made.append(
            [[row[n] for n in ("prompt_ids", "chosen_ids", "rejected_ids")] for row in trainer.train_dataset]
        )
    assert made[0] == made[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_loss_and_its_gradients_are_theirs(both: tuple[Any, Any], case: dict[str, Any]) -> None:
    theirs, ours = both
    plain: dict[str, Any] = {
        "loss_weights": None, "ld_alpha": None, "label_smoothing": 0.0, "beta": 0.1, "use_weighting": False,
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "discopop_tau": 0.05,
    }  # fmt: skip
    given = {**plain, **case}
    for name, value in given.items():
        setattr(ours.args, name, value)
        setattr(theirs.args, name, value)
        setattr(theirs, {"loss_type": "loss_types"}.get(name, name), value)
    theirs.loss_weights = given["loss_weights"] or [1.0] * len(given["loss_type"])
    rows = [theirs.train_dataset[at] for at in range(8)]
    losses, gradients = [], []
    from trl.trainer.utils import add_fused_lm_head

    outputs = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
    add_fused_lm_head(theirs.model, outputs=outputs)
    ours._objective = UpdateLoss(ours.args)
    for trainer in both:
        trainer.model.train().zero_grad()
        loss = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append([p.grad.clone() for p in trainer.model.parameters()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6, abs=1e-6)
    own, other = (torch.cat([part.flatten() for part in parts]) for parts in gradients[::-1])
    # Rounding of sums over tokens is amplified by a loss that is steep there.
    assert float((own - other).abs().max()) < 1e-6 * max(1.0, float(other.norm()))


def test_scores_of_a_divergence_overflow_nowhere_and_keep_small_ratios() -> None:
    args = DPOConfig(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=3.0)
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        large, small_one = scores(torch.tensor([1e3, 1e-3], dtype=kind), args).tolist()
        assert 1e4 < large < math.inf
        assert small_one == pytest.approx(1e-3, rel=1e-2), kind  # 1 + 1e-3 is 1 in bfloat16


@pytest.mark.parametrize(
    "options",
    [{}, {"loss_type": ["robust"], "label_smoothing": 0.1}, {"loss_type": ["sft"]}, {"loss_type": ["sigmoid", "sft"]}],
    ids=["sigmoid", "robust", "sft", "sigmoid-sft"],
)  # fmt: skip
def test_the_log_is_theirs(tmp_path: Path, options: dict[str, Any]) -> None:
    """Every figure of a run of three updates, with one micro-batch each, under the same names."""
    logs, order = [], {**SHORT, "train_sampling_strategy": "sequential"}
    for library, arguments in ((trl.DPOTrainer, trl.DPOConfig), (DPOTrainer, DPOConfig)):
        trainer = library(
            moved(small.model()), small.model(), arguments(str(tmp_path / library.__module__), **order, **options),
            train_dataset=small.table(pairs()), eval_dataset=small.table(pairs(5)), processing_class=small.tokenizer(),
        )  # fmt: skip
        trainer.train()
        logs.append((trainer.state.log_history[:3], trainer.evaluate()))
    for theirs, ours in zip(logs[0][0], logs[1][0], strict=True):
        for name in set(theirs) - {"epoch"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    assert logs[0][1].keys() - {"epoch"} <= logs[1][1].keys()
    for name in ("eval_loss", "eval_rewards/accuracies"):
        assert name in logs[1][1]
