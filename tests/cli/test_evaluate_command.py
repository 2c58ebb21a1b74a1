"""`windlass evaluate` on checkpoints and adapters, with tasks in local files; its errors need no lm_eval."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small

from windlass.cli.evaluate_command import SCHEMA
from windlass.cli.main import main
from windlass.core.optional import is_available

transformers = pytest.importorskip("transformers")
with_lm_eval = pytest.mark.skipif(
    not is_available("lm_eval"), reason='lm_eval is not installed: pip install "windlass-trainer[lm-eval]"'
)
Shown = pytest.CaptureFixture[str]
OPTIONS = ["cat", "dogs", "red"]
QUESTIONS = [f"the {word}" for word in small.WORDS[:8]]
LONG = "tiny_generation_with_a_name_that_is_longer_than_its_column_of_a_terminal_allows"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small.saved(tmp_path_factory.mktemp("model"), initializer_range=0.5)


@pytest.fixture(scope="module")
def answers(model: str) -> list[str]:
    return written(model)


@pytest.fixture
def tasks(tmp_path: Path, answers: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one multiple-choice task and one that generates. Of each second row of the latter, the reference is
    what the model writes.
    """
    if is_available("lm_eval"):
        monkeypatch.setenv("HF_XET_HIGH_PERFORMANCE", "1")  # its import sets this
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        {
            "q": question,
            "options": OPTIONS,
            "gold": i % 3,
            "answer": answers[i] if i % 2 else "mat ?",
        }
        for i, question in enumerate(QUESTIONS)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/rows.jsonl}}\ntest_split: train\n"
    (tmp_path / "choice.yaml").write_text(
        f"task: tiny_choice\noutput_type: multiple_choice\n{data}"
        "doc_to_text: '{{q}}'\ndoc_to_choice: '{{options}}'\ndoc_to_target: gold\n"
    )
    (tmp_path / "generation.yaml").write_text(
        f"task: {LONG}\noutput_type: generate_until\nnum_fewshot: 0\n{data}"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{answer}}'\n"
        "generation_kwargs: {until: ['<eos>'], max_gen_toks: 3, do_sample: false}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    return tmp_path


def written(folder: str) -> list[str]:
    """The three likeliest tokens after each question."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = small.tokenizer()
    found = []
    for question in QUESTIONS:
        ids = tokenizer(question, return_tensors="pt")
        made = model.generate(**ids, do_sample=False, max_new_tokens=3)[0][ids["input_ids"].shape[1] :]
        found.append(str(tokenizer.decode(made, skip_special_tokens=True)).strip())
    return found


def accuracy(model: Any) -> float:
    """The share of questions whose likeliest option is the right one; an option is one token."""
    tokenizer = small.tokenizer()
    ids = tokenizer.convert_tokens_to_ids(OPTIONS)
    right = 0
    for index, question in enumerate(QUESTIONS):
        with torch.no_grad():
            logits = model(**tokenizer(question, return_tensors="pt")).logits[0, -1, ids]
        right += int(logits.argmax()) == index % 3
    return right / len(QUESTIONS)


@with_lm_eval
def test_a_model_on_two_tasks(model: str, tasks: Path, capsys: Shown) -> None:
    words = f"{tasks}/choice.yaml,{tasks}/generation.yaml"
    output = tasks / "results.json"
    asked = ["--tasks", words, "--limit", "6", "--num_fewshot", "1", "--batch_size", "4"]
    assert main(["evaluate", model, *asked, "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert max(map(len, shown.out.splitlines()[1:])) <= 80
    assert "tiny_choice" in shown.out
    assert "measured on 12 of 16 samples" in shown.err
    assert f"--num_fewshot=1 is not used for {LONG}" in shown.err
    assert "has a chat template, which is not used" in shown.err
    found = json.loads(output.read_text())
    assert found["schema"] == SCHEMA == "windlass-evaluate/1"
    scores = {(one["task"], one["metric"]): one for one in found["scores"]}
    assert scores[LONG, "exact_match"]["value"] == 0.5
    assert scores[LONG, "exact_match"]["num_fewshot"] == 0
    assert scores["tiny_choice", "acc"]["num_fewshot"] == 1
    assert (scores["tiny_choice", "acc"]["samples"], scores["tiny_choice", "acc"]["of"]) == (6, 8)
    assert sorted(path.name for path in Path(model).iterdir()) == sorted(
        {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        | {"chat_template.jinja"}
    )


@with_lm_eval
@pytest.mark.parametrize(
    "more", [[], pytest.param(["--merge"], marks=pytest.mark.slow)], ids=["base", "merged"]
)
def test_an_adapter(model: str, tasks: Path, more: list[str], capsys: Shown) -> None:
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    before = accuracy(base)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tasks / "adapter")
    expected = accuracy(adapted)
    assert expected != before
    asked = ["--tasks", "tiny_choice", "--include_path", str(tasks), "--json"]
    assert main(["evaluate", str(tasks / "adapter"), *asked, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["merged"] == bool(more)
    assert {one["metric"]: one["value"] for one in found["scores"]}["acc"] == expected


@with_lm_eval
def test_tasks_that_cannot_be_used(
    model: str, tasks: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The manager reads lm_eval's own tasks from the folder of its module: some of 14,000 files, which take ten seconds.
    manager = importlib.import_module("lm_eval.tasks.manager")
    monkeypatch.setattr(
        manager, "__file__", str(Path(manager.__file__ or "").parent / "hellaswag" / "manager.py")
    )
    assert main(["evaluate", model, "--tasks", "helaswag"]) == 2
    assert "did you mean 'hellaswag'?" in capsys.readouterr().err
    (tasks / "rows.jsonl").unlink()
    assert main(["evaluate", model, "--tasks", f"{tasks}/choice.yaml"]) == 2
    assert "lm_eval cannot load" in capsys.readouterr().err


@with_lm_eval
@pytest.mark.slow  # the refusal is that of `open_trained`
def test_what_is_not_a_language_model(tasks: Path, capsys: Shown) -> None:
    folder = tasks / "classifier"
    transformers.LlamaForSequenceClassification(small.config(num_labels=2)).save_pretrained(folder)
    assert main(["evaluate", str(folder), "--tasks", f"{tasks}/choice.yaml"]) == 2
    assert "which does not generate text" in capsys.readouterr().err


def test_without_the_package(model: str, capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", model, "--tasks", "hellaswag"]) == 2
    assert 'pip install "windlass-trainer[lm-eval]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tasks nothing.yaml", "no such file"),
        ("--tasks a,,b", "separated by commas"),
        ("--tasks a --limit 1.5", "--limit=1.5"),
        ("--tasks a --limit 0", "--limit=0.0"),
        ("--tasks a --num_fewshot -1", "--num_fewshot=-1"),
        ("--tasks a --batch_size 0", "--batch_size='0'"),
        ("--tasks a --include_path nowhere", "--include_path='nowhere'"),
        ("--tasks a --output nowhere/file.json", "--output='nowhere/file.json'"),
        ("--tasks a --output /dev/null", "--output='/dev/null'"),
        ("--tasks a --device tpu:9", "--device='tpu:9'"),
        ("--tasks a --merge", "is not an adapter"),
    ],
)
def test_options_that_cannot_be_used(words: str, expected: str, model: str, capsys: Shown) -> None:
    assert main(["evaluate", model, *words.split()]) == 2
    assert expected in capsys.readouterr().err


def test_no_checkpoint(tmp_path: Path, capsys: Shown) -> None:
    assert main(["evaluate", str(tmp_path), "--tasks", "a"]) == 2
    assert "neither a model" in capsys.readouterr().err
