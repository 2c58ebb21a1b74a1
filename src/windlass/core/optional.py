"""Optional packages: found without importing them, and asked for with the command that installs them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
import sys
from importlib import metadata
from types import ModuleType

from windlass.core.errors import MissingDependencyError, OutdatedDependencyError
from windlass.core.package_remarks import muted_import_remarks

DISTRIBUTION = "windlass-trainer"  # `windlass` on the package index is another project
# import name -> the extra of the distribution that brings it
EXTRAS = {
    "transformers": "hf",
    "tokenizers": "hf",
    "datasets": "datasets",
    "matplotlib": "report",
    "pyarrow": "parquet",
    "submitit": "slurm",
    "ray": "ray",
    "fsspec": "remote",
    "peft": "peft",
    "huggingface_hub": "hub",
    "bitsandbytes": "bnb",
    "torchao": "torchao",
    "deepspeed": "deepspeed",
    "sacrebleu": "metrics",
    "rouge_score": "metrics",
    "sklearn": "images",
    "PIL": "images",
    "shtab": "completion",
    "optuna": "search",
    "lm_eval": "lm-eval",
    "starlette": "ui",
    "uvicorn": "ui",
}


# import name -> the oldest release that works; `pyproject.toml` asks for the same
OLDEST = {"torch": "2.9", "transformers": "5.17", "datasets": "3.0", "peft": "0.18", "torchao": "0.11"}

# import name -> the distribution that brings it, if it has another name and no extra
_DISTRIBUTIONS = {"azureml": "azureml-mlflow"}


def is_available(name: str) -> bool:
    """Whether package `name` is installed. Does not import it."""
    if name in sys.modules:
        return sys.modules[name] is not None
    found = importlib.util.find_spec(name)
    if found is None:
        return False
    # To Python each folder in the working directory is a package, also `wandb` or `swanlab` with the runs of a tracker.
    return found.origin is not None or name in _distributed()


@functools.cache
def _distributed() -> frozenset[str]:
    """The packages that installed distributions brought, those without code of their own included."""
    return frozenset(metadata.packages_distributions())


def is_imported(name: str) -> bool:
    """Whether package `name` was already imported: a value of one of its types can only exist then."""
    return sys.modules.get(name) is not None


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution by its metadata; None if it is not installed. Of one that was installed at
    the first question, the answer stays: what was imported does, too.
    """
    try:
        return _version_by_metadata(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.cache  # every run asks for ten of them, which takes as long as some updates of a small model
def _version_by_metadata(distribution: str) -> str:
    found = metadata.distribution(distribution)
    # Of a text that `found.version` would parse as a whole: the package's readme is in it.
    line = re.search(r"^Version: *(\S+)", found.read_text("METADATA") or "", re.MULTILINE)
    return line[1] if line else found.version


def is_older(package: ModuleType, release: str) -> bool:
    """Whether an imported package is older than a release. Development builds of a release count as it."""
    return _numbers(package.__version__) < _numbers(release)


def check_release(package: ModuleType) -> None:
    """Raise OutdatedDependencyError if an imported package is older than what works."""
    name = package.__name__
    if name in OLDEST and is_older(package, OLDEST[name]):
        command = f'pip install --upgrade "{name}>={OLDEST[name]}"'
        raise OutdatedDependencyError(name, package.__version__, OLDEST[name], command)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release.split("+")[0])[:3])


def install_command(package: str, extra: str | None = None) -> str:
    """Return the command that installs a package: by `extra`, by the extra that brings it, or by its own name."""
    extra = extra or EXTRAS.get(package)
    return (
        f'pip install "{DISTRIBUTION}[{extra}]"'
        if extra
        else f"pip install {_DISTRIBUTIONS.get(package, package)}"
    )


def check_installed(name: str, purpose: str, extra: str | None = None) -> None:
    """Raise MissingDependencyError if package `name` is not installed. Does not import it."""
    if not is_available(name):
        raise _missing(name, purpose, extra)


def require(name: str, purpose: str) -> ModuleType:
    """Import optional package `name`, or raise with the command that installs it.

    `purpose` completes the sentence "... is needed to <purpose>".
    """
    top = name.split(".")[0]
    check_installed(top, purpose)
    try:
        with contextlib.nullcontext() if is_imported(name) else muted_import_remarks():
            found = importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != top:
            raise  # the package is there and is itself broken: its own message says more
        raise _missing(top, purpose) from error
    if name in OLDEST:
        check_release(found)
    return found


def _missing(name: str, purpose: str, extra: str | None = None) -> MissingDependencyError:
    command = install_command(name, extra)
    return MissingDependencyError(
        f"{name} is needed to {purpose}, and it is not installed. Install it with: {command}"
    )
