"""Mistakes in scripts: in data, models, arguments, callbacks, and when a run is resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tests.finetuning import small as texts
from tests.reliability.mistakes.mistake import Mistakes
from tests.trainer.small import Net, arguments, bert, llama, rows, token_rows, tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from windlass import (
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

SCRIPTS = Mistakes()
mistake = SCRIPTS.add


def train(folder: Path, model: Any, data: Any, resume: Any = None, **given: Any) -> None:
    """A short run; `given` are arguments of the Trainer, and of TrainingArguments."""
    of_trainer = {
        name: given.pop(name)
        for name in (
            "eval_dataset", "data_collator", "compute_metrics", "compute_loss_func", "callbacks", "processing_class",
            "optimizers",
        )
        if name in given
    }  # fmt: skip
    args = arguments(folder / "run", **given)
    Trainer(model, args, train_dataset=data, **of_trainer).train(resume_from_checkpoint=resume)


def changed(data: list[dict[str, Any]], row: int, **values: Any) -> list[dict[str, Any]]:
    """`data` with other values in one row."""
    return [{**one, **values} if index == row else one for index, one in enumerate(data)]


# --- data -------------------------------------------------------------------------------------------------------------


@mistake(
    "A label outside the classes",
    "row 9 of the training set",
    "column 'labels'",
    "the label 2 ",
    "num_labels=3",
)
def label_outside(folder: Path) -> None:
    train(folder, bert(labels=2), changed(token_rows(16), 9, labels=2))


@mistake("A label of -1, in a table", "row 9 of the training set", "column 'labels'", "the label -1 ", "-100")
def label_outside_in_a_table(folder: Path) -> None:
    train(folder, bert(labels=2), texts.table(changed(token_rows(16), 9, labels=-1)))


@mistake(
    "A label outside the classes of a module of one's own",
    "3 in row 9 of the training set",
    "column 'labels'",
    "4 classes",
)
def label_outside_of_a_module(folder: Path) -> None:
    train(folder, Net(classes=3), changed(rows(16), 9, labels=3), max_steps=8)


@mistake(
    "A label outside the classes, in the evaluation set",
    "row 5 of the evaluation set",
    "column 'labels'",
    "the label 7",
    "num_labels=8",
)
def label_outside_in_evaluation(folder: Path) -> None:
    train(
        folder, bert(labels=2), token_rows(16), eval_dataset=changed(token_rows(8), 5, labels=7), eval_strategy="steps"
    )  # fmt: skip


@mistake(
    "A token id outside the vocabulary",
    "row 3 of the training set",
    "column 'input_ids'",
    "the token 400",
    "20 rows",
    "tokenizer",
)
def token_outside(folder: Path) -> None:
    train(folder, bert(), changed(token_rows(16), 3, input_ids=[4, 5, 400, 6, 7, 8]), max_steps=8)


@mistake(
    "A token id outside an embedding of one's own",
    "column 'ids'",
    "row 26 of the training set: 26",
    "'words' has 24 rows",
)
def token_outside_of_a_module(folder: Path) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(24, 8), nn.Linear(8, 2)

        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            logits = self.head(self.words(ids).mean(1))
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"ids": [1, 2, index], "labels": index % 2} for index in range(30)]
    train(folder, Bag(), data, max_steps=8)


@mistake(
    "Rows longer than the model's positions",
    "of the training set: 40 tokens",
    "16 positions",
    "max_length=16",
)
def row_too_long(folder: Path) -> None:
    train(folder, bert(), token_rows(16, length=40))


@mistake(
    "Rows longer than a rotary model was made for",
    "of the training set: 40 tokens",
    "32 positions",
    warns=True,
)
def row_longer_than_rotary_positions(folder: Path) -> None:
    data = [{"input_ids": [3] * 40, "labels": [3] * 40} for _ in range(8)]
    train(folder, llama(), data)


@mistake("Labels that are words", "column 'labels'", "'pos'", "class_encode_column")
def labels_as_words(folder: Path) -> None:
    train(folder, bert(), [{**row, "labels": "pos"} for row in token_rows(8)])


@mistake("Labels that are words, with a padding collator", "column 'label'", "'pos'", "class_encode_column")
def labels_as_words_with_padding(folder: Path) -> None:
    data = [{**row, "label": "pos", "labels": None} for row in token_rows(8)]
    data = [{name: value for name, value in row.items() if value is not None} for row in data]
    train(folder, bert(), data, data_collator=DataCollatorWithPadding(tokenizer()))


@mistake("Text that was never tokenized", "column 'text'", "tokenize it first", "tokenizer(")
def text_not_tokenized(folder: Path) -> None:
    train(folder, bert(), [{"text": "a good film", "labels": 1} for _ in range(8)])


@mistake("Text that was never tokenized, in a table", "column 'text'", "tokenize it first")
def text_not_tokenized_in_a_table(folder: Path) -> None:
    data = texts.table([{"text": "a good film", "labels": 1} for _ in range(8)])
    train(folder, bert(), data, processing_class=tokenizer())


@mistake("Labels in a column of another name", "no loss", "target", "rename it to 'labels'")
def column_under_another_name(folder: Path) -> None:
    train(folder, Net(), [{"x": row["x"], "target": row["labels"]} for row in rows(8)])


@mistake("Inputs in a column of another name", "features", "takes: x", "rename")
def input_under_another_name(folder: Path) -> None:
    train(folder, Net(), [{"features": row["x"], "labels": row["labels"]} for row in rows(8)])


@mistake("NumPy's float64 for a float32 model", "column 'x'", "float64", "astype('float32')")
def float64_input(folder: Path) -> None:
    train(folder, Net(), [{"x": row["x"].double(), "labels": row["labels"]} for row in rows(8)])


@mistake("Classes given as floats", "column 'labels'", "float32", "int()")
def class_labels_as_floats(folder: Path) -> None:
    train(folder, Net(), [{"x": row["x"], "labels": float(row["labels"])} for row in rows(8)])


@mistake("Labels with one axis too many", "column 'labels'", "[4, 1]", "squeeze")
def labels_with_an_axis_too_many(folder: Path) -> None:
    train(folder, Net(), [{"x": row["x"], "labels": [row["labels"]]} for row in rows(8)])


@mistake("Rows of another width than the model's", "4x4 and 5x3", "x float32 [4, 4]")
def another_width(folder: Path) -> None:
    train(folder, Net(width=5), rows(8, width=4))


@mistake("Rows of several lengths without padding", "input_ids", "DataCollatorWithPadding")
def rows_of_several_lengths(folder: Path) -> None:
    train(folder, bert(), token_rows(4) + token_rows(4, length=5))


@mistake("A value that one row lacks", "'labels'", "samples [11, 14, 9, 5]", "every row the same columns")
def value_missing(folder: Path) -> None:
    data = rows(16)
    del data[9]["labels"]
    train(folder, Net(), data, max_steps=8)


@mistake("NaN in the data", "step 3", "sample 9", "non-finite")
def not_a_number(folder: Path) -> None:
    train(folder, Net(), changed(rows(16), 9, x=torch.full((4,), math.nan)), max_steps=8)


@mistake("An empty training set", "empty")
def no_rows(folder: Path) -> None:
    train(folder, Net(), [])


@mistake("No training set", "train_dataset=")
def no_dataset(folder: Path) -> None:
    train(folder, Net(), None)


@mistake("A DataLoader as the dataset", "train_dataset", "its dataset")
def a_loader_as_dataset(folder: Path) -> None:
    train(folder, Net(), DataLoader(rows(8), batch_size=4))  # type: ignore[arg-type]


@mistake("A DataFrame as the dataset", "train_dataset='a DataFrame'", "to_dict('records')")
def a_frame_as_dataset(folder: Path) -> None:
    import pandas

    train(folder, Net(), pandas.DataFrame({"x": [0.0, 1.0], "labels": [0, 1]}))  # type: ignore[arg-type]


@mistake("A file's name as the dataset", "train_dataset='rows.jsonl'", "load_dataset")
def a_name_as_dataset(folder: Path) -> None:
    train(folder, Net(), "rows.jsonl")  # type: ignore[arg-type]


@mistake("An optimizer in place of a pair", "optimizers='SGD'", "(optimizer, None)")
def an_optimizer_alone(folder: Path) -> None:
    model = Net()
    train(folder, model, rows(8), optimizers=torch.optim.SGD(model.parameters(), lr=0.1))


@mistake("A collator that returns a list", "list of 4", "forward of Net", "return a dict")
def a_list_as_batch(folder: Path) -> None:
    train(folder, Net(), rows(8), data_collator=lambda samples: samples)


@mistake("All splits as the dataset", "train_dataset", "['train', 'test']", "dataset['train']")
def all_splits_as_dataset(folder: Path) -> None:
    import datasets

    table = texts.table(token_rows(8))
    train(folder, bert(), datasets.DatasetDict(train=table, test=table))


@mistake("Evaluation without an evaluation set", "eval_strategy", "eval_dataset")
def evaluation_without_data(folder: Path) -> None:
    train(folder, Net(), rows(8), eval_strategy="epoch")


# --- models and losses ------------------------------------------------------------------------------------------------


@mistake("A model that takes no labels", "Linear takes: input", "no labels", "compute_loss_func")
def model_without_labels(folder: Path) -> None:
    train(folder, nn.Linear(4, 3), [{"input": row["x"], "labels": row["labels"]} for row in rows(8)])


@mistake("A model that returns no loss", "logits", "compute_loss")
def model_without_loss(folder: Path) -> None:
    class Logits(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return {"logits": self.layer(x)}

    train(folder, Logits(), rows(8))


@mistake("A class in place of a model", "Net()")
def class_as_model(folder: Path) -> None:
    train(folder, Net, rows(8))


@mistake("A name in place of a model", "bert-base-uncased", "from_pretrained")
def name_as_model(folder: Path) -> None:
    train(folder, "bert-base-uncased", rows(8))


@mistake("A loss for each row", "shape (4,)", "scalar")
def loss_of_each_row(folder: Path) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")

    train(folder, Net(), rows(8), compute_loss_func=loss)


@mistake("A loss without a gradient", "gradient", "detached")
def detached_loss(folder: Path) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return torch.tensor(float(nn.functional.cross_entropy(outputs["logits"], labels)))

    train(folder, Net(), rows(8), compute_loss_func=loss)


@mistake("No parameter to train", "requires_grad")
def all_frozen(folder: Path) -> None:
    train(folder, Net().requires_grad_(False), rows(8))


# --- arguments --------------------------------------------------------------------------------------------------------


@mistake('learning_rate="1e-4"', "learning_rate='1e-4'", 'float("1e-4")')
def rate_as_text(folder: Path) -> None:
    train(folder, Net(), rows(8), learning_rate="1e-4")


@mistake("A misspelt argument", "learning_rte", "learning_rate")
def misspelt_argument(folder: Path) -> None:
    TrainingArguments(str(folder), learning_rte=1e-4)  # type: ignore[call-arg]


@mistake("A misspelt optimizer", "adamw_trch", "adamw_torch")
def misspelt_optimizer(folder: Path) -> None:
    train(folder, Net(), rows(8), optim="adamw_trch")


@mistake("A misspelt schedule", "'cosin'", "cosine")
def misspelt_schedule(folder: Path) -> None:
    train(folder, Net(), rows(8), lr_scheduler_type="cosin")


@mistake("A negative learning rate", "learning_rate=-0.001")
def negative_rate(folder: Path) -> None:
    train(folder, Net(), rows(8), learning_rate=-1e-3)


@mistake("fp16 and bf16 together", "fp16", "bf16")
def two_precisions(folder: Path) -> None:
    train(folder, Net(), rows(8), bf16=True, fp16=True)


@mistake("A dict in place of the arguments", "TrainingArguments", "dict")
def arguments_as_dict(folder: Path) -> None:
    Trainer(Net(), {"output_dir": str(folder), "learning_rate": 1e-3}, train_dataset=rows(8)).train()  # type: ignore[arg-type]


@mistake("The best model without evaluation", "load_best_model_at_end", "eval_strategy")
def best_without_evaluation(folder: Path) -> None:
    train(folder, Net(), rows(8), load_best_model_at_end=True, save_strategy="epoch")


@mistake("A metric that evaluation does not return", "f1", "eval_loss")
def unknown_metric(folder: Path) -> None:
    train(
        folder, Net(), rows(8), eval_dataset=rows(4), eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=2, load_best_model_at_end=True, metric_for_best_model="f1",
    )  # fmt: skip


@mistake("A global batch that does not divide", "global_batch_size=10", "4")
def uneven_global_batch(folder: Path) -> None:
    train(folder, Net(), rows(16), per_device_train_batch_size=4, global_batch_size=10)


@mistake("Metrics that are not a dict", "compute_metrics", "dict", "float")
def no_metrics_returned(folder: Path) -> None:
    train(
        folder, Net(), rows(8), eval_dataset=rows(4), eval_strategy="steps", eval_steps=2,
        compute_metrics=lambda prediction: 0.5,
    )  # fmt: skip


@mistake("Metrics in place of a function of them", "compute_metrics", "function of an EvalPrediction")
def metrics_that_cannot_be_called(folder: Path) -> None:
    train(folder, Net(), rows(8), compute_metrics={"accuracy": 1.0})


# --- callbacks --------------------------------------------------------------------------------------------------------


class NeedsArguments(TrainerCallback):
    def __init__(self, path: str) -> None:
        self.path = path


class Misspelt(TrainerCallback):
    def on_step_ends(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class Narrow(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any) -> None: ...  # type: ignore[override]


@mistake("A callback without **kwargs", "on_log", "add **kwargs")
def callback_without_keywords(folder: Path) -> None:
    train(folder, Net(), rows(8), callbacks=[Narrow()])


@mistake("A callback class that needs arguments", "NeedsArguments", "path")
def callback_class_with_arguments(folder: Path) -> None:
    train(folder, Net(), rows(8), callbacks=[NeedsArguments])


@mistake("A function as a callback", "callback", "TrainerCallback")
def function_as_callback(folder: Path) -> None:
    train(folder, Net(), rows(8), callbacks=[lambda state: None])


@mistake("A misspelt event of a callback", "on_step_ends", "on_step_end", warns=True)
def misspelt_event(folder: Path) -> None:
    train(folder, Net(), rows(8), callbacks=[Misspelt()])


@mistake("Early stopping without evaluation", "EarlyStoppingCallback", "eval_strategy")
def early_stopping_without_metric(folder: Path) -> None:
    train(folder, Net(), rows(8), callbacks=[EarlyStoppingCallback(early_stopping_patience=2)])


# --- resuming ---------------------------------------------------------------------------------------------------------


@mistake("Resuming where nothing was saved", "No valid checkpoint", '"auto"')
def nothing_to_resume(folder: Path) -> None:
    train(folder, Net(), rows(8), resume=True)


@mistake("A checkpoint that does not exist", "checkpoint-9")
def checkpoint_that_is_absent(folder: Path) -> None:
    train(folder, Net(), rows(8), resume=str(folder / "checkpoint-9"))


@mistake("A checkpoint of another model", "layer.weight", "3, 4", "3, 6")
def checkpoint_of_another_model(folder: Path) -> None:
    train(folder, Net(), rows(8), save_strategy="steps", save_steps=2)
    train(
        folder, Net(width=6), rows(8, width=6), resume=True, save_strategy="steps", save_steps=2, max_steps=6
    )


@mistake("A damaged checkpoint", "model", "checkpoint-4")
def damaged_checkpoint(folder: Path) -> None:
    train(folder, Net(), rows(8), save_strategy="steps", save_steps=4)
    (weights,) = (folder / "run" / "checkpoint-4").glob("model*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    train(folder, Net(), rows(8), resume=str(folder / "run" / "checkpoint-4"), max_steps=6)
