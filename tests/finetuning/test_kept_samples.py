"""A run keeps some rows of its data as the model gets them, and what a mixture is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.finetuning import preferences, small
from tests.finetuning.trainers import trainer_of

from windlass import DPOTrainer, KTOTrainer
from windlass.callbacks.run_view import read_run
from windlass.callbacks.samples_log import FILE_NAME, read_samples
from windlass.checkpoint.export import model_files
from windlass.checkpoint.remote import RemoteFolder
from windlass.checkpoint.stored import open_folder
from windlass.finetuning.kto_config import KTOConfig
from windlass.text.mixture import DatasetMixture

PAIRS = [{"prompt": "the cat ", "completion": "sat on a mat"}, {"prompt": "two dogs ", "completion": "run"}]


def test_the_samples_of_a_run_have_what_is_trained_on(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(tmp_path, PAIRS, max_steps=1, **saves)
    trainer.train()
    first, second = read_samples(tmp_path)
    assert (first["name"], second["name"]) == ("train, row 0", "train, row 1")
    text = "".join(piece for piece, trained in first["pieces"] if not trained)
    trained = "".join(piece for piece, trained in first["pieces"] if trained)
    assert text.split() == ["the", "cat"]
    assert trained.split() == ["sat", "on", "a", "mat", "<eos>"]
    assert (first["tokens"], first["trained"]) == (7, 5)
    kept = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).write_bytes(kept.replace(b"row 0", b"row 9"))
    again = trainer_of(tmp_path, PAIRS, max_steps=2, **saves)
    again.train(resume_from_checkpoint="auto")
    assert read_samples(tmp_path)[0]["name"] == "train, row 9", "a resumed run keeps its samples"


def test_the_samples_stay_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = trainer_of(tmp_path / "here", PAIRS, max_steps=1, log_level="info")
    here.train()
    here.save_model()
    assert read_samples(tmp_path / "here")
    line = f"{tmp_path / 'here' / FILE_NAME} has 2 rows of the training data as text"
    assert caplog.text.count(line) == 1
    published = model_files(open_folder(tmp_path / "here"))
    assert published is not None
    assert "config.json" in published
    assert FILE_NAME not in published, "what is pushed to the Hub"
    monkeypatch.setenv("WINDLASS_STAGING", str(tmp_path / "staging"))
    # A path would lose one of the URL's slashes.
    away = trainer_of(f"file://{tmp_path}/bucket/run", PAIRS, max_steps=1)  # type: ignore[arg-type]
    away.train()
    names = RemoteFolder(away.args.output_path).names()
    assert "metrics.jsonl" in names
    assert FILE_NAME not in names
    assert not read_samples(away.output_folder)


def test_answers_are_shown_with_what_they_are_judged_as(tmp_path: Path) -> None:
    rows = small.table([{"prompt": "the cat", "chosen": " sat", "rejected": " run"}] * 2)
    model, tokenizer = small.model(), small.tokenizer()
    DPOTrainer(
        model, args=preferences.settings(tmp_path / "pairs", max_steps=1), train_dataset=rows,
        processing_class=tokenizer,
    ).train()  # fmt: skip
    names = [one["name"] for one in read_samples(tmp_path / "pairs")]
    assert names == [f"train, row {row}, {which}" for row in (0, 1) for which in ("chosen", "rejected")]
    assert read_samples(tmp_path / "pairs")[1]["pieces"] == [["the cat", False], ["run <eos>", True]]
    judged = small.table(
        [{"prompt": "the cat", "completion": " sat", "label": flag} for flag in (True, False)]
    )
    KTOTrainer(
        model, args=KTOConfig(str(tmp_path / "judged"), **{**preferences.SHORT, "max_steps": 1}),
        train_dataset=judged, processing_class=tokenizer,
    ).train()  # fmt: skip
    assert [one["label"] for one in read_samples(tmp_path / "judged")] == ["desirable", "undesirable"]


def test_a_stream_shows_its_first_batch(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, small.table(PAIRS * 4).to_iterable_dataset(), max_steps=1)
    trainer.train()
    first = read_samples(tmp_path)[0]
    assert first["name"] == "first batch, row 0"
    assert first["pieces"] == [["the cat", False], ["sat on a mat <eos>", True]]


def test_a_mixture_has_what_was_wanted_and_what_is_used(tmp_path: Path) -> None:
    mixture = DatasetMixture({"a": PAIRS * 4, "b": PAIRS[:1] * 4}, {"a": 1.0, "b": 3.0}, length=10)
    trainer = trainer_of(tmp_path, mixture, max_steps=1)
    trainer.train()
    data = read_run(tmp_path).data
    # 3 of 10 and 7 of 10 rows (2.5 and 7.5 have equal rests: the first gets the row); 5.5 and 7 tokens each.
    share = 3 * 5.5 / (3 * 5.5 + 7 * 7)
    assert data["mixture: a"] == (
        f"wanted 25.00%; used 30.00% of the samples, {share:.2%} of the tokens; 0.375 times an epoch"
    )
    assert data["mixture: b"].startswith("wanted 75.00%; used 70.00% of the samples")
    assert [one["name"] for one in read_samples(tmp_path)] == [
        *(f"a, row {number}" for number in range(3)),
        *(f"b, row {number}" for number in range(3)),
    ]
    assert json.loads((tmp_path / FILE_NAME).read_text())
