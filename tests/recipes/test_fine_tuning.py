"""The recipes of the task sft: a base that is trained first, an adapter, a sample before and after."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from tests.dist.launch import failure_on_ranks, on_ranks

from windlass.checkpoint.remote import RemoteFolder
from windlass.checkpoint.run_lock import RunLock
from windlass.cli.main import main
from windlass.core.errors import ConfigError
from windlass.recipes.recipe import load_recipe

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    rows = [
        {
            "question": f"Tom has {n} apples and gets {n + 1} more. How many?",
            "answer": f"{n} + {n + 1} = {2 * n + 1}",
        }
        for n in range(120)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small(problems: Path, *more: str) -> list[str]:
    return [
        f"data.train={problems}", f"training.output_dir={problems.parent / 'run'}", "tokenizer.train.vocab_size=300",
        "base.config.hidden_size=64", "base.config.intermediate_size=64", "base.config.num_hidden_layers=1",
        "base.max_steps=2", "base.batch_size=2", "base.block_size=32", "training.max_steps=2", "training.save_steps=2",
        "training.eval_steps=2", "training.per_device_train_batch_size=1", "sample.max_new_tokens=4", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["sft-gsm8k", "qlora-gsm8k"])
def test_a_newcomer_gets_an_adapter_and_a_sample(
    name: str, problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.startswith("qlora"):
        pytest.importorskip("bitsandbytes")
    assert main(["train", name, *small(problems)]) == 0
    shown = capsys.readouterr().out
    run = problems.parent / "run"
    assert "Adapter     training " in shown
    assert re.search(
        r"  train: +118 rows, [\d,]+ tokens .* 0 truncated, 0 dropped; packed into \d+ rows", shown
    )
    assert "Before training, the model writes: Tom has 3 apples" in shown
    assert "\nafter          Tom has 3 apples" in shown
    assert (run / "base" / "model.safetensors").is_file()
    assert (run / "checkpoint-2" / "adapter_model.safetensors").is_file()
    assert (run / "report.html").is_file()
    before = (run / "base" / "model.safetensors").stat().st_mtime_ns
    assert main(["train", name, *small(problems, "training.max_steps=3"), "--resume"]) == 0
    assert (run / "base" / "model.safetensors").stat().st_mtime_ns == before, "the base is trained once"
    assert (run / "metrics.jsonl").read_text().count('"base"') == 0


def test_the_base_of_a_run_stays_and_another_run_gets_another(
    problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = problems.parent / "run" / "base" / "model.safetensors"
    words = ["train", "sft-gsm8k", *small(problems, "adapter.r=2")]
    assert main(words) == 0
    first = weights.read_bytes()
    # The file has other rows now, of which a new tokenizer has as many entries.
    problems.write_text(problems.read_text().replace("Tom has", "Zoe and Yak saw"))
    assert main([*words, "training.max_steps=3", "--resume"]) == 0
    assert weights.read_bytes() == first
    assert main([*words, "base.max_steps=3", "training.max_steps=4", "--resume"]) == 2
    assert "base.max_steps=3: the run that is resumed began with 2" in capsys.readouterr().err
    assert weights.read_bytes() == first
    other = [f"training.output_dir={problems.parent / 'other'}", "training.max_steps=4"]
    assert main([*words, *other, "--resume", str(weights.parents[1] / "checkpoint-3")]) == 2
    assert "holds no complete base, and the adapter of the run that is resumed" in capsys.readouterr().err
    with RunLock(problems.parent / "run"):  # of a run that is under way
        assert main([*words, "base.max_steps=3"]) == 2
    assert "another run is writing to it" in capsys.readouterr().err
    assert weights.read_bytes() == first
    assert main(words) == 2
    assert "holds an adapter of an earlier run (checkpoint-3)" in capsys.readouterr().err
    assert weights.read_bytes() == first
    for checkpoint in (problems.parent / "run").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    assert main(words) == 0
    assert weights.read_bytes() != first


@pytest.mark.parametrize("begins", ["eva", "pissa_niter_4"])
def test_an_adapter_that_cannot_begin_is_refused_before_a_base_is_trained(
    begins: str, problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "sft-gsm8k", *small(problems), f"adapter.init_lora_weights={begins}"]) != 0
    assert f"adapter.init_lora_weights='{begins}'" in capsys.readouterr().err
    assert not (problems.parent / "run" / "base").exists()


@pytest.mark.parametrize("adapter", ["adapter=null", "adapter.r=2"])
def test_a_run_in_a_remote_folder_is_continued_on_another_machine_with_its_tokenizer_and_base(
    adapter: str, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    remote = f"training.output_dir=file://{tmp_path}/remote/run"
    words = ["train", "sft-gsm8k", *small(problems, remote, adapter)]
    monkeypatch.setenv("WINDLASS_STAGING", str(tmp_path / "one"))
    assert main(words) == 0
    tokenizer = (tmp_path / "remote/run/checkpoint-2/tokenizer.json").read_bytes()
    base = (tmp_path / "remote/run/base/model.safetensors").read_bytes()
    problems.write_text(problems.read_text().replace("Tom has", "Zoe and Yak saw"))
    monkeypatch.setenv("WINDLASS_STAGING", str(tmp_path / "two"))

    def fails(folder: RemoteFolder, operation: str, name: str) -> None:
        if operation == "download" and folder.url.endswith("/base") and name == "model.safetensors":
            raise ConnectionError("the line is cut")

    with monkeypatch.context() as cut:
        cut.setattr(RemoteFolder, "before", fails)
        assert main([*words, "training.max_steps=3", "--resume"]) != 0
    assert not list((tmp_path / "two").glob("*/*base"))
    assert main([*words, "training.max_steps=3", "--resume"]) == 0
    assert (tmp_path / "remote/run/checkpoint-3/tokenizer.json").read_bytes() == tokenizer
    assert (tmp_path / "remote/run/base/model.safetensors").read_bytes() == base
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "remote", "train.jsonl", "two"]


def test_a_base_is_not_taken_over_from_other_texts_or_another_seed(problems: Path) -> None:
    """A named tokenizer stays the same, but rows that are held out now may have trained the base that is there."""
    run = problems.parent / "run"
    assert main(["train", "sft-gsm8k", *small(problems)]) == 0
    shutil.copytree(run / "base", problems.parent / "words")
    named = small(problems, f"tokenizer.name={problems.parent / 'words'}")
    seen = []
    for more in ([], [], ["training.seed=7"], ["training.seed=7"]):
        for checkpoint in run.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        if len(seen) == 3:
            problems.write_text(problems.read_text().replace("Tom has", "Zoe and Yak saw"))
        assert main(["train", "sft-gsm8k", *named, *more]) == 0
        seen.append((run / "base" / "model.safetensors").read_bytes())
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


def test_a_base_that_the_first_process_cannot_write_ends_all(problems: Path) -> None:
    base, words = problems.parent / "run" / "base", ["train", "sft-gsm8k", *small(problems)]
    assert main(words) == 0
    (base / "base_recipe.json").unlink()
    (base / "base_recipe.json").mkdir()  # in the way at its end
    shutil.rmtree(problems.parent / "run" / "checkpoint-2")
    assert on_ranks(2, main, [*words, "training.use_cpu=true"]) == [2, 2]
    shutil.rmtree(base)
    base.write_text("")  # in the way at its beginning
    assert on_ranks(2, main, [*words, "training.use_cpu=true"]) == [2, 2]
    base.unlink()
    assert on_ranks(2, main, [*words, "training.use_cpu=true"]) == [0, 0]


def test_ranks_rehearse_a_run_in_one_folder(problems: Path) -> None:
    """The base that the first one trains is there for the others, and so is the checkpoint that all load."""
    words = ["train", "sft-gsm8k", *small(problems), "training.use_cpu=true", "--dry-run"]
    assert on_ranks(2, main, words) == [0, 0]
    assert not (problems.parent / "run").exists()


def test_a_machine_whose_disk_lacks_the_base_does_not_wait_for_the_others(problems: Path) -> None:
    words = ["train", "sft-gsm8k", *small(problems), "training.use_cpu=true"]
    assert main(words) == 0
    shutil.copytree(problems.parent / "run" / "base", problems.parent / "0" / "base")
    printed = failure_on_ranks(2, train_on_own_disk, words, str(problems.parent), timeout=120)
    assert printed.count("base is not on all machines of the job") == 2


def train_on_own_disk(words: list[str], root: str) -> None:
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
    assert main([*words, f"training.output_dir={root}/{os.environ['RANK']}"]) == 0


def test_a_named_model_is_tuned_as_it_is(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "sft-gsm8k", *small(problems)]) == 0
    base = problems.parent / "run" / "base"
    recipe = problems.parent / "mine.yaml"
    recipe.write_text(
        f"task: sft\ndata: {{train: {problems}, prompt_column: question, completion_column: answer}}\nmodel: {base}\n"
        f"training: {{max_steps: 1, use_cpu: true, max_length: 32, output_dir: {problems.parent / 'whole'}}}\n"
    )
    capsys.readouterr()
    assert main(["train", str(recipe)]) == 0
    assert "Adapter" not in capsys.readouterr().out
    assert list((problems.parent / "whole").glob("**/model.safetensors"))


def test_a_ready_recipe_tunes_a_named_model_with_its_tokenizer(problems: Path) -> None:
    """As its first lines say; what it says of the base, and of its tokenizer, applies without a name."""
    recipe, run = "sft-gsm8k", problems.parent / "run"
    assert main(["train", recipe, *small(problems)]) == 0
    base = (run / "base").rename(problems.parent / "mine")
    options = [word for word in small(problems) if not word.startswith("base.")]
    named = [
        f"model.name={base}",
        "tokenizer.train.vocab_size=300",
        "--output-dir",
        str(problems.parent / "named"),
    ]
    assert main(["train", recipe, *options, *named]) == 0
    (tuned,) = (problems.parent / "named").glob("checkpoint-*")
    assert (tuned / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert (tuned / "adapter_model.safetensors").is_file()
    assert not (problems.parent / "named" / "base").exists()


def test_rows_that_cannot_be_prepared_are_found_before_a_base_is_trained(
    problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "sft-gsm8k", *small(problems, "training.assistant_only_loss=true")]) == 2
    assert "needs conversations" in capsys.readouterr().err
    assert not (problems.parent / "run" / "base").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("data: {train: T, prompt_column: q}", "name both or neither"),
        ("data: T\nmodel: {config: {model_type: llama}}", "names new weights, which cannot be tuned"),
        ("data: T\nquantization: nf4", "add an adapter"),
        ("data: T\nquantization: 2bit\nadapter: {r: 2}", "must be one of nf4, fp4, int8"),
        ("data: {train: T, mixture: {T: 1}}", "give either data.mixture or data.train"),
        ("data: {mixture: {nowhere.jsonl: 1}}", "no such file or folder"),
        ("data: T\ntraining: {packing_strategy: best}", "must be one of bfd, bfd_split, wrapped"),
        ("task: causal-lm\ndata: T\nadapter: {r: 2}", "has no meaning for task causal-lm"),
    ],
)
def test_contradictions_are_found_at_once(tmp_path: Path, body: str, message: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        ("" if body.startswith("task") else "task: sft\n") + body.replace("T", str(text)) + "\n"
    )
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe)
