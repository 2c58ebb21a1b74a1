"""The API reference has every public name, and every argument, also of methods, with its type, default and meaning."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import windlass
from windlass import SFTConfig, TrainingArguments

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs" / "hooks" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(reference: ModuleType) -> dict[str, str]:
    return reference.pages()


def rows(text: str, name: str) -> dict[str, list[str]]:
    """Return the rows of the table below the heading of a name, by their first cell."""
    section = text.split(f"## `{name}`", 1)[1].split("\n## ", 1)[0]
    lines = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {line[0].strip("| `"): line for line in lines}


def test_every_public_name_has_a_page(reference: ModuleType, pages: dict[str, str]) -> None:
    text = "\n".join(text for name, text in pages.items() if name != "index")
    for name in windlass.__all__:
        if reference.page_of(name) is not None:
            assert text.count(f"## `{name}` ") == 1, name
            assert f"| [`{name}`]" in pages["index"]


def test_every_page_is_in_the_menu(pages: dict[str, str]) -> None:
    menu = set(re.findall(r"reference/([\w-]+)\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    assert menu == set(pages)


def test_every_argument_of_a_run_has_type_default_and_meaning(pages: dict[str, str]) -> None:
    table = rows(pages["arguments"], "TrainingArguments")
    assert set(table) >= {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert table["learning_rate"][1:3] == ["`float`", "`5e-05`"]
    assert all(len(row) >= 5 and row[-2].strip() and row[-1].strip(" |") for row in table.values())


def test_every_name_and_argument_has_the_release_that_brought_it(
    reference: ModuleType, pages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in reference.SINCE:
        name, _, rest = key.partition(".")
        thing = getattr(windlass, name)
        method, _, argument = rest.partition(".")
        if (
            method in getattr(thing, "__dict__", {})
            and inspect.isclass(thing)
            and method in reference.methods(thing)
        ):
            assert not argument or argument in reference._arguments(vars(thing)[method]), key
        else:
            fields = getattr(thing, "__dataclass_fields__", {})
            assert rest in fields if rest else name in windlass.__all__, key
    assert windlass.__version__ != reference.FIRST or not reference.SINCE, (
        "all names are of the first release"
    )
    assert "from windlass import Trainer  # since 0.1.0" in pages["trainer"]
    since = {"Trainer": "0.2.0", "TrainingArguments.seed": "0.3.0", "Trainer.predict.ignore_keys": "0.4.0"}
    monkeypatch.setattr(reference, "SINCE", since)
    later = reference.pages()
    assert "- `predict.ignore_keys`: since 0.4.0" in later["trainer"]
    assert "from windlass import Trainer  # since 0.2.0" in later["trainer"]
    assert rows(later["arguments"], "TrainingArguments")["seed"][-1].strip(" |") == "0.3.0"
    assert rows(later["arguments"], "TrainingArguments")["optim"][-1].strip(" |") == "0.1.0"


def test_every_argument_of_a_public_name_has_a_meaning(reference: ModuleType, pages: dict[str, str]) -> None:
    things = {name: getattr(windlass, name) for name in windlass.__all__ if reference.page_of(name)}
    found = {name: [one.name for one in reference.undescribed(thing)] for name, thing in things.items()}
    words = reference._words()
    assert not {name: lost for name, named in found.items() if (lost := set(named) - words.keys())}
    assert not words.keys() - {one for named in found.values() for one in named}, (
        "those are described elsewhere"
    )
    table = rows(pages["optimizers"], "get_linear_schedule_with_warmup")
    assert table["num_warmup_steps"][2:4] == ["required", "Updates in which the rate rises from 0."]


def test_every_method_of_a_public_class_and_its_arguments_have_a_meaning(reference: ModuleType) -> None:
    things = {name: getattr(windlass, name) for name in windlass.__all__ if reference.page_of(name)}
    classes = {name: thing for name, thing in things.items() if inspect.isclass(thing)}
    assert {"train", "is_world_process_zero", "state"} <= reference.methods(windlass.Trainer).keys()
    assert {"set_training", "world_size"} <= reference.methods(TrainingArguments).keys(), "of mixins too"
    classes |= {"GeneralTracker": windlass.tracking.GeneralTracker, "ModelHook": windlass.hooks.ModelHook}
    assert not {name: lost for name, thing in classes.items() if (lost := reference.unexplained(thing))}


def test_what_has_no_meaning_is_found(reference: ModuleType) -> None:
    class Base(windlass.TrainerCallback):
        def used(self, size: int) -> None:
            """Use `size` bytes of a path."""

        def vague(self, path: str) -> None:
            """Use a path."""

        def bare(self) -> None: ...

        @staticmethod
        def made(path: str, count: int = 0) -> None:
            """Make `path`."""

        @property
        def length(self) -> int:
            return 0

    class Derived(Base):
        def used(self, size: int, other: int = 0) -> None: ...

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, more: Any = 0, **kwargs: Any
        ) -> None:
            """Write."""

    Base.__module__ = Derived.__module__ = "windlass.of_this_test"
    found = ["used(other)", "on_log(more)", "bare", "made(count)", "length", "vague(path)"]
    assert sorted(reference.unexplained(Derived)) == sorted(found)


def test_methods_of_a_public_base_are_on_its_page(reference: ModuleType, pages: dict[str, str]) -> None:
    assert not {"train", "predict"} - reference.methods(windlass.Trainer).keys()
    assert not {"predict", "log_metrics"} & reference.methods(windlass.SFTTrainer).keys()
    assert {"compute_loss", "data_facts"} <= reference.methods(windlass.SFTTrainer).keys(), (
        "its own, and of FineTuner"
    )
    section = pages["fine-tuning"].split("## `SFTTrainer`", 1)[1].split("\n## ", 1)[0]
    assert "It has the methods of [`Trainer`](trainer.md#trainer) too." in section


def test_arguments_of_a_subclass_are_those_that_differ(pages: dict[str, str]) -> None:
    table = rows(pages["fine-tuning"], "SFTConfig")
    assert {"packing", "max_length", "learning_rate"} <= set(table)
    assert "output_dir" not in table
    assert SFTConfig.__dataclass_fields__["learning_rate"].default != 5e-5


def test_a_name_without_a_page_is_an_error(reference: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ROOMS", {})
    with pytest.raises(LookupError, match=r"Trainer is defined in windlass\.trainer\.trainer"):
        reference.page_of("Trainer")
