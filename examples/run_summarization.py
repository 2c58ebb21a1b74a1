"""Summarise: an encoder-decoder, measured by ROUGE of what it generates (`pip install rouge-score`).

    python examples/run_summarization.py --train_file train.jsonl --validation_file val.jsonl --text_column article \
        --summary_column highlights --do_train --do_eval --output_dir runs/summaries
    python examples/run_summarization.py --model_name_or_path google-t5/t5-small --source_prefix "summarize: " \
        --dataset_name cnn_dailymail --dataset_config_name 3.0.0 --text_column article --summary_column highlights \
        --do_train --do_eval --output_dir runs/summaries

Predictions for --test_file are written to OUTPUT_DIR/generated_predictions.txt. Without --model_name_or_path a small
BART is built from a config.
"""

from dataclasses import dataclass, field

from common import (
    DataArguments,
    GeneratingArguments,
    ModelArguments,
    chosen,
    generate_text,
    load_splits,
    parse,
)

KINDS = ("rouge1", "rouge2", "rougeL")


@dataclass
class SummaryArguments(DataArguments):
    text_column: str = field(default="text", metadata={"help": "Column with the text."})
    summary_column: str = field(default="summary", metadata={"help": "Column with its summary."})
    source_prefix: str = field(default="", metadata={"help": "Text before every source, for T5."})
    max_source_length: int = field(default=512, metadata={"help": "Longer texts are cut to so many tokens."})
    max_target_length: int = field(
        default=128, metadata={"help": "Longer summaries are cut to so many tokens."}
    )


def rouge(texts, references):
    """Mean F-measures, in percent."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(KINDS, use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {kind: 100 * sum(score[kind].fmeasure for score in scores) / len(scores) for kind in KINDS}


def main():
    model_args, data, args = parse(ModelArguments, SummaryArguments, GeneratingArguments)
    splits = {
        name: [{"source": row[data.text_column], "target": row[data.summary_column]} for row in rows]
        for name, rows in load_splits(data).items()
    }
    chosen(splits, "train", args.do_train or not model_args.model_name_or_path)
    metrics = generate_text(model_args, data, args, splits, rouge)
    for name, value in metrics.items():
        print(f"{name} {value:.2f}")


if __name__ == "__main__":
    main()
