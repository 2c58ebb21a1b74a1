from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import Net, arguments, rows, token_rows
from torch import nn

from windlass import DataError, ModelError, Trainer
from windlass.core.errors import PeerError
from windlass.trainer.batch_faults import BatchFaults, Fed


class Rows:
    """A dataset of its own kind: its columns are not looked at before a run."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def of_bert(own_loss: bool = False, device: str = "cpu") -> BatchFaults:
    pytest.importorskip("transformers")
    from tests.trainer.small import bert

    faults = BatchFaults(torch.device(device))
    faults.begin(bert(labels=2), ["labels"], own_loss, None)
    return faults


def tokens(*ids: int, labels: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([ids] * len(labels)), "labels": torch.tensor(labels)}


def with_label(label: int, at: int = 5) -> Rows:
    samples = rows(8)
    samples[at] = {**samples[at], "labels": label}
    return Rows(samples)


# --- before a forward -------------------------------------------------------------------------------------------------


def test_a_good_batch_passes() -> None:
    of_bert().check(Fed("training", tokens(1, 2, 19, labels=[0, 1, -100])))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (tokens(1, 20, labels=[0]), r"'input_ids', row 7 of the training set: the token 20 .* 20 rows"),
        (tokens(-1, labels=[0]), r"row 7 of the training set: the token -1 "),
        (
            tokens(1, labels=[2]),
            r"'labels', row 7 of the training set: the label 2 .* 2 \(0 to 1\).*num_labels=3",
        ),
        (tokens(1, labels=[-1]), r"the label -1 "),
    ],
)
def test_what_the_model_does_not_have_is_named(batch: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(DataError, match=said):
        of_bert().check(Fed("training", batch, [7]))


def test_labels_of_a_scripts_own_loss_may_be_anything() -> None:
    of_bert(own_loss=True).check(Fed("training", tokens(1, labels=[7])))


def test_a_row_whose_place_is_unknown_is_counted_in_its_batch() -> None:
    with pytest.raises(DataError, match="row 1 of a batch of the evaluation set: the label 9 "):
        of_bert().check(Fed("evaluation", tokens(1, labels=[0, 9])))


def test_all_batches_are_checked_ahead_where_errors_come_late(tmp_path: Path) -> None:
    """On the CPU the same wiring: a device that raises nothing must not be needed."""
    pytest.importorskip("transformers")
    from tests.trainer.small import bert

    assert of_bert(device="cuda").checks_ahead
    assert not of_bert().checks_ahead
    samples = token_rows(16)
    samples[9]["input_ids"] = [4, 5, 400, 6, 7, 8]
    model = bert()
    model.forward = _never_with(model.forward, 400)
    for field in ("train", "eval"):
        data = {"train_dataset": Rows(samples), "eval_dataset": Rows(samples)}
        trainer = Trainer(model, arguments(tmp_path / field, max_steps=8), **data)
        trainer._services.faults.checks_ahead = True
        with pytest.raises(DataError, match=r"row 9 of the (training|evaluation) set: the token 400"):
            trainer.train() if field == "train" else trainer.evaluate()


def _never_with(forward: Any, token: int) -> Any:
    def checked(input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        assert not bool((input_ids == token).any()), "the batch came to the forward"
        return forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    return checked


# --- after a forward that failed --------------------------------------------------------------------------------------


def test_an_evaluation_names_its_row(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path), eval_dataset=with_label(3))
    with pytest.raises(DataError, match=r"3 in row 5 of the evaluation set") as caught:
        trainer.evaluate()
    assert isinstance(caught.value.__cause__, IndexError)


def test_accumulated_micro_batches_name_their_own_rows(tmp_path: Path) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    with pytest.raises(DataError, match="3 in row 5 of the training set"):
        Trainer(Net(), args, train_dataset=with_label(3)).train()


def test_an_error_of_another_kind_is_as_it_was(tmp_path: Path) -> None:
    class Breaks(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return [][1]

    with pytest.raises(IndexError, match="list index out of range") as caught:
        Trainer(Breaks(), arguments(tmp_path), train_dataset=rows(8)).train()
    assert not any("the batch of" in note for note in caught.value.__notes__)


def test_a_wrong_shape_gets_the_shapes_of_the_batch(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        Trainer(Net(width=5), arguments(tmp_path), train_dataset=rows(8)).train()
    assert "the batch of the training set: x float32 [4, 4], labels int64 [4]" in caught.value.__notes__


@pytest.mark.parametrize("error", [PeerError("rank 1 failed"), torch.OutOfMemoryError("out of memory: size")])
def test_errors_that_others_handle_are_left_alone(error: Exception) -> None:
    of_bert().explain(error, Fed("training", tokens(1, 400, labels=[7])))
    assert not getattr(error, "__notes__", [])


def test_labels_of_another_shape_than_the_output_are_not_called_wrong_classes() -> None:
    class Independent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.binary_cross_entropy_with_logits(self.layer(x), labels.float())

    model, faults = Independent(), BatchFaults(torch.device("cpu"))
    faults.begin(model, ["labels"], False, None)
    batch = {"x": torch.randn(2, 4), "labels": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match="must be the same as input size") as caught:
        model(**batch)
    faults.explain(caught.value, Fed("training", batch))
    assert "labels int64 [2]" in caught.value.__notes__[0]


def test_numbers_as_labels_are_named_if_the_loss_takes_classes_and_not_for_another_dtype() -> None:
    faults, numbers = BatchFaults(torch.device("cpu")), torch.ones(2)
    norm = nn.BatchNorm1d(3).bfloat16()
    norm.running_mean = torch.zeros(3)
    faults.begin(norm, ["labels"], False, None)
    for fails, explained in (
        (lambda: nn.functional.cross_entropy(torch.ones(2, 3), numbers), True),
        (lambda: norm(torch.ones(2, 3).bfloat16()), False),
    ):
        with pytest.raises(RuntimeError) as caught:
            fails()
        with pytest.raises(DataError, match="classes are integers") if explained else nullcontext():
            faults.explain(caught.value, Fed("training", {"x": torch.ones(2, 3), "labels": numbers}))


def test_a_batch_without_names_is_no_second_error() -> None:
    faults = BatchFaults(torch.device("cpu"))
    faults.begin(nn.Linear(2, 2), ["labels"], False, None)
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    faults.explain(error, Fed("training", [torch.zeros(2, 3), torch.zeros(2)]))
    assert error.__notes__ == ["the batch of the training set: [float32 [2, 3], float32 [2]]"]


def test_an_assertion_of_a_device_is_explained_by_the_batch() -> None:
    error = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(DataError, match="row 4 of the training set: the token 400") as caught:
        of_bert().explain(error, Fed("training", tokens(1, 400, labels=[0]), [4]))
    assert caught.value.__cause__ is error


def test_arguments_that_a_forward_needs(tmp_path: Path) -> None:
    data = [{"features": row["x"], "labels": row["labels"]} for row in rows(8)]
    with pytest.raises(ModelError, match=r"Net takes: x, labels, and .* columns: features"):
        Trainer(Net(), arguments(tmp_path), train_dataset=Rows(data)).train()


def test_a_loss_function_of_the_script_gets_no_advice_on_labels(tmp_path: Path) -> None:
    data = [{"features": row["x"], "labels": row["labels"]} for row in rows(8)]
    with pytest.raises(ModelError, match="rename the columns"):
        Trainer(
            nn.Linear(4, 3),
            arguments(tmp_path),
            train_dataset=Rows(data),
            compute_loss_func=lambda *_, **__: None,
        ).train()


def test_a_type_error_within_a_forward_of_any_arguments_is_as_it_was(tmp_path: Path) -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, *parts: torch.Tensor) -> Any:
            return self.layer(parts[0]) + "a"

    data = [(row["x"], row["labels"]) for row in rows(8)]
    with pytest.raises(TypeError, match="unsupported operand"):
        Trainer(Joined(), arguments(tmp_path), train_dataset=data).train()


def test_a_model_without_loss_is_named_also_without_names_of_labels(tmp_path: Path) -> None:
    class Lossless(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return {"logits": self.layer(x)}

    data = [{**row, "further": 1} for row in rows(8)]
    with pytest.raises(ModelError, match="returned no loss"):
        Trainer(Lossless(), arguments(tmp_path, label_names=[]), train_dataset=data).train()


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_padding_of_a_computed_position_counts_for_nothing(said: list[str]) -> None:
    pytest.importorskip("transformers")
    from tests.trainer.small import llama

    faults = BatchFaults(torch.device("cpu"))
    mask = torch.zeros(2, 40, dtype=torch.int64)
    mask[:, :32] = 1
    batch = {"input_ids": torch.full((2, 40), 3), "attention_mask": mask}
    faults.begin(llama(), ["labels"], False, None)
    faults.warn_of_length(Fed("training", batch))
    assert not said
    mask[1, :35] = 1
    faults.begin(llama(), ["labels"], False, None)
    faults.warn_of_length(Fed("training", batch, [4, 6]))
    faults.warn_of_length(Fed("training", batch, [4, 6]))
    assert len(said) == 1
    assert "row 6 of the training set: 35 tokens, and the model has 32 positions" in said[0]


@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_a_row_beyond_a_table_of_positions_is_named_also_where_the_loss_is_measured(
    call: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    ids = torch.arange(9)
    data = Rows([{"input_ids": ids, "labels": ids}] * 8)
    made = Trainer(transformers.GPT2LMHeadModel(config), arguments(tmp_path), None, data, data)
    with pytest.raises(DataError, match=r"row \d of the \w+ set: 9 tokens, and the model has 8 positions"):
        getattr(made, call)()
