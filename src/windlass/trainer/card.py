"""The model card: a README.md with a YAML head for programs and a Markdown body for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from windlass.config.plain_yaml import load_yaml
from windlass.core.events import TrainerState
from windlass.core.output import shown
from windlass.core.plain_text import read_text

_SETTINGS = (
    "learning_rate", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "seed",
    "optim", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "lr_scheduler_type",
    "warmup_steps", "label_smoothing_factor", "bf16", "fp16",
)  # fmt: skip


@dataclass(frozen=True)
class ModelCard:
    """Contents of a card.

    Attributes:
        base: the model that this one was fine-tuned from.
        facts: lists for the YAML head; empty ones are left out.
        settings: the arguments of the run as a plain dict.
        world: number of processes.
    """

    name: str
    model: nn.Module
    base: str | None
    facts: dict[str, list[str]]
    dataset: list[str]
    dataset_args: list[str]
    settings: Mapping[str, Any]
    world: int
    state: TrainerState


def write_card(path: Path, card: ModelCard) -> None:
    """Write the card; tags that an earlier one at `path` had are kept."""
    tags = [*card.facts["tags"], *earlier_tags(path), "windlass"]
    head: dict[str, Any] = {"library_name": "windlass", **card.facts, "tags": list(dict.fromkeys(tags))}
    if card.base:
        head["base_model"] = card.base
    head = {
        key: value[0] if isinstance(value, list) and len(value) == 1 and key != "tags" else value
        for key, value in head.items()
        if value
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n{body(card)}"
    path.write_text(shown(text), encoding="utf-8")


def earlier_tags(path: Path) -> list[str]:
    """The tags in the YAML head of a card; empty if there is no card or no head."""
    if not path.is_file():
        return []
    try:
        parts = read_text(path).split("---\n", 2)
    except (OSError, UnicodeDecodeError):  # too long for a card, or not a text: another program's file
        return []
    if len(parts) < 3 or parts[0].strip():
        return []
    try:
        head = load_yaml(parts[1])[0]
    except yaml.YAMLError:
        return []
    tags = head.get("tags", []) if isinstance(head, dict) else []
    return [str(tag) for tag in (tags if isinstance(tags, list) else [tags])]


def body(card: ModelCard) -> str:
    """The Markdown below the head."""
    origin = f"fine-tuned from {card.base}" if card.base else "trained from scratch"
    data = f" on {', '.join(card.dataset)}" if card.dataset else ""
    detail = f" ({', '.join(card.dataset_args)})" if card.dataset_args else ""
    parameters = sum(p.numel() for p in card.model.parameters())
    settings = [(name, card.settings[name]) for name in _SETTINGS if name in card.settings]
    text = (
        f"# {card.name}\n\n"
        f"A {type(card.model).__name__} of {parameters:,} parameters, {origin}{data}{detail}.\n\n"
        "## Training\n\n"
        f"{card.state.global_step:,} updates, {card.state.epoch:.2f} epochs, {card.world} process(es).\n\n"
        f"{table(('setting', 'value'), settings)}"
    )
    evaluations = evaluated(card.state.log_history)
    if evaluations:
        head = ("step", "epoch", *sorted({name for row in evaluations for name in row} - {"step", "epoch"}))
        rows = [[row.get(name, "") for name in head] for row in evaluations]
        text += f"\n## Evaluation\n\n{table(head, rows)}"
    return text


def evaluated(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations of a run: metrics without their timings."""
    found = []
    for entry in history:
        metrics = {
            name: value
            for name, value in entry.items()
            if name.startswith("eval_") and not name.endswith(("_runtime", "_per_second"))
        }
        if metrics:
            found.append({"step": entry.get("step", ""), "epoch": entry.get("epoch", ""), **metrics})
    return found


def table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; floats with four digits."""
    shown = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    lines = [[cell.replace("|", "/") for cell in row] for row in (head, ["---"] * len(head), *shown)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
