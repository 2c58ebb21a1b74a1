"""Law 1: imports go down the floors, rooms of one floor don't know each other, and nothing goes round in circles."""

from __future__ import annotations

import ast

import pytest
from tests.laws.source import Module, by_name, imports, modules, nodes, stubs, windlass_targets
from tests.laws.test_facade import BINDERS, FACADE

from windlass.core.outside import OUTSIDE

FLOORS = [
    {"core"},
    {"config", "dist"},
    {"transforms", "precision", "optim", "metrics", "data", "checkpoint"},
    {"engine", "callbacks", "hub", "text", "search", "proofs"},
    {"zero"},
    {"assemble"},
    {"accelerator"},
    {"trainer"},
    {"compat", "finetuning", "forecast"},
    {"recipes"},
    {"cli"},
    {
        # what scripts import by the names of their old library
        "launchers", "utils",
        "big_modeling", "commands", "data_loader", "debug_utils", "hf_argparser", "hooks", "hyperparameter_search",
        "inference", "integrations", "local_sgd", "logging", "optimization", "optimizer", "parallelism_config",
        "scheduler", "state", "tracking", "trainer_callback", "trainer_jit_checkpoint",
        "trainer_optimizer", "trainer_pt_utils", "trainer_seq2seq", "trainer_utils", "training_args",
        "training_args_seq2seq",
    },
    {"__main__"},
]  # fmt: skip
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The denominator is one thing, needed where batches are made and where losses are computed.
SHARED_SIDEWAYS = {("data", "windlass.metrics.tokens"), ("transforms", "windlass.metrics.tokens")}

# Modules of a higher floor that a file names and imports once something needs it: what is in `compat/`, which one file
# names for the whole core, and what divides models that scripts build after their arguments. Nothing else may.
LOADED_BY_NAME = {
    ("windlass.config.arguments", "windlass.zero.building"),
    *(("windlass.core.outside", name) for name in ("windlass.compat", *OUTSIDE.values())),
}
# What other libraries name. No file of another room imports from it, not even inside a function.
NAMES_OF_OTHERS = {"compat", *FLOORS[-2]}
# The rooms that have names of a module of transformers, some of which are in `compat/`.
TABLES_OF_NAMES = {"windlass.data", "windlass.trainer"}


def test_every_room_has_a_floor() -> None:
    strangers = {m.where for m in modules() if m.room and m.room not in FLOOR_OF}
    assert not strangers, f"not on any floor of the house plan: {sorted(strangers)}"


def _allowed(source: Module, target: str, known: dict[str, Module]) -> bool:
    room = known[target].room if target in known else target.split(".")[1] if "." in target else ""
    if room == source.room or (source.room, target) in SHARED_SIDEWAYS:
        return True
    return bool(room) and FLOOR_OF[room] < FLOOR_OF[source.room]


def _upward(source: Module) -> list[str]:
    known = by_name()
    return [
        f"{source.where}:{item.line} imports {target}"
        for item in imports(source)
        # `__version__` is a constant of the root, which itself imports nothing
        if (item.module, item.names) != ("windlass", ("__version__",))
        for target in windlass_targets(item, known)
        if not _allowed(source, target, known)
    ]


def test_imports_go_down_the_floors() -> None:
    upward = [line for m in modules() if m.room for line in _upward(m)]
    assert not upward, "\n".join(upward)


def test_modules_named_in_strings_are_no_way_round() -> None:
    known = {name: module for name, module in by_name().items() if module.room}
    upward = {
        (module.name, node.value)
        for module in known.values()
        for node in nodes(module.tree)
        if isinstance(node, ast.Constant) and node.value in known and not _allowed(module, node.value, known)
    }
    assert upward == LOADED_BY_NAME


def test_the_core_names_what_is_outside_in_one_place() -> None:
    known = by_name()
    core = [m for m in modules() if m.room and m.room not in {*NAMES_OF_OTHERS, "__main__"}]
    imported = [
        f"{module.where}:{item.line} imports {target}"
        for module in core
        for item in imports(module)
        for target in windlass_targets(item, known)
        if known[target].room in NAMES_OF_OTHERS
    ]
    assert not imported, "\n".join(imported)
    named = {
        module.name
        for module in core
        for node in nodes(module.tree)
        if isinstance(node, ast.Constant)
        and node.value in known
        and known[node.value].room in NAMES_OF_OTHERS
    }
    assert named == {"windlass.core.outside"}
    # What scripts import from a room, or from a module at the top, may live in any room.
    tables = {
        stub.name
        for stub in stubs()
        if stub.room not in {*NAMES_OF_OTHERS, ""}
        for item in imports(stub)
        for target in windlass_targets(item, known)
        if known[target].room in NAMES_OF_OTHERS
    }
    assert tables == TABLES_OF_NAMES


def _graph() -> dict[str, set[str]]:
    """Edges between files. The root is left out: its table names the public things of every floor; so is the type of
    the facade in those modules that bind its methods.
    """
    known = by_name()
    edges: dict[str, set[str]] = {}
    for module in modules():
        targets = (
            {
                target
                for item in imports(module)
                for target in windlass_targets(item, known)
                if not (item.types_only and target == FACADE and module.name in BINDERS)
            }
            if module.room
            else set()
        )
        targets |= {package for target in targets for package in _packages(target)}
        own = {module.name, "windlass", *_packages(module.name)}
        edges[module.name] = {t for t in targets if t in known} - own
    return edges


def _packages(name: str) -> set[str]:
    """The packages around a module: importing it runs their files too."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """Some cycle as the list of its nodes, or an empty list."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(edges.get(node, ())):
            if cycle := visit(target, [*path, node]):
                return cycle
        done.add(node)
        return []

    return next((cycle for node in sorted(edges) if (cycle := visit(node, []))), [])


def test_no_import_cycles() -> None:
    cycle = find_cycle(_graph())
    assert not cycle, " -> ".join(cycle)


@pytest.mark.parametrize(
    ("edges", "expected"),
    [({"a": {"b"}, "b": {"c"}}, []), ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"])],
)
def test_the_cycle_finder_finds_cycles(edges: dict[str, set[str]], expected: list[str]) -> None:
    assert find_cycle(edges) == expected


def test_the_graph_is_not_empty() -> None:
    edges = _graph()
    assert "windlass.core.errors" in edges["windlass.core.device"]
    assert "windlass.data.update_batch" in edges["windlass.engine.executor"]
    assert "windlass.config.parallel" in edges["windlass.compat.plugin_fsdp"], "by way of a module in it"
    assert "windlass.config.parallel" not in edges["windlass.config.parallel.keys"], "it runs already"
