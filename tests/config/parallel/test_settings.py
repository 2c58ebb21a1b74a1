"""Layers of settings: which goes before which, and what contradicts."""

from __future__ import annotations

from windlass.config.parallel.keys import Settings, Source, merge
from windlass.config.parallel.table import KEYS

PRECISION, OFFLOAD, RAM = KEYS["precision"], KEYS["fsdp.cpu_offload"], KEYS["fsdp.cpu_ram_efficient_loading"]


def layer(raw: object, origin: str, source: Source, implicit: bool | None = False) -> Settings:
    settings = Settings()
    settings.record(PRECISION, raw, origin, source, implicit)
    return settings


def test_a_flag_goes_before_a_variable_before_a_file_and_all_are_recorded() -> None:
    flag, variable, file = (
        layer("bf16", "--x", "flag"),
        layer("fp16", "X", "variable"),
        layer("no", "f", "file"),
    )
    for layers in ([flag, variable, file], [file, variable, flag], [variable, file, flag]):
        merged = merge(*layers)
        assert merged["precision"].value == "bf16"
        assert merged.problems == []
        assert {other.origin for other in _all_over(merged)} == {"X", "f"}


def _all_over(settings: Settings) -> list:  # type: ignore[type-arg]
    found, todo = [], list(settings["precision"].overridden)
    while todo:
        found.append(todo.pop())
        todo += found[-1].overridden
    return found


def test_script_and_launcher_must_agree() -> None:
    merged = merge(
        layer("bf16", "TrainingArguments.bf16", "script"), layer("fp16", "--mixed_precision", "flag")
    )
    (problem,) = merged.problems
    assert "TrainingArguments.bf16='bf16'" in str(problem)
    assert "--mixed_precision='fp16'" in str(problem)
    same = merge(
        layer("bf16", "TrainingArguments.bf16", "script"), layer("bf16", "--mixed_precision", "flag")
    )
    assert same.problems == []


def test_what_a_tool_wrote_unasked_contradicts_nothing() -> None:
    launcher = layer("no", "ACCELERATE_MIXED_PRECISION", "variable", implicit=None)
    assert launcher["precision"].implicit
    for layers in (
        [layer("bf16", "script", "script"), launcher],
        [launcher, layer("bf16", "script", "script")],
    ):
        merged = merge(*layers)
        assert merged["precision"].value == "bf16"
        assert merged.problems == []


def test_one_place_that_says_two_things_is_a_contradiction() -> None:
    settings = layer("bf16", "one", "file")
    settings.record(PRECISION, "fp16", "two", "file", implicit=False)
    assert len(settings.problems) == 1


def test_values_that_cannot_be_read_are_problems_and_none_says_nothing() -> None:
    settings = Settings()
    settings.record(OFFLOAD, "perhaps", "here", "file")
    settings.record(OFFLOAD, None, "there", "file")
    assert settings == {}
    assert [problem.field for problem in settings.problems] == ["here"]


def test_refused_keys_are_problems_only_when_they_ask_for_something() -> None:
    key = KEYS["launch.tpu_use_sudo"]
    settings = Settings()
    for nothing in (False, "no", [], None, "false"):
        settings.record(key, nothing, "file", "file")
    assert settings.problems == []
    settings.record(key, True, "file", "file")
    assert len(settings.problems) == 1


def test_what_changes_nothing_is_noted_when_it_was_meant() -> None:
    settings = Settings()
    settings.record(KEYS["fsdp.use_orig_params"], True, "written unasked", "variable")
    assert settings.notes == []
    settings.record(KEYS["fsdp.use_orig_params"], False, "fsdp_use_orig_params", "file")
    assert len(settings.notes) == 1


def test_a_weak_value_holds_where_nothing_else_was_said() -> None:
    settings = Settings()
    settings.record(RAM, "true", "FSDP_CPU_RAM_EFFICIENT_LOADING", "variable")
    assert settings.value(RAM) is True
    assert not settings.explicit(RAM)


def test_what_pairs_look_like_is_not_taken_for_a_secret() -> None:
    """In a message `key=...` is masked."""
    settings = Settings()
    settings.record(KEYS["launch.engine_options"], "a", "--engine_options", "flag")
    assert "name=value" in str(settings.problems[0])
