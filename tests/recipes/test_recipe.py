"""A recipe is checked in one pass: every problem, each with its place and its fix."""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from windlass.cli.print_config import render_config
from windlass.cli.recipe_schema import EDITOR_LINE
from windlass.config.documents import loads
from windlass.core.errors import ConfigError
from windlass.recipes.argument_table import all_arguments
from windlass.recipes.built_in_recipes import names
from windlass.recipes.recipe import check_draft, load_recipe, read_draft, training_arguments
from windlass.recipes.schema import DataSpec, Recipe, SampleSpec
from windlass.recipes.tasks import TASKS

GOOD = """\
task: causal-lm
data:
  train: {text}
  block_size: 16
model:
  config: {{model_type: llama, hidden_size: 16}}
tokenizer:
  train: {{vocab_size: 300}}
training:
  max_steps: 3
  learning_rate: 1e-3
  save_strategy: no
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("one two three\n" * 50)
    return path


def write(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(body)
    return path


def complaint(*args: object, **options: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(*args, **options)  # type: ignore[arg-type]
    return [str(problem) for problem in caught.value.problems]


def test_a_good_recipe(tmp_path: Path, text: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD.format(text=text)))
    assert recipe.data.block_size == 16
    assert recipe.tokenizer.train is not None
    assert recipe.tokenizer.train.vocab_size == 300
    assert recipe.training["learning_rate"] == 1e-3  # YAML 1.1 would have made it text
    assert recipe.training["save_strategy"] == "no"  # and this one False
    assert recipe.training["output_dir"] == "runs/recipe"


def test_the_built_in_recipe_is_valid() -> None:
    assert load_recipe(None).training["output_dir"] == "runs/python-docs"


@pytest.mark.parametrize("name", ["sst2", "shakespeare"])
def test_the_ready_recipes_are_valid(name: str, tmp_path: Path) -> None:
    ending = "tsv" if name == "sst2" else "txt"
    for part in ("train", "dev"):
        (tmp_path / f"{part}.{ending}").write_text("a\t1\n")
    overrides = [f"data.train={tmp_path}/train.{ending}"]
    overrides += [f"data.eval={tmp_path}/dev.{ending}"] if name == "sst2" else []
    assert load_recipe(name, overrides).data.train.startswith(str(tmp_path))


def test_all_problems_at_once_with_line_and_nearest_key(tmp_path: Path, text: Path) -> None:
    body = GOOD.format(text=text).replace("block_size", "blok_size").replace("causal-lm", "causal")
    end = "learning_rate: 1\ndata.eval: x\n"
    path = write(tmp_path, body.replace("max_steps: 3", "max_stepz: 3") + end)
    found = complaint(path, ["data.max_samples=many", "sample.temperature=-1"])
    wanted = [
        f"{path}:4: data.blok_size=16: no such key; did you mean data.block_size?",
        f"{path}:1: task='causal': must be one of {', '.join(TASKS)}; did you mean 'causal-lm'?",
        f"{path}:13: learning_rate=1: no such key here; did you mean training.learning_rate?",
        f"{path}:14: data.eval='x': a key of a file names one level; write it as data: {{eval: ...}}",
        "data.max_samples='many': must be a whole number or None, and is str",
        "sample.temperature=-1.0: must be 0 or more",
        f"{path}:10: training.max_stepz=3: there is no such argument; did you mean 'max_steps'?",
    ]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_a_temperature_that_is_not_finite_is_refused(value: str, tmp_path: Path, text: Path) -> None:
    found = complaint(write(tmp_path, GOOD.format(text=text)), [f"sample.temperature={value}"])
    assert found == [f"sample.temperature={value[1:]}: must be 0 or more, and finite"]


def test_an_override_replaces_a_setting_that_the_file_spells_in_one_word(tmp_path: Path, text: Path) -> None:
    body = GOOD.format(text=text) + "parallel:\n  mesh.pp_schedule: gpipe\n"
    recipe = load_recipe(write(tmp_path, body), ["parallel.mesh.pp_schedule=1f1b"])
    assert recipe.parallel == {"mesh.pp_schedule": "1f1b"}


def test_training_arguments_speak_for_their_section(tmp_path: Path, text: Path) -> None:
    body = GOOD.format(text=text).replace("1e-3", "fast") + "  bf16: true\n  fp16: true\n"
    found = complaint(write(tmp_path, body))
    assert any("recipe.yaml:11: training.learning_rate='fast'" in line for line in found)
    assert any("training.fp16" in line and "bf16" in line for line in found)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train=nowhere.txt", ["data.train='nowhere.txt'", "no such file"]),
        ("data.train=texd.txt", ["no such file"]),
        (r'data.train="\ud800.txt"', ["cannot be named in the encoding of this locale"]),
        ("data.train=https://me:hunter2@host/x.jsonl", ["is a URL: download it"]),
        ("data.label_column=x", ["no meaning for task causal-lm"]),
        ("data.subset=x", ["hub data only"]),
        ("data.columns=[a, b]", ["csv and tsv data only"]),
        ("data.eval_fraction=1.5", ["below 1"]),
        ("data.block_size=1", ["at least 2"]),
        ("data.max_samples=99999999999999999999", ["must be at least 1 and below 2**31"]),
        ("data.text_column=3", ["quote it"]),
        ("model.name=gpt2 model.config.model_type=gpt2", ["model='both'"]),
        ("model.name=gpt2", []),  # replaces model.config of the file
        ("model.config=null", ["model='neither'"]),
        ("model.config={hidden_size: 3}", ["model_type"]),
        ("tokenizer.train=null", ["tokenizer='neither'"]),
        ("tokenizer.train=300", ["must be a section", "vocab_size"]),
        ("data.format=hub", []),
        ("training.eval_strategy=steps data.eval_fraction=0", ["needs data to evaluate on"]),
        ("nothing", ["name=value"]),
        ("training.max_steps.y=4", ["training.max_steps is 3, which has no keys"]),
    ],
)
def test_one_problem_each(override: str, words: list[str], tmp_path: Path, text: Path) -> None:
    path = write(tmp_path, GOOD.format(text=text))
    overrides = override.split(" ") if "[" not in override and "{" not in override else [override]
    if not words:
        assert isinstance(load_recipe(path, overrides), Recipe)
        return
    found = complaint(path, overrides)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


TUNING = "task: sft\ndata: {{train: {text}}}\ntraining: {{max_steps: 1}}\n"
LONG = "x" * 5000  # as a path, the system refuses it


@pytest.mark.parametrize("body", [GOOD, TUNING])
@pytest.mark.parametrize("value", [[["a"]], {"a": {"b": []}}, {"a": "b"}, LONG, "", -1, float("nan")])
def test_a_value_of_any_type_is_taken_or_refused(
    value: object, body: str, tmp_path: Path, text: Path
) -> None:
    for argument in all_arguments(loads(body.format(text=text)).values["task"]):
        if not argument.is_training or argument.keys[-1] in ("packing_strategy", "loss_type", "fsdp"):
            document = loads(body.format(text=text)).values
            section = document
            for key in argument.keys[:-1]:
                section = section.setdefault(key, {})
            section[argument.keys[-1]] = value
            with contextlib.suppress(ConfigError):
                load_recipe(write(tmp_path, yaml.safe_dump(document)), asks_libraries=False)


def test_the_types_of_items_are_checked(tmp_path: Path, text: Path) -> None:
    path = write(tmp_path, TUNING.format(text=text))
    for words in ("data.rename={a: [b]}", "data.messages.roles={human: {x: y}}"):
        (found,) = complaint(path, [words])
        assert "must be a dict of text or None, and is dict of " in found
    (found,) = complaint(path, ["data.columns=[1]"])
    assert "must be a list of text or None, and is list of int" in found


def test_a_missing_file_names_its_neighbour(tmp_path: Path, text: Path) -> None:
    path = write(tmp_path, GOOD.format(text=str(text).replace("text.txt", "txet.txt")))
    (line,) = complaint(path)
    assert f"(there is {text})" in line
    assert line.startswith(f"{path}:3: data.train=")


def test_a_missing_file_in_place_of_a_dataset_of_the_hub_is_a_missing_file() -> None:
    (line,) = complaint("sft-lora", ["data.train=absent.jsonl"])
    assert line.startswith("data.train='absent.jsonl': no such file or folder")


def test_the_folder_of_a_run_is_not_a_model(tmp_path: Path, text: Path) -> None:
    for step in (4, 12):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "run" / f"checkpoint-{step}" / "config.json").write_text("{}")
    problems = complaint(None, [f"data.train={text}", f"model={tmp_path / 'run'}"])
    assert len(problems) == 1
    assert "the folder of a run, not of a model" in problems[0]
    assert problems[0].endswith("checkpoint-12")


def test_broken_yaml_and_missing_recipe_name_the_file(tmp_path: Path) -> None:
    assert "recipe.yaml:2" in complaint(write(tmp_path, "task: x\n  data: [\n"))[0]
    assert "given twice" in complaint(write(tmp_path, "task: causal-lm\ntask: causal-lm\n"))[0]
    assert "missing.yaml" in complaint(tmp_path / "missing.yaml")[0]


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ("1: 2", "1"),
        ("true: 3", "true"),
        ("data: {1: 2}", "data.1"),
        ("training: {1: 2}", "training.1"),
        ("data: {mixture: {1: 2}}", "data.mixture.1"),
        ("model: {config: {null: 2}}", "model.config.null"),
    ],
)
def test_a_key_that_is_not_text_is_reported(lines: str, field: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"task: causal-lm\n{lines}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "recipe.yaml")
    (problem,) = caught.value.problems
    assert problem.field.endswith(f"recipe.yaml:2: {field}")
    assert "quote it" in problem.fix


def test_shorthands(tmp_path: Path, text: Path) -> None:
    body = f"data: {text}\nmodel: gpt2\nsample: Once upon\n"
    recipe = load_recipe(write(tmp_path, body))
    assert (recipe.data.train, recipe.model.name, recipe.sample.prompt) == (str(text), "gpt2", "Once upon")


def test_a_model_named_on_the_command_line_replaces_the_config(tmp_path: Path, text: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD.format(text=text)), ["model=gpt2", "tokenizer=gpt2"])
    assert recipe.model.name == "gpt2"
    assert recipe.model.config is None
    assert recipe.tokenizer.train is None


def test_one_key_of_a_nested_config_can_be_overridden(tmp_path: Path, text: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD.format(text=text)), ["model.config.hidden_size=32"])
    assert recipe.model.config == {"model_type": "llama", "hidden_size": 32}


def test_classification_needs_labels(tmp_path: Path, text: Path) -> None:
    path = write(tmp_path, GOOD.format(text=text).replace("  block_size: 16\n", ""))
    (line,) = complaint(path, ["task=classification"])
    assert "no labels" in line


@pytest.mark.parametrize("section", ["training", "data", "sample"])
def test_a_value_where_a_section_belongs_stays_an_error(section: str, tmp_path: Path, text: Path) -> None:
    # Setting a key inside it afterwards, as --output-dir does, must not make a section of it in silence.
    path = write(tmp_path, GOOD.format(text=text))
    problems = complaint(path, [f"{section}=3", f"{section}.max_steps=5"], output_dir="elsewhere")
    assert any(problem.startswith(f"{section}=3") for problem in problems), problems


def test_output_dir_option_wins(tmp_path: Path, text: Path) -> None:
    path = write(tmp_path, GOOD.format(text=text))
    recipe = load_recipe(path, ["training.output_dir=a"], output_dir="b")
    assert recipe.training["output_dir"] == "b"


def test_printed_config_reads_back_equal(tmp_path: Path, text: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD.format(text=text)), ["sample.prompt=no"])
    again = tmp_path / "again.yaml"
    again.write_text(render_config(recipe))
    copy = load_recipe(again)
    assert {k: v for k, v in vars_of(copy).items() if k != "training"} == {
        k: v for k, v in vars_of(recipe).items() if k != "training"
    }
    assert render_config(copy) == render_config(recipe)


def test_printed_config_marks_what_differs(tmp_path: Path, text: Path) -> None:
    printed = render_config(load_recipe(write(tmp_path, GOOD.format(text=text)))).splitlines()
    marked = {line.split(":")[0].strip() for line in printed if "# *" in line and ":" in line.split("#")[0]}
    assert marked == {
        "train",
        "block_size",
        "config",
        "vocab_size",
        "max_steps",
        "learning_rate",
        "save_strategy",
        "output_dir",
        "log_level",
    }
    assert not any("_token:" in line for line in printed)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("name", names())
def test_the_printed_config_of_a_recipe_is_the_same_recipe_and_warns_of_nothing(
    name: str, everything: bool, tmp_path: Path
) -> None:
    recipe = check_draft(read_draft(name), opens_files=False)
    (tmp_path / "copy.yaml").write_text(printed := render_config(recipe, everything=everything))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = check_draft(read_draft(tmp_path / "copy.yaml"), opens_files=False)
        mine, theirs = (training_arguments(one.training, one.task) for one in (recipe, copy))
    assert vars_of(copy) | {"training": None} == vars_of(recipe) | {"training": None}
    assert mine.to_dict() == theirs.to_dict()
    assert render_config(copy, everything=everything) == printed
    assert ("dataloader_num_workers" in printed) == everything


def test_every_printed_key_is_explained(tmp_path: Path, text: Path) -> None:
    printed = render_config(
        load_recipe(write(tmp_path, GOOD.format(text=text))), everything=True
    ).splitlines()
    keys = [number for number, line in enumerate(printed) if re.match(r" *\w+: \S", line)]
    assert len(keys) > 120
    for number in keys:
        assert "# " in printed[number].replace("# *", "# ") + printed[number - 1], printed[number]
    assert printed[0] + "\n" == EDITOR_LINE
    assert [
        line for line in printed[1:] if len(line) > 80 and "{" not in line and str(tmp_path) not in line
    ] == []


def vars_of(recipe: Recipe) -> dict[str, object]:
    return {name: getattr(recipe, name) for name in Recipe.__dataclass_fields__}


@settings(max_examples=30)
@given(prompt=st.text(max_size=20), fraction=st.floats(0, 0.99), size=st.integers(2, 10**6))
@example(prompt="1e5", fraction=0.1, size=2)
def test_any_value_survives_printing(prompt: str, fraction: float, size: int) -> None:
    changed = Recipe(
        sample=SampleSpec(prompt=prompt),
        data=DataSpec(eval_fraction=fraction, block_size=size),
        training={"output_dir": "runs/x"},
    )
    values = loads(render_config(changed)).values
    assert values["sample"]["prompt"] == prompt
    assert values["data"]["eval_fraction"] == fraction
    assert values["data"]["block_size"] == size


def test_data_laid_over_the_built_in_recipe_takes_the_place_of_its_text(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("hello\n")
    recipe = load_recipe(None, [f"data.train={text}"])
    assert (recipe.data.format, recipe.data.train) == ("auto", str(text))
    assert recipe.training["output_dir"] == "runs/mine"


def test_data_beside_the_built_in_text_is_refused_not_ignored(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("hello\n")
    with pytest.raises(ConfigError, match="brings its own data"):
        load_recipe(None, [f"data.train={text}", "data.format=python-docs"])


def test_paths_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    lines = "task: sft\nmodel: ~/model\ntokenizer: ~/model\ndata: {train: ~/a.jsonl, eval: ~/b.jsonl}\n"
    (tmp_path / "recipe.yaml").write_text(lines)
    found = load_recipe(tmp_path / "recipe.yaml", asks_libraries=False)
    assert (found.model.name, found.tokenizer.name) == (f"{tmp_path}/model", f"{tmp_path}/model")
    assert (found.data.train, found.data.eval) == (f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl")
    words = ["data.train=''", "data.mixture={~/a.jsonl: 1, ~/b.jsonl: 2}"]
    mixed = load_recipe(tmp_path / "recipe.yaml", words, asks_libraries=False).data.mixture
    assert mixed == {f"{tmp_path}/a.jsonl": 1, f"{tmp_path}/b.jsonl": 2}
