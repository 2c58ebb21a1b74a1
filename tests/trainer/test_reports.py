"""What a run says: `log`, the history, and the files and lines of the `*_metrics` helpers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.small import Net, arguments, recorder, rows

from windlass import Trainer, TrainerState
from windlass.core.logs import get_verbosity, set_verbosity


def test_history_and_callbacks_get_the_same(tmp_path: Path) -> None:
    watching = recorder()
    args = arguments(tmp_path, logging_steps=2, eval_strategy="steps", eval_steps=2)
    trainer = Trainer(Net(), args, train_dataset=rows(16), eval_dataset=rows(4), callbacks=[watching])
    output = trainer.train()
    history = [
        {name: v for name, v in entry.items() if name != "step"} for entry in trainer.state.log_history
    ]
    assert history == watching.logs
    assert [entry["step"] for entry in trainer.state.log_history] == [2, 2, 4, 4, 4]
    assert set(history[0]) == {"loss", "grad_norm", "learning_rate", "epoch"}
    assert history[-1] == output.metrics
    assert output.training_loss == pytest.approx((history[0]["loss"] + history[2]["loss"]) / 2)


def test_metrics_jsonl_holds_every_log(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path, logging_steps=1), train_dataset=rows(16))
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses == [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("shape", ["logs", "logs and start", "anything", "keywords", "a keyword"])
def test_log_may_be_overridden_in_every_generation(tmp_path: Path, shape: str) -> None:
    class One(Trainer):
        def log(self, logs: dict[str, float]) -> None:
            super().log({**logs, "mine": 1.0})

    class Two(Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1.0}, start_time)

    class Third(Trainer):
        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log({**logs, "mine": 1.0}, *args, **kwargs)

    class Fourth(Trainer):
        def log(self, logs: dict[str, float], **kwargs: Any) -> None:
            super().log({**logs, "mine": 1.0}, **kwargs)

    class Fifth(Trainer):
        def log(self, logs: dict[str, float], *, start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1.0}, start_time)

    shapes = {"logs": One, "logs and start": Two, "anything": Third, "keywords": Fourth, "a keyword": Fifth}
    kind = shapes[shape]
    trainer = kind(Net(), arguments(tmp_path, logging_steps=1), train_dataset=rows(16))
    trainer.train()
    assert len(trainer.state.log_history) == 5
    assert all(entry["mine"] == 1.0 for entry in trainer.state.log_history)


def test_log_metrics_prints_aligned_lines(tmp_path: Path, capsys: Any) -> None:
    trainer = Trainer(Net(), arguments(tmp_path))
    metrics = {
        "train_loss": 0.123456,
        "train_runtime": 3725.5,
        "total_flos": float(3 << 30),
        "epoch": 2.0,
        "n": 7,
    }
    trainer.log_metrics("train", metrics)
    said = capsys.readouterr().out
    assert said == (
        "***** train metrics *****\n"
        "  epoch         = 2.0\n"
        "  n             = 7\n"
        "  total_flos    = 3GF\n"
        "  train_loss    = 0.1235\n"
        "  train_runtime = 1:02:05.50\n"
    )


def test_formatted_metrics_are_as_transformers_formats_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    metrics = {"train_loss": 0.123456, "train_runtime": 65.25, "total_flos": float(5 << 30), "n": 7, "epoch": 2.0,
               "train_samples_per_second": 12.345678, "before_init_mem_cpu": 3 << 20}  # fmt: skip
    theirs = transformers.Trainer.metrics_format(dict(metrics))
    ours = Trainer(Net(), arguments(tmp_path))
    assert ours.metrics_format(dict(metrics)) == theirs
    assert ours.metrics_format({"train_runtime": 59.999}) == {"train_runtime": "0:01:00.00"}


def test_save_metrics_and_state(tmp_path: Path) -> None:
    trainer = Trainer(Net(), arguments(tmp_path), train_dataset=rows(16), eval_dataset=rows(4))
    trained = trainer.train().metrics
    evaluated = trainer.evaluate()
    trainer.save_metrics("train", trained)
    trainer.save_metrics("eval", evaluated)
    trainer.save_metrics("other", {"x": 1}, combined=False)
    assert json.loads((tmp_path / "train_results.json").read_text()) == trained
    assert json.loads((tmp_path / "eval_results.json").read_text()) == evaluated
    assert json.loads((tmp_path / "other_results.json").read_text()) == {"x": 1}
    assert json.loads((tmp_path / "all_results.json").read_text()) == {**trained, **evaluated}
    trainer.save_state()
    read = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert read.log_history == trainer.state.log_history
    assert read.global_step == 4


def test_the_constructor_sets_the_verbosity(tmp_path: Path) -> None:
    before = get_verbosity()
    try:
        for level, number in (("error", 40), ("debug", 10), ("warning", 30)):
            Trainer(Net(), arguments(tmp_path, log_level=level))
            assert get_verbosity() == number
        Trainer(Net(), arguments(tmp_path))
        assert get_verbosity() == before
        for number in (logging.INFO, logging.DEBUG):  # a script may set it with the standard library, too
            logging.getLogger("windlass").setLevel(number)
            Trainer(Net(), arguments(tmp_path, log_level="critical"))
            assert not arguments(tmp_path, disable_tqdm=None).disable_tqdm
            Trainer(Net(), arguments(tmp_path))
            assert get_verbosity() == number
    finally:
        set_verbosity(before)


def test_token_rates_are_in_the_log_where_tokens_are_counted(tmp_path: Path) -> None:
    from tests.trainer.small import llama, text_rows

    pytest.importorskip("transformers")
    for counted in ("all", "no"):
        args = arguments(tmp_path, include_num_input_tokens_seen=counted, logging_steps=2)
        trainer = Trainer(llama(), args, train_dataset=text_rows(16))
        trainer.train()
        first = trainer.state.log_history[0]
        assert (
            ("train_tokens_per_second" in first) == ("num_input_tokens_seen" in first) == (counted == "all")
        )
        assert first.get("num_input_tokens_seen", 64) == 64


def test_a_resumed_runs_token_rate_counts_its_own_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[float] = []

    def speed(prefix: str, start: float, num_tokens: float | None = None, **_: Any) -> dict[str, float]:
        counted.append(num_tokens or 0.0)
        return {}

    monkeypatch.setattr("windlass.trainer.reports.speed_metrics", speed)
    for steps, resume in ((2, None), (4, True)):
        args = arguments(
            tmp_path,
            max_steps=steps,
            include_num_input_tokens_seen="all",
            logging_steps=2,
            save_strategy="steps",
            save_steps=2,
        )
        model = Net()
        model.main_input_name = "x"  # type: ignore[assignment]
        Trainer(model, args, train_dataset=rows(16)).train(resume_from_checkpoint=resume)
    assert counted == [32, 32], "two updates of four samples with four numbers, before and after"


def test_flops_are_counted(tmp_path: Path) -> None:
    from tests.trainer.small import llama, text_rows

    pytest.importorskip("transformers")
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=text_rows(16))
    output = trainer.train()
    # Kaplan's N: an embedding table is looked up, not multiplied.
    parameters = trainer.model.num_parameters(exclude_embeddings=True)
    assert output.metrics["total_flos"] == trainer.state.total_flos == 6 * parameters * 16 * 8
    batch = trainer.data_collator(text_rows(4))
    assert trainer.floating_point_ops(batch) == 6 * parameters * 4 * 8
    # The same forward and backward, whichever layer has the weight of the output.
    assert Trainer(llama(tied=True), arguments(tmp_path)).floating_point_ops(batch) == 6 * parameters * 4 * 8


def test_flops_of_a_script_are_added_up(tmp_path: Path) -> None:
    class Counting(Trainer):
        def floating_point_ops(self, inputs: Any) -> int:
            return 7 * len(inputs["x"])

    changes = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    args = arguments(tmp_path, **changes)
    assert Counting(Net(), args, train_dataset=rows(24)).train().metrics["total_flos"] == 7 * 24
    again = Counting(Net(), args, train_dataset=rows(24))
    assert again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2")).metrics["total_flos"] == 7 * 24
