"""The model card: a README.md with a YAML head for programs and a Markdown body for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from windlass.callbacks.charts import text_chart
from windlass.callbacks.page_tables import curve
from windlass.callbacks.run_record import package_versions
from windlass.checkpoint.files import Files
from windlass.checkpoint.manifest import read_manifest
from windlass.config.documents import load_yaml
from windlass.core.events import TrainerState
from windlass.core.output import shown
from windlass.core.whole_file import parse_json, read_text, write_whole
from windlass.trainer import card_facts

CARD = "README.md"
_SETTINGS = (
    "learning_rate", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "seed",
    "num_train_epochs", "max_steps", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay",
    "max_grad_norm", "lr_scheduler_type", "warmup_steps", "label_smoothing_factor", "neftune_noise_alpha", "bf16",
    "fp16", "max_length", "packing", "loss_type", "assistant_only_loss", "completion_only_loss",
)  # fmt: skip
# The most rows of losses or evaluations in a card. Of more, rows at equal distances are kept.
_ROWS = 20


@dataclass(frozen=True)
class CardFacts:
    """Facts that a script gives for the card; empty facts are determined from the run, or left out."""

    name: str
    language: list[str] = field(default_factory=list)
    license: str | None = None
    tags: list[str] = field(default_factory=list)
    base: str | None = None  # the model that this one was fine-tuned from
    tasks: list[str] = field(default_factory=list)
    # Ids of datasets on the Hub; `dataset` their names for people, `dataset_args` their configurations, in the same
    # order
    datasets: list[str] = field(default_factory=list)
    dataset: list[str] = field(default_factory=list)
    dataset_args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Card:
    """The contents of a card."""

    given: CardFacts
    model: card_facts.ModelFacts
    settings: Mapping[str, Any]  # the arguments of the run as a plain dict
    state: TrainerState
    data: Any  # the dataset that was evaluated, or else trained on; None if it is not known
    world: int  # number of processes
    versions: Mapping[str, str]  # of the packages that the run used; empty if they are not known

    @property
    def base(self) -> str | None:
        return self.given.base or self.model.base

    @property
    def datasets(self) -> dict[str, dict[str, str]]:
        """Id on the Hub -> name, configuration and split for the results."""
        given = self.given
        if not given.datasets:
            found = card_facts.datasets_of(self.data)
            return {tag: {"name": tag, **details} for tag, details in found.items()}
        names = [*given.dataset, *given.datasets[len(given.dataset) :]]
        described = {tag: {"name": name} for tag, name in zip(given.datasets, names, strict=False)}
        for tag, details in zip(given.datasets, given.dataset_args, strict=False):
            described[tag]["args"] = details
        return described

    @property
    def results(self) -> dict[str, float]:
        best = self.state.best_global_step if self.settings.get("load_best_model_at_end") else None
        return card_facts.results(self.state.log_history, best)


def of_run(
    given: CardFacts,
    model: nn.Module,
    settings: Mapping[str, Any],
    state: TrainerState,
    data: Any,
    world: int,
) -> Card:
    """The card of a model in memory."""
    return Card(given, card_facts.facts_of(model), settings, state, data, world, package_versions())


def of_checkpoint(folder: Path, name: str) -> Card | None:
    """The card of a Trainer's checkpoint; None for one that a loop of the user's own saved, which has no history."""
    if not (folder / "trainer_state.json").is_file():
        return None
    arguments = folder / "training_args.json"
    settings = parse_json(arguments.read_bytes()) if arguments.is_file() else {}
    world = read_manifest(folder, Files()).world_size
    state = TrainerState.load_from_json(folder)
    # The weights of the checkpoint itself, and not of the best one.
    settings = {name: value for name, value in dict(settings).items() if name != "load_best_model_at_end"}
    return Card(CardFacts(name), card_facts.facts_of_files(folder), settings, state, None, world, {})


def write_card(path: Path, card: Card) -> None:
    """Write the card; tags and the licence that an earlier one at `path` had are kept."""
    earlier = earlier_head(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        f"---\n{yaml.safe_dump(head(card, earlier), sort_keys=False, allow_unicode=True)}---\n\n{body(card)}"
    )
    write_whole(path, shown(text))  # a card is published: without secrets


def earlier_head(path: Path) -> dict[str, Any]:
    """The YAML head of a card; empty if there is no card or no head."""
    if not path.is_file():
        return {}
    try:
        parts = read_text(path).split("---\n", 2)
    except (OSError, UnicodeDecodeError):  # too long for a card, or not a text: another program's file
        return {}
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        found = load_yaml(parts[1])[0]
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def head(card: Card, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata, in the Hub's format."""
    given, results = card.given, card.results
    tasks, kept = given.tasks or card.model.tasks, earlier.get("tags") or []
    kept = kept if isinstance(kept, list) else [kept]
    tags = [*given.tags, *map(str, kept), *card.model.tags, "windlass", "generated_from_trainer"]
    found = {
        "library_name": card.model.library,
        "language": given.language,
        "license": given.license or earlier.get("license"),
        "base_model": card.base if card.base and card_facts.is_repository(card.base) else None,
        "pipeline_tag": tasks[0] if tasks else None,
        "tags": list(dict.fromkeys(tags)),
        "datasets": list(card.datasets),
        "metrics": list(results),
        "model-index": _model_index(card, tasks, results) if results else None,
    }
    return {key: value for key, value in found.items() if value}


def _model_index(card: Card, tasks: list[str], results: Mapping[str, float]) -> list[dict[str, Any]]:
    """One entry per task and dataset, each with all metrics. The Hub refuses an entry that lacks one of the three."""
    datasets = [{"type": tag, **details} for tag, details in card.datasets.items()]
    unknown = [{"type": "unknown", "name": ", ".join(card.given.dataset) or "Unknown"}]
    metrics = [{"type": name, "name": name, "value": value} for name, value in results.items()]
    entries = [
        {
            "task": {"type": task, "name": task.replace("-", " ").capitalize()},
            "dataset": data,
            "metrics": metrics,
        }
        for task in tasks or ["other"]
        for data in datasets or unknown
    ]
    plain = yaml.safe_load(yaml.safe_dump(entries))  # copies, so that YAML has no references between entries
    return [{"name": card.given.name, "results": plain}]


def body(card: Card) -> str:
    """The Markdown below the head."""
    given, state, history = card.given, card.state, card.state.log_history
    origin = f"fine-tuned from {card.base}" if card.base else "trained from scratch"
    names = given.dataset or [details["name"] for details in card.datasets.values()]
    data = f" on {', '.join(names)}" if names else ""
    detail = f" ({', '.join(given.dataset_args)})" if given.dataset_args else ""
    size = "" if card.model.parameters is None else f" of {card.model.parameters:,} parameters"
    results = sorted(card.results.items())
    values = {name: value for name, value in card.settings.items() if name in _SETTINGS and value is not None}
    loss = curve(history, "loss")
    drawn = text_chart(loss)
    sections = {
        "Results": table(("metric", "value"), results) if results else "",
        "Loss curve": f"```text\n{drawn}```\n" if drawn else "",
        "Training": f"{state.global_step:,} updates, {state.epoch or 0:.2f} epochs, {card.world} process(es).\n\n"
        + table(("setting", "value"), [(name, values[name]) for name in _SETTINGS if name in values]),
        "Evaluations": _evaluations(card),
        "Versions": table(("package", "version"), card.versions.items()) if card.versions else "",
    }
    opening = f"A {card.model.kind}{size}, {origin}{data}{detail}."
    return f"# {given.name}\n\n{opening}\n" + "".join(
        f"\n## {title}\n\n{text}" for title, text in sections.items() if text
    )


def _evaluations(card: Card) -> str:
    """A table of the evaluations, with the training loss that was last reported before each."""
    found = card_facts.evaluations(card.state.log_history)
    if not found:
        return ""
    losses = curve(card.state.log_history, "loss")
    for row in found:
        earlier = [loss for step, loss in losses if step <= float(row["step"] or 0)]
        row["loss"] = earlier[-1] if earlier else ""
    head = (
        "step",
        "epoch",
        "loss",
        *sorted({name for row in found for name in row if name.startswith("eval_")}),
    )
    every = -(-len(found) // _ROWS)
    kept = found[::-1][::every][::-1]  # the last one among them
    note = f"\n{len(kept)} of {len(found)} evaluations.\n" if len(kept) < len(found) else ""
    return table(head, [[row.get(name, "") for name in head] for row in kept]) + note


def table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; floats with four digits."""
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    lines = [[cell.replace("|", "/") for cell in row] for row in (head, ["---"] * len(head), *cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
