"""`save_state` and `load_state` in one process: what is kept, how folders are named, and what is refused."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.accelerator.loop_cases import make, regression, tiny
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from windlass import Accelerator, LossTerms
from windlass.accelerator.saved_parts import described_ranks, same_ranks
from windlass.checkpoint.codec import load_state
from windlass.checkpoint.manager import CheckpointManager
from windlass.checkpoint.store import Store
from windlass.config.loop_options import DataLoaderConfiguration, ProjectConfiguration
from windlass.core import logs
from windlass.core.errors import CheckpointError, ConfigError
from windlass.dist.gang import Gang
from windlass.utils import other


class Counter:
    """A script's own object: tensors, numbers and lists."""

    def __init__(self) -> None:
        self.seen = {"total": 0, "mean": torch.zeros(2), "history": [1.5, None]}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


class Loop:
    """Everything that a script prepares."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.accelerator = make(False, **options)
        self.model = nn.Sequential(*tiny(), nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        data = DataLoader(regression(), batch_size=8, shuffle=True)
        prepared = self.accelerator.prepare(self.model, optimizer, schedule, data)
        self.model, self.optimizer, self.schedule, self.data = prepared
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def run(self, steps: int, data: Any = None) -> None:
        for x, y in itertools.islice(self.data if data is None else data, steps):
            self.accelerator.backward(F.mse_loss(self.model(x), y))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.counter.seen["total"] += 1


def weights(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("stateful", [True, False])
def test_a_loop_goes_on_as_if_it_had_never_stopped(tmp_path: Path, stateful: bool) -> None:
    """Dropout, order of samples, optimizer and schedule included, from within an epoch."""
    options = {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=stateful)}
    whole = Loop(**options)
    whole.run(3)
    folder = whole.accelerator.save_state(tmp_path / "state")
    assert folder == str(tmp_path / "state")
    rest = whole.accelerator.skip_first_batches(whole.data, 3)
    whole.run(99, rest)

    later = Loop(**options)
    later.run(2)
    later.accelerator.load_state(folder)
    assert later.counter.seen["total"] == 3
    assert later.counter.seen["history"] == [1.5, None]
    later.run(99, None if stateful else later.accelerator.skip_first_batches(later.data, 3))
    assert same(weights(later), weights(whole))
    assert later.schedule.get_last_lr() == whole.schedule.get_last_lr()


def test_folders_are_numbered_and_the_oldest_go(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    loop = Loop(project_config=project)
    folders = [Path(loop.accelerator.save_state()) for _ in range(3)]
    assert [folder.name for folder in folders] == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert folders[0].parent == tmp_path / "checkpoints"
    assert [folder.exists() for folder in folders] == [False, True, True]

    again = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, iteration=2)
    loop = Loop(project_config=again)
    foreign = tmp_path / "checkpoints" / "checkpoint_7"
    foreign.mkdir()
    for number in (7, 2):
        again.iteration = number
        with pytest.raises(CheckpointError, match=f"checkpoint_{number} exists already"):
            loop.accelerator.save_state()
    (folders[2] / "model.safetensors").write_bytes(b"torn")
    loop.accelerator.load_state()  # the newest that is whole
    assert loop.accelerator.save_iteration == 2


def test_a_loop_that_goes_back_numbers_its_saves_after_those_that_it_made(tmp_path: Path) -> None:
    loop = Loop(project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True))
    first, *_ = [loop.accelerator.save_state() for _ in range(3)]
    loop.accelerator.load_state(first)
    assert Path(loop.accelerator.save_state()).name == "checkpoint_3"


def no_room(store: Store, needed: int) -> None:
    raise OSError(28, "no room")


@pytest.mark.parametrize("background", [False, True])
def test_a_save_without_room_is_an_error_of_the_system_and_takes_no_number(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_prepare", no_room)
        with pytest.raises(OSError, match="no room"):
            accelerator.save_state(background=background)
    assert Path(accelerator.save_state()).name == "checkpoint_0"


def test_a_save_replaces_the_folder_as_a_whole(tmp_path: Path) -> None:
    loop = Loop()
    loop.accelerator.save_state(tmp_path / "state")
    loop.run(2)
    loop.accelerator.save_state(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    fresh = Loop()
    fresh.accelerator.load_state(tmp_path / "state")
    assert same(weights(fresh), weights(loop))


@pytest.mark.parametrize("prefix", ["tmp-", "replaced-"])
def test_a_name_that_another_save_would_remove_is_refused(tmp_path: Path, prefix: str) -> None:
    loop = Loop()
    with pytest.raises(ConfigError, match=f"output_dir='{prefix}best': a save of 'best' removes folders"):
        loop.accelerator.save_state(tmp_path / f"{prefix}best")
    loop.accelerator.save_state(tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize("name", [".", ".."])
def test_the_working_directory_is_not_moved_aside_for_a_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "script.py").write_text("mine")
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(ConfigError, match="the working directory lies in it"):
        Loop().accelerator.save_state(name)
    assert (tmp_path / "work" / "script.py").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


@pytest.mark.parametrize("name", [".", "../state/extra/.."])
def test_a_checkpoint_is_saved_and_loaded_by_any_path_to_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Loop()
    saved.accelerator.save_state(tmp_path / "state")
    (tmp_path / "state" / "extra").mkdir()
    saved.run(2)
    saved.accelerator.save_state(tmp_path / "state" / "extra" / "..")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    (tmp_path / "state" / "extra").mkdir()
    monkeypatch.chdir(tmp_path / "state")
    fresh = Loop()
    fresh.accelerator.load_state(name)
    assert same(weights(fresh), weights(saved))


def test_nothing_is_pickled(tmp_path: Path) -> None:
    loop = Loop()
    loop.run(1)
    folder = Path(loop.accelerator.save_state(tmp_path / "state"))
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    loop.counter.seen["opaque"] = object()
    with pytest.raises(CheckpointError, match=r"'opaque' is a builtins\.object, which cannot be saved"):
        loop.accelerator.save_state(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(ConfigError):
        loop.accelerator.save_state(tmp_path / "other", max_shard_size=3)


def test_a_request_for_pickle_is_mapped_to_safetensors_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs.warn_once.cache_clear()
    loop = Loop()
    loop.run(1)
    with caplog.at_level(logging.WARNING):
        folder = Path(loop.accelerator.save_state(tmp_path / "state", safe_serialization=False))
        loop.accelerator.save_model(loop.model, tmp_path / "model", safe_serialization=False)
        other.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=False)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], torch.ones(2))
    assert [r.getMessage() for r in caplog.records if "safe_serialization" in r.getMessage()] == [
        "safe_serialization=False has no effect: safetensors are written, never pickle"
    ]


def test_a_save_in_the_middle_of_an_update_says_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = make(False, gradient_accumulation_steps=2)
    model = accelerator.prepare(tiny())
    for name in ("first", "second"):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 6).double()).sum())
        accelerator.save_state(tmp_path / name)
        assert ("in the middle of an update" in caplog.text) is (name == "first")
        caplog.clear()


def test_another_set_of_objects_is_refused(tmp_path: Path) -> None:
    folder = Loop().accelerator.save_state(tmp_path / "state")
    other = Loop()
    other.accelerator.prepare(tiny(), torch.optim.lr_scheduler.StepLR(other.optimizer, 1))
    other.accelerator.register_for_checkpointing(Drawing())
    wrong = "holds 1 models and 2 here, 1 schedules and 2 here, 1 registered objects and 2 here"
    with pytest.raises(CheckpointError, match=wrong):
        other.accelerator.load_state(folder)
    lacking = Loop()
    lacking.accelerator.prepare(DataLoader([1, 2]))  # type: ignore[arg-type]
    before = weights(lacking)
    with pytest.raises(CheckpointError, match="positions of 1 loaders, and 2 are prepared"):
        lacking.accelerator.load_state(folder)
    assert same(weights(lacking), before), "nothing was loaded"
    with pytest.raises(CheckpointError, match="there is no such folder"):
        other.accelerator.load_state(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="input_dir"):
        other.accelerator.load_state()
    with pytest.raises(ConfigError, match="strict"):
        other.accelerator.load_state(folder, strict=False)
    with pytest.raises(ConfigError, match="state_dict and load_state_dict"):
        other.accelerator.register_for_checkpointing(3)


class Drawing:
    """Draws random numbers when it is restored."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.rand(3)


def test_generators_are_restored_after_all_that_may_draw(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Drawing())
    folder = accelerator.save_state(tmp_path / "state")
    drawn = torch.rand(2)
    accelerator.load_state(folder)
    assert torch.equal(torch.rand(2), drawn)


def test_other_work_of_as_many_ranks_is_not_the_same(tmp_path: Path) -> None:
    """Two ranks with samples of their own, and two that compute the same ones together."""
    store, alone = Store(tmp_path), Gang()
    for step, (together, same) in enumerate((({}, True), ({"tensor": [2]}, False))):
        meta = described_ranks(alone)
        store.write(step, {key: {**value, **together} for key, value in meta.items()}, lambda staged: None)
        checkpoint = CheckpointManager(store).load(store.path_for(step))
        assert same_ranks(checkpoint, alone) is same


def test_hooks_may_save_models_themselves(tmp_path: Path) -> None:
    loop = Loop()

    def save(models: list[nn.Module], states: list[Any], folder: str) -> None:
        assert models == [loop.model]
        own = states.pop()
        (Path(folder) / "own.json").write_text(json.dumps(len(own)))

    removed = loop.accelerator.register_save_state_pre_hook(save)
    folder = Path(loop.accelerator.save_state(tmp_path / "state"))
    assert (folder / "own.json").read_text() == str(len(loop.model.state_dict()))
    assert not (folder / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match="has no weights"):
        loop.accelerator.load_state(folder)
    seen: list[str] = []
    loop.accelerator.register_load_state_pre_hook(lambda models, where: (models.clear(), seen.append(where)))  # type: ignore[arg-type, return-value]
    loop.accelerator.load_state(folder)
    assert seen == [str(folder)]
    removed.remove()
    loop.accelerator.save_state(folder)
    assert (folder / "model.safetensors").exists()


def test_two_models_and_an_optimizer_over_both(tmp_path: Path) -> None:
    def build() -> tuple[Accelerator, nn.Module, nn.Module, Any]:
        accelerator, first, second = make(False), tiny(), tiny()
        both = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.1)
        return accelerator, *accelerator.prepare(first, second, both)

    accelerator, first, second, both = build()
    x = torch.ones(2, 6).double()
    accelerator.backward((first(x) + second(x)).sum())
    both.step()
    folder = accelerator.save_state(tmp_path / "state")
    other, *models, optimizer = build()
    other.load_state(folder)
    assert same(models[1].state_dict(), second.state_dict())
    assert torch.equal(models[0][0].weight, first[0].weight)  # type: ignore[index]
    found = optimizer.state[models[1][0].weight]["exp_avg"]
    assert torch.equal(found, both.state[second[0].weight]["exp_avg"])  # type: ignore[index]


# --- weights alone ----------------------------------------------------------------------------------------------------


def test_a_model_is_saved_in_one_file_or_several(tmp_path: Path) -> None:
    accelerator, model = make(False), tiny()
    for name in ("tmp-model-00001-of-00004.safetensors", "tmp-model.safetensors.index.json"):
        (tmp_path / name).write_text("left by a process that was killed")
    accelerator.save_model(model, tmp_path, max_shard_size=300)
    assert not list(tmp_path.glob("tmp-*"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    found = {}
    for name in set(index["weight_map"].values()):
        found |= load_file(tmp_path / name)
    assert same(found, model.state_dict())
    accelerator.save_model(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_tensors_and_plain_values_can_be_saved(tmp_path: Path) -> None:
    accelerator = make(False)
    for name in ("tmp-a.safetensors", "tmp-notes.json"):
        (tmp_path / name).write_text("left by a process that was killed")
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], torch.ones(2))
    accelerator.save({"epoch": 3}, tmp_path / "notes.json")
    assert json.loads((tmp_path / "notes.json").read_text()) == {"epoch": 3}
    accelerator.save({"epoch": 4, "mean": torch.ones(2)}, tmp_path / "notes.json")
    assert load_state(tmp_path / "notes")["epoch"] == 4
    assert torch.equal(load_state(tmp_path / "notes")["mean"], torch.ones(2))
    with pytest.raises(CheckpointError, match="holds a dict of tensors"):
        accelerator.save([1], tmp_path / "a.safetensors")


def test_single_files_cannot_be_remote() -> None:
    """A path would take the scheme for a folder's name, and write it here."""
    accelerator = make(False)
    for save in (
        lambda: accelerator.save_model(tiny(), "s3://bucket/run"),
        lambda: accelerator.save({"epoch": 1}, "s3://bucket/notes.json"),
        lambda: other.save({"epoch": 1}, "s3://bucket/notes.json"),
        lambda: other.load("s3://bucket/notes.json"),
    ):
        with pytest.raises(ConfigError, match=r"folder='s3://bucket/.*checkpoints alone can be written"):
            save()


def test_terms_over_several_micro_batches_go_on_with_the_same_bits(tmp_path: Path) -> None:
    """Until an update is complete its sums are divided by an estimate, of the update before it."""

    def loop() -> Loop:
        return Loop(gradient_accumulation_steps=3)

    def run(loop: Loop, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            for number in range(3):
                x, y = regression()[8 * number : 8 * number + 8 - step % 3]
                with loop.accelerator.accumulate(loop.model):
                    total = F.mse_loss(loop.model(x), y, reduction="sum") * 0.1
                    loop.accelerator.backward(LossTerms(total, 0.7 * len(x)))
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()

    whole, later = loop(), loop()
    run(whole, range(2))
    folder = Path(whole.accelerator.save_state(tmp_path / "state"))
    run(whole, range(2, 5))
    run(later, range(1))
    later.accelerator.load_state(folder)
    run(later, range(2, 5))
    assert same(weights(later), weights(whole))


@pytest.mark.parametrize("terms", [True, False])
def test_a_state_that_is_loaded_in_the_middle_of_an_update_ends_it(tmp_path: Path, terms: bool) -> None:
    """Gradients, weights of terms and batches of the update that was under way are no part of the next one."""

    def run(loop: Loop, micro_batches: int) -> None:
        for x, y in itertools.islice(loop.data, micro_batches):
            with loop.accelerator.accumulate(loop.model):
                total = F.mse_loss(loop.model(x), y, reduction="sum")
                loss = LossTerms(total, 0.7 * len(x)) if terms else total / len(x)
                loop.accelerator.backward(loss)
                loop.optimizer.step()
                loop.schedule.step()
                loop.optimizer.zero_grad()

    ends = []
    for more in (0, 1):
        loop = Loop(gradient_accumulation_steps=2)
        if not ends:
            run(loop, 4)
            loop.accelerator.save_state(tmp_path / "state")
        else:
            run(loop, more)
        loop.accelerator.load_state(tmp_path / "state")
        assert loop.accelerator.sync_gradients
        run(loop, 4)
        ends.append((weights(loop), loop.schedule.state_dict()))
    assert same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
