"""`RewardTrainer`: TRL's loss, gradients, rows and figures; margins; and a run that learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.preferences import SHORT, pairs, talks

from windlass.core.errors import ConfigError, DataError
from windlass.finetuning.reward_config import RewardConfig
from windlass.finetuning.reward_trainer import RewardTrainer

pytest.importorskip("transformers")


def scorer(seed: int = 0, labels: int = 1) -> Any:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(seed)
    return LlamaForSequenceClassification(small.config(num_labels=labels))


def settings(folder: Path, **changes: Any) -> RewardConfig:
    return RewardConfig(str(folder), **{**SHORT, **changes})


@pytest.mark.parametrize(
    "rows", [pairs(), talks(), talks(explicit=False)], ids=["text", "explicit", "implicit"]
)
@pytest.mark.parametrize("centred", [None, 0.01])
def test_rows_losses_gradients_and_figures_are_trls(tmp_path: Path, rows: Any, centred: float | None) -> None:
    trl = pytest.importorskip("trl")
    rows = [{**row, "margin": 0.1 * at} for at, row in enumerate(rows)]
    found = []
    for library, config in ((trl.RewardTrainer, trl.RewardConfig), (RewardTrainer, RewardConfig)):
        options = {**SHORT, "train_sampling_strategy": "sequential", "center_rewards_coefficient": centred}
        trainer = library(
            scorer(), config(str(tmp_path / library.__module__), **options), train_dataset=small.table(rows),
            processing_class=small.tokenizer(),
        )  # fmt: skip
        made = [trainer.data_collator([trainer.train_dataset[at] for at in range(8)])]
        batch = {name: value for name, value in made[0].items() if name != "completion_mask"}
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        trainer.model.zero_grad()
        if library is not RewardTrainer:
            trainer._metrics["train"].clear()  # of the call above
        trainer.train()
        found.append((batch, loss.detach(), gradient, trainer.state.log_history[:3]))
    theirs, ours = found
    for name in ("input_ids", "attention_mask", "margin"):
        assert torch.equal(ours[0][name].to(theirs[0][name]), theirs[0][name]), name
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-4, atol=1e-6)
    for own, other in zip(ours[3], theirs[3], strict=True):
        for name in set(other) - {"epoch", "num_tokens"}:
            assert own[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


def test_accumulated_micro_batches_are_one(tmp_path: Path) -> None:
    logs = []
    for size in (8, 2):
        args = settings(
            tmp_path / str(size),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            max_steps=2,
        )
        trainer = RewardTrainer(
            scorer().double(),
            args,
            train_dataset=pairs(),
            eval_dataset=pairs(5),
            processing_class=small.tokenizer(),
        )
        trainer.train()
        rows = [*trainer.state.log_history[:2], trainer.evaluate()]
        skipped = ("runtime", "per_second")
        logs.append(
            [{n: v for n, v in row.items() if not any(part in n for part in skipped)} for row in rows]
        )
    for one, other in zip(*logs, strict=True):
        assert one == pytest.approx(other, rel=1e-10, abs=1e-12)


def test_rewards_in_mixed_precision_are_compared_in_single_precision(tmp_path: Path) -> None:
    trainer = RewardTrainer(
        scorer(), settings(tmp_path, bf16=True), train_dataset=pairs(), processing_class=small.tokenizer()
    )
    batch = trainer.data_collator([trainer.train_dataset[at] for at in range(4)])
    with trainer.compute_loss_context_manager():
        loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        chosen, rejected = trainer.model(**inputs).logits[:, 0].float().chunk(2)
    assert outputs["rewards"].dtype == loss.dtype == torch.float32
    assert loss == -torch.nn.functional.logsigmoid(chosen - rejected).mean()


def test_the_model_learns_to_score(tmp_path: Path) -> None:
    trainer = RewardTrainer(
        scorer(), settings(tmp_path, max_steps=12, logging_steps=4), train_dataset=pairs(),
        eval_dataset=pairs(5), processing_class=small.tokenizer(),
        compute_metrics=lambda p: {"right": float((p.predictions[:, 0] > p.predictions[:, 1]).mean())},
    )  # fmt: skip
    trainer.train()
    found = trainer.evaluate()
    assert trainer.state.log_history[2]["accuracy"] > 0.9
    assert found["eval_accuracy"] == pytest.approx(found["eval_right"])


def test_a_folder_of_a_language_model_gets_a_head_and_an_adapter_trains_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = RewardTrainer(
        small.saved(tmp_path / "model"), settings(tmp_path / "out", max_steps=1), train_dataset=pairs(),
        peft_config=peft.LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["q_proj"]),
    )  # fmt: skip
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert any("score" in name for name in trained)
    trainer.train()
    with pytest.raises(ConfigError, match=r"peft_config.task_type=.CAUSAL_LM.*use 'SEQ_CLS'"):
        RewardTrainer(
            small.saved(tmp_path / "model"), settings(tmp_path / "out"), train_dataset=pairs(),
            peft_config=peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"]),
        )  # fmt: skip


def test_a_score_of_rounded_weights_is_learnt(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    losses = []
    for qat in (None, "int8"):
        trainer = RewardTrainer(
            scorer(), settings(tmp_path / f"{qat}", max_steps=12, qat=qat), train_dataset=pairs(),
            processing_class=small.tokenizer(),
        )  # fmt: skip
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[0] != losses[1]
    assert losses[1][-1] < losses[1][0]


def test_options_of_a_model_given_by_name_are_used_without_a_remark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = settings(tmp_path / "out", model_init_kwargs={"dtype": "bfloat16"})
    trainer = RewardTrainer(small.saved(tmp_path / "model"), args, train_dataset=pairs())
    assert trainer.model.dtype == torch.bfloat16
    assert "model_init_kwargs" not in caplog.text


def test_learnt_prompts_are_refused_because_rewards_would_depend_on_padding(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    prompts = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match=r"peft_config='PROMPT_TUNING': .* padding"):
        RewardTrainer(
            scorer(), settings(tmp_path), train_dataset=pairs(), processing_class=small.tokenizer(),
            peft_config=prompts,
        )  # fmt: skip


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a reward is one number"):
        RewardTrainer(
            scorer(labels=2), settings(tmp_path), train_dataset=pairs(), processing_class=small.tokenizer()
        )
    rows = [{**row, "margin": 1.0} for row in pairs(3)]
    rows[2]["margin"] = "much"
    with pytest.raises(DataError, match="row 2: column 'margin' must hold numbers, not str"):
        RewardTrainer(scorer(), settings(tmp_path), train_dataset=rows, processing_class=small.tokenizer())
