"""Links that another user of an output folder has planted there: no file that a run writes leads to what they name."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.callbacks.report import ReportCallback
from windlass.core.optional import is_available

WRITTEN = (
    "README.md", "trainer_state.json", "training_args.json", "all_results.json", "train_results.json",
    "report.html", "training.png", "metrics.jsonl", "run.json", "model.safetensors",
)  # fmt: skip
BESIDE = (".windlass-write-test", *(f"tmp-{name}" for name in WRITTEN), *(f"{name}.tmp" for name in WRITTEN))


@pytest.mark.parametrize("leads", ["to a file", "nowhere"])
@pytest.mark.parametrize("evaluates_first", [False, True])
def test_a_run_changes_nothing_that_links_in_its_folder_lead_to(
    tmp_path: Path, leads: str, evaluates_first: bool
) -> None:
    output, victims = tmp_path / "run", tmp_path / "victims"
    output.mkdir()
    victims.mkdir()
    for name in (*WRITTEN, *BESIDE):
        if leads == "to a file":
            (victims / name).write_text(f"precious {name}")
        (output / name).symlink_to(victims / name)
    before = {path.name: path.read_text() for path in victims.iterdir()}
    args = arguments(output, save_strategy="steps", save_steps=2)
    report = ReportCallback(output)
    trainer = Trainer(Net(), args, train_dataset=rows(16), eval_dataset=rows(4), callbacks=[report])
    if evaluates_first:
        trainer.evaluate()
    metrics = trainer.train().metrics
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.save_model()
    trainer.create_model_card()
    assert {path.name: path.read_text() for path in victims.iterdir()} == before
    for name in WRITTEN:
        if name != "training.png" or is_available("matplotlib"):
            assert (output / name).is_file(), name
            assert not (output / name).is_symlink(), name
