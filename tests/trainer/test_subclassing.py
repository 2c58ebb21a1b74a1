"""What a script does to a Trainer from outside or in a subclass, without touching anything private."""

from __future__ import annotations

import inspect
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import launch, on_ranks, run_script
from tests.trainer.small import Net, rows
from tests.trainer.test_losses import samples, trainer_for

from windlass import Accelerator, Trainer, TrainingArguments
from windlass.core.errors import ConfigError, WindlassError
from windlass.trainer.uncalled import NEVER_CALLED

ROLLOUTS = Path(__file__).parent / "rollout_run.py"


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    defaults = {
        "max_steps": 3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **{**defaults, **changes})


def three(model: Any, inputs: Any, return_outputs: bool = False) -> Any:
    outputs = model(**inputs)
    return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def four(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    return three(model, inputs, return_outputs)


@pytest.mark.parametrize("function", [three, four])
def test_compute_loss_is_assigned_after_construction(tmp_path: Path, function: Any) -> None:
    expected, assigned = (
        Trainer(Net(), arguments(tmp_path / name), train_dataset=rows(24), eval_dataset=rows(8))
        for name in ("expected", "assigned")
    )
    called = []

    def loss(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return function(*args, **kwargs)

    loss.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    assigned.compute_loss = loss  # type: ignore[method-assign]
    for trainer in (expected, assigned):
        trainer.train()
    assert called
    for ours, theirs in zip(assigned.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert assigned.evaluate()["eval_loss"] == expected.evaluate()["eval_loss"]


def test_a_method_of_any_name_is_overridden_once(tmp_path: Path) -> None:
    """Each public method that a run or an evaluation calls, overridden by one that notes the call."""
    called: set[str] = set()

    def noting(name: str) -> Any:
        method = getattr(Trainer, name)

        def noted(self: Trainer, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return method(self, *args, **kwargs)

        noted.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return noted

    names = [
        "training_step", "compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager",
        "count_targets", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "create_optimizer",
        "create_scheduler", "create_optimizer_and_scheduler", "get_decay_parameter_names", "evaluate", "predict",
        "evaluation_loop", "prediction_step", "log", "save_model", "add_callback", "is_world_process_zero",
        "create_accelerator_and_postprocess", "train", "call_model_init", "_save", "_save_checkpoint",
        "_load_best_model", "_determine_best_metric", "_prepare_inputs", "_get_train_sampler", "_get_eval_sampler",
        "_set_signature_columns_if_needed", "_get_dataloader",
    ]  # fmt: skip
    noted = type("Noted", (Trainer,), {name: noting(name) for name in names})
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    args = arguments(tmp_path, **options, load_best_model_at_end=True)
    trainer = noted(model_init=Net, args=args, train_dataset=rows(24), eval_dataset=rows(8))
    trainer.train()
    trainer.predict(rows(8))
    trainer.save_model()
    assert called == set(names)


def test_the_accelerator_of_a_trainer_is_its_own(tmp_path: Path) -> None:
    """Copies of transformers' method make another one, or read what only its own classes have."""

    class Making(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            self.accelerator = Accelerator()

    class Reading(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            self._build_accelerator_args(fsdp_plugin=None)

    class ReadingArguments(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            self.args.fsdp_plugin_args  # noqa: B018

    args = arguments(tmp_path, max_steps=1)
    for kind, message in (
        (Making, "trainer.accelerator='Accelerator': "),
        (Reading, "'_build_accelerator_args'; "),
        (ReadingArguments, "'fsdp_plugin_args'.*; "),
    ):
        with pytest.raises(WindlassError, match=rf"{message}the Trainer makes its accelerator itself"):
            kind(Net(), args)


def test_a_fault_of_the_scripts_own_there_is_reported_as_it_is(tmp_path: Path) -> None:
    class Noting(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            self.note = re.match("a", "b").group()  # type: ignore[union-attr]

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'group'"):
        Noting(Net(), arguments(tmp_path, max_steps=1))


def test_a_second_call_for_the_accelerator_keeps_it(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path, max_steps=1), train_dataset=rows(8))
    accelerator = trainer.accelerator
    trainer.create_accelerator_and_postprocess()
    assert trainer.accelerator is accelerator
    trainer.train()


def test_a_script_may_let_go_of_the_accelerator_or_never_let_one_be_made(tmp_path: Path) -> None:
    class TrainsByItself(Trainer):
        def __init__(self) -> None:
            self.accelerator = Accelerator(cpu=True)

    trainer = Trainer(Net(), arguments(tmp_path, max_steps=1), train_dataset=rows(8))
    trainer.train()
    trainer.accelerator = None
    assert trainer.accelerator is None
    assert TrainsByItself().accelerator.num_processes == 1


def test_every_public_method_can_be_overridden(tmp_path: Path) -> None:
    """A subclass that replaces all of them at once, each by one that passes on, trains to the same bits."""
    skipped = {"init_hf_repo", "push_to_hub", "hyperparameter_search"}  # refused by name

    def passing(name: str) -> Any:
        method = getattr(Trainer, name)

        def passed(self: Trainer, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs)

        passed.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return passed

    names = [
        name
        for name, value in inspect.getmembers(Trainer, inspect.isfunction)
        if not name.startswith("_") and name not in skipped | NEVER_CALLED.keys()
        and not isinstance(inspect.getattr_static(Trainer, name), staticmethod)
    ]  # fmt: skip
    assert len(names) > 40
    everything = type("Everything", (Trainer,), {name: passing(name) for name in names})
    weights = []
    for kind in (Trainer, everything):
        trainer = kind(
            Net(), arguments(tmp_path / kind.__name__), train_dataset=rows(24), eval_dataset=rows(8)
        )
        trainer.train()
        metrics = trainer.evaluate()
        weights.append([metrics["eval_loss"], *(p.detach().clone() for p in trainer.model.parameters())])
    assert weights[0][0] == weights[1][0]
    assert all(torch.equal(a, b) for a, b in zip(weights[0][1:], weights[1][1:], strict=True))


def test_a_buffer_of_the_scripts_own_survives_a_kill(tmp_path: Path) -> None:
    """Its samples decide the gradients, so a run that is killed and resumed ends with the same bits only with it."""
    run_script(ROLLOUTS, tmp_path / "whole", 0)
    run_script(ROLLOUTS, tmp_path / "killed", 5, expect=-signal.SIGKILL)
    assert "continuing from" in run_script(ROLLOUTS, tmp_path / "killed", 0)
    ours, theirs = (torch.load(tmp_path / name / "end.pt") for name in ("killed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_buffers_are_compared_to_something() -> None:
    """Without its state a buffer starts empty, which changes what is drawn from it."""
    from tests.trainer.rollout_run import Rollouts

    full = Rollouts()
    full.add(torch.ones(2))
    other = Rollouts()
    other.load_state_dict(full.state_dict())
    assert float(other.mean()) == 1.0
    assert float(Rollouts().mean()) == 0.0


def test_registered_objects_go_on_with_another_number_of_processes(tmp_path: Path) -> None:
    """Each process takes the state of its rank; a further one that of rank 0, as accelerate's would."""
    launch(2, ROLLOUTS, tmp_path / "run", 0, 3)
    said = run_script(ROLLOUTS, tmp_path / "run", 0, 6)
    assert "2 process(es) saved a state of a registered object, this run has 1" in said
    kept = re.findall(r"kept \[.*\]", said)
    said = launch(2, ROLLOUTS, tmp_path / "run", 0, 9)
    starts = re.findall(r"begins with (\[.*\])", said)
    assert starts == [kept[-1].removeprefix("kept ")] * 2
    assert starts[0] != "[]"


def test_an_override_that_moves_one_value_is_called_for_nested_ones(tmp_path: Path) -> None:
    """`_prepare_input` moves a value of any depth to the device: a script may know more types than we do."""
    seen: list[type] = []

    class Moving(Trainer):
        def _prepare_input(self, data: Any) -> Any:
            seen.append(type(data))
            return super()._prepare_input(data)

    Moving(Net(), arguments(tmp_path, max_steps=1), train_dataset=rows(8)).train()
    assert {dict, torch.Tensor} <= set(seen)


class Buffered(Trainer):
    """Prepares the batches of an update at once and deals them by a count of its own, as samplers of answers do."""

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        self.dealt.append(inputs["x"].clone())
        return model(**inputs)["loss"]

    def _prepare_inputs(self, inputs: Any) -> Any:
        number = self.calls = getattr(self, "calls", -1) + 1
        if number % 2 == 0:
            self.buffer = [super()._prepare_inputs(inputs), {key: -value for key, value in inputs.items()}]
        return {"x": self.buffer[number % 2]["x"], "labels": self.buffer[0]["labels"]}


def test_a_script_prepares_each_micro_batch_once_and_nothing_else(folder: Path) -> None:
    trainer = trainer_for(
        folder, Buffered, gradient_accumulation_steps=2, train_sampling_strategy="sequential"
    )
    trainer.dealt = []
    trainer.train()
    assert trainer.calls == 5, "three updates of two"
    first = torch.stack([row["x"] for row in samples()])
    assert torch.equal(torch.cat(trainer.dealt[:2]), torch.cat([first[:2], -first[:2]]))


class Ranked(Trainer):
    """Compares the two answers of a row, and has no labels, as reward models do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        first, second = (model(x=inputs[name])["logits"] for name in ("first", "second"))
        loss = -torch.nn.functional.logsigmoid(first - second).mean()
        return (loss, {"first": first, "second": second}) if return_outputs else loss


def pairs_together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    first = torch.stack([row["x"] for row in rows])
    return {"first": first, "second": -first, "return_loss": True}


def measure_without_labels(folder: str) -> tuple[Any, str]:
    told: list[Any] = []
    trainer = trainer_for(
        Path(folder), Ranked, eval_dataset=samples(6), label_names=[], remove_unused_columns=False,
        compute_metrics=lambda found: told.append(found) or {"rows": len(found.predictions[0])},
    )  # fmt: skip
    trainer.data_collator = pairs_together
    return trainer.evaluate()["eval_rows"], repr(told[0].label_ids)


def test_metrics_of_a_loss_without_labels(tmp_path: Path) -> None:
    assert measure_without_labels(str(tmp_path)) == (6, "()")


@pytest.mark.dist
def test_metrics_of_a_loss_without_labels_on_two_ranks(tmp_path: Path) -> None:
    assert on_ranks(2, measure_without_labels, str(tmp_path)) == [[6, "()"]] * 2


def test_copies_of_their_steps_and_evaluation_run_here(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="whose methods scripts copy")
    names = "evaluate", "predict", "evaluation_loop", "prediction_step", "training_step", "compute_loss"
    copied = type("Copied", (Trainer,), {name: getattr(transformers.Trainer, name) for name in names})
    reported = []
    for kind in Trainer, copied:
        options: Any = {"eval_strategy": "steps", "eval_steps": 2, "skip_memory_metrics": False}
        args = arguments(tmp_path / kind.__name__, max_steps=4, **options)
        trainer = kind(Net(), args, train_dataset=rows(8), eval_dataset=rows(5))
        trainer.compute_metrics = lambda p: {"sum": float(p.predictions.sum())}
        trainer.train()
        logged = trainer.state.log_history
        assert "train_mem_cpu_alloc_delta" in logged[-1], "an evaluation within it does not end its stage"
        reported.append([*logged, {"rows": len(trainer.predict(rows(5)).predictions)}])
    ours, theirs = reported
    for one, other in zip(ours, theirs, strict=True):
        for name in {"eval_loss", "eval_sum", "train_loss", "rows"} & one.keys():
            assert other[name] == pytest.approx(one[name], rel=1e-6), name


def test_another_way_to_save_beside_the_inherited_one_does_not_refuse_the_run(tmp_path: Path) -> None:
    """As ms-swift has one for another engine; it would fail only where the script takes it."""

    class Mine(Trainer):
        elsewhere = False

        def _save_checkpoint(self, *args: Any) -> None:
            self._own_way(*args) if self.elsewhere else super()._save_checkpoint(*args)

        def _own_way(self, model: Any, trial: Any) -> None:
            self._push_from_checkpoint(self.args.output_dir)

    trainer = Mine(Net(), arguments(tmp_path, save_strategy="steps", save_steps=2), train_dataset=rows(8))
    trainer.train()
    assert (tmp_path / f"checkpoint-{trainer.state.global_step}").is_dir()

    class Rotating(Mine):
        def _save_checkpoint(self, *args: Any) -> None:
            super()._save_checkpoint(*args)
            self._rotate_checkpoints()

    with pytest.raises(ConfigError, match="calls _rotate_checkpoints, which Windlass does"):
        Rotating(Net(), arguments(tmp_path, save_strategy="steps"), train_dataset=rows(8)).train()


def test_a_way_to_save_passes_on_all_that_it_gets(tmp_path: Path) -> None:
    """To a class between it and the Trainer, which takes the trial of a search, as those of TRL do."""

    class Between(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)

    class Mine(Between):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            super()._save_checkpoint(*args, **kwargs)

    Mine(Net(), arguments(tmp_path, save_strategy="steps", max_steps=1), train_dataset=rows(8)).train()
    assert (tmp_path / "checkpoint-1").is_dir()


class Declared:
    state: Any = None  # for a type checker


class Declaring(Declared, Trainer):
    args = None  # type: ignore[assignment]
    accelerator: Any = None
    compute_loss_func = None  # type: ignore[assignment]


def test_attributes_that_are_declared_with_values_are_those_of_the_trainer(tmp_path: Path) -> None:
    class Further(Declaring):
        control: Any = None

    args = arguments(tmp_path, max_steps=2)
    trainer = Further(Net(), args, train_dataset=rows(8))
    assert trainer.args is args
    assert trainer.train().global_step == trainer.state.global_step == 2
    assert trainer.accelerator.num_processes == 1
    assert trainer.compute_loss_func is None


def test_what_is_made_to_be_called_stays_declared(tmp_path: Path) -> None:
    class OfClass(Trainer):
        @staticmethod
        def compute_loss_func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            raise AssertionError

        @property
        def state(self) -> Any:
            return "the script's"

    assert OfClass.compute_loss_func is OfClass.__dict__["compute_loss_func"].__func__
    assert isinstance(OfClass.__dict__["state"], property)
    assert OfClass.__dict__["state"] is not Trainer.__dict__["state"]
