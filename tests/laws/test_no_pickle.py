"""Law 6: nothing is unpickled, nothing is evaluated, ever; but for files of `torch.save`, in a process of their own."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.laws.source import Module, classes, imports, modules, nodes

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "pickletools",
}
BUILTINS = {"eval", "exec", "compile"}
# The one file that calls torch.load, once and with weights_only=True; it is run as a script in a process with limits.
READER = "windlass.compat.readers.torch_reader"
# The one file that calls torch.save: for a name that a script gives, of values that `weights_only=True` reads.
WRITER = "windlass.accelerator.value_files"
# (object, method): how the same thing is spelt through a library.
CALLS = {
    ("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load"), ("pandas", "read_pickle"),
    ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("torch.jit", "load"), ("torch.hub", "load"),
}  # fmt: skip
# Collectives that carry pickled objects between ranks.
OBJECT_COLLECTIVES = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}


def violations(module: Module) -> Iterator[str]:
    # Windlass's own operations of these names carry JSON.
    own = {n for i in imports(module) if i.module == "windlass.dist.operations" for n in i.names}
    for item in imports(module):
        if item.module.split(".")[0] in MODULES:
            yield f"{module.where}:{item.line} imports {item.module}"
    for node in nodes(module.tree):
        if isinstance(node, ast.Call):
            name = _forbidden_call(node.func)
            safe = name == "yaml.load" and _is_safe(node, module)
            read = name == "torch.load" and module.name == READER and _loads_weights_only(node)
            written = name == "torch.save" and module.name == WRITER
            if name and name not in own and not (safe or read or written):
                yield f"{module.where}:{node.lineno} calls {name}"
            if any(k.arg == "allow_pickle" and getattr(k.value, "value", True) for k in node.keywords):
                yield f"{module.where}:{node.lineno} allows pickle"


def _is_safe(node: ast.Call, module: Module) -> bool:
    """`yaml.load` with a loader that this very file derives from SafeLoader."""
    safe = {name for name, bases in classes(module) if bases & {"SafeLoader", "CSafeLoader"}}
    return any(k.arg == "Loader" and getattr(k.value, "id", None) in safe for k in node.keywords)


def _loads_weights_only(node: ast.Call) -> bool:
    return any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in node.keywords)


def _forbidden_call(func: ast.expr) -> str | None:
    if isinstance(func, ast.Name):
        return func.id if func.id in BUILTINS | OBJECT_COLLECTIVES else None
    if isinstance(func, ast.Attribute):
        owner = ast.unparse(func.value)
        if (owner, func.attr) in CALLS or func.attr in OBJECT_COLLECTIVES:
            return f"{owner}.{func.attr}"
    return None


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = [line for module in modules() for line in violations(module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "def f():\n    import dill", "torch.load('x')", "eval('1')",
        "np.load('x', allow_pickle=True)", "yaml.load(text)", "dist.all_gather_object(out, x)",
        "from torch.distributed import gather_object\ngather_object(x)",
        "importlib.import_module('marshal')",
    ],
)  # fmt: skip
def test_the_law_sees(source: str) -> None:
    example = modules()[0]
    assert list(violations(Module("windlass.example", example.path, ast.parse(source))))


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        (READER, "torch.load(f, weights_only=True)", 0),
        (READER, "torch.load(f)", 1),
        (READER, "torch.load(f, weights_only=False)", 1),
        (READER, "torch.load(f, weights_only=safe)", 1),
        (READER, "import pickle", 1),
        (READER, "torch.hub.load(f, weights_only=True)", 1),
        ("windlass.compat.readers.torch_file", "torch.load(f, weights_only=True)", 1),
        (WRITER, "torch.save(x, f)", 0),
        (WRITER, "torch.load(f, weights_only=True)", 1),
        ("windlass.accelerator.accelerator", "torch.save(x, f)", 1),
    ],
)
def test_one_file_may_load_weights_only_and_one_may_save(name: str, source: str, count: int) -> None:
    assert len(list(violations(Module(name, modules()[0].path, ast.parse(source))))) == count


def test_nobody_imports_that_file_but_the_one_that_starts_it() -> None:
    users = {
        module.name
        for module in modules()
        for item in imports(module)
        if item.module == READER
        or (item.module == READER.rpartition(".")[0] and "torch_reader" in item.names)
    }
    assert users == {"windlass.compat.readers.reader_process"}
