"""Facts for a model card that follow from the run: library, task, base model, datasets, results, versions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from windlass.checkpoint.adapters import ADAPTER_CONFIG
from windlass.core.module_state import bare, without_adapters
from windlass.core.tensors import count_elements
from windlass.core.whole_file import parse_json

History = list[dict[str, Any]]

# Packages whose `from_pretrained` reads what is published; the outermost class of a model decides.
_LIBRARIES = ("peft", "sentence_transformers", "diffusers", "timm", "transformers")
# Ends of the names of transformers' classes, and the task of each on the Hub.
_TASKS = {
    "ForCausalLM": "text-generation", "LMHeadModel": "text-generation", "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification", "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering", "ForMultipleChoice": "multiple-choice",
    "ForImageClassification": "image-classification", "ForObjectDetection": "object-detection",
    "ForAudioClassification": "audio-classification", "ForCTC": "automatic-speech-recognition",
    "ForSpeechSeq2Seq": "automatic-speech-recognition", "ForSemanticSegmentation": "image-segmentation",
}  # fmt: skip
_REPOSITORY = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
# How the package datasets names files of the Hub among those that it downloaded.
_SOURCE = re.compile(r"hf://datasets/([\w.-]+(?:/[\w.-]+)?)@")


@dataclass(frozen=True)
class ModelFacts:
    """Facts that follow from a model."""

    kind: str  # the name of its class
    parameters: int | None  # None if only its files are known
    library: str  # the package that reads it, as the Hub names it
    tasks: list[str]  # the tasks of its class; empty if the class name does not show them
    base: str | None  # the repository that it was loaded from
    tags: list[str]


def facts_of(model: nn.Module) -> ModelFacts:
    """The facts of a model in memory."""
    inner: Any = bare(model)
    # With the bases: the class of a script that extends one of transformers is read by transformers.
    packages = [kind.__module__.partition(".")[0] for kind in type(inner).__mro__]
    library = next((package for package in packages if package in _LIBRARIES), "windlass")
    return ModelFacts(
        kind=type(inner).__name__,
        parameters=count_elements(model.parameters()),
        library=library,
        tasks=_tasks(type(without_adapters(inner)).__name__),
        base=base_of(model),
        tags=list(getattr(inner, "model_tags", None) or []),
    )


def facts_of_files(folder: Path) -> ModelFacts:
    """The facts of a saved model, from its configuration."""
    adapter, config = (_read(folder / name) for name in (ADAPTER_CONFIG, "config.json"))
    kind = next(iter(config.get("architectures") or []), None)
    library = "peft" if adapter else "transformers" if "model_type" in config else "windlass"
    base = adapter.get("base_model_name_or_path") or config.get("_name_or_path")
    return ModelFacts(
        kind=str(kind or ("adapter" if adapter else "model")),
        parameters=None,
        library=library,
        tasks=_tasks(str(kind)),
        base=base if isinstance(base, str) and is_repository(base) else None,
        tags=[],
    )


def _tasks(kind: str) -> list[str]:
    return [task for end, task in _TASKS.items() if kind.endswith(end)]


def _read(path: Path) -> dict[str, Any]:
    found = parse_json(path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def base_of(model: nn.Module) -> str | None:
    """The repository that the model was loaded from; None for a folder, which others cannot read."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return name if isinstance(name, str) and is_repository(name) else None


def is_repository(name: str) -> bool:
    """Return True if a model's name can be that of a repository on the Hub."""
    # `from_pretrained` prefers a folder of this name to a repository.
    return bool(_REPOSITORY.fullmatch(name)) and not Path(name).exists()


def datasets_of(dataset: Any) -> dict[str, dict[str, str]]:
    """Datasets of the Hub, by name, with their `config` and `split`; empty for data from elsewhere. `dataset` is one of
    the package `datasets`, a mapping of them, or anything else.
    """
    parts = dataset.values() if isinstance(dataset, Mapping) else [dataset]
    found: dict[str, dict[str, str]] = {}
    for part in parts:
        sources = getattr(getattr(part, "info", None), "download_checksums", None) or {}
        where = {"config": getattr(part, "config_name", None), "split": getattr(part, "split", None)}
        details = {key: str(value) for key, value in where.items() if value is not None}
        found.update({match[1]: details for source in sources if (match := _SOURCE.match(str(source)))})
    return found


def evaluations(history: Iterable[Mapping[str, Any]]) -> History:
    """The evaluations of a run: metrics without their timings."""
    found: dict[Any, dict[str, Any]] = {}
    for entry in history:
        metrics = {
            name: value
            for name, value in entry.items()
            if name.startswith("eval_") and not name.endswith(("_runtime", "_per_second"))
        }
        if metrics:  # several datasets are evaluated at one step
            row = found.setdefault(entry.get("step", ""), {"step": "", "epoch": ""})
            row.update({"step": entry.get("step", ""), "epoch": entry.get("epoch", ""), **metrics})
    return list(found.values())


def results(history: History, best_step: int | None) -> dict[str, float]:
    """The metrics of the published weights, without `eval_`: those of an evaluation after training, else those of
    `best_step`, whose weights were loaded, else the last ones. Only finite numbers, which the Hub's metadata takes.
    """
    ends = [index for index, entry in enumerate(history) if "train_runtime" in entry]
    after = evaluations(history[ends[-1] :]) if ends else []
    found = after or [row for row in evaluations(history) if row["step"] == best_step] or evaluations(history)
    last = found[-1] if found else {}
    return {
        name.removeprefix("eval_"): value
        for name, value in last.items()
        if name.startswith("eval_") and isinstance(value, int | float) and math.isfinite(value)
    }
