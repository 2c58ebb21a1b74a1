"""Train a language model on text: the next token, in blocks of equal length.

    python examples/run_clm.py --train_file input.txt --do_train --do_eval --block_size 128 --output_dir runs/clm
    python examples/run_clm.py --model_name_or_path gpt2 --dataset_name wikitext \
        --dataset_config_name wikitext-2-raw-v1 --do_train --do_eval --output_dir runs/clm

Without --validation_file the last 5 % of the blocks are for evaluation. Without --model_name_or_path a small Llama is
built from a config.
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
from transformers import AutoModelForCausalLM

from windlass import Trainer, TrainingArguments, default_data_collator

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}


@dataclass
class TextArguments(DataArguments):
    block_size: int = field(default=256, metadata={"help": "Tokens in a sample."})
    text_column: str = field(default="text", metadata={"help": "Column with the text."})


def blocks(rows, tokenizer, data):
    """The texts one after another, cut into blocks; the tokens after the last whole block are left out."""
    texts = [row[data.text_column] + "\n" for row in rows]
    tokens = [
        token
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for token in ids
    ]
    starts = range(0, len(tokens) - data.block_size + 1, data.block_size)
    found = [tokens[start : start + data.block_size] for start in starts]
    if not found:
        raise SystemExit(f"the text has {len(tokens)} tokens, fewer than one block of {data.block_size}")
    return [{"input_ids": ids, "labels": ids} for ids in found]


def main():
    model_args, data, args = parse(ModelArguments, TextArguments, TrainingArguments)
    splits = load_splits(data)
    texts = (row[data.text_column] for row in chosen(splits, "train", True))
    tokenizer = build_tokenizer(model_args, texts)
    model = build_model(
        AutoModelForCausalLM, model_args, tokenizer, "llama", num_key_value_heads=4, tie_word_embeddings=True,
        max_position_embeddings=data.block_size, **SIZES,
    )  # fmt: skip
    train = blocks(splits["train"], tokenizer, data)
    if "validation" in splits:
        held = blocks(splits["validation"], tokenizer, data)
    else:
        count = max(1, len(train) // 20)
        train, held = train[:-count], train[-count:]
    trainer = Trainer(
        model=model, args=args, train_dataset=train, eval_dataset=held, processing_class=tokenizer,
        data_collator=default_data_collator,
    )  # fmt: skip
    metrics = run(trainer, args)
    if metrics and trainer.is_world_process_zero():
        print(f"perplexity {math.exp(metrics['eval_loss']):.2f}")


if __name__ == "__main__":
    main()
