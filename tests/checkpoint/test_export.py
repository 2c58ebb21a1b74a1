"""Exports on a disk that fails: whatever was there stays, and a result is whole."""

from __future__ import annotations

import contextlib
import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.checkpoint.faults import CountingFiles, failing, save, vanish
from tests.checkpoint.test_faults import in_child
from torch import nn

from windlass import Accelerator
from windlass.checkpoint.export import ExportOptions, export_file, export_folder, model_files
from windlass.checkpoint.stored import Folder, open_folder
from windlass.checkpoint.weights import ALIASES_KEY, save_weights
from windlass.core.errors import CheckpointError

WEIGHT = "layer.weight"


def source(root: Path, step: int) -> Folder:
    path = save(root / f"run-{step}", step)
    assert path is not None
    return open_folder(path)


def value_of(path: Path) -> float:
    """What the weights of a result are all equal to."""
    weight = load_file(path)[WEIGHT]
    assert torch.equal(weight, torch.full((3, 2), float(weight[0, 0])))
    return float(weight[0, 0])


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_disk_that_fails_at_any_operation(is_folder: bool, replaces: bool, tmp_path: Path) -> None:
    first, second = source(tmp_path, 1), source(tmp_path, 2)
    export, name = (export_folder, "model.safetensors") if is_folder else (export_file, "")
    number = 0
    while True:
        number += 1
        place = tmp_path / f"out-{number}"
        target = place / "result"
        if replaces:
            export(first, target, ExportOptions())
        files = CountingFiles(number, failing(errno.ENOSPC))
        with contextlib.suppress(OSError):
            export(second, target, ExportOptions(force=replaces), files)
        result = target / name if name else target
        if files.count < number:
            assert value_of(result) == 2
            break
        if replaces:
            assert value_of(result) in (1, 2)
        elif result.exists():
            assert value_of(result) == 2
        export(second, target, ExportOptions(force=True))
        assert value_of(result) == 2
        assert [path.name for path in place.iterdir()] == ["result"]
    assert number > 5


def test_an_export_that_is_cut_off_leaves_a_whole_result_for_the_next(tmp_path: Path) -> None:
    first, second = source(tmp_path, 1), source(tmp_path, 2)

    number, code = 0, 77
    while code == 77:
        number += 1
        target = tmp_path / f"out-{number}" / "result"
        export_folder(first, target, ExportOptions())
        files = CountingFiles(number, vanish)
        code = in_child(lambda: export_folder(second, target, ExportOptions(force=True), files))  # noqa: B023
        aside = target.with_name("tmp-replaced-result")
        standing = target if target.exists() else aside
        assert value_of(standing / "model.safetensors") in (1, 2)
        with pytest.raises(CheckpointError, match="is there already"):
            export_folder(second, target, ExportOptions())
        export_folder(second, target, ExportOptions(force=True))
        assert value_of(target / "model.safetensors") == 2
        assert [path.name for path in target.parent.iterdir()] == ["result"]
    assert code == 0
    assert number > 8


def test_folders_beside_the_result_stay(tmp_path: Path) -> None:
    for name in ("tmp-out", "tmp-removed-out"):
        (tmp_path / name).mkdir()
    here = source(tmp_path, 1)
    export_folder(here, tmp_path / "out", ExportOptions())
    export_folder(here, tmp_path / "out", ExportOptions(force=True))
    assert (tmp_path / "tmp-out").is_dir()
    assert (tmp_path / "tmp-removed-out").is_dir()


@pytest.mark.parametrize("force", [True, False])
def test_the_working_directory_is_not_replaced(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell that runs in it would be in a folder that no longer exists."""
    here = source(tmp_path, 1)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    for target in (Path(), Path(".."), tmp_path / "out", Path("/")):
        with pytest.raises(CheckpointError, match="name a new folder"):
            export_folder(here, target, ExportOptions(force=force))
    assert not any((tmp_path / "out").iterdir())
    export_folder(here, Path("new"), ExportOptions())
    assert value_of(Path("new/model.safetensors")) == 1


def test_folders_beside_the_weights_are_not_companions(tmp_path: Path) -> None:
    export_folder(source(tmp_path, 1), tmp_path / "out", ExportOptions(), files := CountingFiles())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json"}
    flush = f"fsync_folder {tmp_path.name}"
    assert files.operations[-3:] == ["fsync_folder tmp-unfinished-out", "rename tmp-unfinished-out", flush]
    export_file(source(tmp_path, 1), tmp_path / "file", ExportOptions(), files)
    assert files.operations[-2:] == ["rename tmp-file", flush]


def test_what_tokenizers_of_few_models_and_named_templates_need_goes_along(tmp_path: Path) -> None:
    made, out = tmp_path / "in", tmp_path / "out"
    taken = {"source.spm", "vocab-src.json", "normalizer.json", "additional_chat_templates/tool_use.jinja"}
    taken |= {"qformer_tokenizer/vocab.txt", "qformer_tokenizer/additional_chat_templates/a.jinja"}
    left = {"checkpoint-1/additional_chat_templates/rag.jinja", "additional_chat_templates/notes.txt"}
    for name in taken | left | {"adapter_config.json"}:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("{}")
    save_file({WEIGHT: torch.ones(2)}, made / "model.safetensors")
    for _ in range(2):
        export_folder(open_folder(made), out, ExportOptions(force=True))
        assert open_folder(out).names == {*taken, "model.safetensors"}
    assert model_files(open_folder(made)) == sorted({*taken, "model.safetensors"})
    (out / "qformer_tokenizer/notes.md").touch()
    with pytest.raises(CheckpointError, match="not a folder that an export wrote"):
        export_folder(open_folder(made), out, ExportOptions(force=True))


def test_counters_keep_their_dtype_and_names_their_ties(tmp_path: Path) -> None:
    state = {"state/w/step": torch.tensor(3.0), "state/w/exp_avg": torch.ones(2)}
    save_file(state, tmp_path / "optimizer.safetensors")
    (tmp_path / "config.json").write_text('{"torch_dtype": "float32"}')
    extra = {"_extra_state": {"scale": torch.ones(2)}}
    save_weights(tmp_path, {"a": (tied := torch.ones(2)), "b": tied, **extra})
    here, out, options = open_folder(tmp_path), tmp_path / "out", ExportOptions("optimizer", torch.bfloat16)
    export_file(here, tmp_path / "moments", options)
    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "moments").items()}
    assert dtypes == {"w/step": torch.float32, "w/exp_avg": torch.bfloat16}
    export_file(here, tmp_path / "weights", ExportOptions())
    with safe_open(tmp_path / "weights", "pt") as file:
        assert file.metadata()[ALIASES_KEY] == '{"b": "a"}'
    export_folder(here, out, ExportOptions(dtype=torch.bfloat16))
    assert json.loads((out / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
    dtypes = {name: tensor.dtype for name, tensor in load_file(out / "model.safetensors").items()}
    assert (dtypes["a"], dtypes["_extra_state#tensors/scale"]) == (torch.bfloat16, torch.float32)


def test_a_configuration_may_hold_infinities(tmp_path: Path) -> None:
    """As that of Mamba-2 does: transformers writes and reads them."""
    (tmp_path / "in").mkdir()
    save_file({WEIGHT: torch.ones(2)}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"time_step_limit": [0.0, float("inf")]}))
    export_folder(open_folder(tmp_path / "in"), tmp_path / "out", ExportOptions(dtype=torch.bfloat16))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"time_step_limit": [0.0, float("inf")], "dtype": "bfloat16"}


def test_a_file_and_a_folder_are_not_taken_for_each_other(tmp_path: Path) -> None:
    here = source(tmp_path, 1)
    (tmp_path / "file").write_text("mine")
    for other in ("file", "run-1/checkpoint-1"):
        with pytest.raises(CheckpointError, match="is not a folder that an export wrote"):
            export_folder(here, tmp_path / other, ExportOptions(force=True))
    with pytest.raises(CheckpointError, match="is a folder; name a file"):
        export_file(here, tmp_path / "run-1", ExportOptions(force=True))
    assert (tmp_path / "file").read_text() == "mine"


def test_an_optimizer_of_torch_save_is_named_as_what_is_not_exported(tmp_path: Path) -> None:
    (tmp_path / "optimizer.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt, which torch\.save wrote, is not exported"):
        export_file(
            open_folder(tmp_path), tmp_path / "moments.safetensors", ExportOptions(tensors="optimizer")
        )


def test_a_link_to_a_folder_is_kept_and_the_folder_filled_and_replaced(tmp_path: Path) -> None:
    (tmp_path / "large-disk").mkdir()
    link = tmp_path / "result"
    link.symlink_to(tmp_path / "large-disk")
    for number in (1, 2):
        export_folder(source(tmp_path, number), link, ExportOptions(force=True))
        assert link.is_symlink()
        assert value_of(tmp_path / "large-disk" / "model.safetensors") == number


def loop_of(models: int, folder: Path) -> Folder:
    """What a loop of so many models, each with an Adam, saved after an update."""
    accelerator = Accelerator(cpu=True)
    for number in range(models):
        made = nn.Linear(2, 2)
        nn.init.constant_(made.weight, float(number))
        model, optimizer = accelerator.prepare(made, torch.optim.Adam(made.parameters(), lr=0.0))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    accelerator.save_state(folder)
    accelerator.end_training()
    return open_folder(folder)


def test_of_several_models_of_a_loop_the_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_file(loop_of(3, tmp_path / "loop"), tmp_path / "first.safetensors", ExportOptions())
    assert "holds 3 models, and this is the first" in caplog.text
    assert "model_1, model_2 in it" in caplog.text
    caplog.clear()
    export_file(open_folder(tmp_path / "loop" / "model_2"), tmp_path / "third.safetensors", ExportOptions())
    assert load_file(tmp_path / "third.safetensors")["weight"].unique().tolist() == [2.0]
    export_file(loop_of(1, tmp_path / "one"), tmp_path / "only.safetensors", ExportOptions())
    assert not caplog.text


def test_the_optimizer_of_a_loop_is_exported_if_it_is_the_only_one(tmp_path: Path) -> None:
    options = ExportOptions("optimizer")
    export_file(loop_of(1, tmp_path / "one"), tmp_path / "moments.safetensors", options)
    assert "weight/exp_avg" in load_file(tmp_path / "moments.safetensors")
    with pytest.raises(CheckpointError, match=r"the state of 2 optimizers.*optimizer_0\*\.safetensors"):
        export_file(loop_of(2, tmp_path / "two"), tmp_path / "none.safetensors", options)
