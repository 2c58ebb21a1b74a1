"""Sentiment of film reviews: a training loop of one's own, in one process or many.

    python examples/loop.py
    windlass launch --config_file examples/two_processes.yaml examples/loop.py
    windlass launch --config_file examples/fsdp.yaml examples/loop.py
    windlass launch --config_file examples/fsdp.yaml --num_processes 1 examples/loop.py

Data, tokenizer and model are those of `sst2.py`, which does the same through the `Trainer` and takes the same
configuration files. A plain PyTorch loop becomes this one by the lines that name `accelerator`.
"""

import argparse
from pathlib import Path

import torch
from sst2 import ROOT, build_model, encode, read_tsv, train_tokenizer
from torch.utils.data import DataLoader

from windlass import (
    Accelerator,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
    set_seed,
)
from windlass.utils import DataLoaderConfiguration


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=str(ROOT.parent / "shared" / "data" / "sst2"))
    parser.add_argument("--output_dir", default="runs/loop")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=None, help="stop each epoch after so many batches")
    parser.add_argument(
        "--batch_size", type=int, default=32, help="sentences of one update, over all processes"
    )
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--vocab_size", type=int, default=8000)
    parser.add_argument("--log_with", default=None, help="an experiment tracker, such as tensorboard")
    return parser.parse_args()


def build_loaders(args):
    """The tokenizer, and loaders of the training and the dev sentences."""
    train_texts, train_labels = read_tsv(Path(args.data) / "train.tsv")
    dev_texts, dev_labels = read_tsv(Path(args.data) / "dev.tsv")
    tokenizer = train_tokenizer(train_texts, args.vocab_size)
    collate = DataCollatorWithPadding(tokenizer)
    train = encode(tokenizer, train_texts, train_labels, args.max_length)
    dev = encode(tokenizer, dev_texts, dev_labels, args.max_length)
    return (
        tokenizer,
        DataLoader(train, batch_size=args.batch_size, shuffle=True, collate_fn=collate),
        DataLoader(dev, batch_size=64, collate_fn=collate),
    )


def train_epoch(accelerator, model, optimizer, schedule, loader, max_steps):
    """One pass over the training data.

    Returns:
        Mean loss of its updates, on this process's share of the data.
    """
    model.train()
    total, steps = torch.zeros((), device=accelerator.device), 0
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()
        steps += 1
        if steps == max_steps:
            break
    return total / steps


@torch.no_grad()
def accuracy(accelerator, model, loader):
    """Share of the sentences that the model judges rightly; each counts once, on any number of processes."""
    model.eval()
    right = count = 0
    for batch in loader:
        guesses = model(**batch).logits.argmax(-1)
        guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
        right += int((guesses == labels).sum())
        count += len(labels)
    return right / count


def main():
    args = parse_arguments()
    # The batch is that of all processes together, so two of them take the same updates as one.
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        log_with=args.log_with,
        project_dir=args.output_dir,
    )
    set_seed(42)
    tokenizer, train_loader, dev_loader = build_loaders(args)
    model = build_model(tokenizer, args.max_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)
    updates = args.epochs * len(train_loader)
    schedule = get_linear_schedule_with_warmup(optimizer, updates // 10, updates)
    model, optimizer, schedule, train_loader, dev_loader = accelerator.prepare(
        model, optimizer, schedule, train_loader, dev_loader
    )
    accelerator.init_trackers("sst2", config=vars(args))

    for epoch in range(args.epochs):
        loss = train_epoch(accelerator, model, optimizer, schedule, train_loader, args.max_steps)
        mean = accelerator.reduce(loss, reduction="mean").item()
        score = accuracy(accelerator, model, dev_loader)
        accelerator.print(f"epoch {epoch + 1}: loss {mean:.4f}, dev accuracy {score:.4f}")
        accelerator.log({"loss": mean, "dev_accuracy": score}, step=epoch + 1)

    accelerator.save_model(model, args.output_dir)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
