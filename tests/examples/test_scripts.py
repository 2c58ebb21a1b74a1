"""The scripts of `examples/` that have a data flag each, for a few steps in one process and in two."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from tests.dist.launch import launch, run_script

for package in ("transformers", "tokenizers"):
    pytest.importorskip(package)

SHORT = "--do_train --do_eval --max_steps 2 --per_device_train_batch_size 4 --per_device_eval_batch_size 4 "
SHORT += "--report_to none --disable_tqdm true --use_cpu true --save_strategy no --overwrite_output_dir"
SMALL = "hidden_size=16,intermediate_size=16,num_hidden_layers=1,num_attention_heads=2"
SMALL_BART = (
    "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2"
)
SENTENCES = [
    "a man walks his dog", "two women talk", "the dog sleeps in the sun", "children play with a red ball",
    "one man reads", "a woman and a child wait for the train", "people dance", "the train leaves in the rain",
] * 3  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for each kind of data."""
    folder = tmp_path_factory.mktemp("data")
    reversed_words = [" ".join(reversed(text.split())) for text in SENTENCES]
    (folder / "text.txt").write_text("\n".join(SENTENCES) + "\n", "utf-8")
    (folder / "labelled.tsv").write_text(
        "".join(f"{text}\t{len(text.split()) > 4:d}\n" for text in SENTENCES), "utf-8"
    )
    for name, lines in (("pairs.de.gz", reversed_words), ("pairs.en.gz", SENTENCES)):
        with gzip.open(folder / name, "wt", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    rows = [{"text": a, "summary": b} for a, b in zip(reversed_words, SENTENCES, strict=True)]
    (folder / "summaries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder


def test_a_quoted_cell_keeps_its_lines(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not as "common": the benchmarks have a module of that name too.
    spec = importlib.util.spec_from_file_location("common_of_examples", root / "examples" / "common.py")
    assert spec is not None
    assert spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, common)  # where its dataclasses look for their types
    spec.loader.exec_module(common)
    (tmp_path / "rows.csv").write_bytes(b'text,label\r\n"a man\nwalks",1\r\n\r\n')
    assert common.read_file(tmp_path / "rows.csv") == [{"text": "a man\nwalks", "label": "1"}]
    (tmp_path / "rows.txt").write_bytes(b"a man\r\nwalks\r\n")
    assert common.read_file(tmp_path / "rows.txt") == [{"text": "a man"}, {"text": "walks"}]


def flags(script: str, data: Path, folder: Path) -> list[str]:
    both = "--train_file {0} --validation_file {0}"
    words = {
        "run_glue": both.format(data / "labelled.tsv")
        + f" --column_names text,label --config_overrides {SMALL}",
        "run_clm": f"--train_file {data / 'text.txt'} --block_size 16 --config_overrides {SMALL},num_key_value_heads=2",
        "run_mlm": f"--train_file {data / 'text.txt'} --config_overrides {SMALL}",
        "run_translation": both.format(data / "pairs.de.gz")
        + f" --test_file {data / 'pairs.de.gz'} --do_predict --config_overrides {SMALL_BART}"
        + " --max_target_length 12 --generation_num_beams 2",
        "run_summarization": both.format(data / "summaries.jsonl")
        + f" --config_overrides {SMALL_BART} --max_target_length 12 --generation_num_beams 1",
        "run_image_classification": f"--config_overrides {SMALL}",
    }[script]
    vocabulary = "" if script == "run_image_classification" else "--vocab_size 280 "
    return f"{words} {vocabulary}{SHORT} --output_dir {folder}".split()


NEEDS = {
    "run_translation": "sacrebleu",
    "run_summarization": "rouge_score",
    "run_image_classification": "sklearn",
}
METRICS = {
    "run_glue": "eval_accuracy", "run_clm": "eval_loss", "run_mlm": "eval_loss", "run_translation": "eval_bleu",
    "run_summarization": "eval_rougeL", "run_image_classification": "eval_accuracy",
}  # fmt: skip

# What two processes do differently is the trainer's; by default only these show that the scripts let it.
ALSO_TWO = ("run_glue", "run_translation")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("script", "processes"),
    [
        pytest.param(
            script, processes, marks=[pytest.mark.slow] if processes == 2 and script not in ALSO_TWO else []
        )
        for script in METRICS
        for processes in (1, 2)
    ],
)
def test_a_few_steps(script: str, processes: int, root: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(script, "transformers"))
    words, file = flags(script, data, tmp_path / "run"), root / "examples" / f"{script}.py"
    said = run_script(file, *words, cwd=tmp_path) if processes == 1 else launch(processes, file, *words)
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert METRICS[script] in results
    assert results["train_loss"] > 0
    assert (tmp_path / "run" / "model.safetensors").is_file()
    if script == "run_translation":
        check_bleu(said, data, tmp_path / "run")


def check_bleu(said: str, data: Path, folder: Path) -> None:
    """What the script printed is what sacrebleu says of the file that it wrote."""
    import sacrebleu

    texts = (folder / "generated_predictions.txt").read_text("utf-8").splitlines()
    assert len(texts) == len(SENTENCES)
    printed = re.findall(r"predict_bleu (\d+\.\d\d)", said)
    assert printed == [f"{sacrebleu.corpus_bleu(texts, [SENTENCES]).score:.2f}"]


def test_nothing_to_do(root: Path, data: Path, tmp_path: Path) -> None:
    words = ("--train_file", data / "text.txt", "--output_dir", tmp_path)
    said = run_script(root / "examples" / "run_clm.py", *words, cwd=tmp_path, expect=1)
    assert "nothing to do: give --do_train, --do_eval or --do_predict" in said
