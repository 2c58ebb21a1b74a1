"""The same model and data through this Trainer and through transformers': events, names, numbers, structures."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.docs.support_table import SECTIONS
from tests.trainer.small import Net, bert, recorder, rows, settings, text_rows, token_rows, weights_hash

import windlass
from windlass import Trainer, TrainingArguments
from windlass.core.errors import ConfigError
from windlass.trainer.uncalled import NEVER_CALLED

transformers = pytest.importorskip("transformers", reason="compares with transformers")
pytest.importorskip("accelerate", reason="transformers' trainer needs it")


def both(folder: Path, model: Any, train: Any = None, evaluation: Any = None, **changes: Any) -> list[Any]:
    """Our Trainer and theirs, on models and data of their own."""
    extra = {name: changes.pop(name) for name in list(changes) if name in _OF_TRAINER}
    made = []
    for package, name in ((windlass, "ours"), (transformers, "theirs")):
        args = package.TrainingArguments(**settings(folder / name, **changes))
        made.append(
            package.Trainer(
                model=model() if not isinstance(model, torch.nn.Module) else model,
                args=args,
                train_dataset=train,
                eval_dataset=evaluation,
                **extra,
            )
        )
    return made


_OF_TRAINER = (
    "compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func", "data_collator", "optimizers",
    "processing_class",
)  # fmt: skip


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def events_of(trainer: Any, package: Any) -> list[tuple[str, int]]:
    watching = recorder(package.TrainerCallback)
    trainer.add_callback(watching)
    trainer.train()
    return list(watching.seen)


CADENCES = [
    {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3},
    {"logging_steps": 3, "eval_strategy": "steps", "save_strategy": "epoch", "gradient_accumulation_steps": 2},
    {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": -1,
     "num_train_epochs": 2},
    {"logging_strategy": "no", "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 0.4,
     "logging_first_step": True},
    {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "eval_delay": 3, "save_strategy": "no"},
    {"logging_strategy": "no", "eval_strategy": "epoch", "eval_delay": 2, "max_steps": 7},
    {"logging_steps": 0.5, "eval_strategy": "steps", "eval_steps": 3, "eval_delay": 9},
    {"logging_steps": 2, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 2, "eval_on_start": True},
    {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "loss"},
]  # fmt: skip


@pytest.mark.parametrize("cadence", CADENCES, ids=range(len(CADENCES)))
def test_the_events_of_a_run_come_in_the_same_order(tmp_path: Path, cadence: dict[str, Any]) -> None:
    ours, theirs = both(tmp_path, Net, rows(10), rows(6, seed=5), **{"max_steps": 5, **cadence})
    assert events_of(ours, windlass) == events_of(theirs, transformers)


def test_what_a_run_reports_has_the_same_names_and_numbers(tmp_path: Path) -> None:
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 2,
        "max_steps": 4,
        "weight_decay": 0.1,
    }
    changes |= {"train_sampling_strategy": "sequential"}
    ours, theirs = both(tmp_path, Net, rows(20), rows(6, seed=5), compute_metrics=accuracy, **changes)
    mine, other = ours.train(), theirs.train()
    assert mine._fields == other._fields
    # Their printer takes `total_flos` out of the metrics that the caller gets.
    assert (mine.global_step, set(mine.metrics) - {"total_flos"}) == (other.global_step, set(other.metrics))
    assert (
        type(mine.metrics["total_flos"])
        is type(ours.state.total_flos)
        is type(theirs.state.total_flos)
        is float
    )
    assert mine.training_loss == pytest.approx(other.training_loss, rel=1e-5)
    assert [set(entry) for entry in ours.state.log_history] == [set(e) for e in theirs.state.log_history]
    for entry, expected in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        for name in entry.keys() & {
            "loss",
            "grad_norm",
            "learning_rate",
            "epoch",
            "eval_loss",
            "eval_accuracy",
        }:
            assert entry[name] == pytest.approx(expected[name], rel=1e-4), name


def test_evaluate_and_predict_name_their_metrics_alike(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, Net, rows(8), rows(6, seed=5), compute_metrics=accuracy)
    mine, other = ours.evaluate(), theirs.evaluate()
    assert set(mine) == {name for name in other if "preparation" not in name}
    assert mine["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)
    mine, other = ours.predict(rows(7)), theirs.predict(rows(7))
    assert mine._fields == other._fields
    assert set(mine.metrics) == {name for name in other.metrics if "preparation" not in name}
    np.testing.assert_allclose(mine.predictions, other.predictions, rtol=1e-6)
    np.testing.assert_array_equal(mine.label_ids, other.label_ids)


class TwoHeads(torch.nn.Module):
    """Two outputs, two label columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)

    def forward(self, x: Any, first_labels: Any = None, second_labels: Any = None) -> Any:
        one, two = self.first(x), self.second(x)
        if first_labels is None or second_labels is None:
            return {"one": one, "two": two}
        loss = torch.nn.functional.cross_entropy(one, first_labels)
        return {"loss": loss + torch.nn.functional.cross_entropy(two, second_labels), "one": one, "two": two}


def test_several_outputs_and_label_names_give_tuples(tmp_path: Path) -> None:
    data = [{"x": r["x"], "first_labels": r["labels"], "second_labels": i % 2} for i, r in enumerate(rows(7))]
    ours, theirs = both(tmp_path, TwoHeads, data, label_names=["first_labels", "second_labels"])
    mine, other = ours.predict(data), theirs.predict(data)
    assert isinstance(mine.predictions, tuple)
    assert isinstance(mine.label_ids, tuple)
    for part, expected in zip(
        [*mine.predictions, *mine.label_ids], [*other.predictions, *other.label_ids], strict=True
    ):
        np.testing.assert_allclose(part, expected, rtol=1e-6)
    assert mine.metrics["test_loss"] == pytest.approx(other.metrics["test_loss"], rel=1e-5)
    ours.train()
    assert len(ours.predict([{"x": r["x"]} for r in rows(5)]).predictions) == 2


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["classifier", "causal"])
def test_label_smoothing_is_theirs(tmp_path: Path, kind: str, accumulation: int) -> None:
    from tests.trainer.small import llama

    model, data = (bert, token_rows(16)) if kind == "classifier" else (llama, text_rows(16))
    changes = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": accumulation, "logging_steps": 1}
    changes |= {"max_steps": 2, "train_sampling_strategy": "sequential"}
    ours, theirs = both(tmp_path, model, data, data, **changes)
    ours.train()
    theirs.train()
    mine, other = ours.state.log_history, theirs.state.log_history
    assert [e["loss"] for e in mine if "loss" in e] == pytest.approx(
        [e["loss"] for e in other if "loss" in e], rel=1e-4
    )
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-4)


def test_compute_loss_func_gets_outputs_labels_and_the_count(tmp_path: Path) -> None:
    counts: list[Any] = []

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        counts.append(None if num_items_in_batch is None else int(num_items_in_batch))
        total = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
        return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)

    changes = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential", "logging_steps": 1}
    ours, theirs = both(tmp_path, Net, rows(16), compute_loss_func=loss, **changes)
    ours.train()
    assert set(counts) == {4}, "of its own micro-batch"
    theirs.train()
    assert 8 in counts
    mine, other = ours.state.log_history, theirs.state.log_history
    assert [e["loss"] for e in mine[:-1]] == pytest.approx([e["loss"] for e in other[:-1]], rel=1e-5)
    assert [e["grad_norm"] for e in mine[:-1]] == pytest.approx(
        [e["grad_norm"] for e in other[:-1]], rel=1e-4
    )


@pytest.mark.parametrize("counting", ["all", "non_padding"])
def test_input_tokens_are_counted_alike(tmp_path: Path, counting: str) -> None:
    from tests.trainer.small import tokenizer

    data = [{"input_ids": [5] * (2 + i % 4), "labels": i % 2} for i in range(12)]
    ours, theirs = both(
        tmp_path, bert, data, include_num_input_tokens_seen=counting, processing_class=tokenizer(), logging_steps=1,
        train_sampling_strategy="sequential", max_steps=3,
    )  # fmt: skip
    ours.train()
    theirs.train()
    assert ours.state.num_input_tokens_seen == theirs.state.num_input_tokens_seen > 0
    for entry, expected in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert set(entry) == set(expected)
        assert entry["num_input_tokens_seen"] == expected["num_input_tokens_seen"]


def test_metrics_hooks_see_the_same(tmp_path: Path) -> None:
    seen: list[Any] = []

    def measure(prediction: Any) -> dict[str, float]:
        seen.append(
            (prediction.predictions, prediction.label_ids, prediction.inputs, np.asarray(prediction.losses))
        )
        return {"size": len(prediction.predictions)}

    ours, theirs = both(
        tmp_path, bert, None, token_rows(7), compute_metrics=measure, include_for_metrics=["inputs", "loss"],
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    assert ours.evaluate()["eval_size"] == theirs.evaluate()["eval_size"] == 7
    mine, other = seen
    for part, expected in zip(mine[:3], other[:3], strict=True):
        np.testing.assert_array_equal(part, expected)
    assert mine[3].shape == other[3].shape


def test_batch_metrics_are_told_of_the_last_batch(tmp_path: Path) -> None:
    calls: dict[str, list[tuple[int, bool]]] = {"ours": [], "theirs": []}
    for name, trainer in zip(calls, both(tmp_path, Net, None, rows(10)), strict=True):

        def measure(prediction: Any, compute_result: bool, name: str = name) -> dict[str, float]:
            assert isinstance(prediction.predictions, torch.Tensor)
            calls[name].append((len(prediction.predictions), compute_result))
            return {"batches": len(calls[name])} if compute_result else {}

        trainer.args.batch_eval_metrics = True
        trainer.compute_metrics = measure
        assert trainer.evaluate()["eval_batches"] == 3
    assert calls["ours"] == calls["theirs"] == [(4, False), (4, False), (2, True)]


def test_several_evaluation_sets_are_named_alike(tmp_path: Path) -> None:
    sets = {"near": rows(5), "far": rows(6, seed=9)}
    ours, theirs = both(tmp_path, Net, rows(8), sets, eval_strategy="epoch", max_steps=-1, num_train_epochs=1)
    mine, other = ours.evaluate(), theirs.evaluate()
    assert set(mine) == {name for name in other if "preparation" not in name}
    assert set(ours.evaluate("far")) == {n for n in theirs.evaluate("far") if "preparation" not in n}
    other = {name for name in theirs.evaluate({"more": rows(3)}) if "preparation" not in name}
    assert set(ours.evaluate({"more": rows(3)})) == other
    ours.train()
    theirs.train()
    assert [set(e) for e in ours.state.log_history] == [
        {n for n in e if "preparation" not in n} for e in theirs.state.log_history
    ]


@pytest.mark.parametrize("loss_only", [True, False])
def test_prediction_loss_only_leaves_metrics_out(tmp_path: Path, loss_only: bool) -> None:
    ours, theirs = both(
        tmp_path, Net, None, rows(6), compute_metrics=accuracy, prediction_loss_only=loss_only
    )
    mine, other = ours.evaluate(), theirs.evaluate()
    assert ("eval_accuracy" in mine) == ("eval_accuracy" in other) == (not loss_only)


def test_weight_decay_groups_keep_their_order(tmp_path: Path) -> None:
    from tests.trainer.small import llama

    for model, decay in itertools.product((bert, llama, TwoHeads), (0.1, 0.0)):
        ours, theirs = both(tmp_path, model, weight_decay=decay)
        assert ours.get_decay_parameter_names(ours.model) == theirs.get_decay_parameter_names(theirs.model)
        groups = []
        for trainer in (ours, theirs):
            names = {id(p): n for n, p in trainer.model.named_parameters()}
            optimizer = trainer.create_optimizer()
            groups.append(
                [([names[id(p)] for p in g["params"]], g["weight_decay"]) for g in optimizer.param_groups]
            )
        assert groups[0] == groups[1]


LENGTHS = [
    (10, {}),
    (10, {"max_steps": 7}),
    (9, {"num_train_epochs": 1.5}),
    (11, {"gradient_accumulation_steps": 2, "num_train_epochs": 3}),
]


@pytest.mark.parametrize(("size", "changes"), LENGTHS)
def test_initial_training_values_are_theirs(tmp_path: Path, size: int, changes: dict[str, Any]) -> None:
    ours, theirs = both(tmp_path, Net, rows(size), **{"max_steps": -1, **changes})
    mine = ours.set_initial_training_values(ours.args, ours.get_train_dataloader())
    assert mine == theirs.set_initial_training_values(theirs.args, theirs.get_train_dataloader())
    assert ours.get_total_train_batch_size(ours.args) == theirs.get_total_train_batch_size(theirs.args)
    assert ours.num_examples(ours.get_train_dataloader()) == theirs.num_examples(
        theirs.get_train_dataloader()
    )


def test_epochs_and_rates_agree_over_uneven_epochs(tmp_path: Path) -> None:
    changes = {"max_steps": -1, "num_train_epochs": 2.5, "gradient_accumulation_steps": 2, "logging_steps": 1}
    changes |= {"lr_scheduler_type": "cosine", "warmup_steps": 0.2}
    ours, theirs = both(tmp_path, Net, rows(21), **changes)
    ours.train()
    theirs.train()
    mine, other = ours.state.log_history, theirs.state.log_history
    assert [e["step"] for e in mine] == [e["step"] for e in other]
    assert [e["epoch"] for e in mine] == pytest.approx([e["epoch"] for e in other])
    assert [e.get("learning_rate") for e in mine] == pytest.approx([e.get("learning_rate") for e in other])
    assert ours.state.max_steps == theirs.state.max_steps


@pytest.mark.parametrize(
    "event", ["on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end", "on_log", "on_epoch_end"]
)
def test_a_rate_that_a_callback_sets_is_that_of_the_next_update(tmp_path: Path, event: str) -> None:
    found, changes = [], {"max_steps": 6, "logging_steps": 1, "train_sampling_strategy": "sequential"}
    trainers = both(tmp_path, Net, rows(12), **changes)
    for trainer, package in zip(trainers, (windlass, transformers), strict=True):
        seen: list[float] = []

        def change(self: Any, args: Any, state: Any, control: Any, seen: Any = seen, **kwargs: Any) -> None:
            seen.extend((state.global_step, kwargs["lr_scheduler"].last_epoch))
            for group in kwargs["optimizer"].param_groups:
                seen.append(group["lr"])
                group["lr"] = group["lr"] * (0.1 if state.global_step in (0, 3) else 1.0)

        trainer.add_callback(type("Change", (package.TrainerCallback,), {event: change})())
        trainer.train()
        found.append((seen, weights_hash(trainer.model)))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1] == found[1][1]


def test_the_state_has_the_same_fields(tmp_path: Path) -> None:
    ours, theirs = both(
        tmp_path, Net, rows(8), rows(4), eval_strategy="steps", eval_steps=2, logging_steps=0.5
    )
    ours.train()
    theirs.train()
    for name in ("max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs",
                 "global_step", "epoch", "is_hyper_param_search", "is_world_process_zero"):  # fmt: skip
        assert getattr(ours.state, name) == getattr(theirs.state, name), name


def test_greater_is_better_follows_the_name(tmp_path: Path) -> None:
    for metric in ("loss", "eval_loss", "accuracy", "eval_a_loss", "lossless"):
        changes = {"load_best_model_at_end": True, "metric_for_best_model": metric, "eval_strategy": "steps",
                   "save_strategy": "steps", "save_steps": 2, "eval_steps": 2}  # fmt: skip
        ours = TrainingArguments(**settings(tmp_path, **changes))
        theirs = transformers.TrainingArguments(**settings(tmp_path, **changes))
        assert ours.greater_is_better == theirs.greater_is_better, metric


def test_the_trained_weights_are_theirs(tmp_path: Path) -> None:
    """Same order of samples, same optimizer: the same weights, up to the order of additions."""
    ours, theirs = both(tmp_path, bert, token_rows(24), train_sampling_strategy="sequential", max_steps=6)
    ours.train()
    theirs.train()
    before = weights_hash(bert())
    assert weights_hash(ours.model) != before
    other = theirs.model.state_dict()
    for name, tensor in ours.model.state_dict().items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-6, msg=name)


class Contrastive(torch.nn.Module):
    """Returns a loss without labels, if asked (or by default), as CLIP does."""

    def __init__(self, default: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: Any, return_loss: bool = True) -> Any:
        made = self.layer(x)
        similar = made @ made.T
        loss = torch.nn.functional.cross_entropy(similar, torch.arange(len(x)))
        return {"loss": loss, "embeds": made} if return_loss else {"embeds": made}


def test_a_model_that_needs_no_labels_is_evaluated(tmp_path: Path) -> None:
    data = [{"x": r["x"]} for r in rows(8)]
    ours, theirs = both(tmp_path, Contrastive, data, data)
    assert ours.can_return_loss
    assert ours.can_return_loss == theirs.can_return_loss
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)
    assert math.isfinite(ours.train().training_loss)
    assert ours.predict(data).predictions.shape == (8, 4)


def test_trainer_constructors_take_the_same_names() -> None:
    import inspect

    theirs = set(inspect.signature(transformers.Trainer.__init__).parameters)
    assert theirs <= set(inspect.signature(Trainer.__init__).parameters)


def test_every_method_of_theirs_is_here() -> None:
    theirs = {name for name in vars(transformers.Trainer) if not name.startswith("_")}
    assert {name for name in theirs if not hasattr(Trainer, name)} == set()


def test_the_privates_that_scripts_override_are_called_or_refused() -> None:
    known = """_get_train_sampler _get_eval_sampler _prepare_inputs _inner_training_loop _run_epoch
    _maybe_log_save_evaluate _save_checkpoint _save _load_from_checkpoint _load_best_model _wrap_model
    _set_signature_columns_if_needed loss_is_scaled_for_ga"""
    assert {
        name for name in known.split() if not hasattr(Trainer, name) and name not in NEVER_CALLED
    } == set()


def test_the_support_table_knows_every_method_and_tells_the_truth(tmp_path: Path) -> None:
    table = SECTIONS["Trainer methods"]
    theirs = {
        name for name, value in vars(transformers.Trainer).items() if callable(value) and name[0] != "_"
    }
    assert theirs - set(table) == set()
    assert {name for name in table if not hasattr(Trainer, name)} == set()
    trainer = Trainer(Net(), windlass.TrainingArguments(**settings(tmp_path)))
    for name, row in table.items():
        if row.status == "refused":
            with pytest.raises(ConfigError, match=name):
                getattr(trainer, name)()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_model_that_returns_its_loss_without_labels(tmp_path: Path, accumulation: int) -> None:
    """As preference trainers configure it: no label names, and a `compute_loss` of their own or of the model."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.layer(x)
            return {"loss": scores.square().mean(), "scores": scores}

    samples = [{"x": row["x"]} for row in rows(16)]
    found = []
    options = {
        "label_names": [],
        "gradient_accumulation_steps": accumulation,
        "max_steps": 2,
        "train_sampling_strategy": "sequential",
    }
    for trainer in both(tmp_path, Own, samples, samples[:5], **options):
        trainer.can_return_loss = True
        loss = trainer.train().training_loss
        found.append((loss, trainer.evaluate()["eval_loss"], trainer.predict(samples[:5])))
    (loss, evaluated, ours), (their_loss, their_evaluated, theirs) = found
    assert (loss, evaluated) == pytest.approx((their_loss, their_evaluated), rel=1e-5)
    assert ours.label_ids == theirs.label_ids == ()
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-5)
    np.testing.assert_allclose(ours.predictions, theirs.predictions, rtol=1e-4)


def test_the_history_and_the_state_have_the_same_names_in_the_same_order(tmp_path: Path) -> None:
    options = {
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "include_num_input_tokens_seen": True, "train_sampling_strategy": "sequential",
        "load_best_model_at_end": True, "metric_for_best_model": "loss",
    }  # fmt: skip
    found = []
    for trainer in both(tmp_path, bert(), token_rows(16), token_rows(4), **options):
        trainer.train()
        path = Path(trainer.args.output_dir, "checkpoint-4", "trainer_state.json")
        theirs = transformers.TrainerState.load_from_json(str(path))
        assert theirs.global_step == 4
        names = [list(row) for row in trainer.state.log_history]
        tokens = [row["num_input_tokens_seen"] for row in trainer.state.log_history]
        found.append((names, tokens, json.loads(path.read_text()).keys()))
    assert found[0] == found[1]
    assert found[0][1][-1] == 16 * 6


def test_states_and_controls_are_written_and_read_by_either_library(tmp_path: Path) -> None:
    rows_of_log = [{"loss": 1.5, "step": 2}]
    for one, other in itertools.permutations((windlass, transformers)):
        state = one.TrainerState(epoch=0.5, global_step=2, log_history=rows_of_log, best_metric=1.5)
        state.save_to_json(str(tmp_path / "state.json"))
        read = other.TrainerState.load_from_json(str(tmp_path / "state.json"))
        assert {**vars(read), "stateful_callbacks": {}} == {**vars(state), "stateful_callbacks": {}}
    controls = [package.TrainerControl(True, True, True, True, True) for package in (windlass, transformers)]
    for reset in ("_new_step", "_new_epoch", "_new_training"):
        for control in controls:
            getattr(control, reset)()
        assert vars(controls[0]) == vars(controls[1])
