"""`windlass train` as a user runs it: a process of its own, its exit code, its output, and the files it leaves."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import Started, run_script
from tests.hub.server import Hub

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from windlass.checkpoint.files import Files
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.store import Store
from windlass.cli.main import main
from windlass.config.arguments import TrainingArguments
from windlass.recipes.tokenizing import saved_tokenizer
from windlass.trainer import run_checkpoints
from windlass.trainer.trainer import Trainer

Run = Callable[..., str]
ROOT = Path(__file__).parents[2]
NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}
LM = """\
data:
  train: text.txt
  block_size: 16
  eval_fraction: 0.2
model:
  config:
    model_type: llama
    hidden_size: 16
    intermediate_size: 32
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 2
tokenizer:
  train: {vocab_size: 300}
training:
  max_steps: 6
  per_device_train_batch_size: 4
  logging_steps: 2
  eval_strategy: steps
  eval_steps: 3
  save_steps: 3
sample: the cat
"""
CLASSIFIER = """\
task: classification
data:
  train: train.tsv
  eval: dev.tsv
  columns: [text, label]
  max_length: 16
model:
  config:
    model_type: bert
    hidden_size: 16
    intermediate_size: 16
    num_hidden_layers: 1
    num_attention_heads: 2
tokenizer:
  train: {vocab_size: 300, lowercase: true}
training:
  num_train_epochs: 4
  learning_rate: 1e-2
  eval_strategy: epoch
  save_strategy: epoch
  load_best_model_at_end: true
  metric_for_best_model: accuracy
"""
TRANSLATION = """\
task: seq2seq
metric: bleu
data:
  train: train.tsv
  columns: [text, target]
  max_length: 8
model:
  config: {model_type: t5, d_model: 16, d_kv: 8, d_ff: 16, num_layers: 1, num_heads: 2}
tokenizer:
  train: {vocab_size: 300}
training:
  max_steps: 4
  eval_strategy: "no"
"""


@pytest.fixture
def room(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog did not\n" * 60)
    rows = [f"{'good' if index % 2 else 'bad'} film number {index % 7}\t{index % 2}\n" for index in range(64)]
    (tmp_path / "train.tsv").write_text("".join(rows))
    (tmp_path / "dev.tsv").write_text("".join(rows[:21]))
    (tmp_path / "lm.yaml").write_text(LM)
    (tmp_path / "classifier.yaml").write_text(CLASSIFIER)
    return tmp_path


def process(room: Path, *words: str) -> str:
    """What `python -m windlass` writes to a pipe."""
    return run_script("windlass", *words, cwd=room, timeout=240, environ=NO_DEVICE)


@pytest.fixture
def windlass(room: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(room)

    def run(*words: str, code: int = 0) -> str:
        found = main(words)
        written = capsys.readouterr()
        assert found == code, written.out + written.err
        return written.err if code else written.out

    return run


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_language_model_from_start_to_resume(room: Path, windlass: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = process(room, "train", "lm.yaml")
    folder = room / "runs" / "lm"
    assert {"checkpoint-3", "checkpoint-6", "metrics.jsonl", "report.html"} <= {
        p.name for p in folder.iterdir()
    }
    assert "\r" not in out
    assert "Before training, the model writes: the cat" in out
    assert re.search(r"loss +\d\.\d{4} \(step 2\) -> \d\.\d{4} \(step 6\)", out)
    assert re.search(r"speed +[\d,]+ tokens/s, 6 steps", out)
    for shown in ("eval loss", "runs/lm/checkpoint-6", "runs/lm/metrics.jsonl", "runs/lm/report.html"):
        assert shown in out
    checkpoint = folder / "checkpoint-6"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(checkpoint),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    assert model.config.vocab_size == len(tokenizer)
    (command,) = re.findall(r"^resume +(.*)$", out, re.MULTILINE)
    assert command == shlex.join([sys.executable, "-m", "windlass", "train", "lm.yaml", "--resume"])
    fine_tuned = windlass(
        "train", "lm.yaml", f"model={checkpoint}", f"tokenizer={checkpoint}", "--output-dir", "fine"
    )
    assert (room / "fine" / "checkpoint-6").is_dir()
    assert "\r" not in fine_tuned
    again = windlass(*shlex.split(command)[3:], "training.max_steps=8")
    assert (folder / "checkpoint-8").is_dir()
    assert re.search(r"2 steps in", again)
    assert [row["step"] for row in rows(folder) if "loss" in row] == [2, 4, 6, 8]


def test_resuming_a_finished_run_trains_nothing(room: Path, windlass: Run) -> None:
    windlass("train", "lm.yaml", "training.eval_strategy=no")
    out = windlass("train", "lm.yaml", "training.eval_strategy=no", "--resume")
    assert "the run was complete at step 6" in out
    assert not (room / "runs" / "lm" / "checkpoint-7").exists()
    assert not (room / "runs" / "lm" / "model.safetensors").exists()
    # Another run of the same length: the checkpoint of the first one is not its model.
    out = windlass("train", "lm.yaml", "training.eval_strategy=no", "training.save_strategy=no")
    assert (room / "runs" / "lm" / "model.safetensors").exists()
    assert re.search(r"^model +runs/lm$", out, re.MULTILINE)
    (seconds,) = [
        row["timing"]["train_runtime"] for row in rows(room / "runs" / "lm") if row["event"] == "summary"
    ]
    # It was evaluated after that time.
    assert f"{6 * 4 * 16 / seconds:,.0f} tokens/s, 6 steps" in out


def test_a_classifier_learns_and_keeps_its_best(room: Path, windlass: Run) -> None:
    from transformers import AutoModelForSequenceClassification

    out = windlass("train", "classifier.yaml", "--output-dir", "here")
    (accuracy,) = re.findall(r"eval accuracy +(\d\.\d+)", out)
    best = max(float(row["eval_accuracy"]) for row in rows(room / "here") if "eval_accuracy" in row)  # type: ignore[arg-type]
    assert float(accuracy) == pytest.approx(best, abs=1e-4)
    assert best > 0.9
    (place,) = re.findall(r"model +(here/checkpoint-\d+) \(the best by accuracy\)", out)
    model = AutoModelForSequenceClassification.from_pretrained(room / place)
    assert model.config.id2label == {0: "0", 1: "1"}
    assert "samples/s" in out


def test_dry_run_leaves_nothing_and_says_what_it_takes(room: Path, windlass: Run) -> None:
    out = windlass("train", "lm.yaml", "--dry-run", "training.max_steps=1000")
    assert "2 updates, an evaluation, a save, a load" in out
    assert re.search(r"steps +1,000 at \d", out)
    for name in ("time", "disk", "memory"):
        assert re.search(rf"^  {name} +\S", out, re.MULTILINE)
    assert not (room / "runs").exists()


def test_dry_run_counts_epochs(windlass: Run) -> None:
    out = windlass(
        "train", "classifier.yaml", "--dry-run", "--json", "training.gradient_accumulation_steps=3"
    )
    found = json.loads(out)
    assert found["steps"] == 12  # 64 texts, 24 to an update, 3 updates to an epoch, 4 epochs
    checked = {"updates": 2, "evaluation": True, "predictions": False, "save": True, "load": True}
    assert found["checked"] == checked
    assert found["disk_bytes"] == found["checkpoints_kept"] * found["checkpoint_bytes"] > 0
    assert found["schema"] == "windlass-dry-run/1"
    # One more than the epochs: the best weights are loaded at the end, and evaluated.
    assert (found["evaluations"], found["saves"]) == (5, 4)
    words = ("training.max_steps=20", "training.gradient_accumulation_steps=3", "training.keep_last=2")
    found = json.loads(windlass("train", "classifier.yaml", "--dry-run", "--json", *words))
    # 3 updates to an epoch: the end of training is that of the last one, which is not whole.
    assert (found["steps"], found["evaluations"], found["saves"]) == (20, 8, 7)
    assert found["checkpoints_kept"] == 4  # the two newest, the best, and one before it is removed


def test_dry_run_generates_what_the_run_writes_at_its_end(
    room: Path, windlass: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted: list[int] = []
    predict = Trainer.predict

    def noted(trainer: Trainer, rows: Any, *args: Any, **kwargs: Any) -> Any:
        predicted.append(len(rows))
        return predict(trainer, rows, *args, **kwargs)

    monkeypatch.setattr(Trainer, "predict", noted)
    (room / "translate.yaml").write_text(TRANSLATION)
    out = windlass("train", "translate.yaml", "--dry-run", "--json", "data.test=train.tsv")
    assert json.loads(out)["checked"]["predictions"]
    assert predicted == [16]  # two batches
    # Without a metric the run measures the loss of the test data.
    monkeypatch.setattr(Trainer, "evaluate", lambda trainer, rows, *_: predicted.append(len(rows)))
    out = windlass("train", "translate.yaml", "--dry-run", "--json", "data.test=train.tsv", "metric=null")
    assert json.loads(out)["checked"]["predictions"]
    assert predicted == [16, 3, 16]  # of the evaluation data, and of the test data


@pytest.mark.parametrize(
    "words",
    [
        ["training.eval_strategy=no"],
        ["training.eval_delay=4"],
        ["training.eval_on_start=true"],
        ["training.keep_best=2", "training.eval_steps=2"],
        [
            "training.eval_strategy=epoch",
            "training.save_strategy=best",
            "training.metric_for_best_model=loss",
        ],
        ["training.load_best_model_at_end=true", "training.save_total_limit=1"],
        # The last update is saved, and after the evaluation of its epoch again.
        ["training.eval_strategy=epoch", "training.keep_best=1"],
    ],
)
def test_dry_run_counts_what_the_run_does(
    words: list[str], room: Path, windlass: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = json.loads(windlass("train", "lm.yaml", "--dry-run", "--json", *words))
    counts = [0, 0, 0]
    evaluate, remove = Trainer.evaluate, Retention.apply

    def evaluated(trainer: Trainer, *args: Any, **kwargs: Any) -> dict[str, float]:
        counts[0] += 1
        return evaluate(trainer, *args, **kwargs)

    def saved(policy: Retention, store: Store, protected: Iterable[Path]) -> None:
        counts[1:] = counts[1] + 1, max(counts[2], len(store.whole()))
        remove(policy, store, protected)

    monkeypatch.setattr(Trainer, "evaluate", evaluated)
    monkeypatch.setattr(Retention, "apply", saved)
    windlass("train", "lm.yaml", *words)
    assert [estimate["evaluations"], estimate["saves"]] == counts[:2]
    assert estimate["checkpoints_kept"] >= counts[2]  # at most: the best may be the newest too


@pytest.mark.parametrize(
    "words",
    [
        ["training.keep_best=2"],
        ["training.lr_scheduler_type=reduce_lr_on_plateau"],
        ["training.lr_scheduler_type=warmup_stable_decay", "training.lr_scheduler_kwargs.num_decay_steps=4"],
        ["training.save_only_model=true"],
        ["training.max_steps=1"],
    ],
)
def test_dry_run_accepts_what_the_run_accepts(words: list[str], windlass: Run) -> None:
    found = json.loads(windlass("train", "lm.yaml", "--dry-run", "--json", *words))
    assert found["checked"]["load"] == ("training.save_only_model=true" not in words)
    assert found["checked"]["updates"] == (1 if "training.max_steps=1" in words else 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lm.yaml", "data.train=nowhere.txt"], ["data.train='nowhere.txt'", "no such file"]),
        (["lm.yaml", "model.config.hiden_size=3"], ["hidden_size"]),
        (["broken.yaml"], ["broken.jsonl:2", "not valid JSON"]),
        # A layout is checked before the data is read.
        (["broken.yaml", "parallel.tp=2"], ["tp_size=2", "the number of processes"]),
        (["lm.yaml", "--resume"], ["No valid checkpoint found in output directory"]),
        (["nothing.yaml"], ["nothing.yaml"]),
        (["lm.yaml", "--output-dir", "text.txt/run"], ["output_dir='text.txt/run'", "can't be written"]),
        (["lm.yaml", "--output-dir", "text.txt/run", "--dry-run"], ["output_dir='text.txt/run'"]),
        (
            ["lm.yaml", "training.max_steps=-5", "training.num_train_epochs=-1"],
            ["max_steps=-5", "num_train_epochs"],
        ),
        (["lm.yaml", "training.metric_for_best_model=f1"], ["metric_for_best_model='f1'", "eval_loss"]),
        (["lm.yaml", "training.metric_for_best_model=f1", "--dry-run"], ["metric_for_best_model='f1'"]),
    ],
)
def test_bad_input_is_one_message_and_code_2(
    words: list[str], said: list[str], room: Path, windlass: Run
) -> None:
    (room / "broken.jsonl").write_text('{"text": "x"}\n{"text: 3}\n')
    (room / "broken.yaml").write_text(LM.replace("text.txt", "broken.jsonl"))
    done = windlass("train", *words, code=2)
    assert done.startswith("windlass: ")
    assert all(word in done for word in said), done


def test_a_last_save_that_fails_is_one_message_and_code_2(
    room: Path, windlass: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(files: Files, descriptor: int, piece: memoryview) -> int:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(Files, "write_some", gone)
    monkeypatch.setattr(run_checkpoints, "LAST_PAUSES", (0.0,))
    said = windlass("train", "lm.yaml", "--output-dir", "gone", code=2)
    assert f"but its last save failed: [Errno {errno.ENOTCONN}]" in said
    assert "Last whole checkpoint: none of this run" in said
    assert rows(room / "gone")[-1]["event"] == "summary"


def test_a_disk_that_is_full_at_the_end_is_one_message_and_code_2(
    room: Path, windlass: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(files: Files, descriptor: int, piece: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Files, "write_some", full)
    said = windlass("train", "lm.yaml", "training.save_strategy=no", "--output-dir", "full", code=2)
    assert re.search(r"the model cannot be written to \S+/full \(.*No space left on device\): choose", said)
    assert not list((room / "full").glob("*.safetensors"))  # nor a part of one
    assert rows(room / "full")  # what was learnt of the run is kept


@pytest.mark.parametrize("resume", [True, "auto", "checkpoint-2"])
def test_a_resumed_run_takes_the_tokenizer_of_its_checkpoint(resume: bool | str, tmp_path: Path) -> None:
    Store(tmp_path).write(2, {}, lambda draft: draft.write_file("tokenizer.json", b"{}"))
    place = str(tmp_path / resume) if resume == "checkpoint-2" else resume
    args = TrainingArguments(str(tmp_path))
    assert saved_tokenizer(args, place) == tmp_path / "checkpoint-2"
    assert saved_tokenizer(args, None) is None


def test_a_run_from_the_hub_takes_the_tokenizer_of_its_checkpoint(
    room: Path, windlass: Run, hub: Hub, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the text may be another one, from which another tokenizer would be trained."""
    monkeypatch.setenv("HF_TOKEN", token)
    publish = ("training.push_to_hub=true", "training.hub_model_id=run", "training.hub_strategy=checkpoint")
    quick = ("lm.yaml", "training.eval_strategy=no", "training.save_steps=2")
    windlass("train", *quick, "--output-dir", "first", "training.max_steps=2", *publish)
    (room / "text.txt").write_text("a bird sang in the old tree until the rain came down\n" * 60)
    windlass(
        "train", *quick, "--output-dir", "second", "training.max_steps=4", "--resume", "hub:someone/run@main"
    )
    first, second = (
        (room / folder / f"checkpoint-{step}" / "tokenizer.json").read_text()
        for folder, step in (("first", 2), ("second", 4))
    )
    assert first == second
    assert "missing/run: no such repository" in windlass(
        "train", *quick, "--resume", "hub:missing/run", code=2
    )


def test_a_resumed_run_reports_the_keys_that_changed(room: Path, windlass: Run) -> None:
    first = ("lm.yaml", "training.eval_strategy=no", "training.save_steps=2", "--output-dir", "here")
    windlass("train", *first, "training.max_steps=2")
    again = windlass("train", *first, "training.max_steps=4", "--resume")
    assert "Continuing from here/checkpoint-2, step 2\nModel " in again
    changed = (
        "data.eval_fraction=0.3",
        "tokenizer.train.vocab_size=290",
        "sample.prompt=a dog",
        "training.seed=7",
    )
    said = windlass("train", *first, "training.max_steps=6", *changed, "--resume")
    assert (
        "Continuing from here/checkpoint-4, step 4\n"
        "  data.eval_fraction: 0.3, and was 0.2\n"
        "  tokenizer.train.vocab_size: 290, and was 300; the tokenizer of the checkpoint is kept\n"
        "  training.seed: 7, and was 42; a part of the rows that is drawn for evaluation is another one, which was "
    ) in " ".join(said.split("\n    "))


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals to a process")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_leaves_a_state_that_resumes(
    number: signal.Signals, code: int, room: Path, windlass: Run
) -> None:
    words = [
        "train",
        "lm.yaml",
        "training.max_steps=100000",
        "training.logging_steps=1",
        "training.eval_strategy=no",
    ]
    with Started("windlass", *words, "training.save_steps=50000", cwd=room, environ=NO_DEVICE) as process:
        for line in process.stdout:
            if "loss" in line:
                process.send_signal(number)
                break
        ended, said = process.end()
    assert ended == code, said
    assert "Traceback" not in said
    (checkpoint,) = re.findall(r"Interrupted: (\S+) is complete", said)
    (resume,) = re.findall(rf"^  {re.escape(sys.executable)} -m windlass (.*--resume)$", said, re.MULTILINE)
    step = int(checkpoint.rpartition("-")[2])
    out = windlass(*shlex.split(resume), f"training.max_steps={step + 2}")
    assert "2 steps in" in out, out


@pytest.mark.dist
@pytest.mark.skipif(sys.platform == "win32", reason="sends signals to a process")
def test_the_launcher_of_a_recipe_reports_the_step_at_which_it_exited(room: Path) -> None:
    launch = ("launch", "--cpu", "--num_processes", "1", "-m", "windlass", "train", "lm.yaml")
    endless = ("training.max_steps=100000", "training.logging_steps=1", "training.eval_strategy=no")
    with Started("windlass", *launch, *endless, cwd=room, environ=NO_DEVICE) as process:
        for line in process.stdout:
            if "loss" in line:
                process.send_signal(signal.SIGTERM)
                break
        ended, said = process.end()
    assert ended == 75, said
    (step,) = re.findall(r"Interrupted: \S+/checkpoint-(\d+) is complete", said)
    assert f"the job saved and exited at step {step}, as requested" in said


def test_the_built_in_recipe(room: Path, windlass: Run) -> None:
    shorter = [
        "training.max_steps=14",
        "training.eval_steps=7",
        "training.save_steps=7",
        "training.logging_steps=7",
        "training.per_device_train_batch_size=8",
    ]
    out = windlass("train", *shorter)
    losses = re.findall(r"loss +(\d\.\d+) \(step 1\) -> (\d\.\d+) \(step 14\)", out)
    assert float(losses[0][0]) - float(losses[0][1]) > 1
    assert (room / "runs" / "python-docs" / "checkpoint-14").is_dir()


@pytest.mark.slow
def test_a_ready_recipe_runs_on_real_files(windlass: Run) -> None:
    data = ROOT.parent / "shared" / "data" / "sst2"
    if not data.is_dir():
        pytest.skip("the SST-2 files are not beside the repository")
    files = [f"data.train={data}/train.tsv", f"data.eval={data}/dev.tsv"]
    recipe = "sst2"
    out = windlass("train", recipe, *files, "training.num_train_epochs=2")
    (accuracy,) = re.findall(r"eval accuracy +(\d\.\d+)", out)
    assert float(accuracy) > 0.72
