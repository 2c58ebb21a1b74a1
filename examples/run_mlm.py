"""Train a masked language model on text: the tokens that a mask hides.

    python examples/run_mlm.py --train_file input.txt --do_train --do_eval --output_dir runs/mlm
    python examples/run_mlm.py --model_name_or_path google-bert/bert-base-cased --dataset_name wikitext \
        --dataset_config_name wikitext-2-raw-v1 --do_train --do_eval --output_dir runs/mlm

Each line is a sample. Without --validation_file the last 5 % of them are for evaluation. Without --model_name_or_path a
small BERT is built from a config.
"""

import math
from dataclasses import dataclass, field

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
from transformers import AutoModelForMaskedLM

from windlass import DataCollatorForLanguageModeling, Trainer, TrainingArguments

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass
class TextArguments(DataArguments):
    max_seq_length: int = field(default=128, metadata={"help": "Longer lines are cut to so many tokens."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens to predict."})
    text_column: str = field(default="text", metadata={"help": "Column with the text."})


def encode(rows, tokenizer, data):
    texts = [text for row in rows if (text := row[data.text_column].strip())]
    ids = tokenizer(texts, truncation=True, max_length=data.max_seq_length)["input_ids"]
    return [{"input_ids": row} for row in ids]


def main():
    model_args, data, args = parse(ModelArguments, TextArguments, TrainingArguments)
    splits = load_splits(data)
    texts = (row[data.text_column] for row in chosen(splits, "train", True))
    tokenizer = build_tokenizer(model_args, texts)
    model = build_model(
        AutoModelForMaskedLM,
        model_args,
        tokenizer,
        "bert",
        max_position_embeddings=data.max_seq_length,
        **SIZES,
    )
    train = encode(splits["train"], tokenizer, data)
    if "validation" in splits:
        held = encode(splits["validation"], tokenizer, data)
    else:
        count = max(1, len(train) // 20)
        train, held = train[:-count], train[-count:]
    trainer = Trainer(
        model=model, args=args, train_dataset=train, eval_dataset=held, processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=data.mlm_probability),
    )  # fmt: skip
    metrics = run(trainer, args)
    if metrics and trainer.is_world_process_zero():
        print(f"perplexity {math.exp(metrics['eval_loss']):.2f}")


if __name__ == "__main__":
    main()
