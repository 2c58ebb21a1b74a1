"""Overrides that a run calls in some places or under some arguments, and refuses elsewhere."""

from __future__ import annotations

import errno
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.checkpoint.files import Files
from windlass.checkpoint.store import is_checkpoint
from windlass.core.errors import ConfigError
from windlass.trainer import trainer as module_of_trainer
from windlass.trainer.uncalled import SAVED_PARTS, idle

# --- saving -------------------------------------------------------------------------------------------------------


class Beside(Trainer):
    """Does something of its own beside saving each part."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self._note(output_dir, "optimizer")

    def _save_rng_state(self, output_dir: str) -> None:
        self._note(output_dir, "generators")
        super()._save_rng_state(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(output_dir)
        self._note(output_dir, "scaler")

    def _note(self, output_dir: str, name: str) -> None:
        assert is_checkpoint(Path(output_dir))
        (Path(output_dir) / f"own-{name}.txt").write_text(str(self.state.global_step))


def test_what_a_script_does_beside_saving_a_part_comes_after_the_save(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    Beside(Net(), arguments(tmp_path, **options), train_dataset=rows(32)).train()
    for step in (2, 4):
        written = {path.name: path.read_text() for path in (tmp_path / f"checkpoint-{step}").glob("own-*")}
        assert written == {f"own-{name}.txt": str(step) for name in ("optimizer", "generators", "scaler")}
    resumed = Beside(Net(), arguments(tmp_path, **options | {"max_steps": 6}), train_dataset=rows(32))
    assert resumed.train(resume_from_checkpoint=True).global_step == 6


def test_a_save_that_failed_has_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Files.make_folder

    def fails_once(files: Files, path: Path) -> None:
        if path.name == "tmp-checkpoint-2":
            raise OSError(errno.ENOTCONN, "gone", str(path))
        make(files, path)

    monkeypatch.setattr(Files, "make_folder", fails_once)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    Beside(Net(), arguments(tmp_path, **options), train_dataset=rows(32)).train()
    names = ("own-generators.txt", "own-optimizer.txt", "own-scaler.txt")
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.glob("checkpoint-*/own-*"))
    assert written == [Path("checkpoint-4") / name for name in names]


def run_beside(folder: str) -> list[str]:
    noted = []

    class Notes(Beside):
        def _note(self, output_dir: str, name: str) -> None:
            assert is_checkpoint(Path(output_dir))
            noted.append(f"{Path(output_dir).name} {name}")

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    Notes(Net(), arguments(Path(folder), **options), train_dataset=rows(32)).train()
    return noted


@pytest.mark.dist
def test_every_process_is_called_once_a_save_is_committed(tmp_path: Path) -> None:
    each = [f"checkpoint-{step} {name}" for step in (2, 4) for name in ("optimizer", "generators", "scaler")]
    assert on_ranks(2, run_beside, str(tmp_path)) == [each, each]


def test_another_way_to_save_is_told_of_before_the_run_and_fails_where_it_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Two(Trainer):
        own = False

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if not self.own:
                super()._save_checkpoint(model, trial)
            else:
                self._save_optimizer_and_scheduler(str(tmp_path))

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trainer = Two(Net(), arguments(tmp_path, **options), train_dataset=rows(32))
    with caplog.at_level("WARNING", logger="windlass"):
        trainer.train()
    assert "names _save_optimizer_and_scheduler: if it saves by that" in caplog.text
    assert is_checkpoint(tmp_path / "checkpoint-4")
    trainer.own = True
    with pytest.raises(
        ConfigError, match="_save_optimizer_and_scheduler='called': a checkpoint is written as"
    ):
        trainer.train()


# --- the text of a method -----------------------------------------------------------------------------------------


def test_a_method_whose_text_a_library_has_changed_does_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = textwrap.dedent(inspect.getsource(Trainer._maybe_log_save_evaluate))
    names: dict[str, Any] = {}
    exec(text.replace("_maybe_log_save_evaluate(", "patched(", 1), {**vars(module_of_trainer)}, names)
    monkeypatch.setattr(Trainer, "_maybe_log_save_evaluate", names["patched"])
    trainer = Trainer(Net(), arguments(tmp_path, logging_steps=1), train_dataset=rows(32))
    assert trainer.train().global_step == 4
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [1, 2, 3, 4]


# --- reports ------------------------------------------------------------------------------------------------------


def test_the_learning_rate_of_reports_is_the_scripts(tmp_path: Path) -> None:
    class Doubles(Trainer):
        def _get_learning_rate(self) -> float:
            return 2 * super()._get_learning_rate()

    def reported(kind: type[Trainer], folder: str) -> list[float]:
        args = arguments(tmp_path / folder, logging_steps=1, learning_rate=0.5)
        trainer = kind(Net(), args, train_dataset=rows(32))
        trainer.train()
        return [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]

    plain = reported(Trainer, "plain")
    assert plain[0] == 0.5
    assert reported(Doubles, "doubles") == [2 * rate for rate in plain]


# --- what is called under some arguments alone --------------------------------------------------------------------


def test_a_way_to_push_checkpoints_is_refused_only_where_they_would_be_pushed(tmp_path: Path) -> None:
    class Pushes(Trainer):
        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            raise AssertionError

    trainer = Pushes(
        Net(),
        arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1),
        train_dataset=rows(8),
    )
    assert trainer.train().global_step == 2
    for strategy, refused in (("end", False), ("every_save", True)):
        args = arguments(tmp_path, push_to_hub=True, hub_strategy=strategy)
        assert ("_push_from_checkpoint" not in idle(args, False)) == refused


def test_a_part_of_context_parallelism_is_refused_only_where_sequences_are_divided(tmp_path: Path) -> None:
    class Prepares(Trainer):
        def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
            raise AssertionError

    args = arguments(tmp_path, max_steps=2)
    assert Prepares(Net(), args, train_dataset=rows(8)).train().global_step == 2
    assert "_prepare_context_parallel_inputs" not in idle(args, divides_sequences=True)


def test_parts_that_are_not_saved_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """Scripts leave them out by methods that do nothing, beside that argument or in place of it."""

    def nothing(self: Any, output_dir: str) -> None:
        raise AssertionError

    kind = type("Leaves", (Trainer,), dict.fromkeys(SAVED_PARTS, nothing))
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(
        ConfigError, match=r"_save_scaler='overridden'.*set save_only_model=True to save no such"
    ):
        kind(Net(), arguments(tmp_path, **options), train_dataset=rows(32)).train()
    for one in (kind, Beside):
        one(Net(), arguments(tmp_path, **options, save_only_model=True), train_dataset=rows(32)).train()
        assert (tmp_path / "checkpoint-4" / "model.safetensors").is_file()
    assert not list(tmp_path.glob("checkpoint-*/own-*"))
