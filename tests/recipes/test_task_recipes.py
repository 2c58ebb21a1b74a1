"""Recipes of each task that is not text to continue or to classify, for a few steps on a slice of the real data."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.dist.launch import run_script

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from windlass.cli.main import main
from windlass.core.errors import ConfigError
from windlass.core.types import EvalPrediction
from windlass.metrics.answer_scores import scores_of_set
from windlass.recipes.recipe import load_recipe, training_arguments
from windlass.recipes.tasks import TASKS
from windlass.recipes.text_metrics import decoded

SMALL = {
    "translate-multi30k": "model.config.d_model=16 model.config.encoder_layers=1 model.config.decoder_layers=1 "
    "model.config.encoder_ffn_dim=16 model.config.decoder_ffn_dim=16 training.generation_num_beams=2 "
    "tokenizer.train.vocab_size=300 data.max_length=24",
    "masked-shakespeare": "model.config.hidden_size=16 model.config.intermediate_size=16 "
    "model.config.num_hidden_layers=1 tokenizer.train.vocab_size=300 data.block_size=32",
    "digits": "model.config.hidden_size=16 model.config.intermediate_size=16 model.config.num_hidden_layers=1",
}
STEPS = "training.max_steps=4 training.logging_steps=2 training.eval_strategy=steps training.eval_steps=2 "
STEPS += "training.save_strategy=steps training.save_steps=2 training.use_cpu=true training.disable_tqdm=true"


def sliced(shared_data: Path, folder: Path) -> dict[str, str]:
    """The first lines of the real data, and the overrides that name them."""
    sizes = {"train": 64, "val": 12, "test_2016_flickr": 10}
    for name, count in sizes.items():
        for language in ("de", "en"):
            with gzip.open(
                shared_data / "multi30k" / f"{name}.{language}.gz", "rt", encoding="utf-8"
            ) as file:
                lines = [next(file) for _ in range(count)]
            with gzip.open(folder / f"{name}.{language}.gz", "wt", encoding="utf-8") as file:
                file.writelines(lines)
    text = (shared_data / "tinyshakespeare" / "input.txt").read_text("utf-8")
    (folder / "input.txt").write_text(text[:20_000], "utf-8")
    files = ("data.train=train.de.gz", "data.eval=val.de.gz", "data.test=test_2016_flickr.de.gz")
    return {
        "translate-multi30k": " ".join(files),
        "masked-shakespeare": "data.train=input.txt",
        "digits": "data.max_samples=60",
    }


@pytest.mark.parametrize("name", SMALL)
def test_a_few_steps(name: str, shared_data: Path, tmp_path: Path) -> None:
    pytest.importorskip({"translate-multi30k": "sacrebleu", "digits": "sklearn"}.get(name, "torch"))
    words = f"{sliced(shared_data, tmp_path)[name]} {SMALL[name]} {STEPS}".split()
    said = run_script("windlass", "train", name, "--output-dir", "run", *words, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "evaluation" or "eval_loss" in row][:2] == [2, 4]
    assert "eval loss" in said
    if name == "translate-multi30k":
        check_bleu(said, tmp_path)
    if name == "digits":
        assert re.search(r"eval accuracy +0\.\d{4}", said)
        assert "48 images, 12 images held out for evaluation" in said


def check_bleu(said: str, folder: Path) -> None:
    """The printed figure is what sacrebleu says of the file of predictions."""
    import sacrebleu

    texts = (folder / "run" / "predictions.txt").read_text("utf-8").splitlines()
    with gzip.open(folder / "test_2016_flickr.en.gz", "rt", encoding="utf-8") as file:
        references = file.read().splitlines()
    assert len(texts) == len(references) == 10
    expected = f"{sacrebleu.corpus_bleu(texts, [references]).score:.2f}"
    assert re.findall(r"test bleu +(\S+)", said) == [expected]
    assert re.findall(r"predictions +(\S+)", said) == ["run/predictions.txt"]


def complaint(tmp_path: Path, body: str, *overrides: str) -> str:
    (tmp_path / "recipe.yaml").write_text(body)
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "recipe.yaml", overrides)
    return str(caught.value)


TINY_PAIRS = """
task: seq2seq
data: {train: t.jsonl, eval_fraction: 0.5}
model: {config: {model_type: marian, d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_ffn_dim: 16,
  decoder_ffn_dim: 16, encoder_attention_heads: 2, decoder_attention_heads: 2}}
tokenizer: {train: {vocab_size: 300}}
metric: rouge
training: {max_steps: 1, use_cpu: true, report_to: none, save_strategy: "no", output_dir: run}
"""


def test_predictions_that_cannot_be_written_are_an_error_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rouge_score")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text('{"text": "ein Hund", "target": "a dog"}\n' * 8)
    (tmp_path / "recipe.yaml").write_text(TINY_PAIRS)
    (tmp_path / "run" / "predictions.txt" / "in-the-way").mkdir(parents=True)
    assert main(["train", "recipe.yaml"]) == 2
    assert "predictions.txt" in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "run" / "model.safetensors").is_file(), "what was trained is not lost"


def test_whole_references_count_and_test_data_without_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rouge_score")
    monkeypatch.chdir(tmp_path)
    whole = " ".join(["a dog"] * 10)
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "ein Hund", "target": whole}) + "\n")
    (tmp_path / "recipe.yaml").write_text(TINY_PAIRS)
    words = ("data.eval=t.jsonl", "data.eval_fraction=0.05", "data.test=t.jsonl", "data.max_length=8")
    recipe = load_recipe("recipe.yaml", words)
    args, task = training_arguments(recipe.training, recipe.task), TASKS[recipe.task]
    parts = task.build_parts(recipe, args)
    labels = np.array([parts.evaluation[0]["labels"]])
    (cut,) = decoded(parts.tokenizer, labels)
    found = task.trainer_options(parts, args)["compute_metrics"](EvalPrediction(labels, labels))
    assert found == scores_of_set(["rouge"], [cut], [whole])
    assert found["rouge1"] < 100
    assert main(["train", "recipe.yaml", *words, "metric=null"]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"test loss +(\S+)", said) == re.findall(r"eval loss +(\S+)", said) != []


PAIRS = "task: seq2seq\nmodel: {config: {model_type: marian}}\ntokenizer: {train: {vocab_size: 300}}\n"


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (
            PAIRS + "data: {train: t.txt}\n",
            "a txt file has no labels; seq2seq reads jsonl, csv, tsv, parquet, parallel",
        ),
        (PAIRS + "data: {train: t.jsonl, block_size: 8}\n", "has no meaning for task seq2seq; leave it out"),
        (
            PAIRS + "data: {train: t.jsonl}\nmetric: bleu\ntraining: {predict_with_generate: false}\n",
            "is computed from generated text; leave training.predict_with_generate out",
        ),
        (
            PAIRS + "data: {train: t.jsonl}\nmetric: bleu\ntraining: {prediction_loss_only: true}\n",
            "is computed from generated text, which is not kept; leave training.prediction_loss_only out",
        ),
        (PAIRS + "data: {train: t.jsonl}\nmetric: blue\n", "must be one of bleu, rouge; did you mean 'bleu'"),
        (
            PAIRS.replace("seq2seq", "masked-lm") + "data: {train: t.txt}\nmetric: bleu\n",
            "has no meaning for task masked-lm",
        ),
        (
            PAIRS.replace("seq2seq", "masked-lm")
            + "data: {train: t.txt}\ntraining: {generation_num_beams: 2}\n",
            "training.generation_num_beams=2: has no meaning for task masked-lm",
        ),
        (
            PAIRS.replace("seq2seq", "image-classification") + "data: {train: t.txt}\n",
            "has no meaning for task image-classification",
        ),
        (
            PAIRS + "data: {format: digits}\n",
            "is for task image-classification and sft; seq2seq needs another",
        ),
    ],
)
def test_keys_of_another_task_are_refused(
    body: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("t.txt", "t.jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert match in complaint(tmp_path, body)
