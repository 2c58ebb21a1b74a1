"""YAML is bounded in depth and in what its aliases unfold to; ordinary aliases and merges are not in the way."""

from __future__ import annotations

import pytest
import yaml

from windlass.config.documents import load_yaml


def test_aliases_and_merges_are_read() -> None:
    text = "base: &base {lr: 0.1, steps: [1, 2]}\nrun: {<<: *base, lr: 0.2}\nlist: [*base, *base]\n"
    values, node = load_yaml(text)
    assert values == yaml.safe_load(text)
    assert isinstance(node, yaml.MappingNode)
    assert load_yaml("") == (None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 10_000, "nested too deeply"),
        ("a: &a [*a]", "too often"),
        (
            "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]),
            "too often",
        ),
        ("a: !!python/name:os.system", "python/name"),
        ("a: 2026-99-99", "month"),
        ('a: !!int ""', "not of its type"),
        ("a: !!bool x", "not of its type"),
        ("a: !!timestamp x", "not of its type"),
        ("a: !!float x", "not of its type"),
        ("a: !!binary ü", "base64|ascii|not of its type"),
        ("!!set [1]", "mapping"),
    ],
)
def test_what_has_no_end_or_is_no_value_is_refused(text: str, message: str) -> None:
    with pytest.raises(yaml.YAMLError, match=message):
        load_yaml(text)
