"""Translate: an encoder-decoder, measured by BLEU of what it generates (`pip install sacrebleu`).

    python examples/run_translation.py --train_file train.de.gz --validation_file val.de.gz --test_file test.de.gz \
        --source_lang de --target_lang en --do_train --do_eval --do_predict --output_dir runs/translation

A file is parallel text (`train.de` beside `train.en`, one sentence a line, or the same .gz), or jsonl with rows
{"translation": {"de": ..., "en": ...}} or {"de": ..., "en": ...}. Predictions are written to
OUTPUT_DIR/generated_predictions.txt. Without --model_name_or_path a small BART is built from a config.
"""

from dataclasses import dataclass, field
from pathlib import Path

from common import (
    DataArguments,
    GeneratingArguments,
    ModelArguments,
    chosen,
    generate_text,
    load_splits,
    parse,
    read_lines,
)

TEXT = (".jsonl", ".json", ".csv", ".tsv")


@dataclass
class TranslationArguments(DataArguments):
    source_lang: str = field(default="de", metadata={"help": "Language to translate from."})
    target_lang: str = field(default="en", metadata={"help": "Language to translate to."})
    source_prefix: str = field(default="", metadata={"help": "Text before every source, for T5."})
    max_source_length: int = field(default=64, metadata={"help": "Longer sources are cut to so many tokens."})
    max_target_length: int = field(default=64, metadata={"help": "Longer targets are cut to so many tokens."})


def load(data):
    """The splits as rows {"source": ..., "target": ...}."""
    files = {"train": data.train_file, "validation": data.validation_file, "test": data.test_file}
    parallel = {
        name: file for name, file in files.items() if file and not file.removesuffix(".gz").endswith(TEXT)
    }
    if parallel:
        limits = {"train": data.max_train_samples}
        return {
            name: parallel_rows(Path(file), data)[: limits.get(name, data.max_eval_samples)]
            for name, file in parallel.items()
        }
    rows = {name: [row.get("translation", row) for row in split] for name, split in load_splits(data).items()}
    source, target = data.source_lang, data.target_lang
    return {
        name: [{"source": row[source], "target": row[target]} for row in split]
        for name, split in rows.items()
    }


def parallel_rows(path, data):
    other = path.with_name(path.name.replace(f".{data.source_lang}", f".{data.target_lang}"))
    sources, targets = read_lines(path), read_lines(other)
    if len(sources) != len(targets) or other == path:
        raise SystemExit(
            f"{path} has {len(sources)} lines and {other} has {len(targets)}: they must be parallel"
        )
    return [{"source": s, "target": t} for s, t in zip(sources, targets, strict=True)]


def bleu(texts, references):
    import sacrebleu

    return {"bleu": sacrebleu.corpus_bleu(texts, [references]).score}


def main():
    model_args, data, args = parse(ModelArguments, TranslationArguments, GeneratingArguments)
    splits = load(data)
    chosen(splits, "train", args.do_train or not model_args.model_name_or_path)
    metrics = generate_text(model_args, data, args, splits, bleu)
    for name, value in metrics.items():
        print(f"{name} {value:.2f}")


if __name__ == "__main__":
    main()
