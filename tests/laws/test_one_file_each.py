"""Law 3: a strategy, a tracker, an optimizer, a schedule or a kind of task is one file; adding one touches it and one
registry line."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from tests.laws.source import PACKAGE, Module, classes, imports, modules, nodes

from windlass.recipes.tasks import TASKS

# Which bases make a class "one of those" that has a file of its own.
KINDS = {
    "optimizer": {"Optimizer"},
    "executor": {"Executor", "NativeExecutor"},
    "schedule": {"Schedule", "MetricSchedule"},
    "tracker": {"GeneralTracker", "PackageTracker"},
    "task": {"Task", "TextTask"},
}
# Packages whose files are each one thing, and the modules that may know all of them.
FAMILIES = {
    "windlass.optim.optimizers": "windlass.optim.registry",
    "windlass.optim.schedules": "windlass.optim",
    "windlass.callbacks.trackers": "windlass.callbacks.tracker_registry",
    "windlass.recipes.tasks": "windlass.recipes.tasks",
}
# The engines that stand behind the executor protocol. Above the rooms that build them no module asks which one it is.
OWNERS = ("optim", "config", "assemble")
STRATEGIES = {"deepspeed", "fsdp", "fsdp2", "pipeline", "fused_backward"}
NEVER_NAMES_A_STRATEGY = ("windlass.engine.loop", "windlass.engine.feed", "windlass.engine.evaluate")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_at_most_one_in_a_file(kind: str) -> None:
    crowded = {
        module.where: found
        for module in modules()
        if len(found := [name for name, bases in classes(module) if bases & KINDS[kind]]) > 1
    }
    assert not crowded, crowded


@pytest.mark.parametrize(("family", "registry"), sorted(FAMILIES.items()))
def test_members_are_known_to_the_registry_alone(family: str, registry: str) -> None:
    """Members may share a base module, but no module outside imports one past the registry."""
    members = {m.name for m in modules() if m.name.startswith(family + ".")}
    assert len(members) > 3
    strangers = {
        f"{module.where} imports {target}"
        for module in modules()
        if not module.name.startswith((family, registry))
        for item in imports(module)
        for target in (item.module, *(f"{item.module}.{name}" for name in item.names))
        if target in members
    }
    assert not strangers, sorted(strangers)


def _names_compared(module: Module) -> Counter[str]:
    """String constants that a file compares something with, or matches."""
    found: Counter[str] = Counter()
    for node in nodes(module.tree):
        parts = [*node.comparators, node.left] if isinstance(node, ast.Compare) else []
        if isinstance(node, ast.MatchValue):
            parts = [node.value]
        for part in parts:
            inner = part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]
            found.update(c.value for c in inner if isinstance(c, ast.Constant) and isinstance(c.value, str))
    return found


@pytest.mark.parametrize("name", NEVER_NAMES_A_STRATEGY)
def test_the_engine_never_asks_which_strategy(name: str) -> None:
    module = next(m for m in modules() if m.name == name)
    assert not set(_names_compared(module)) & STRATEGIES


def test_schedules_and_optimizers_are_not_chosen_by_name_elsewhere() -> None:
    """No `if name == "cosine"` outside the rooms that own the names, and the table of cross-option rules."""
    owned = {
        "cosine", "linear", "polynomial", "inverse_sqrt", "cosine_with_restarts", "warmup_stable_decay", "greedy",
        "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "lomo", "adalomo",
    }  # fmt: skip
    found = {m.where: set(_names_compared(m)) & owned for m in modules() if m.room not in OWNERS}
    assert not {where: names for where, names in found.items() if names}


def _names_listed(module: Module) -> set[str]:
    """String constants that are keys, subscripts or members of a collection in a file."""
    parts: list[ast.AST | None] = []
    for node in nodes(module.tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts += node.elts
        elif isinstance(node, ast.Dict):
            parts += node.keys
        elif isinstance(node, ast.Subscript):
            parts.append(node.slice)
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def test_kinds_of_task_are_known_by_name_to_their_own_files_alone() -> None:
    """A recipe's default may be a name; nothing compares or lists them."""
    found = {
        m.where: names
        for m in modules()
        if m.room in ("recipes", "cli") and not m.name.startswith("windlass.recipes.tasks.")
        if (names := ({*_names_compared(m)} | _names_listed(m)) & TASKS.keys())
    }
    assert not found


def test_the_law_on_tasks_sees() -> None:
    tree = ast.parse("a == 'sft'; {'seq2seq': 1}; ('masked-lm', 2); table['causal-lm']; f('classification')")
    module = Module("windlass.cli.some", PACKAGE / "cli" / "some.py", tree)
    assert {*_names_compared(module)} | _names_listed(module) == {"sft", "seq2seq", "masked-lm", "causal-lm"}
