"""Optional packages are imported inside a function, and each of them in as few files as it takes."""

from __future__ import annotations

import sys
import tomllib

from tests.laws.source import ROOT, Module, imports, modules

CORE = {"torch", "numpy", "safetensors", "yaml"}
# Engines that Windlass replaces: their parts may be read for facts, never leaned on.
NEVER = {"accelerate", "trl", "lightning", "pytorch_lightning", "deepspeed_trainer", "fastai", "composer"}
TRACKERS = (
    "aim", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "mlflow", "neptune", "swanlab", "tensorboard",
    "trackio", "wandb",
)  # fmt: skip
# package -> how many files may import it, and which rooms those are in.
HOMES: dict[str, set[str]] = {
    "transformers": {
        "cli",
        "recipes",
        "trainer",
        "data",
        "config",
        "callbacks",
        "checkpoint",
        "transforms",
        "text",
        "finetuning",
        "forecast",
        "zero",
    },
    "tokenizers": {"recipes"},
    "datasets": {"text"},
    "IPython": {"callbacks"},
    "matplotlib": {"callbacks"},
    "pyarrow": {"text"},
    "submitit": {"cli"},
    "ray": {"cli", "search"},  # the engine for clusters, and the words of a search space
    "fsspec": {"checkpoint"},
    "peft": {"checkpoint"},
    "tqdm": {"utils"},
    "huggingface_hub": {"hub"},
    "bitsandbytes": {"optim"},
    "torchao": {"optim", "transforms"},
    "deepspeed": {"zero"},
    "sacrebleu": {"metrics"},
    "rouge_score": {"metrics"},
    "sklearn": {"recipes"},
    "PIL": {"text"},
    "shtab": {"cli"},
    "optuna": {"search"},
    "lm_eval": {"finetuning"},
    "starlette": {"cli"},
    "uvicorn": {"cli"},
    "torch_xla": {"core"},
    "liger_kernel": {"transforms"},
    **{tracker: {"callbacks"} for tracker in TRACKERS},
}
ONE_FILE = {
    "submitit", "fsspec", "peft", "huggingface_hub", "tqdm", "tokenizers", "matplotlib", "pyarrow", "datasets",
    "bitsandbytes", "deepspeed", "sacrebleu", "rouge_score", "sklearn", "PIL", "shtab", "optuna", "torch_xla",
    "liger_kernel", "starlette", "uvicorn", "lm_eval", *TRACKERS,
}  # fmt: skip


def _top(name: str) -> str:
    return name.split(".")[0]


def _users(package: str) -> list[Module]:
    return [m for m in modules() if any(_top(i.module) == package for i in imports(m))]


def test_only_known_packages() -> None:
    known = CORE | HOMES.keys() | set(sys.stdlib_module_names) | {"windlass"}
    strangers = {
        f"{m.where}: {i.module}" for m in modules() for i in imports(m) if _top(i.module) not in known
    }
    assert not strangers, sorted(strangers)


def test_no_other_engine() -> None:
    found = {f"{m.where}: {i.module}" for m in modules() for i in imports(m) if _top(i.module) in NEVER}
    found |= {m.where for m in modules() for i in imports(m) if i.module.startswith("transformers.trainer")}
    assert not found, sorted(found)


def test_never_at_import_time() -> None:
    early = {
        f"{m.where}:{i.line} imports {i.module}"
        for m in modules()
        for i in imports(m)
        if i.at_import and _top(i.module) in HOMES
    }
    assert not early, sorted(early)


def test_each_in_its_own_home() -> None:
    lost = {m.where: p for p, rooms in HOMES.items() for m in _users(p) if m.room not in rooms}
    assert not lost, lost


def test_one_file_each() -> None:
    many = {p: [m.where for m in _users(p)] for p in ONE_FILE if len(_users(p)) > 1}
    assert not many, many


def test_the_distribution_asks_for_the_core_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = {d.split(">")[0].split("=")[0].strip().lower() for d in project["dependencies"]}
    assert asked == {"torch", "numpy", "safetensors", "pyyaml"}
