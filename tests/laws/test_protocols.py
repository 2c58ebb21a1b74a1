"""Law: a protocol has several implementations. With one, its readers have two places to look instead of one.

What has one implementation above and is called from below is a base class with defaults, which that class names.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

import pytest
from tests.laws.source import Module, modules, nodes

UNSEEN = {
    "Follower": "AccumulationState, and GradientState, which hands every name on to that of the newest loop",
    "ActiveLoader": "PreparedLoader has its batch_size from PyTorch's DataLoader, and scripts write such loaders",
}


class _Class:
    """A class as the law sees it: its bases, and what it defines or assigns on `self`."""

    def __init__(self, node: ast.ClassDef) -> None:
        # A base of another library may have the same name.
        self.bases = {_name(base) for base in node.bases} - {node.name, ""}
        self.is_protocol = any(_name(base) == "Protocol" for base in node.bases)
        self.members = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        for inner in ast.walk(node):
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                self.members.add(inner.target.id)
            elif isinstance(inner, ast.Assign):
                self.members |= {t.id for t in inner.targets if isinstance(t, ast.Name)}
            elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                self.members |= {inner.attr} if _name(inner.value) == "self" else set()


def _name(node: ast.expr) -> str:
    node = node.value if isinstance(node, ast.Subscript) else node
    return getattr(node, "id", None) or getattr(node, "attr", "")


def implementations(found: Sequence[Module]) -> dict[str, set[str]]:
    """The classes that implement each protocol: that name it among their bases, or have all its members."""
    classes = {
        node.name: _Class(node)
        for module in found
        for node in nodes(module.tree)
        if isinstance(node, ast.ClassDef)
    }

    def lineage(name: str) -> set[str]:
        return {name}.union(*(lineage(base) for base in classes[name].bases if base in classes))

    def members(name: str) -> set[str]:
        return set().union(*(classes[each].members for each in lineage(name)))

    concrete = [name for name, each in classes.items() if not each.is_protocol]
    return {
        protocol: {
            name for name in concrete if protocol in lineage(name) or members(protocol) <= members(name)
        }
        for protocol, each in classes.items()
        if each.is_protocol
    }


def test_a_protocol_has_several_implementations() -> None:
    found = implementations(modules())
    assert found, "the law sees no protocol at all"
    lonely = {name: sorted(classes) for name, classes in found.items() if len(classes) < 2}
    assert lonely.keys() == UNSEEN.keys(), lonely


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("class A(P): ...", 1),
        ("class A:\n    def f(self): ...\n    x = 1", 1),
        ("class A:\n    def f(self): self.x = 1\nclass B(A): ...", 2),
        ("class A:\n    def f(self): ...", 0),
    ],
)
def test_the_law_counts(source: str, count: int) -> None:
    protocol = "class P(Protocol):\n    x: int\n    def f(self): ...\n"
    (found,) = implementations(
        [Module("windlass.example", modules()[0].path, ast.parse(protocol + source))]
    ).values()
    assert len(found) == count
