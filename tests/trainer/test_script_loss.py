"""A loss of the script's is a mean over the whole update, whatever it is worth, and no matter which code divides."""

from __future__ import annotations

import functools
import json
import logging
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.dist.launch import on_ranks
from tests.trainer.exactness_cases import PlainModel, collate
from tests.trainer.script_loss_cases import (
    FACTORS,
    KINDS,
    MIXED,
    ROWS,
    SPLITS,
    STEPS,
    UNCLEAR,
    WAYS,
    Compares,
    Complete,
    Distilling,
    DividesOnly,
    Growing,
    MultipliesOnly,
    by_hand,
    options,
    resumed_at_each_update,
    run,
    run_loop,
    saving,
    weights_after,
)  # fmt: skip
from tests.trainer.small import Net, arguments, rows

from windlass import LossTerms, ModelError, Trainer, TrainingArguments
from windlass.core.errors import ConfigError
from windlass.trainer.script_loss import NotedCount, names_in_code

TOLERANCE = 1e-12  # of float64 sums in another order
SFT_TOLERANCE = 1e-6  # relative: normalisation layers of its model compute in float32
# A factor at which two processes once halved what was not a plain cross-entropy.
SHORT = [
    *(("compute_loss", kind, 1.6, 3) for kind in KINDS),
    *(("function", kind, 1.6, 3) for kind in ("mixture", "complete")),
    ("sft", "distillation", 2.0, 3),
    *(("sft function", kind, 1.6, 3) for kind in ("mixture", "complete")),
    ("loop", "terms", 1.6, 3),
]
LONG = [
    *(
        (way, kind, factor, accumulation)
        for way in WAYS
        for kind in KINDS
        for factor in FACTORS
        for accumulation in (1, 3)
    ),
    *(("loop", "terms", factor, accumulation) for factor in FACTORS for accumulation in (1, 3)),
]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@functools.cache
def expected(way: str, kind: str, factor: float) -> dict[str, list[float]]:
    if way == "loop":
        return {"weights": by_hand("compute_loss", kind, factor, updates=1)["weights"]}
    return by_hand(way, kind, factor)


def compare(world: int, cases: list[Any], folder: Path) -> None:
    ranks = on_ranks(world, outcomes, folder, world, cases, timeout=1500)
    assert all(rank == ranks[0] for rank in ranks), "ranks hold the same bits"
    for (way, kind, factor, accumulation), found in zip(cases, ranks[0], strict=True):
        for what, values in expected(way, kind, factor).items():
            apart = np.abs(np.array(found[what]) - np.array(values)).max()
            allowed = SFT_TOLERANCE * max(1.0, *map(abs, values)) if way.startswith("sft") else TOLERANCE
            assert apart <= allowed, f"{way}, {kind}, {factor}, {accumulation}: {what} is off by {apart}"


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_every_split_equals_the_loop_written_by_hand(world: int, folder: Path) -> None:
    compare(world, SHORT, folder)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("way", [*WAYS, "loop"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_so_does_every_factor_by_every_way(world: int, way: str, folder: Path) -> None:
    compare(world, [case for case in LONG if case[0] == way], folder)


@pytest.mark.parametrize(
    "kind", ["token_mean", "mixture", "class_weights", "distillation", "all_positions", "count_as_a_number"]
)
def test_a_micro_batch_without_targets_counts_with_what_it_sums(kind: str, folder: Path) -> None:
    got = run("compute_loss", kind, 1.6, folder, 1, 18)
    for what, values in by_hand("compute_loss", kind, 1.6).items():
        assert np.abs(np.array(got[what]) - np.array(values)).max() <= TOLERANCE


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_a_training_step_may_compute_its_loss_itself(world: int, folder: Path) -> None:
    found = on_ranks(world, steps, folder, world)[0]
    assert found.keys() == {name for name, *_ in STEPS}
    hand = np.array(by_hand("compute_loss", "token_mean", 1.0)["weights"])
    for name, weights in found.items():
        assert np.abs(np.array(weights) - hand).max() <= TOLERANCE, name


# --- one loss as long as a run lasts ----------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_is_resumed_at_any_update_has_the_same_bits(world: int, folder: Path) -> None:
    found = on_ranks(world, resumed_runs, folder)[0]
    for name, complete in (("Growing", False), ("Distilling", False), ("Complete", True)):
        runs = found[name]
        assert len(runs) > 2
        assert all(run == runs[0] for run in runs[1:])
        manifest = json.loads((folder / name / "checkpoint-1" / "manifest.json").read_text())
        assert manifest["meta"]["loss"]["complete"] is complete


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.dist
def test_code_that_does_not_show_what_it_divides_by_is_refused_before_the_first_update(folder: Path) -> None:
    _, found = on_ranks(2, ends_of_unclear, folder)
    words = {
        "DividesOnly": "divides by `num_items_in_batch`, and does not multiply by the number of processes (2)",
        "ReadsTheEnvironment": "divides by `num_items_in_batch`, and does not multiply by the number of processes (2)",
        "MultipliesOnly": "does not read `num_items_in_batch`, and multiplies by the number of processes (2)",
        "StepOutOfSight": "divides by `num_items_in_batch`, and does not multiply by the number of processes (2)",
        "Hidden": "is computed with the number of processes (2), which its code does not name",
    }
    for name, expected_words in words.items():
        said = found[name]
        assert expected_words in said
        assert said.count("loss_is_scaled_for_ga") == 1
    assert found["Declared"] == found["Compares"] == "trained"
    assert "num_items_in_batch=None" in found["evaluated"]
    assert "`loss_is_scaled_for_ga`" in found["evaluated"]


@pytest.mark.dist
def test_losses_of_two_kinds_end_every_rank_before_the_first_update(folder: Path) -> None:
    for ends in on_ranks(2, ends_of, MIXED, folder):
        assert len(ends) == 3
        assert all("1 of 2 processes passed LossTerms to backward" in end for end in ends.values())


@pytest.mark.parametrize("cls", [Compares, MultipliesOnly, Complete])
def test_of_a_compiled_model_it_is_not_known_if_the_count_is_read(cls: type[Trainer], folder: Path) -> None:
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "save_strategy": "no"}
    with pytest.raises(ModelError, match=r"the model is compiled.*`loss_is_scaled_for_ga`: True if"):
        saving(cls, folder, **compiled).train()


def test_names_are_found_in_the_code_that_a_script_owns() -> None:
    def helper() -> None:
        WORLD_SIZE  # type: ignore[name-defined]  # noqa: B018, F821

    class Base:
        def loss(self) -> None:
            self.part()

        def part(self) -> None:
            (lambda: self.num_processes)()  # type: ignore[attr-defined]

    class Child(Base):
        def loss(self) -> None:
            super().loss()

    class Other(Base):
        def loss(self) -> None:
            helper()

    class Decorated(Base):
        @functools.cache  # noqa: B019
        def loss(self) -> None:
            super().loss()

    attached = Other()
    attached.loss = types.MethodType(Base.loss, attached)  # type: ignore[method-assign]

    assert "num_processes" in names_in_code([Child().loss])
    assert "num_processes" in names_in_code([Decorated().loss])
    assert "num_processes" in names_in_code([attached.loss])
    assert "num_processes" not in names_in_code([Other().loss])
    assert "WORLD_SIZE" in names_in_code([functools.partial(Other().loss)])
    assert names_in_code([Trainer.compute_loss, len]) == frozenset()


def overriding(code: str) -> type[Trainer]:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
            return model(**inputs)["loss"]

    class Calls(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
            return super().compute_loss(model, inputs, return_outputs, **given)

    class Smooths(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
            assert self.label_smoother is not None
            outputs = model(input_ids=inputs["input_ids"])
            return self.label_smoother(outputs, inputs["labels"], shift_labels=True, **given)

    return {"own": Own, "calls": Calls, "smooths": Smooths, "function": Trainer}[code]


@pytest.mark.parametrize("code", ["own", "function"])
def test_smoothing_that_a_scripts_loss_replaces_is_refused(code: str, folder: Path) -> None:
    function = None
    if code == "function":

        def function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            raise AssertionError("called")

    trainer = smoothed(overriding(code), folder, function)
    replaced = "compute_loss_func" if code == "function" else "the overridden compute_loss"
    with pytest.raises(ConfigError, match=rf"label_smoothing_factor=0\.1.*has no effect: {replaced}"):
        trainer.train()
    assert trainer.state.global_step == 0


class WithLoss(Net):
    """A model that keeps its loss, which it does not have to call to be asked for its options."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.ce = torch.nn.CrossEntropyLoss(**given)


@pytest.mark.parametrize("given", [{"weight": torch.ones(3)}, {"ignore_index": 9}])
def test_smoothing_that_drops_options_of_a_models_loss_is_refused(
    given: dict[str, Any], folder: Path
) -> None:
    trainer = Trainer(WithLoss(**given), arguments(folder, label_smoothing_factor=0.1), train_dataset=rows(8))
    with pytest.raises(
        ConfigError, match=rf"label_smoothing_factor=0\.1: replaces .* {'|'.join(given)}.* of its 'ce'"
    ):
        trainer.train()


def test_labels_that_a_models_loss_ignores_and_that_are_counted_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("windlass"), "propagate", True)
    for given in ({"ignore_index": 9}, {}):
        caplog.clear()
        Trainer(
            WithLoss(**given), arguments(folder / str(len(given)), max_steps=1), train_dataset=rows(8)
        ).train()
        assert ("'ce' of the model ignores labels of 9, which are counted as targets" in caplog.text) is bool(
            given
        )


class OfPixels(torch.nn.Module):
    """Declares the label that its loss leaves out as models of transformers for images do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(semantic_loss_ignore_index=255)
        self.layer = torch.nn.Linear(2, 3).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x).permute(0, 3, 1, 2)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels, ignore_index=255)}


def test_the_label_that_a_model_of_images_declares_to_ignore_is_no_target(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [
        {"x": torch.randn(4, 4, 2, generator=generator).double(), "labels": torch.randint(3, (4, 4))}
        for _ in range(8)
    ]
    for at, row in enumerate(data):
        row["labels"][: at % 4] = 255
    weights = []
    for size in (8, 2):
        torch.manual_seed(0)
        settings = {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": 8 // size,
            "max_steps": 2,
        }
        trainer = Trainer(OfPixels(), arguments(folder / str(size), **settings), train_dataset=data)
        trainer.train()
        weights.append(trainer.model.layer.weight)
    torch.testing.assert_close(*weights, rtol=1e-12, atol=0)


def test_an_override_that_smooths_or_calls_what_does_is_not(folder: Path) -> None:
    losses = []
    for cls in (Trainer, overriding("calls"), overriding("smooths")):
        trainer = smoothed(cls, folder, None)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert losses[2] == pytest.approx(losses[0], rel=1e-12)


def smoothed(cls: type[Trainer], folder: Path, function: Any) -> Trainer:
    torch.manual_seed(0)
    args = TrainingArguments(**{**options(folder, 4, 2), "label_smoothing_factor": 0.1, "max_steps": 2})
    return cls(PlainModel(), args, train_dataset=ROWS, data_collator=collate, compute_loss_func=function)


# --- what each rank runs ----------------------------------------------------------------------------------------------


def end_of(cls: type[Trainer], place: Path) -> str:
    """What ends its training: "trained", or the words of the error."""
    trainer = saving(cls, place / cls.__name__, save_strategy="no", max_steps=2)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    try:
        trainer.train()
    except ModelError as error:
        assert all(map(torch.equal, before, trainer.model.parameters())), "refused, but trained"
        return str(error)
    return "trained"


@pytest.mark.parametrize("by", ["compute_loss", "function"])
def test_an_evaluation_without_training_gives_the_count_too(by: str, folder: Path) -> None:
    for kind in ("token_mean", "complete"):
        torch.manual_seed(0)
        found = WAYS[by](KINDS[kind], 1.6, folder, 3, 2).evaluate(ROWS)["eval_loss"]
        assert found == pytest.approx(by_hand(by, kind, 1.6, updates=0)["evaluated"][0], abs=TOLERANCE)


@pytest.mark.parametrize("terms", [True, False])
def test_reads_of_the_count_are_noted_in_the_first_update_alone(terms: bool, tmp_path: Path) -> None:
    """Noting them costs time in each operation with the count, and one update is enough."""
    kinds: list[type] = []

    class Noted(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            kinds.append(type(num_items_in_batch))
            loss = model(**inputs)["loss"]
            return LossTerms(loss * num_items_in_batch, num_items_in_batch) if terms else loss

    args = TrainingArguments(**options(tmp_path, 2, 2), max_steps=3)
    Noted(PlainModel(), args, train_dataset=ROWS, data_collator=collate).train()
    assert kinds == [NotedCount] * 2 + [torch.Tensor] * 4


def resumed_runs(folder: Path) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    kinds = (Growing, Distilling, Complete)
    return {cls.__name__: resumed_at_each_update(cls, folder / cls.__name__) for cls in kinds}


def steps(folder: Path, world: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    return {name: weights_after(cls, model, folder, world) for name, cls, model in STEPS}


def ends_of_unclear(folder: Path) -> dict[str, str]:
    ends = ends_of(UNCLEAR, folder)
    with pytest.raises(TypeError) as caught:
        saving(DividesOnly, folder).evaluate(ROWS)
    return {**ends, "evaluated": "\n".join(caught.value.__notes__)}


def ends_of(kinds: Sequence[type], folder: Path) -> dict[str, str]:
    torch.set_default_dtype(torch.float64)
    return {cls.__name__: end_of(cls, folder) for cls in kinds}


def outcomes(folder: Path, world: int, cases: list[Any]) -> list[dict[str, Any]]:
    torch.set_default_dtype(torch.float64)
    found: list[dict[str, Any]] = []
    for way, kind, factor, accumulation in cases:
        split = next(split for split in SPLITS[world] if split[1] == accumulation)
        if way == "loop":
            found.append({"weights": run_loop(kind, factor, *split)})
        else:
            found.append(run(way, kind, factor, folder / "run", *split))
    return found
