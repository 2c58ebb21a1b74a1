"""What a model card can say without being given it: library, task, base model, datasets, results, versions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from windlass.core.module_state import bare

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


def library_of(model: nn.Module) -> str:
    """The package that reads the model, as the Hub names it."""
    packages = [kind.__module__.partition(".")[0] for kind in type(bare(model)).__mro__]
    return next((package for package in packages if package in _LIBRARIES), "windlass")


def task_of(model: nn.Module) -> list[str]:
    """The task that the name of the model's class tells; empty if it tells none."""
    inner: Any = bare(model)
    base = getattr(inner, "get_base_model", None)  # of a peft model
    name = type(base() if callable(base) else inner).__name__
    return [task for end, task in _TASKS.items() if name.endswith(end)]


def base_of(model: nn.Module) -> str | None:
    """The repository that the model was loaded from; None for a folder, which others cannot read."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return name if isinstance(name, str) and is_repository(name) else None


def is_repository(name: str) -> bool:
    """Return True if a model's name can be that of a repository on the Hub."""
    return bool(_REPOSITORY.fullmatch(name)) and not Path(name).exists()


def datasets_of(dataset: Any) -> dict[str, dict[str, str]]:
    """Datasets of the Hub, by name, with their `config` and `split`; empty for data from elsewhere.

    Args:
        dataset: one of the package `datasets`, a mapping of them, or anything else.
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
