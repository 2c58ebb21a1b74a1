"""The guides' snippets as printed, with the import replaced."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import launch, run_script
from tests.trainer.small import Net, arguments, bert, llama, rows, text_rows, token_rows, weights_hash
from torch import nn

from windlass import EarlyStoppingCallback, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from windlass.core.errors import ConfigError

pytest.importorskip("transformers", reason="the guides' models are transformers'")


class CustomTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        # forward pass
        outputs = model(**inputs)
        logits = outputs.get("logits")
        # compute custom loss for 3 labels with different weights
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device=model.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


class StopAfterTen(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= 10:
            return {"should_training_stop": True}
        return {}


def weighted(model: nn.Module, samples: list[dict[str, Any]]) -> torch.Tensor:
    batch = {name: torch.tensor([s[name] for s in samples]) for name in samples[0]}
    labels = batch.pop("labels")
    weight = torch.tensor([1.0, 2.0, 3.0])
    return nn.CrossEntropyLoss(weight=weight)(model(**batch).logits, labels)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_weighted_loss_of_three_arguments_trains_and_evaluates(tmp_path: Path, accumulation: int) -> None:
    data = token_rows(8, labels=3)
    trainer = CustomTrainer(
        model=bert(3),
        args=arguments(
            tmp_path,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            logging_steps=1,
            train_sampling_strategy="sequential",
            per_device_train_batch_size=8 // accumulation,
        ),
        train_dataset=data,
        eval_dataset=data,
    )
    size = 8 // accumulation
    with torch.no_grad():
        parts = [weighted(bert(3).train(), data[i : i + size]) for i in range(0, 8, size)]
    before = weights_hash(trainer.model)
    assert trainer.train().training_loss == pytest.approx(float(sum(parts)) / len(parts), rel=1e-5)
    assert weights_hash(trainer.model) != before
    with torch.no_grad():
        trainer.model.eval()
        expected = [weighted(trainer.model, data[i : i + 4]) for i in (0, 4)]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(sum(expected)) / 2, rel=1e-5)
    assert trainer.predict(data).predictions.shape == (8, 3)


def test_a_callback_that_returns_a_dict_stops_after_ten_steps(tmp_path: Path) -> None:
    trainer = Trainer(
        model=bert(),
        args=arguments(tmp_path, max_steps=30),
        train_dataset=token_rows(16),
        callback=[StopAfterTen],
    )
    assert trainer.train().global_step == 10
    with pytest.raises(ConfigError, match="callback"):
        Trainer(Net(), arguments(tmp_path), callbacks=[StopAfterTen], callback=[StopAfterTen()])


def test_both_generations_of_names(tmp_path: Path) -> None:
    from tests.trainer.small import tokenizer

    training_args = TrainingArguments(
        output_dir=str(tmp_path / "your-model"),
        learning_rate=2e-5,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        num_train_epochs=2,
        weight_decay=0.01,
        evaluation_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        push_to_hub=False,
        use_cpu=True,
    )
    words = tokenizer()
    trainer = Trainer(
        model=bert(),
        args=training_args,
        train_dataset=token_rows(32),
        eval_dataset=token_rows(8),
        tokenizer=words,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
    )
    trainer.train()
    assert trainer.processing_class is trainer.tokenizer is words
    assert sum("eval_accuracy" in entry for entry in trainer.state.log_history) == 2
    assert sorted(p.name for p in (tmp_path / "your-model").glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    assert (tmp_path / "your-model" / "checkpoint-4" / "tokenizer.json").exists()


def test_resume_by_true_and_by_path(tmp_path: Path) -> None:
    def trainer(steps: int) -> Trainer:
        args = arguments(
            tmp_path, max_steps=steps, save_strategy="steps", save_steps=2, lr_scheduler_type="constant"
        )
        return Trainer(model=llama(), args=args, train_dataset=text_rows(24))

    trainer(4).train()
    first = trainer(6)
    first.train(resume_from_checkpoint=True)
    second = trainer(6)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    third = trainer(6)
    third.train(model_path=str(tmp_path / "checkpoint-4"))
    whole = trainer(6)
    whole.train(resume_from_checkpoint=False)
    assert len({weights_hash(t.model) for t in (first, second, third, whole)}) == 1


@pytest.mark.parametrize("form", ["tuple", "dict", "object"])
def test_any_module_that_returns_its_loss(tmp_path: Path, form: str) -> None:
    trainer = Trainer(
        Net(form), arguments(tmp_path, max_steps=20), train_dataset=rows(40), eval_dataset=rows(9)
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert trainer.predict(rows(9)).predictions.shape == (9, 3)
    assert trainer.predict([{"x": row["x"]} for row in rows(9)]).predictions.shape == (9, 3)


def test_overridden_loaders_and_log(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    class Mine(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(rows(6), batch_size=3, collate_fn=self.data_collator)

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            return DataLoader(test_dataset, batch_size=5, collate_fn=self.data_collator)

        def log(self, logs: dict[str, float], *args: Any) -> None:
            logs["mine"] = 1.0
            super().log(logs, *args)

    trainer = Mine(
        Net(),
        arguments(tmp_path, eval_strategy="epoch", max_steps=-1, num_train_epochs=2),
        train_dataset=rows(6),
    )
    assert trainer.train().global_step == 6
    assert all(entry["mine"] == 1.0 for entry in trainer.state.log_history)
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 2
    assert trainer.predict(rows(7)).predictions.shape == (7, 3)


# --- the logging guide ----------------------------------------------------------------------------------------------

MY_APP = """
import logging
import sys
import windlass
from windlass import HfArgumentParser, Trainer, TrainingArguments
from tests.trainer.small import Net, rows

logger = logging.getLogger(__name__)

(training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()

# Setup logging
logging.basicConfig(
    format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
    datefmt="%m/%d/%Y %H:%M:%S",
    handlers=[logging.StreamHandler(sys.stdout)],
)

# set the main code and the modules it uses to the same log-level according to the node
log_level = training_args.get_process_log_level()
logger.setLevel(log_level)
windlass.utils.logging.set_verbosity(log_level)

trainer = Trainer(Net(), training_args, train_dataset=rows(8))
windlass.utils.logging.get_logger("windlass.app").info("library info %d", training_args.process_index)
windlass.utils.logging.get_logger("windlass.app").warning("library warning %d", training_args.process_index)
logger.info("script info %d", training_args.process_index)
logger.warning("script warning %d", training_args.process_index)
trainer.train()
trainer.end()
"""

FIRST = ["--log_level", "warning", "--log_level_replica", "error"]
COMMANDS = [FIRST, [*FIRST, "--log_on_each_node", "0"],
            ["--log_level", "error", "--log_level_replica", "error", "--log_on_each_node", "0"]]  # fmt: skip


def my_app(folder: Path) -> tuple[Path, Sequence[str]]:
    """The script, and the flags that every run of it has."""
    script = folder / "my_app.py"
    script.write_text(MY_APP)
    return script, ["--output_dir", str(folder / "out"), "--max_steps", "1", "--use_cpu"]


@pytest.mark.parametrize("number", [0, 2])
def test_the_logging_snippet_on_one_process(tmp_path: Path, number: int) -> None:
    script, flags = my_app(tmp_path)
    said = run_script(script, *flags, *COMMANDS[number], cwd=tmp_path)
    assert ("script warning 0" in said) == ("library warning 0" in said) == (number == 0)
    assert "script info" not in said
    assert "library info" not in said


@pytest.mark.dist
def test_the_logging_snippet_on_two_processes(tmp_path: Path) -> None:
    script, flags = my_app(tmp_path)
    said = launch(2, script, *flags, *COMMANDS[1])
    assert "script warning 0" in said
    assert "library warning 0" in said
    assert "warning 1" not in said


@pytest.mark.parametrize(("node", "local", "levels"), [
    (0, 0, (logging.WARNING, logging.WARNING, logging.ERROR)),
    (0, 1, (logging.ERROR, logging.ERROR, logging.ERROR)),
    (1, 0, (logging.WARNING, logging.ERROR, logging.ERROR)),
    (1, 1, (logging.ERROR, logging.ERROR, logging.ERROR)),
])  # fmt: skip
def test_the_three_command_lines_on_two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int, local: int, levels: tuple[int, ...]
) -> None:
    for name, value in {"RANK": 2 * node + local, "LOCAL_RANK": local, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2,
                        "GROUP_RANK": node, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    for flags, level in zip(COMMANDS, levels, strict=True):
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            ["--output_dir", "x", *flags]
        )
        assert args.get_process_log_level() == level, flags
