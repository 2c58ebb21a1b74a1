"""The public names of transformers' trainer modules and of accelerate, as they are installed."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TRANSFORMERS = (
    "trainer", "trainer_utils", "trainer_callback", "training_args", "trainer_pt_utils", "optimization",
    "integrations", "integrations.integration_utils", "hyperparameter_search", "data", "data.data_collator",
    "trainer_seq2seq", "training_args_seq2seq", "trainer_optimizer", "trainer_jit_checkpoint",
    "hf_argparser",
)  # fmt: skip
ACCELERATE = (
    "accelerator", "utils", "state", "scheduler", "optimizer", "data_loader", "big_modeling", "hooks", "logging",
    "tracking", "launchers", "local_sgd", "inference", "parallelism_config", "commands",
)  # fmt: skip
# Where several modules of a peer are one of Windlass's.
MERGED = {"integrations.integration_utils": "integrations", "data.data_collator": "data"}


def modules() -> Iterator[tuple[str, str]]:
    """(module of a peer, module of Windlass)"""
    for name in TRANSFORMERS:
        yield f"transformers.{name}", f"windlass.{MERGED.get(name, name)}"
    yield "accelerate", "windlass"
    for name in ACCELERATE:
        yield f"accelerate.{name}", f"windlass.{name}"


@cache
def names_of(peer: str) -> list[str]:
    """The public names of a module: what it defines, and for a package what its `__init__` offers.

    Of transformers' modules also what they have from each other.
    """
    module = importlib.import_module(peer)
    if peer == "accelerate.commands":
        return sorted(
            path.stem for path in Path(module.__file__).parent.iterdir() if path.stem[0] not in "_."
        )
    if peer == "transformers.integrations":
        return sorted(name for name in module.__all__ if not name.startswith("_"))
    path = Path(module.__file__)
    defined = _defined(path) | (_offered(path) if hasattr(module, "__path__") else set())
    # Scripts import from transformers' trainer modules also what these have from each other.
    covered = {name for name, _ in modules()} if peer.startswith("transformers.") else {peer}
    reexported = {
        name for name, value in vars(module).items() if getattr(value, "__module__", None) in covered
    }
    submodules = {name for name, value in vars(module).items() if isinstance(value, types.ModuleType)}
    found = (defined | reexported) - submodules - {"logger"}
    return sorted(name for name in found if not name.startswith("_"))


def _offered(path: Path) -> set[str]:
    """What an `__init__` imports from its own package, whatever is installed; modules are left out."""
    return {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
        if not path.parent.joinpath(*(node.module or "").split("."), f"{alias.name}.py").exists()
    }


def _defined(path: Path) -> set[str]:
    """Names that the top level of a file binds otherwise than by an import."""

    def bound(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.If | ast.Try):
                yield from bound([*node.body, *node.orelse])

    return set(bound(ast.parse(path.read_text("utf-8")).body))


def members_of(cls: type) -> set[str]:
    """The public methods, properties, fields and attributes of a class."""
    found = {*dir(cls), *_declared(cls), *_assigned(cls, ("transformers", "accelerate"))}
    return {name for name in found if not name.startswith("_")}


def has_member(cls: type, name: str) -> bool:
    """Whether a class has a method, a property, a field, or an attribute."""
    return hasattr(cls, name) or name in _declared(cls) or name in _assigned(cls, ("windlass",))


def _declared(cls: type) -> set[str]:
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return fields | {key for base in cls.__mro__ for key in vars(base).get("__annotations__", {})}


@cache
def _assigned(cls: type, packages: tuple[str, ...]) -> set[str]:
    """Attributes that methods of the class, or of its bases in these packages, set on `self`."""
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in packages]
    return {name for base in bases for name in _assigned_in(base.__module__).get(base.__name__, ())}


@cache
def _assigned_in(module: str) -> dict[str, set[str]]:
    """The same for each class at the top level of a module."""
    tree = ast.parse(Path(importlib.import_module(module).__file__).read_text("utf-8"))
    return {
        cls.name: {
            node.attr
            for node in ast.walk(cls)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
    }


def classes() -> Iterator[tuple[str, type, str, str]]:
    """(module of a peer, class of it, module of Windlass, name there) for every public class, once."""
    seen = set()
    for peer, own in modules():
        if peer == "accelerate.commands":
            continue  # its names are those of files
        for name in names_of(peer):
            cls = _class_at(peer, name)
            if cls is not None and cls not in seen:
                seen.add(cls)
                yield peer, cls, own, name


def _class_at(peer: str, name: str) -> type | None:
    try:
        found = getattr(importlib.import_module(peer), name)
    except (AttributeError, ImportError):  # of a package that is not installed
        return None
    return found if isinstance(found, type) else None
