"""Every field of a plan is read below `assemble/`: a field that no code reads would promise what no code does.

Two laws. A real run reads the plan that was made for it, and no other. And all fields are read somewhere in the source,
also those that one run has no use for: an expression has a plan's type if a parameter, an attribute or a function's
result is annotated with it, or if it is a field of another plan.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.laws.source import Module, modules, nodes
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.cli.launching import launch_plan
from windlass.config import plan

HOMES = (plan, launch_plan)
KINDS = {
    name: kind
    for home in HOMES
    for name, kind in vars(home).items()
    if dataclasses.is_dataclass(kind) and getattr(kind, "__module__", "") == home.__name__
}
# Those who make, check and compare the plan: a read there does nothing that a user asked for. `assemble/build` carries
# the plan out.
MAKERS = (
    "windlass.config.",
    "windlass.cli.launching.launch",
    "windlass.assemble.resolve",
    "windlass.assemble.rules",
    "windlass.assemble.rules",
    "windlass.trainer.compare_ranks",
)
Types = frozenset[str]
NOTHING: Types = frozenset()

NOT_READ = {
    "DurationPlan.steps_per_epoch": "is compared between the ranks, whose loaders must be of one length",
    "LaunchPlan.devices": "becomes a variable of the processes' environment when the plan is made",
    "LaunchPlan.settings": "becomes WINDLASS_PARALLEL, which the processes read",
}


def _fields() -> dict[str, dict[str, Types]]:
    """Plan -> field -> the plan that the field holds, if any."""
    found = {}
    for name, kind in KINDS.items():
        hints = typing.get_type_hints(kind)
        found[name] = {
            field.name: frozenset(
                k for k, v in KINDS.items() if v in (hints[field.name], *typing.get_args(hints[field.name]))
            )
            for field in dataclasses.fields(kind)
            if not any(field.name in getattr(base, "__annotations__", ()) for base in kind.__mro__[1:])
        }
    return found


FIELDS = _fields()  # a field of a plan that another one extends is that of the former
BASES = {
    name: [base.__name__ for base in kind.__mro__ if base.__name__ in KINDS] for name, kind in KINDS.items()
}


def _properties(trees: Iterable[ast.Module]) -> dict[tuple[str, str], set[str]]:
    """(plan, property) -> the fields that the property reads."""
    return {
        (owner.name, method.name): {n.attr for n in ast.walk(method) if isinstance(n, ast.Attribute)}
        for tree in trees
        for owner in tree.body
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
    }


PROPERTIES = _properties(m.tree for m in modules() if m.name in {home.__name__ for home in HOMES})


def _named(annotation: ast.expr | None) -> Types:
    """The plans that an annotation names."""
    if annotation is None:
        return NOTHING
    return frozenset(n.id for n in ast.walk(annotation) if isinstance(n, ast.Name) and n.id in KINDS)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of each assignment in `node`; `a, b = x, y` is two."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign):
            for target in inner.targets:
                if isinstance(target, ast.Tuple) and isinstance(inner.value, ast.Tuple):
                    yield from zip(target.elts, inner.value.elts, strict=False)
                else:
                    yield target, inner.value


class Declared:
    """What the source says about types: of attributes, by class and by name alone, and of functions' results."""

    def __init__(self, sources: Iterable[Module]) -> None:
        self.of_class: dict[str, dict[str, Types]] = defaultdict(dict)
        self.by_name: dict[str, Types] = defaultdict(frozenset)
        self.returns: dict[str, Types] = {name: frozenset({name}) for name in KINDS}
        for module in sources:
            for node in nodes(module.tree):
                if isinstance(node, ast.ClassDef):
                    self._attributes(node)
                elif isinstance(node, ast.FunctionDef) and _named(node.returns):
                    self.returns[node.name] = _named(node.returns)

    def _attributes(self, owner: ast.ClassDef) -> None:
        for node in ast.walk(owner):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name | ast.Attribute):
                name = node.target.id if isinstance(node.target, ast.Name) else node.target.attr
                self.add(owner.name, name, _named(node.annotation))

    def add(self, owner: str, name: str, types: Types) -> None:
        if types:
            self.of_class[owner][name] = types
            self.by_name[name] |= types


class Reads(ast.NodeVisitor):
    """The (plan, field) pairs that a file reads."""

    def __init__(self, declared: Declared) -> None:
        self.found: set[tuple[str, str]] = set()
        self._declared = declared
        self._owner = ""
        self._names: dict[str, Types] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._owner = self._owner, node.name
        self.generic_visit(node)
        self._owner = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self._names
        arguments = (*node.args.args, *node.args.kwonlyargs)
        self._names = {**outer, **{a.arg: _named(a.annotation) for a in arguments}}
        self.generic_visit(node)
        self._names = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target, value in _assignments(node):
            if isinstance(target, ast.Name):
                self._names[target.id] = self.types(value)
            elif isinstance(target, ast.Attribute):
                self._declared.add(self._owner, target.attr, self.types(value))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        for kind in self.types(node.value) if isinstance(node.ctx, ast.Load) else ():
            for owner in BASES[kind]:
                inner = PROPERTIES.get((owner, node.attr), set()) | {node.attr}
                self.found |= {(owner, name) for name in inner & FIELDS[owner].keys()}

    def types(self, node: ast.expr) -> Types:
        """The plans that an expression may be."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, NOTHING)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            return (
                self.types(node.args[0])
                if called == "replace" and node.args
                else self._declared.returns.get(called, NOTHING)
            )
        if isinstance(node, ast.BoolOp | ast.IfExp):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return frozenset().union(*map(self.types, parts))
        return NOTHING

    def _attribute(self, node: ast.Attribute) -> Types:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            own = self._declared.of_class[self._owner].get(node.attr)
            return own if own is not None else self._declared.by_name.get(node.attr, NOTHING)
        kinds = self.types(node.value)
        if kinds:
            owners = {owner for kind in kinds for owner in BASES[kind]}
            return frozenset().union(*(FIELDS[owner].get(node.attr, NOTHING) for owner in owners))
        return self._declared.by_name.get(node.attr, NOTHING)


def unread(sources: Iterable[Module]) -> set[str]:
    """The fields that no reader among `sources` reads, as "RunPlan.seed"."""
    sources = list(sources)
    declared, found = Declared(sources), set()
    for _ in ("what attributes hold", "who reads them"):
        for module in sources:
            reads = Reads(declared)
            reads.visit(module.tree)
            found |= set() if module.name.startswith(MAKERS) else reads.found
    return {f"{kind}.{name}" for kind in FIELDS for name in FIELDS[kind] if (kind, name) not in found}


def test_every_field_is_read() -> None:
    """Drop a field that no code reads, or read it; one on the list that is read by now leaves the list."""
    assert unread(modules()) == NOT_READ.keys()


SOURCE = """
class Run:
    def __init__(self, plan: RunPlan, other: object) -> None:
        self._plan = plan
        self.seed = other.seed

    def go(self, data: DataPlan | None) -> int:
        batch = self._plan.batch
        data = data or self._plan.data
        return batch.samples + data.workers
"""


def test_the_law_sees_reads_and_what_is_not_read() -> None:
    found = unread([Module("windlass.trainer.example", modules()[0].path, ast.parse(SOURCE))])
    assert {
        "RunPlan.batch",
        "CallPlan.data",
        "UpdateSize.micro",
        "UpdateSize.ranks",
        "DataPlan.workers",
    }.isdisjoint(found)
    assert {"CallPlan.seed", "UpdateSize.asked", "DataPlan.seed", "RunPlan.save"} <= found


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_plan_is_part_of_a_run_or_a_launch(kind: str) -> None:
    reached = {"RunPlan", "CallPlan", "LaunchPlan"}
    for _ in KINDS:
        reached |= {inner for outer in reached for types in FIELDS[outer].values() for inner in types}
    assert kind in reached


# --- a real run -----------------------------------------------------------------------------------------------------

# What the run below has no use for. Loaders are made from the plan, and each keeps sections of its own batch size.
NO_USE = {
    "BatchPlan.finds": "a run that is resumed",
    "BatchPlan.fixed": "a run that is resumed",
    "DataPlan.dispatch": "streams",
    "DataPlan.in_order": "workers",
    "DataPlan.length_column": "an order by length",
    "DataPlan.multiprocessing_context": "workers",
    "DataPlan.start_timeout": "workers",
    "DataPlan.worker_init": "workers",
    "DataPlan.worker_timeout": "workers",
    "DistPlan.broadcast_buffers": "several processes",
    "DistPlan.bucket_cap_mb": "several processes",
    "DistPlan.comm_options": "several processes",
    "DistPlan.find_unused_parameters": "several processes",
    "DistPlan.static_graph": "several processes",
    "DistPlan.tensor_positions": "several processes",
    "DistPlan.timeout_seconds": "several processes",
    "DurationPlan.steps_per_epoch": "several processes",
    "DurationPlan.warmup": "the schedule of a configuration of DeepSpeed",
    "EvaluationPlan.start_timeout": "workers",
    "OptimizerPlan.targets": "an optimizer that projects gradients",
    "PreemptionPlan.deadline_text": "a signal",
    "ReportPlan.restore_callback_args": "a run that is resumed",
    "UpdateSize.asked": "a run that is resumed",
    "TransformPlan.recompute_options": "recomputation",
}
ADAPTED = {"BatchPlan", "DataPlan"}


@dataclasses.dataclass
class Watched:
    """The reads of plans outside `MAKERS`: the object, and the field as "RunPlan.seed"."""

    reads: list[tuple[Any, str]] = dataclasses.field(default_factory=list)

    def watch(self, kind: type) -> Any:
        """A `__getattribute__` of a plan that notes who reads a field."""
        plain = kind.__getattribute__

        def get(instance: Any, name: str) -> Any:
            frame = sys._getframe(1)
            while frame.f_globals["__name__"] == plan.__name__:  # a property, which the caller reads
                frame = frame.f_back  # type: ignore[assignment]
            reader = frame.f_globals["__name__"]
            if reader.startswith("windlass.") and not reader.startswith(MAKERS):
                owner = next((o for o in BASES[type(instance).__name__] if name in FIELDS[o]), None)
                self.reads += [] if owner is None else [(instance, f"{owner}.{name}")]
            return plain(instance, name)

        return get


def _noting(kind: type, made: list[Any]) -> Any:
    """The constructor of a plan, which adds the object to `made`."""
    plain = kind.__init__

    def init(instance: Any, *args: Any, **fields: Any) -> None:
        plain(instance, *args, **fields)
        made.append(instance)

    return init


def _parts(whole: Any) -> Iterator[Any]:
    """A plan and all plans in it."""
    if type(whole).__name__ in KINDS:
        yield whole
        for field in dataclasses.fields(whole):
            yield from _parts(getattr(whole, field.name))


def test_a_run_reads_its_plan_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "WINDLASS_HOME", str(tmp_path / "home")
    )  # without predictions and proofs of other tests
    args = arguments(
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
    )
    trainer = Trainer(
        Net(), args, train_dataset=rows(16), eval_dataset=rows(4), compute_metrics=lambda found: {}
    )
    made: list[Any] = []
    watched = Watched()
    for kind in (plan.CallPlan, plan.RunPlan):
        monkeypatch.setattr(kind, "__init__", _noting(kind, made))
    for kind in KINDS.values():
        monkeypatch.setattr(kind, "__getattribute__", watched.watch(kind))
    trainer.train()
    reads = list(watched.reads)
    assert [type(one).__name__ for one in made] == ["CallPlan", "RunPlan"]
    own = {id(part): part for whole in made for part in _parts(whole)}
    foreign = {name for instance, name in reads if id(instance) not in own}
    assert {name.partition(".")[0] for name in foreign} <= ADAPTED
    kinds = {type(part).__name__ for part in own.values()}
    fields = {f"{owner}.{name}" for kind in kinds for owner in BASES[kind] for name in FIELDS[owner]}
    assert sorted(fields - {name for _, name in reads}) == sorted(NO_USE)
