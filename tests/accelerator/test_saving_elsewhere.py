"""`save_state` in the background, behind a URL, of adapters alone, and with files of a script's own."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator.loop_cases import make, tiny
from tests.dist.launch import run_script
from tests.interrupts import InterruptAt
from tests.trainer.adapter_cases import adapted, base
from torch import Tensor, nn

from windlass import Accelerator
from windlass.accelerator import loop_saver
from windlass.checkpoint import run_lock
from windlass.checkpoint.background import Saver
from windlass.checkpoint.files import Files
from windlass.checkpoint.remote import RemoteFolder
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.run_lock import FolderInUse
from windlass.checkpoint.script_files import ScriptFiles
from windlass.checkpoint.store import Store
from windlass.config.loop_options import ProjectConfiguration
from windlass.core.errors import CheckpointError, ConfigError
from windlass.core.locations import local_folder


def loop(**options: Any) -> tuple[Accelerator, nn.Module]:
    torch.manual_seed(1)
    accelerator = make(False, **options)
    return accelerator, accelerator.prepare(tiny())


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def loaded(folder: str | Path) -> dict[str, Tensor]:
    accelerator, model = loop()
    change(model)
    accelerator.load_state(folder)
    return weights(model)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def until(happened: Callable[[], bool]) -> None:
    """A thread makes it so: no other thread is asked to."""
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


# --- in the background ------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Threads write nothing before it is set."""
    opened = threading.Event()

    def before(self: Files, operation: str, path: Path) -> None:
        if threading.current_thread() is not threading.main_thread() and operation == "create":
            assert opened.wait(60)

    monkeypatch.setattr(Files, "before", before)
    yield opened
    opened.set()


def test_a_loop_goes_on_while_it_is_saved(tmp_path: Path, gate: threading.Event) -> None:
    accelerator, model = loop()
    before = weights(model)
    folder = accelerator.save_state(tmp_path / "state", background=True)
    assert not Path(folder).exists()
    change(model)
    gate.set()
    accelerator.wait_for_everyone()
    assert same(loaded(folder), before)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_what_is_written_is_committed_by_itself(tmp_path: Path) -> None:
    accelerator, _ = loop()
    folder = Path(accelerator.save_state(tmp_path / "state", background=True))
    until(folder.exists)
    accelerator.end_training()


@pytest.mark.parametrize("waits", ["save_state", "load_state", "end_training"])
def test_who_waits_for_it(tmp_path: Path, gate: threading.Event, waits: str) -> None:
    accelerator, model = loop()
    before = weights(model)
    folder = accelerator.save_state(tmp_path / "first", background=True)
    change(model)
    threading.Timer(0.05, gate.set).start()
    {
        "save_state": lambda: accelerator.save_state(tmp_path / "second"),
        "load_state": lambda: accelerator.load_state(folder),
        "end_training": accelerator.end_training,
    }[waits]()
    assert same(loaded(folder), before)


def test_a_save_that_has_begun_is_not_changed_by_ctrl_c_and_the_save_after_it(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, whose cell is run again."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator, model = loop(project_config=project)
    accelerator.register_save_state_pre_hook(lambda _, __, folder: Path(folder, "own.txt").write_text("own"))
    committing = Saver.commit_when_seen

    def interrupted(saver: Saver) -> None:
        committing(saver)
        raise KeyboardInterrupt

    before = weights(model)
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "commit_when_seen", interrupted)
        with pytest.raises(KeyboardInterrupt):
            accelerator.save_state(background=True)
    change(model)
    threading.Timer(0.05, gate.set).start()
    accelerator.save_state(background=True)
    accelerator.wait_for_everyone()
    first, second = (tmp_path / "checkpoints" / f"checkpoint_{number}" for number in range(2))
    assert same(loaded(first), before)
    assert same(loaded(second), weights(model))
    assert (first / "own.txt").read_text() == "own"


def test_ctrl_c_at_any_line_leaves_each_save_its_values(tmp_path: Path, gate: threading.Event) -> None:
    accelerator, model = loop()
    first, second = tmp_path / "first", tmp_path / "second"
    for line in itertools.count():
        before = weights(model)
        gate.clear()
        with InterruptAt(loop_saver, line) as interrupt:
            accelerator.save_state(first, background=True)
        change(model)
        threading.Timer(0.02, gate.set).start()  # the next save begins while this one goes on
        accelerator.save_state(second, background=True)
        accelerator.wait_for_everyone()
        assert not first.exists() or same(loaded(first), before), line
        assert same(loaded(second), weights(model)), line
        if not interrupt.came:
            break
        shutil.rmtree(first, ignore_errors=True)
    assert line > 50
    assert first.exists()


def test_ctrl_c_while_old_checkpoints_are_removed_leaves_the_next_save_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator, model = loop(project_config=project)
    numbers: list[int] = []
    accelerator.register_save_state_pre_hook(lambda *_: numbers.append(accelerator.save_iteration))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Retention, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            accelerator.save_state()
    change(model)
    folder = accelerator.save_state()
    assert same(loaded(folder), weights(model))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]
    assert numbers == [0, 1]


def test_a_save_that_fails_is_told_when_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, model = loop()
    before = weights(model)
    folder = accelerator.save_state(tmp_path / "state")
    change(model)

    def before_each(self: Files, operation: str, path: Path) -> None:
        if path.name == "tmp-model.safetensors":
            raise OSError(5, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Files, "before", before_each)
        accelerator.save_state(folder, background=True)
        with pytest.raises(CheckpointError, match=r"state was not saved: .*the disk is gone"):
            accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()
    assert same(loaded(folder), before), "what was there stands"
    accelerator.save_state(folder, background=True)
    accelerator.wait_for_everyone()
    assert same(loaded(folder), weights(model))


def test_the_folder_is_kept_from_others_meanwhile(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "GRACE", 0.1)
    accelerator, _ = loop()
    folder = accelerator.save_state(tmp_path / "state", background=True)
    other, _ = loop()
    with pytest.raises(FolderInUse):
        other.save_state(folder)
    gate.set()
    accelerator.wait_for_everyone()
    other.save_state(folder)


def test_without_room_for_a_copy_it_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.checkpoint.host_memory.available_memory", lambda: 10)
    accelerator, model = loop()
    folder = accelerator.save_state(tmp_path / "state", background=True)
    assert same(loaded(folder), weights(model))


def test_numbered_saves_in_the_background(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model = loop(project_config=project)
    for _ in range(4):
        change(model)
        accelerator.save_state(background=True)
    accelerator.wait_for_everyone()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_2", "checkpoint_3"]
    last = weights(model)
    change(model)
    accelerator.load_state()
    assert same(weights(model), last)


def test_a_script_that_ends_at_once_still_has_its_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import threading, torch\n"
        "from windlass import Accelerator\n"
        "from windlass.checkpoint.background import BackgroundCall\n"
        "from windlass.checkpoint.files import Files\n"
        # Nothing is written before it is waited for.
        "waited, main, wait = threading.Event(), threading.main_thread(), BackgroundCall.wait\n"
        "Files.before = lambda *_: threading.current_thread() is main or waited.wait(60)\n"
        "BackgroundCall.wait = lambda call: (waited.set(), wait(call))\n"
        "accelerator = Accelerator(cpu=True)\n"
        "accelerator.prepare(torch.nn.Linear(300, 300))\n"
        f"accelerator.save_state({str(tmp_path / 'state')!r}, background=True)\n"
        "raise SystemExit(0)\n"
    )
    run_script(script)
    Store(tmp_path, name="state").verify(tmp_path / "state")


# --- behind a URL -----------------------------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("WINDLASS_STAGING", str(tmp_path / "staging"))
    return f"file://{tmp_path}/bucket/run"


def fresh_machine(url: str) -> None:
    shutil.rmtree(local_folder(url))


@pytest.mark.parametrize("background", [False, True])
def test_a_url_takes_a_checkpoint_and_gives_it_back(url: str, background: bool) -> None:
    accelerator, model = loop()
    for _ in range(2):
        change(model)
        assert accelerator.save_state(f"{url}/state", background=background) == f"{url}/state"
    accelerator.wait_for_everyone()
    fresh_machine(url)
    assert same(loaded(f"{url}/state"), weights(model))
    (name,) = RemoteFolder(url).names()
    assert name in ("state", "state-again-1")
    with pytest.raises(CheckpointError, match="there is no such folder"):
        accelerator.load_state(f"{url}/other")
    with pytest.raises(ConfigError, match=r"best_\{step\}'?: the name has braces"):
        accelerator.save_state("best_{step}")
    with pytest.raises(ConfigError, match="name a folder in it"):
        accelerator.save_state("memory://state")


def test_a_project_behind_a_url(url: str) -> None:
    def project(iteration: int = 0) -> ProjectConfiguration:
        return ProjectConfiguration(
            url, automatic_checkpoint_naming=True, total_limit=2, iteration=iteration, logging_dir="logs"
        )

    accelerator, model = loop(project_config=project())
    for _ in range(3):
        change(model)
        folder = accelerator.save_state()
    assert folder == f"{url}/checkpoints/checkpoint_2"
    assert RemoteFolder(f"{url}/checkpoints").names() == ["checkpoint_1", "checkpoint_2"]
    fresh_machine(f"{url}/checkpoints")
    again, fresh = loop(project_config=project(iteration=2))
    with pytest.raises(CheckpointError, match="checkpoint_2 exists already"):
        again.save_state()
    again.load_state()
    assert same(weights(fresh), weights(model))
    assert again.save_iteration == 3


def test_what_else_lies_there_is_left_alone(url: str) -> None:
    """A folder without a manifest may be anybody's, though it has the name that a checkpoint is to get."""
    RemoteFolder(url).write("state/mine.txt", b"mine")
    accelerator, model = loop()
    for _ in range(2):
        change(model)
        accelerator.save_state(f"{url}/state")
    assert RemoteFolder(url).read("state/mine.txt", 10) == b"mine"
    fresh_machine(url)
    assert same(loaded(f"{url}/state"), weights(model))


# --- adapters alone ---------------------------------------------------------------------------------------------------


def of_adapters(seeds: tuple[int, ...] = (0, 0)) -> tuple[Accelerator, list[Any], Any]:
    accelerator, models = make(False), [adapted(seed) for seed in seeds]
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    *prepared, optimizer = accelerator.prepare(*models, torch.optim.AdamW(trained, lr=0.1))
    return accelerator, prepared, optimizer


def step(accelerator: Accelerator, models: list[Any], optimizer: Any) -> None:
    ids = torch.arange(6)[None]
    accelerator.backward(sum(model(input_ids=ids, labels=ids).loss for model in models))
    optimizer.step()
    optimizer.zero_grad()


def test_of_adapters_their_weights_alone_are_saved(tmp_path: Path) -> None:
    from peft import PeftModel

    accelerator, models, optimizer = of_adapters()
    step(accelerator, models, optimizer)
    folder = Path(accelerator.save_state(tmp_path / "state"))
    for place in (folder, folder / "model_1"):
        names = {path.name for path in place.glob("adapter_*")}
        assert {"adapter_model.safetensors", "adapter_config.json"} <= names
        assert not (place / "model.safetensors").exists()
    step(accelerator, models, optimizer)
    again, fresh, its_optimizer = of_adapters()
    again.load_state(folder)  # the generators too, from which dropout draws
    step(again, fresh, its_optimizer)
    for model, other in zip(models, fresh, strict=True):
        assert same(weights(model), weights(other))
    read: Any = PeftModel.from_pretrained(base(), str(folder / "model_1"))
    assert read.peft_config["default"].r == 2

    other, others, _ = of_adapters(seeds=(0, 1))
    before = weights(others[1])
    with pytest.raises(CheckpointError, match="trained on another base model"):
        other.load_state(folder)
    assert same(weights(others[1]), before)


def test_a_base_that_was_changed_has_another_fingerprint(tmp_path: Path) -> None:
    """Scripts that merge adapters into their base and go on."""
    accelerator, models, _ = of_adapters(seeds=(0,))
    accelerator.save_state(tmp_path / "before")
    with torch.no_grad():
        models[0].get_base_model().model.embed_tokens.weight.mul_(2.0)
    accelerator.save_state(tmp_path / "after")
    accelerator.load_state(tmp_path / "after")
    with pytest.raises(CheckpointError, match="trained on another base model"):
        accelerator.load_state(tmp_path / "before")


def test_whole_models_with_adapters_still_load(tmp_path: Path) -> None:
    """Checkpoints of before held all weights; a script with hooks gets, and saves, all of them."""
    accelerator, models, optimizer = of_adapters(seeds=(0,))
    seen: list[int] = []
    handle = accelerator.register_save_state_pre_hook(lambda _, states, folder: seen.append(len(states[0])))
    step(accelerator, models, optimizer)
    folder = Path(accelerator.save_state(tmp_path / "state"))
    assert seen == [len(models[0].state_dict())]
    assert (folder / "model.safetensors").exists()
    handle.remove()
    want = weights(models[0])
    step(accelerator, models, optimizer)
    accelerator.load_state(folder)
    assert same(weights(models[0]), want)


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_what_hooks_write_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    accelerator, _ = loop()

    def save(models: list[nn.Module], states: list[Any], folder: str) -> None:
        (Path(folder) / "deep" / "er").mkdir(parents=True)
        for name in names:
            (Path(folder) / name).write_text("own")

    # Two of them as if they were files of ranks.
    names = ["deep/er/own.txt", "ema-rank-00001.safetensors", "rank-00001.json"]
    handle = accelerator.register_save_state_pre_hook(save)
    for background in (False, True):
        folder = Path(accelerator.save_state(tmp_path / "state", background=background))
        accelerator.wait_for_everyone()
        listed = json.loads((folder / "manifest.json").read_text())["files"]
        assert [(folder / name).read_text() for name in names if name in listed] == ["own"] * 3
        assert [path.name for path in tmp_path.iterdir()] == ["state"]
        shutil.rmtree(folder)
    handle.remove()

    def collides(models: list[nn.Module], states: list[Any], folder: str) -> None:
        (Path(folder) / "model.safetensors").write_text("own")

    accelerator.register_save_state_pre_hook(collides)
    with pytest.raises(CheckpointError, match=r"wrote model\.safetensors"):
        accelerator.save_state(tmp_path / "state")
    assert not list(tmp_path.iterdir())


def test_files_of_hooks_of_an_interrupted_save_are_removed(tmp_path: Path) -> None:
    accelerator, _ = loop()

    def killed(models: list[nn.Module], states: list[Any], folder: str) -> None:
        (Path(folder) / "old.txt").write_text("old")
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptFiles, "clear", lambda self: None)  # the process ends at once
        handle = accelerator.register_save_state_pre_hook(killed)
        with pytest.raises(KeyboardInterrupt):
            accelerator.save_state(tmp_path / "state")
        handle.remove()
    assert list(tmp_path.glob(".windlass-hooks-*"))
    folder = Path(accelerator.save_state(tmp_path / "state"))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert not (folder / "old.txt").exists()


def test_files_of_hooks_of_another_loop_are_left_to_it(tmp_path: Path) -> None:
    """Two loops may save different numbers of one folder at the same time."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator, _ = loop(project_config=project)
    other = tmp_path / "checkpoints" / ".windlass-hooks-checkpoint_7" / "checkpoint_7" / "own.txt"
    other.parent.mkdir(parents=True)
    other.write_text("being saved")
    accelerator.register_save_state_pre_hook(lambda models, states, folder: None)
    accelerator.save_state()
    assert other.is_file()


def test_of_two_models_a_hook_may_save_one(tmp_path: Path) -> None:
    accelerator = make(False)
    first, second = accelerator.prepare(tiny(), tiny())
    accelerator.register_save_state_pre_hook(lambda models, states, folder: states.pop(0) and None)
    folder = Path(accelerator.save_state(tmp_path / "state"))
    accelerator.register_load_state_pre_hook(lambda models, folder: models.pop(0) and None)
    assert not (folder / "model_1").exists()
    want = weights(second)
    change(first), change(second)
    accelerator.load_state(folder)
    assert same(weights(second), want)
    assert not same(weights(first), want)


def test_a_hook_may_save_other_weights_in_the_place_of_a_models(tmp_path: Path) -> None:
    accelerator, model = loop()

    def halved(models: list[nn.Module], states: list[Any], folder: str) -> None:
        states[0] = {name: value / 2 for name, value in states[0].items()}

    accelerator.register_save_state_pre_hook(halved)
    folder = accelerator.save_state(tmp_path / "state")
    want = {name: value / 2 for name, value in weights(model).items()}
    assert same(loaded(folder), want)
