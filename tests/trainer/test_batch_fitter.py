"""Out of memory: the same updates in smaller micro-batches, and no other trace."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import launch, run_script
from tests.trainer.memory_cases import Samples, Stream, flat, hungry, trainer_for

from windlass import ConfigError, Trainer, TrainerCallback
from windlass.callbacks.metrics_log import read_metrics
from windlass.checkpoint.files import Files
from windlass.core.errors import MemoryShortError
from windlass.trainer.batch_fitter import FILE_NAME


def order(model: Any) -> list[int]:
    return [index for batch in model.seen for index in batch]


def measured(folder: Path, *names: str) -> list[dict[str, Any]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [{name: row[name] for name in names} for row in rows if all(name in row for name in names)]


@pytest.mark.parametrize(
    ("asked", "limit", "found"),
    [
        ((12, 1), 6, (6, 2)),
        ((12, 1), 5, (3, 4)),
        ((10, 2), 9, (5, 4)),
        ((10, 1), 1, (1, 10)),
        ((7, 3), 3, (3, 7)),
    ],
)
def test_it_equals_a_clean_run_at_the_size_that_is_found(
    asked: tuple[int, int], limit: int, found: tuple[int, int], folder: Path
) -> None:
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    short = trainer_for(folder / "short", hungry(limit), **dict(zip(sizes, asked, strict=True)))
    short.train()
    clean = trainer_for(folder / "clean", hungry(99), **dict(zip(sizes, found, strict=True)))
    clean.train()
    assert (short.state.train_batch_size, short.accelerator.gradient_accumulation_steps) == found
    assert order(short.model) == order(clean.model)
    torch.testing.assert_close(flat(short.model), flat(clean.model), rtol=0, atol=1e-12)
    assert short.state.global_step == clean.state.global_step
    names = ("step", "loss", "learning_rate", "grad_norm")
    for row, other in zip(
        measured(folder / "short", *names), measured(folder / "clean", *names), strict=True
    ):
        assert row == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("data", [Samples, Stream])
@pytest.mark.parametrize(("step", "workers"), [(2, 0), (4, 2), (5, 0)])
def test_in_the_middle_of_a_run_it_goes_on_as_one_resumed_with_that_size(
    step: int, data: Any, workers: int, folder: Path
) -> None:
    """With dropout, with buffers that the forward changed before it failed, at an epoch's end and beginning too."""
    options: dict[str, Any] = {"data": data(), "dataloader_num_workers": workers, "save_steps": 1}
    if data is Stream:
        options["max_steps"] = 8
    model = hungry(6, dropout=0.3, norm=True)
    model.from_step = step - 1
    short = trainer_for(folder / "short", model, **options)
    short.train()
    begun = trainer_for(folder / "clean", hungry(99, dropout=0.3, norm=True), **options)
    begun.train()
    clean = trainer_for(
        folder / "clean",
        hungry(99, dropout=0.3, norm=True),
        **{**options, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2},
    )
    clean.train(resume_from_checkpoint=str(folder / "clean" / f"checkpoint-{step - 1}"))
    assert order(short.model) == order(begun.model)
    assert torch.equal(flat(short.model), flat(clean.model))


def test_it_is_logged_and_a_resumed_run_begins_with_what_was_found(folder: Path) -> None:
    trainer_for(folder, hungry(3)).train()
    events = measured(folder, "step", "micro_batch_too_large", "micro_batch_size", "micro_batches")
    assert [tuple(event.values()) for event in events] == [(0, 12, 6, 2), (0, 6, 3, 4)]
    resumed = trainer_for(folder, hungry(3))
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert resumed.state.train_batch_size == 3
    assert len(resumed.model.seen[0]) == 3
    assert len(measured(folder, "micro_batch_size")) == 2, "nothing had to be found again"
    clean = trainer_for(folder / "clean", hungry(99))
    clean.train()
    torch.testing.assert_close(flat(resumed.model), flat(clean.model), rtol=0, atol=1e-12)


def test_not_even_one_sample(folder: Path) -> None:
    with pytest.raises(MemoryShortError, match="tried 12, 6, 3, 1") as caught:
        trainer_for(folder, hungry(0)).train()
    assert isinstance(caught.value, MemoryError), "what scripts catch"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 5"),
              RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)")]
)  # fmt: skip
def test_allocators_have_their_own_words(error: Exception, folder: Path) -> None:
    trainer = trainer_for(folder, hungry(6), max_steps=1)
    trainer.model.error = error
    trainer.train()
    assert trainer.state.train_batch_size == 6


def test_other_errors_stand_and_those_not_asked_for_get_a_hint(folder: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer_for(folder, hungry(6), auto_find_batch_size=False).train()
    assert any("auto_find_batch_size=True" in note for note in caught.value.__notes__)
    trainer = trainer_for(folder, hungry(99))
    trainer.model.head = torch.nn.Linear(3, 1)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trainer.train()


class Greedy(torch.optim.AdamW):
    """Changes the first weight, then runs out of memory."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_an_optimizer_that_stopped_half_way_is_not_tried_again(folder: Path) -> None:
    trainer = trainer_for(folder, hungry(99))
    trainer.optimizer = Greedy(trainer.model.parameters())
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    assert any("the optimizer ran out of memory" in note for note in caught.value.__notes__)


def test_events_of_the_step_come_once(folder: Path) -> None:
    from tests.trainer.small import recorder

    trainer, watcher = trainer_for(folder, hungry(6), max_steps=2), recorder()
    trainer.add_callback(watcher)
    trainer.train()
    for event in ("on_step_begin", "on_optimizer_step", "on_step_end"):
        assert [step for name, step in watcher.seen if name == event] in ([0, 1], [1, 2])


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return [dict(Samples()[0])]


def test_what_cannot_be_cut_smaller_is_refused_before_training(folder: Path) -> None:
    args = trainer_for(folder, hungry(6), dataloader_drop_last=True).args
    with pytest.raises(ConfigError, match="2 problems") as caught:
        OwnLoader(hungry(6), args).train()
    assert "loader of your own" in str(caught.value)
    assert "dataloader_drop_last=False" in str(caught.value)


def test_evaluation_begins_anew_with_smaller_batches_and_measures_the_same(folder: Path) -> None:
    def metrics(limit: int) -> tuple[dict[str, float], Trainer]:
        trainer = trainer_for(folder / str(limit), hungry(99, eval_limit=limit))
        trainer.compute_metrics = lambda p: {"sum": float(p.predictions.sum()), "rows": len(p.predictions)}
        found = trainer.evaluate()
        return {name: found[f"eval_{name}"] for name in ("loss", "sum", "rows")}, trainer

    short, trainer = metrics(5)
    assert short == pytest.approx(metrics(99)[0], rel=1e-12)
    assert trainer.get_eval_dataloader().batch.micro == 3, "the next evaluation begins with it"
    with pytest.raises(MemoryShortError, match="single sample"):
        metrics(0)


def test_evaluation_on_the_way(folder: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    short = trainer_for(folder / "short", hungry(99, dropout=0.3, eval_limit=4), **options)
    short.train()
    clean = trainer_for(folder / "clean", hungry(99, dropout=0.3), **options)
    clean.train()
    assert torch.equal(flat(short.model), flat(clean.model))
    assert short.state.best_metric == pytest.approx(clean.state.best_metric, rel=1e-12)


@pytest.mark.dist
def test_ranks_start_again_with_what_one_of_them_found_out(folder: Path) -> None:
    script, said = Path(__file__), ""
    for attempt in range(3):  # as a launcher that may restart twice
        again = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": "2"}
        said += launch(2, script, folder, expect=int(attempt < 2), environ=again)
    assert "the next attempt uses evaluation batches of 3" in said
    assert "the next attempt uses micro-batches of 3" in said
    for rank in range(2):
        told = json.loads((folder / f"rank{rank}.json").read_text())
        assert (told["attempt"], told["resumed"]) == (2, 2), "it goes on from the last whole checkpoint"
        assert max(told["micro"]) == 3
        assert told["eval"] == [pytest.approx(told["eval"][1], rel=1e-12), told["eval"][1], 3]
        assert told["weights"][0] == pytest.approx(told["weights"][1], abs=1e-12)


NOTE = {"asked_train": 12, "asked_accumulation": 1, "asked_eval": 12, "train": 4, "eval": None}


@pytest.mark.parametrize(
    ("text", "micro"),
    [
        (json.dumps(NOTE), 4),
        (json.dumps({**NOTE, "train": 5}), 4),
        (json.dumps({**NOTE, "asked_train": 8}), 12),
        (json.dumps({**NOTE, "train": 0}), 12),
        (json.dumps({**NOTE, "train": True}), 12),
        (json.dumps({**NOTE, "more": 1}), 12),
        ("[" * 5000, 12),
        ("torn {", 12),
        ("[]", 12),
        (" " * 5000, 12),
    ],
)
def test_the_note_of_an_earlier_attempt(text: str, micro: int, folder: Path) -> None:
    (folder / FILE_NAME).write_text(text)
    trainer = trainer_for(folder, hungry(99), max_steps=1)
    trainer.train()
    assert (trainer.state.train_batch_size, len(order(trainer.model))) == (micro, 12)


def test_a_note_is_not_followed_elsewhere(folder: Path) -> None:
    os.mkfifo(folder / FILE_NAME)
    trainer = trainer_for(folder, hungry(99), max_steps=1)
    trainer.train()
    assert trainer.state.train_batch_size == 12


def test_a_note_on_a_disk_that_fails_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / FILE_NAME).write_text(json.dumps(NOTE))

    def fail(files: Files, path: Path, limit: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Files, "read", fail)
    trainer = trainer_for(folder, hungry(99), max_steps=1)
    trainer.train()
    assert trainer.state.train_batch_size == 12


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_batch_that_really_does_not_fit(folder: Path) -> None:
    """Half of it fits only where nothing of the first attempt is held any longer."""
    said = run_script(Path(__file__).parent / "limited_memory.py", folder)
    assert said.strip().endswith("found 6"), said[-4000:]


# --- what each rank runs ----------------------------------------------------------------------------------------------


RANK = int(os.environ.get("RANK", "0"))
SIZES: dict[str, Any] = {
    "per_device_train_batch_size": 6,
    "per_device_eval_batch_size": 6,
    "save_steps": 1,
    "save_in_background": False,
    "max_steps": 5,
}


class LessRoom(TrainerCallback):
    """From the third update on, one rank has room for three rows."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.limit = 3 if RANK and state.global_step >= 2 else 99


def main() -> None:
    folder, attempt = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = hungry(99, eval_limit=3 if RANK else 99)
    trainer = trainer_for(folder / "run", model, **SIZES)
    trainer.add_callback(LessRoom)
    before = trainer.evaluate(Samples())["eval_loss"]
    saved = list((folder / "run").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint="auto")
    clean = trainer_for(
        folder / "clean",
        hungry(99),
        **{**SIZES, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
    )
    expected = clean.evaluate(Samples())["eval_loss"]
    clean.train()
    said = {
        "attempt": attempt,
        "resumed": len(saved),
        "micro": [len(ids) for ids in model.seen],
        "eval": [before, expected, trainer.get_eval_dataloader().batch.micro],
        "weights": [flat(trainer.model).tolist(), flat(clean.model).tolist()],
    }
    (folder / f"rank{RANK}.json").write_text(json.dumps(said))
    trainer.end()


if __name__ == "__main__":
    main()
