"""`KTOTrainer`: TRL's loss, gradients and figures, rows of single answers and of pairs, and a run that learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.preferences import SHORT, moved, pairs

from windlass.core.errors import ConfigError, DataError
from windlass.finetuning.kto_config import KTOConfig
from windlass.finetuning.kto_trainer import KTOTrainer

pytest.importorskip("transformers")


def judged(count: int = 16) -> list[dict[str, Any]]:
    return [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if at % 3 else "rejected"],
            "label": bool(at % 3),
        }
        for at, row in enumerate(pairs(count))
    ]


def trainer_of(folder: Path, rows: Any = None, **changes: Any) -> KTOTrainer:
    return KTOTrainer(
        small.model(), None, KTOConfig(str(folder), **{**SHORT, **changes}), train_dataset=rows or judged(),
        eval_dataset=judged(5), processing_class=small.tokenizer(),
    )  # fmt: skip


def test_its_reference_is_rounded_as_the_model_is(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    trainer = trainer_of(tmp_path, qat="int8")
    trainer.train()
    logs = trainer.state.log_history
    assert logs[0]["rewards/chosen"] == logs[0]["kl"] == 0.0 != logs[2]["rewards/chosen"]


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_losses_gradients_and_figures_are_trls(tmp_path: Path, kind: str) -> None:
    trl = pytest.importorskip("trl")
    found = []
    for library, config in ((trl.KTOTrainer, trl.KTOConfig), (KTOTrainer, KTOConfig)):
        options = {
            **SHORT,
            "loss_type": kind,
            "desirable_weight": 0.7,
            "undesirable_weight": 1.3,
            "beta": 0.3,
        }
        trainer = library(
            moved(small.model()), small.model(), config(str(tmp_path / library.__module__), **options),
            train_dataset=small.table(judged()), processing_class=small.tokenizer(),
        )  # fmt: skip
        batch = trainer.data_collator([trainer.train_dataset[at] for at in range(4)])
        trainer.model.train().zero_grad()
        loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        trainer.model.zero_grad()
        if library is not KTOTrainer:
            trainer._metrics["train"].clear()  # of the call above
        trainer.train()
        found.append((batch, loss.detach(), gradient, trainer.state.log_history[:3]))
    theirs, ours = found
    assert ours[0].keys() == theirs[0].keys()
    for name, values in theirs[0].items():
        assert torch.equal(ours[0][name], values), name
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-4, atol=1e-6)
    for own, other in zip(ours[3], theirs[3], strict=True):
        for name in set(other) - {"epoch", "num_tokens"}:
            assert own[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


def test_pairs_become_single_answers(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, pairs(4))
    assert [row["label"] for row in trainer.train_dataset] == [True] * 4 + [False] * 4


def test_the_model_learns_what_is_desirable(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=12, logging_steps=4)
    trainer.train()
    logs = trainer.state.log_history
    assert logs[2]["rewards/margins"] > logs[0]["rewards/margins"]
    assert "eval_rewards/margins" in trainer.evaluate()


def test_a_batch_of_one_row_estimates_no_divergence_from_its_own_answer(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, per_device_eval_batch_size=1)
    moved(trainer.model)
    found = trainer.evaluate()
    assert found["eval_kl"] == 0.0
    assert found["eval_loss"] != 0.5


def test_mistakes_are_named(tmp_path: Path) -> None:
    rows = judged(4)
    rows[2]["label"] = None
    with pytest.raises(DataError, match="row 2: column 'label' is missing or null"):
        trainer_of(tmp_path, rows)
    with pytest.raises(DataError, match="a row needs prompt, completion and label"):
        trainer_of(tmp_path, [{"prompt": "a", "text": "b"}])
    with pytest.raises(DataError, match="row 1: must be a mapping of columns, not str"):
        trainer_of(tmp_path, [pairs(1)[0], "text"])
    with pytest.raises(DataError, match="the train dataset: rows of a generator have no numbers"):
        trainer_of(tmp_path, (row for row in pairs(4)))
    with pytest.raises(ConfigError, match=r"batch size must be > 1"):
        KTOConfig("out", per_device_train_batch_size=1)
