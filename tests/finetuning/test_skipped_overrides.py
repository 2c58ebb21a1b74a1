"""Methods of TRL's trainers that no trainer here calls: an override is refused before any work, not skipped."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.preferences import pairs, settings
from tests.finetuning.trainers import trainer_of
from tests.said import listening

import windlass
from windlass.core.errors import ConfigError
from windlass.finetuning.dpo_trainer import DPOTrainer

pytest.importorskip("transformers")

KINDS = ("SFT", "DPO", "KTO", "Reward")
# It checks rows that TRL is asked not to prepare.
ALLOWED = {"_reject_skip_prepare_without_labels"}


def subclass(kind: str, *names: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("called")

    return type("Mine", (getattr(windlass, f"{kind}Trainer"),), dict.fromkeys(names, method))


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_of_trl_s_trainers_is_here_or_its_override_refused(kind: str) -> None:
    trl = pytest.importorskip("trl")
    theirs = {n for n, value in vars(getattr(trl, f"{kind}Trainer")).items() if inspect.isfunction(value)}
    absent = {n for n in theirs - ALLOWED if not hasattr(getattr(windlass, f"{kind}Trainer"), n)}
    assert "_prepare_dataset" in absent
    for name in absent:
        with pytest.raises(ConfigError, match=f"{name}='overridden': {kind}Trainer would never call it"):
            subclass(kind, name)("no model is opened", train_dataset=[{"text": "a"}])


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_columns_that_a_script_keeps_and_prepared_rows_lack_are_refused(kind: str, tmp_path: Path) -> None:
    def added(self: Any) -> None:
        type(self).__mro__[1]._set_signature_columns_if_needed(self)
        self._signature_columns.append("weight")

    cls = type("Mine", (getattr(windlass, f"{kind}Trainer"),), {"_set_signature_columns_if_needed": added})
    rows = [{**row, "weight": 2.0} for row in (small.texts(4) if kind == "SFT" else pairs(4))]
    args = small.arguments(tmp_path) if kind == "SFT" else settings(tmp_path)
    trainer = cls(small.model(), args=args, train_dataset=rows, processing_class=small.tokenizer())
    with pytest.raises(ConfigError, match=r"_set_signature_columns_if_needed=\['weight'\]: prepared rows"):
        trainer.train()


def test_a_collator_of_the_script_s_own_gets_no_other_columns_and_that_is_said(tmp_path: Path) -> None:
    rows = [{**row, "weight": 2.0} for row in small.texts(4)]

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([sample["input_ids"][:1] for sample in samples])
        return {"input_ids": ids, "labels": ids}

    with listening() as said:
        trainer_of(tmp_path, rows, data_collator=collate, remove_unused_columns=False).get_train_dataloader()
    assert any("the data collator gets no text, weight: " in line for line in said)


def test_a_method_that_a_script_assigns_to_the_class_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DPOTrainer, "_compute_loss", lambda self, *args: None, raising=False)
    with pytest.raises(ConfigError, match="_compute_loss='overridden': DPOTrainer would never call it"):
        DPOTrainer("no model is opened", train_dataset=[{"text": "a"}])


def test_what_a_loss_of_the_script_s_own_calls_is_its_own(tmp_path: Path) -> None:
    class Mine(DPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return 2 * self._compute_loss(model, inputs, *args, **kwargs)

        def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    losses = []
    for kind in (DPOTrainer, Mine):
        trainer = kind(
            small.model(), None, settings(tmp_path, max_steps=1), train_dataset=pairs(),
            processing_class=small.tokenizer(),
        )  # fmt: skip
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(2 * losses[0])


def test_an_overridden_reference_is_also_the_precomputed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path / "home"))

    class Mine(DPOTrainer):
        def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
            chosen, rejected = super().compute_ref_log_probs(model, inputs)
            return chosen - 7, rejected

    losses = []
    for ahead in (False, True):
        trainer = Mine(
            small.model(), None, settings(tmp_path, max_steps=1, precompute_ref_log_probs=ahead),
            train_dataset=pairs(), processing_class=small.tokenizer(),
        )  # fmt: skip
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] < 0.6  # that of equal models is log 2
    assert not (tmp_path / "home" / "reference").exists()
