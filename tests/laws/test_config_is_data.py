"""Law 5: configuration is data. It costs no torch, touches no device, and writes nothing into the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.laws.source import Module, imports, modules, nodes

HEAVY = {"torch", "numpy", "transformers", "datasets", "tokenizers", "safetensors", "accelerate"}
ENVIRONMENT_CALLS = {"setdefault", "update", "pop", "clear", "popitem", "__setitem__", "__delitem__"}
# `enable_full_determinism`, a call that a script makes in so many words, sets what cuBLAS and transformers read;
# `patch_environment` sets what it is asked to, for as long as its body runs.
# The command line and the launchers set up the processes they start, and `dist` may hand torch what torch only reads
# from there.
# The last: `env` in the files of `TrlParser`.
MAY_WRITE_ENVIRONMENT = {"windlass.core.rng", "windlass.utils.environment", "windlass.compat.trl_parser"}
WRITER = "windlass.dist.variables"  # of those rooms
ROOMS_THAT_MAY_WRITE = {"dist", "recipes", "cli", "launchers"}
CONFIG = [m for m in modules() if m.room == "config"]


def environment_writes(module: Module) -> Iterator[str]:
    for node in nodes(module.tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            for target in targets:
                if isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith("environ"):
                    yield f"{module.where}:{node.lineno}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
            if (owner.endswith("environ") and name in ENVIRONMENT_CALLS) or name in ("putenv", "unsetenv"):
                yield f"{module.where}:{node.lineno}"


def test_nothing_heavy_at_import() -> None:
    found = [
        f"{module.where}:{item.line} imports {item.module}"
        for module in CONFIG
        for item in imports(module)
        if item.at_import and item.module.split(".")[0] in HEAVY
    ]
    assert CONFIG
    assert not found, "\n".join(found)


def test_configuration_never_writes_the_environment() -> None:
    assert not [line for module in CONFIG for line in environment_writes(module)]


def test_few_places_write_the_environment_at_all() -> None:
    others = [m for m in modules() if m.room not in ROOMS_THAT_MAY_WRITE]
    writers = {m.name for m in others if list(environment_writes(m))}
    writers |= {m.name for m in others if WRITER in {item.module for item in imports(m)}}
    assert writers <= MAY_WRITE_ENVIRONMENT, writers - MAY_WRITE_ENVIRONMENT


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['A'] = '1'",
        "environ.setdefault('A', '1')",
        "os.environ.update(x)",
        "os.putenv('A', '1')",
        "del os.environ['A']",
    ],
)
def test_the_law_sees(source: str) -> None:
    assert list(environment_writes(Module("windlass.config.example", modules()[0].path, ast.parse(source))))
