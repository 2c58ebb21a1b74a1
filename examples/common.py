"""What the scripts of this folder share: arguments, reading files, a tokenizer and a model without a download."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from windlass import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    set_seed,
)

PAD, UNKNOWN, CLASS, SEPARATOR, MASK, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]"


@dataclass
class ModelArguments:
    """The model: one to load, or one to build from a config."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Folder or hub name of a model. Without it one is built from a config."},
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Folder or name of the config of a new model."}
    )
    model_type: str | None = field(
        default=None, metadata={"help": "Kind of a new model without config_name."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Values of a new model's config: hidden_size=64,num_hidden_layers=2"}
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Folder or name, if not that of the model."}
    )
    vocab_size: int = field(
        default=8000, metadata={"help": "Entries of a new tokenizer, which is trained on the training text."}
    )


@dataclass
class DataArguments:
    """The data: files, or a dataset of the hub."""

    dataset_name: str | None = field(default=None, metadata={"help": "Dataset of the hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(
        default=None, metadata={"help": "A jsonl, csv, tsv or txt file; also .gz."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "The same, for evaluation."})
    test_file: str | None = field(default=None, metadata={"help": "The same, for predictions."})
    column_names: str | None = field(
        default=None, metadata={"help": "Columns of a csv or tsv file without a header line: text,label"}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first so many."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "The same, for evaluation and predictions."}
    )


def parse(*kinds: Any) -> tuple[Any, ...]:
    """The arguments of the command line; the last of `kinds` are the training arguments, whose seed is set."""
    parsed = HfArgumentParser(kinds).parse_args_into_dataclasses()
    args = parsed[-1]
    if not (args.do_train or args.do_eval or args.do_predict):
        raise SystemExit("nothing to do: give --do_train, --do_eval or --do_predict")
    set_seed(args.seed)
    return parsed


def load_splits(data: Any) -> dict[str, list[dict[str, Any]]]:
    """The splits train, validation and test, as far as they are given."""
    files = {"train": data.train_file, "validation": data.validation_file, "test": data.test_file}
    if data.dataset_name is not None:
        from datasets import load_dataset

        loaded = load_dataset(data.dataset_name, data.dataset_config_name)
        return {name: cut(loaded[name], name, data) for name in files if name in loaded}
    if not any(files.values()):
        raise SystemExit("no data: give --train_file and --validation_file, or --dataset_name")
    columns = data.column_names.split(",") if data.column_names else None
    return {name: cut(read_file(Path(file), columns), name, data) for name, file in files.items() if file}


def cut(rows: Any, split: str, data: Any) -> list[dict[str, Any]]:
    most = data.max_train_samples if split == "train" else data.max_eval_samples
    return [rows[index] for index in range(len(rows) if most is None else min(most, len(rows)))]


def read_file(path: Path, columns: list[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a file; the lines of a txt file are rows with the column "text"."""
    ending = Path(path.name.removesuffix(".gz")).suffix
    if ending in (".csv", ".tsv"):
        quoting = {".csv": {}, ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}[ending]
        # Lines with their ends: a quoted cell may have several.
        return list(csv.DictReader(io.StringIO(_text_of(path), newline=""), columns, **quoting))
    lines = read_lines(path)
    if ending in (".json", ".jsonl"):
        return [json.loads(line) for line in lines if line.strip()]
    return [{"text": line} for line in lines]


def read_lines(path: Path) -> list[str]:
    return _text_of(path).replace("\r\n", "\n").removesuffix("\n").split("\n")


def _text_of(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")


def build_tokenizer(model: ModelArguments, texts: Any, template: str = f"{CLASS} $A {SEPARATOR}") -> Any:
    """The model's tokenizer; or byte pairs of `texts`, the training texts only.

    Args:
        template: what a new tokenizer puts around a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if name := model.tokenizer_name or model.model_name_or_path:
        return AutoTokenizer.from_pretrained(name)
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [PAD, UNKNOWN, CLASS, SEPARATOR, MASK, END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=model.vocab_size,
            special_tokens=specials,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in specials]
    pair = f"{template} $B:1{template.partition('$A')[2]}:1"
    tokenizer.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, cls_token=CLASS, sep_token=SEPARATOR,
        mask_token=MASK, eos_token=END, bos_token=CLASS,
    )  # fmt: skip


def build_model(auto: Any, model: ModelArguments, tokenizer: Any, default_type: str, **config: Any) -> Any:
    """The named model, or a new one from its config.

    Args:
        auto: a class such as `AutoModelForCausalLM`.
        default_type: the kind of a new model for which neither config_name nor model_type is given.
        config: values of the config, which the flags override.
    """
    from transformers import AutoConfig

    if model.model_name_or_path:
        named = AutoConfig.from_pretrained(
            model.config_name or model.model_name_or_path, **labels_only(config)
        )
        return auto.from_pretrained(model.model_name_or_path, config=named)
    given = dict(pair.split("=", 1) for pair in (model.config_overrides or "").split(",") if pair)
    values = {**config, **{name: json.loads(text) for name, text in given.items()}}
    if tokenizer is not None:
        marks = ("pad_token_id", "bos_token_id", "eos_token_id")
        values = {"vocab_size": len(tokenizer), **{m: getattr(tokenizer, m) for m in marks}, **values}
    if model.config_name:
        return auto.from_config(AutoConfig.from_pretrained(model.config_name, **labels_only(values)))
    return auto.from_config(AutoConfig.for_model(model.model_type or default_type, **values))


def labels_only(config: dict[str, Any]) -> dict[str, Any]:
    """What the data says about a model that exists: its classes."""
    return {
        name: config[name]
        for name in ("num_labels", "id2label", "label2id", "problem_type")
        if name in config
    }


def run(trainer: Trainer, args: TrainingArguments) -> dict[str, float]:
    """Train and evaluate as the flags ask; the metrics of the evaluation, which are printed and saved."""
    metrics: dict[str, float] = {}
    if args.do_train:
        output = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", output.metrics)
        trainer.save_metrics("train", output.metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    return metrics


def chosen(splits: dict[str, Any], name: str, wanted: bool) -> Any:
    """The rows of a split if the flags ask for it."""
    if wanted and name not in splits:
        raise SystemExit(f"there is no {name} data: give --{name}_file, or a dataset that has it")
    return splits[name] if wanted else None


# --- scripts that generate text ---------------------------------------------------------------------------------------

SIZES = {
    "d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512,
}  # fmt: skip


@dataclass
class GeneratingArguments(Seq2SeqTrainingArguments):
    """The defaults of scripts that generate text; a flag changes any of them."""

    predict_with_generate: bool = True
    generation_num_beams: int | None = 4


def generate_text(
    model_args: ModelArguments, data: Any, args: GeneratingArguments, splits: dict[str, Any],
    score: Callable[[list[str], list[str]], dict[str, float]],
) -> dict[str, float]:  # fmt: skip
    """Train an encoder-decoder, measure what it generates, and write predictions for the test split.

    Args:
        splits: rows {"source": text, "target": text}.
        score: (generated texts, references) -> metrics.

    Returns:
        The metrics of the validation and the test split, on the main process.
    """
    from transformers import AutoModelForSeq2SeqLM

    texts = (text for row in splits.get("train", ()) for text in (row["source"], row["target"]))
    tokenizer = build_tokenizer(model_args, texts, f"$A {END}")
    model = build_model(
        AutoModelForSeq2SeqLM, model_args, tokenizer, "bart", decoder_start_token_id=tokenizer.pad_token_id,
        max_position_embeddings=max(data.max_source_length, data.max_target_length) + 2, forced_eos_token_id=None,
        **SIZES,
    )  # fmt: skip
    if args.generation_max_length is None:
        args.generation_max_length = data.max_target_length

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        texts, references = (
            decoded(tokenizer, ids) for ids in (prediction.predictions, prediction.label_ids)
        )
        return score(texts, references)

    sets = {
        name: encoded_pairs(chosen(splits, name, wanted), tokenizer, data) if wanted else None
        for name, wanted in (
            ("train", args.do_train),
            ("validation", args.do_eval),
            ("test", args.do_predict),
        )
    }
    trainer = Seq2SeqTrainer(
        model=model, args=args, train_dataset=sets["train"], eval_dataset=sets["validation"],
        processing_class=tokenizer, data_collator=DataCollatorForSeq2Seq(tokenizer, model), compute_metrics=metrics,
    )  # fmt: skip
    found = run(trainer, args)
    if args.do_predict:
        output = trainer.predict(sets["test"], metric_key_prefix="predict")
        trainer.log_metrics("predict", output.metrics)
        trainer.save_metrics("predict", output.metrics)
        found |= output.metrics
        if trainer.is_world_process_zero():
            lines = "".join(f"{text}\n" for text in decoded(tokenizer, output.predictions))
            (Path(args.output_dir) / "generated_predictions.txt").write_text(lines, "utf-8")
    names = score(["a"], ["a"])
    wanted = [f"{split}_{name}" for split in ("eval", "predict") for name in names]
    return {name: found[name] for name in wanted if name in found and trainer.is_world_process_zero()}


def encoded_pairs(rows: list[dict[str, Any]], tokenizer: Any, data: Any) -> list[dict[str, Any]]:
    sources = [data.source_prefix + row["source"] for row in rows]
    ids = tokenizer(sources, truncation=True, max_length=data.max_source_length)["input_ids"]
    targets = [row["target"] for row in rows]
    labels = tokenizer(text_target=targets, truncation=True, max_length=data.max_target_length)["input_ids"]
    return [{"input_ids": source, "labels": target} for source, target in zip(ids, labels, strict=True)]


def decoded(tokenizer: Any, ids: Any) -> list[str]:
    """The texts of token ids that are padded with -100."""
    ids = np.where(ids == -100, tokenizer.pad_token_id, ids)
    return [" ".join(text.split()) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
