"""What public scripts override, assign and read: each must work, or be refused by name before training."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from windlass import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from windlass.core.errors import CheckpointError, ConfigError, ModelError


class Net(nn.Module):
    """A classifier with dropout: what it returns shows its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 2), nn.Dropout(0.5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.linear(self.dropout(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


ROWS = [{"x": torch.full((4,), float(i)), "labels": i % 2} for i in range(16)]


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    def make(**changes: Any) -> TrainingArguments:
        options = {
            "output_dir": str(tmp_path), "max_steps": 4, "save_strategy": "no", "disable_tqdm": True,
            "per_device_train_batch_size": 4, "report_to": "none",
        }  # fmt: skip
        return TrainingArguments(**{**options, **changes})

    return make


# --- overrides ------------------------------------------------------------------------------------------------------


def test_an_override_of_saving_may_require_the_trial(arguments: Any) -> None:
    seen = []

    class Saves(Trainer):
        def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
            seen.append((model, trial))
            super()._save_checkpoint(model, trial)

    trainer = Saves(Net(), arguments(save_strategy="steps", save_steps=2), train_dataset=ROWS)
    trainer.train()
    assert seen == [(trainer.model, None)] * 2
    assert len(list(Path(trainer.args.output_dir).glob("checkpoint-*"))) == 2


def test_an_override_of_save_model_writes_in_checkpoints(arguments: Any, tmp_path: Path) -> None:
    """Its files are in each, with the weights that a resume needs."""

    class Heads(Trainer):
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            assert output_dir is not None
            assert _internal_call == (output_dir != "out")
            folder = Path(output_dir)
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text("{}")
            (folder / f"{folder.name}.txt").write_text(str(self.state.global_step))

    saving = arguments(save_strategy="steps", save_steps=2)
    # Of a run that was killed in save_model, at a step that is not saved again.
    (tmp_path / ".windlass-hooks-checkpoint-1" / "checkpoint-1").mkdir(parents=True)
    Heads(Net(), saving, train_dataset=ROWS).train()
    folder = tmp_path / "checkpoint-2"
    assert (folder / "checkpoint-2.txt").read_text() == "2"
    assert (folder / "config.json").read_text() == "{}"
    resumed = Heads(Net(), saving, train_dataset=ROWS)
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == 4
    assert not list(tmp_path.glob(".windlass-hooks-*"))


def test_an_override_of_save_model_may_leave_out_what_it_does_not_train(
    arguments: Any, tmp_path: Path
) -> None:
    class Short(Trainer):
        def save_model(self, output_dir: str) -> None:
            super().save_model(output_dir)
            (Path(output_dir) / "mine.txt").write_text("mine")

    Short(Net(), arguments(save_strategy="steps", save_steps=4), train_dataset=ROWS).train()
    written = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert {"mine.txt", "model.safetensors", "training_args.json"} <= written


def test_a_model_that_another_rank_cannot_write_costs_one_save(arguments: Any, tmp_path: Path) -> None:
    class Refused(Trainer):
        def save_model(self, output_dir: str) -> None:
            if self.state.global_step == 2:  # as `super().save_model` raises it on all ranks
                raise CheckpointError("the model cannot be written")
            super().save_model(output_dir)

    saving = arguments(save_strategy="steps", save_steps=2)
    assert Refused(Net(), saving, train_dataset=ROWS).train().global_step == 4
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.parametrize("name", ["_save", "save_model"])
def test_a_script_may_write_the_state_of_the_run_too(arguments: Any, tmp_path: Path, name: str) -> None:
    def write(self: Any, output_dir: str, *args: Any, **kwargs: Any) -> None:
        getattr(Trainer, name)(self, output_dir, *args, **kwargs)
        self.state.save_to_json(str(Path(output_dir) / "trainer_state.json"))

    kind, saving = type("Saves", (Trainer,), {name: write}), arguments(save_strategy="steps", save_steps=2)
    kind(Net(), saving, train_dataset=ROWS).train()
    resumed = kind(Net(), saving, train_dataset=ROWS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [entry["step"] for entry in resumed.state.log_history] == [4]


def test_on_save_follows_a_save_of_the_scripts_own(arguments: Any) -> None:
    saved = []

    class Own(Trainer):
        def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
            saved.append("own")

    class Noting(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saved.append(state.global_step)

    arguments = arguments(save_strategy="steps", save_steps=2)
    Own(Net(), arguments, train_dataset=ROWS, callbacks=[Noting()]).train()
    assert saved == ["own", 2, "own", 4]


def test_an_override_that_judges_an_evaluation_may_require_the_trial(arguments: Any) -> None:
    judged = []

    class Judging(Trainer):
        def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
            judged.append(trial)
            return super()._determine_best_metric(metrics, trial)

    evaluated = arguments(eval_strategy="steps", eval_steps=2)
    Judging(Net(), evaluated, train_dataset=ROWS, eval_dataset=ROWS).train()
    assert judged == [None, None]


def test_a_callback_may_add_the_metric_that_decides_which_evaluation_is_the_best(arguments: Any) -> None:
    class Adding(TrainerCallback):
        def on_evaluate(
            self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any
        ) -> None:
            metrics["eval_later"] = state.global_step

    evaluated = arguments(
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="later", greater_is_better=True,
    )  # fmt: skip
    trainer = Trainer(Net(), evaluated, train_dataset=ROWS, eval_dataset=ROWS, callbacks=[Adding()])
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (4, 4)
    with pytest.raises(ConfigError, match="eval_later"):
        Trainer(Net(), evaluated, train_dataset=ROWS, eval_dataset=ROWS).train()


def test_an_argument_that_a_run_reads_no_more_is_not_changed_in_silence(
    arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Changing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            args.gradient_accumulation_steps = 2 if state.global_step < 3 else 3

    with caplog.at_level("WARNING", "windlass"):
        Trainer(Net(), arguments(logging_steps=1), train_dataset=ROWS, callbacks=[Changing()]).train()
    warned = [line for line in caplog.messages if "gradient_accumulation_steps" in line]
    assert len(warned) == 2
    assert ["from 1 to 2" in warned[0], "from 1 to 3" in warned[1]] == [True, True]
    assert all("goes on with 1" in line for line in warned)


@pytest.mark.parametrize("name", ["_run_epoch", "_nested_gather"])
def test_an_override_that_is_never_called_is_refused_by_name(arguments: Any, name: str) -> None:
    def never(self: Any, *args: Any) -> Any:
        raise AssertionError

    trainer = type("Copied", (Trainer,), {name: never})(Net(), arguments(), train_dataset=ROWS)
    with pytest.raises(ConfigError, match=name):
        trainer.train()


def test_an_override_of_loading_the_optimizer_is_called_before_the_first_update(arguments: Any) -> None:
    seen = []

    class Loads(Trainer):
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            seen.append((checkpoint, self.state.global_step, len(self.optimizer.state)))

    Loads(Net(), arguments(save_strategy="steps", save_steps=2), train_dataset=ROWS).train()
    trainer = Loads(Net(), arguments(max_steps=6), train_dataset=ROWS)
    trainer.train(resume_from_checkpoint=True)
    assert seen == [(None, 0, 0), (str(Path(trainer.args.output_dir, "checkpoint-4")), 4, 2)]


def test_tensors_of_all_ranks_are_gathered_for_scripts_that_ask(arguments: Any) -> None:
    trainer = Trainer(Net(), arguments(), train_dataset=ROWS)
    assert trainer._nested_gather({"a": torch.ones(2)}, "losses")["a"].tolist() == [1, 1]


# --- what is read between updates -------------------------------------------------------------------------------------


def test_after_an_evaluation_the_model_stays_in_evaluation_mode_until_the_next_step(arguments: Any) -> None:
    modes: list[tuple[str, bool]] = []

    class Notes(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            modes.append(("evaluate", model.training))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            modes.append(("step", model.training))

    class Steps(Trainer):
        def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            modes.append(("training_step", model.training))
            return super().training_step(model, *args, **kwargs)

    args = arguments(eval_strategy="steps", eval_steps=2)
    trainer = Steps(Net(), args, train_dataset=ROWS, eval_dataset=ROWS, callbacks=[Notes])
    trainer.train()
    assert {mode for name, mode in modes if name == "evaluate"} == {False}
    assert {mode for name, mode in modes if name != "evaluate"} == {True}
    trainer.evaluate()
    assert not trainer.model.training
    trainer.train()
    assert {mode for name, mode in modes if name == "training_step"} == {True}


def test_a_callback_that_leaves_evaluation_mode_on_does_not_train_in_it(arguments: Any) -> None:
    modes: list[bool] = []

    class Samples(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.eval()

    class Own(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            modes.append(model.training)
            loss: Tensor = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()

    Own(Net(), arguments(), train_dataset=ROWS, callbacks=[Samples]).train()
    assert modes
    assert all(modes)


def test_a_schedule_of_the_script_steps_while_gradients_exist(arguments: Any) -> None:
    model, seen = Net(), []

    class Looks(torch.optim.lr_scheduler.LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            seen.append(model.linear.weight.grad is not None)
            super().step(epoch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = Looks(optimizer, lambda step: 1.0)
    seen.clear()
    Trainer(model, arguments(), train_dataset=ROWS, optimizers=(optimizer, schedule)).train()
    assert seen == [True] * 4


# --- what is refused, and what errors name ----------------------------------------------------------------------------


def test_a_data_loader_in_place_of_a_dataset_is_refused(arguments: Any) -> None:
    loader = DataLoader(ROWS, batch_size=4)
    with pytest.raises(ConfigError, match=r"train_dataset='a DataLoader'.*get_train_dataloader"):
        Trainer(Net(), arguments(), train_dataset=loader).train()
    with pytest.raises(ConfigError, match=r"eval_dataset='a DataLoader'.*get_eval_dataloader"):
        Trainer(Net(), arguments(), eval_dataset=loader).evaluate()


def test_an_optimizer_of_another_model_is_refused(arguments: Any) -> None:
    foreign = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"optimizers='SGD'.*no parameter of this model"):
        Trainer(Net(), arguments(), train_dataset=ROWS, optimizers=(foreign, None)).train()


def test_an_error_of_a_forward_names_the_step_and_the_samples(arguments: Any) -> None:
    class Fails(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            if self.training and bool((x == 13).any()):
                raise RuntimeError("unlucky")
            return super().forward(x, labels)

    args = arguments(train_sampling_strategy="sequential")
    with pytest.raises(RuntimeError, match="unlucky") as caught:
        Trainer(Fails(), args, train_dataset=ROWS).train()
    assert "raised in the update of step 4 (samples 12, 13, 14, 15)" in caught.value.__notes__


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_of_one_element_trains_in_any_shape(arguments: Any, shape: tuple[int, ...]) -> None:
    class Shaped(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            outputs = super().forward(x, labels)
            return {**outputs, "loss": outputs["loss"].reshape(shape)} if labels is not None else outputs

    ends = []
    for model in (Net(), Shaped()):
        torch.manual_seed(0)
        nn.init.ones_(model.linear.weight)
        nn.init.zeros_(model.linear.bias)
        trainer = Trainer(
            model, arguments(gradient_accumulation_steps=2), train_dataset=ROWS, eval_dataset=ROWS
        )
        ends.append((trainer.train().training_loss, trainer.evaluate()["eval_loss"]))
    assert ends[0] == ends[1]


def test_a_loss_of_several_elements_is_refused_by_name(arguments: Any) -> None:
    class Unreduced(Trainer):
        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
        ) -> Any:
            return nn.functional.cross_entropy(
                model(inputs["x"])["logits"], inputs["labels"], reduction="none"
            )

    with pytest.raises(ModelError, match=r"compute_loss.*shape \(4,\)"):
        Unreduced(Net(), arguments(), train_dataset=ROWS).train()


def test_label_smoothing_is_not_used_for_a_model_of_independent_labels(arguments: Any) -> None:
    class Independent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.config = SimpleNamespace(problem_type="multi_label_classification")

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.linear(x)
            return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, labels), "logits": logits}

    rows = [{"x": torch.ones(4), "labels": torch.tensor([0.0, 1.0])} for _ in range(8)]
    args = arguments(label_smoothing_factor=0.1)
    with pytest.warns(UserWarning, match="label_smoothing_factor=0.1 is not used"):
        trainer = Trainer(Independent(), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert "eval_loss" in trainer.evaluate()


def test_the_runtime_of_a_run_starts_with_its_training(arguments: Any) -> None:
    class Slow(Trainer):
        def get_train_dataloader(self) -> Any:
            time.sleep(0.5)  # what is prepared before training
            return super().get_train_dataloader()

    metrics = Slow(Net(), arguments(), train_dataset=ROWS).train().metrics
    assert metrics["train_samples_per_second"] == pytest.approx(16 / metrics["train_runtime"], rel=0.01)
    begin = Slow(Net(), arguments(), train_dataset=ROWS)
    before = time.monotonic()
    runtime = begin.train().metrics["train_runtime"]
    assert runtime < time.monotonic() - before - 0.5


def test_names_that_are_read_after_training(arguments: Any) -> None:
    trainer = Trainer(Net(), arguments(label_smoothing_factor=0.1), train_dataset=ROWS)
    trainer.train()
    assert trainer.deepspeed is None
    assert (trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled) == (False, False)
    assert trainer.hub_model_id is None
    assert trainer.current_flos == trainer.state.total_flos
    assert trainer._train_batch_size == 4
    assert trainer._get_output_dir(trial=None) == trainer.args.output_dir
    logits, labels = torch.randn(3, 2), torch.tensor([0, 1, -100])
    smoothed = trainer.label_smoother({"logits": logits}, labels)
    expected = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    assert torch.equal(smoothed, expected)


def test_a_script_may_declare_that_its_model_takes_no_count(arguments: Any) -> None:
    given = []

    class Divides(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
            given.append("num_items_in_batch" in kwargs)
            return super().forward(x, labels)

    trainer = Trainer(Divides(), arguments(), train_dataset=ROWS)
    assert trainer.model_accepts_loss_kwargs
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    assert not any(given)
    assert not trainer.model_accepts_loss_kwargs


def test_the_micro_batches_of_an_update_are_known_while_it_runs(arguments: Any) -> None:
    seen = []

    class Reads(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(self.current_gradient_accumulation_steps)
            return super().compute_loss(model, inputs, *args, **kwargs)

    args = arguments(gradient_accumulation_steps=3, max_steps=2)
    trainer = Reads(Net(), args, train_dataset=ROWS)
    assert trainer.current_gradient_accumulation_steps == 3
    trainer.train()
    assert seen[-4:] == [3, 3, 3, 1]
    trainer.current_gradient_accumulation_steps = 2
    assert trainer.current_gradient_accumulation_steps == 2
    trainer.train()
    assert seen[4:] == seen[:4]


def test_the_state_of_the_accelerator_has_the_plugins(arguments: Any) -> None:
    state = Trainer(Net(), arguments(), train_dataset=ROWS).accelerator.state
    assert state.deepspeed_plugin is state.deepspeed_plugins is state.fsdp_plugin is None
    config = {"version": 2, "activation_checkpointing": True, "forward_prefetch": True}
    args = arguments(fsdp="shard_grad_op offload", fsdp_config=config)
    plugin = Trainer(Net(), args, train_dataset=ROWS).accelerator.state.fsdp_plugin
    assert (plugin.fsdp_version, plugin.activation_checkpointing, plugin.cpu_offload) == (2, True, True)
    assert (plugin.reshard_after_forward, plugin.forward_prefetch) == (False, True)
    assert not list(plugin.objections())


@pytest.mark.parametrize("wanted", [True, False])
def test_a_script_restores_the_states_of_its_callbacks(arguments: Any, wanted: bool) -> None:
    args = arguments(restore_callback_states_from_checkpoint=wanted)
    callback = EarlyStoppingCallback(early_stopping_patience=3)
    trainer = Trainer(Net(), args, train_dataset=ROWS, callbacks=[callback])
    stored = {"args": {"early_stopping_patience": 9, "early_stopping_threshold": 0.0}, "attributes": {}}
    trainer.state.stateful_callbacks["EarlyStoppingCallback"] = stored
    trainer._load_callback_state()
    assert callback.early_stopping_patience == (9 if wanted else 3)


def test_a_run_reports_the_memory_of_its_stages(arguments: Any) -> None:
    args = arguments(skip_memory_metrics=False, eval_strategy="steps", eval_steps=2)
    trainer = Trainer(Net(), args, train_dataset=ROWS, eval_dataset=ROWS)
    first = trainer.train().metrics
    evaluated, predicted = trainer.evaluate(), trainer.predict(ROWS).metrics

    def names(metrics: dict[str, Any]) -> set[str]:
        return {name for name in metrics if "_mem_" in name}

    def deltas(stage: str) -> set[str]:
        return {f"{stage}_mem_cpu_alloc_delta", f"{stage}_mem_cpu_peaked_delta"}

    assert names(first) == {"before_init_mem_cpu", *deltas("init"), *deltas("train")}
    assert (names(evaluated), names(predicted)) == (deltas("eval"), deltas("test"))
    assert first["before_init_mem_cpu"] > 0
    assert all(first[name] >= 0 for name in first if name.endswith("peaked_delta"))
    within = [row for row in trainer.state.log_history if "eval_loss" in row][:2]
    assert [names(row) for row in within] == [set(), set()]


def test_the_memory_of_stages_is_not_measured_unless_asked(arguments: Any) -> None:
    trainer = Trainer(Net(), arguments(), train_dataset=ROWS, eval_dataset=ROWS)
    assert not any("mem" in name for name in {**trainer.train().metrics, **trainer.evaluate()})


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_copy_of_a_trainer_is_refused(has_trained: bool, arguments: Any) -> None:
    trainer = Trainer(Net(), arguments(max_steps=1), train_dataset=ROWS)
    if has_trained:
        trainer.train()
    with pytest.raises(TypeError, match="make another one"):
        copy.deepcopy(trainer)
