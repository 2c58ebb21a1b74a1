"""Classify sentences and pairs of them: a task of GLUE, or files.

    python examples/run_glue.py --model_name_or_path google-bert/bert-base-cased --task_name mrpc --do_train --do_eval \
        --max_seq_length 128 --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3 \
        --output_dir runs/mrpc --overwrite_output_dir
    python examples/run_glue.py --train_file train.tsv --validation_file dev.tsv --column_names text,label \
        --do_train --do_eval --output_dir runs/own

A file has a column `label`, and one or two of text. Without --model_name_or_path a small BERT is built from a config.
"""

from dataclasses import dataclass, field

import numpy as np
from common import (
    DataArguments,
    ModelArguments,
    build_model,
    build_tokenizer,
    chosen,
    load_splits,
    parse,
    run,
)
from transformers import AutoModelForSequenceClassification

from windlass import DataCollatorWithPadding, Trainer, TrainingArguments

GLUE = "nyu-mll/glue"
# Task -> the columns of its sentences.
TASKS = {
    "cola": ("sentence", None),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence", None),
    "stsb": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass
class GlueArguments(DataArguments):
    task_name: str | None = field(default=None, metadata={"help": "A task of GLUE.", "choices": [*TASKS]})
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are cut to so many tokens."})
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad all samples, not to the longest of a batch."}
    )


def load(data):
    """The splits, with `validation` and `test` also for MNLI, whose splits have other names."""
    if data.task_name is None:
        return load_splits(data)
    data.dataset_name, data.dataset_config_name = GLUE, data.task_name
    if data.task_name != "mnli":
        return load_splits(data)
    from common import cut
    from datasets import load_dataset

    loaded = load_dataset(GLUE, "mnli")
    names = {"train": "train", "validation": "validation_matched", "test": "test_matched"}
    return {name: cut(loaded[whole], name, data) for name, whole in names.items()}


def text_columns(data, row):
    if data.task_name is not None:
        return TASKS[data.task_name]
    texts = [
        name for name, value in row.items() if isinstance(value, str) and name not in ("label", "idx", "id")
    ]
    return (*texts[:2], None)[:2]


def encode(rows, columns, tokenizer, data, classes):
    """Token ids and labels. `classes` is None for a number to predict (STS-B)."""
    first, second = columns
    texts = ([row[first] for row in rows], [row[second] for row in rows] if second else None)
    padding = "max_length" if data.pad_to_max_length else False
    encoded = tokenizer(*texts, truncation=True, max_length=data.max_seq_length, padding=padding)
    labels = [float(row["label"]) if classes is None else classes[str(row["label"])] for row in rows]
    return [
        {**{name: values[i] for name, values in encoded.items()}, "label": label}
        for i, label in enumerate(labels)
    ]


def scores(task, predictions, labels):
    """The metrics of the task: Matthews' or Pearson's correlation, F1, and accuracy."""
    if task == "stsb":
        return {"pearson": float(np.corrcoef(predictions, labels)[0, 1])}
    found = {"accuracy": float(np.mean(predictions == labels))}
    if task in ("mrpc", "qqp", "cola"):
        from sklearn.metrics import f1_score, matthews_corrcoef

        own = {"cola": ("matthews_correlation", matthews_corrcoef)}.get(task, ("f1", f1_score))
        found[own[0]] = float(own[1](labels, predictions))
    return found


def main():
    model_args, data, args = parse(ModelArguments, GlueArguments, TrainingArguments)
    splits = load(data)
    rows = next(iter(splits.values()))
    columns = text_columns(data, rows[0])
    numbers = data.task_name == "stsb" or isinstance(rows[0]["label"], float)
    names = sorted({str(row["label"]) for row in rows})
    classes = None if numbers else {name: index for index, name in enumerate(names)}

    texts = (row[column] for row in rows for column in columns if column)
    tokenizer = build_tokenizer(model_args, texts)
    model = build_model(
        AutoModelForSequenceClassification, model_args, tokenizer, "bert", num_labels=1 if numbers else len(names),
        max_position_embeddings=data.max_seq_length, **SIZES,
    )  # fmt: skip
    if classes is not None:
        model.config.label2id, model.config.id2label = classes, dict(enumerate(names))

    def metrics(prediction):
        logits = prediction.predictions
        return scores(
            data.task_name, logits.squeeze(-1) if numbers else logits.argmax(-1), prediction.label_ids
        )

    sets = {
        split: None
        if chosen(splits, split, wanted) is None
        else encode(splits[split], columns, tokenizer, data, classes)
        for split, wanted in (("train", args.do_train), ("validation", args.do_eval))
    }
    trainer = Trainer(
        model=model, args=args, train_dataset=sets["train"], eval_dataset=sets["validation"],
        processing_class=tokenizer, data_collator=DataCollatorWithPadding(tokenizer), compute_metrics=metrics,
    )  # fmt: skip
    run(trainer, args)


if __name__ == "__main__":
    main()
