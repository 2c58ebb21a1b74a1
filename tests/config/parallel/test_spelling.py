"""A setting as a recipe or a script says it comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest

from windlass import TrainingArguments
from windlass.config.parallel.sources import from_arguments
from windlass.config.parallel.table import FLAGS, KEYS, VARIABLES, spellings, to_arguments

VALUES: dict[str, Any] = {
    "strategy": "fsdp", "precision": "bf16", "accumulation": 3, "cpu": True, "fsdp.layers": ("A", "B"),
    "fsdp.sharding": "shard_grad_op", "fsdp.reshard_after_forward": False, "fsdp.cpu_offload": True,
    "mesh.replicas": 2, "ddp.timeout": 60, "ddp.static_graph": True, "compile.backend": "eager",
    "compile.mode": "max-autotune",
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_arguments_say_what_the_setting_was(name: str) -> None:
    given = to_arguments(KEYS[name], VALUES[name])
    if name == "compile.mode":
        given["torch_compile_backend"] = "inductor"
    assert from_arguments(TrainingArguments("out", **given))[name].value == VALUES[name]


def test_what_only_a_launcher_can_be_told_has_no_argument_and_no_place_in_a_recipe() -> None:
    for name in ("launch.processes", "ddp.comm_hook", "debug", "mesh.used"):
        assert to_arguments(KEYS[name], True) == {}
        assert {"arguments", "recipe"}.isdisjoint(dict(spellings(KEYS[name])))


def test_spellings_are_those_that_are_read() -> None:
    for key in KEYS.values():
        said = dict(spellings(key))
        assert FLAGS.get(said.get("flag", "").lstrip("-"), key) is key
        assert key.refused or VARIABLES.get(said.get("variable", ""), key) is key
    mesh = dict(spellings(KEYS["mesh.replicas"]))
    assert mesh["arguments"] == "parallelism_config={'dp_replicate_size': ...}"
