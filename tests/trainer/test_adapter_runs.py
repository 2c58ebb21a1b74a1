"""A run that trains adapters alone: what it saves, and how it goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.dist.launch import on_ranks
from tests.trainer.adapter_cases import adapted, base, prompted, rows, stretch

from windlass import TrainerCallback
from windlass.checkpoint.adapters import checksum, find_adapter, load_adapter
from windlass.core.errors import CheckpointError
from windlass.dist.sharded import is_sharded

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    stretch(made / "clean", 6, False).save_model()
    stretch(made / "stopped", 3, False)
    return made


def test_the_base_is_not_written(folder: Path) -> None:
    checkpoint = folder / "stopped" / "checkpoint-3"
    for place in (checkpoint, folder / "clean"):
        assert (place / "adapter_model.safetensors").is_file()
        assert json.loads((place / "adapter_config.json").read_text())["inference_mode"] is True
        assert not list(place.glob("model*.safetensors"))
        assert not (place / "config.json").exists()
    assert "adapter_model.safetensors" in json.loads((checkpoint / "manifest.json").read_text())["files"]


def test_the_base_is_named_where_it_was_when_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    model = adapted()
    model.get_base_model().name_or_path = "base"
    adapter = find_adapter(model)
    assert adapter is not None
    monkeypatch.chdir("/")
    adapter.save_config(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


def test_peft_reads_what_was_saved(folder: Path) -> None:
    from peft import PeftModel

    trained = stretch(folder / "again", 6, False).model.eval()
    read = PeftModel.from_pretrained(base(), str(folder / "clean")).double().eval()
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(read(ids).logits, trained(ids).logits)
        assert not torch.equal(read(ids).logits, base()(ids).logits)


def test_a_stopped_run_ends_with_the_same_bits(folder: Path) -> None:
    stretch(folder / "stopped", 6, True)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        found = [(folder / run / "checkpoint-6" / name).read_bytes() for run in ("clean", "stopped")]
        assert found[0] == found[1], name


def test_a_state_dict_assigned_for_the_adapter_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """As in alpaca-lora and scripts made from it, whose trainer saved every model whole."""
    from peft import get_peft_model_state_dict

    model = adapted()
    whole = model.state_dict
    model.state_dict = (lambda self, *_, **__: get_peft_model_state_dict(self, whole())).__get__(
        model, type(model)
    )
    for stop, resume in ((3, False), (6, True)):
        stretch(tmp_path, stop, resume, model=model)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        found = [(run / "checkpoint-6" / name).read_bytes() for run in (folder / "clean", tmp_path)]
        assert found[0] == found[1], name


def test_another_base_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"another base.*other values: base_model\.model\.model\.embed"):
        stretch(folder / "stopped", 6, True, seed=1)


class ChangesBase(TrainerCallback):
    """Saves after each update, and changes a frozen weight of the base after update 2."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        control.should_save = True
        if state.global_step == 2:
            with torch.no_grad():
                model.base_model.model.model.embed_tokens.weight.add_(1)


def test_a_base_that_a_callback_changes_between_saves_has_another_fingerprint(tmp_path: Path) -> None:
    trainer = stretch(tmp_path, 3, False, callbacks=[ChangesBase()])
    saved = [
        json.loads((tmp_path / f"checkpoint-{step}" / "adapter_base.json").read_text())["weights"]
        for step in (1, 2, 3)
    ]
    name = "base_model.model.model.embed_tokens.weight"
    assert [entry for entry in saved[0] if saved[0][entry] != saved[1][entry]] == [name]
    assert saved[1] == saved[2]
    load_adapter(tmp_path / "checkpoint-3", trainer.model, {"weights": saved[2], "buffers": {}})


def test_buffers_that_were_not_saved_or_have_another_shape_are_refused(folder: Path) -> None:
    model, place = adapted(), folder / "clean"
    model.base_model.model.register_buffer("mean", torch.zeros(2))
    adapter, name = find_adapter(model), "base_model.model.mean"
    assert adapter is not None
    base_state: dict[str, Any] = {"weights": adapter.fingerprint(), "buffers": {}}
    with pytest.raises(CheckpointError, match=f"1 are buffers that were not saved: {name}"):
        load_adapter(place, model, base_state)
    with pytest.raises(CheckpointError, match=f"1 are buffers of another shape: {name}"):
        load_adapter(place, model, {**base_state, "buffers": {name: torch.ones(())}})
    load_adapter(place, model, {**base_state, "buffers": {name: torch.ones(2)}})
    assert model.base_model.model.mean.tolist() == [1.0, 1.0]


def test_a_model_without_the_adapter_is_told(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="put the same adapter on the model"):
        load_adapter(folder / "clean", base(), None)


def test_a_model_that_trains_more_is_saved_whole() -> None:
    model = adapted()
    adapter = find_adapter(model)
    assert adapter is not None
    assert any(name.endswith("lm_head.weight") for name in adapter.names.values())
    model.get_input_embeddings().weight.requires_grad_(True)
    assert find_adapter(model) is None


def test_a_checksum_sees_values_places_and_no_layout() -> None:
    tensor = torch.randn(300, 7)
    moved = tensor.flip(0)
    assert checksum(tensor) == checksum(tensor.t().contiguous().t())
    changed = tensor.clone()
    changed[299, 6] += 1e-6
    assert len({checksum(t) for t in (tensor, moved, changed, tensor.bfloat16())}) == 4


@pytest.mark.dist
def test_two_ranks_replicated_and_sharded(tmp_path: Path) -> None:
    on_ranks(2, main, tmp_path)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copytree(tmp_path / "sharded" / "clean" / "checkpoint-6", alone / "checkpoint-6")
    trainer = stretch(alone, 8, True, max_steps=8, gradient_accumulation_steps=2)
    assert trainer.state.global_step == 8


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_learnt_prompts_train_and_continue_on_two_ranks(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    on_ranks(2, with_learnt_prompts, tmp_path, kind == "sharded")
    for form in ("prompt", "prefix", "encoder"):
        saved = [tmp_path / form / run / "checkpoint-3" for run in ("whole", "resumed")]
        names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in saved]
        assert names[0] == names[1]
        assert ("adapter_model.safetensors" in names[0]) == (form != "encoder")
        for name in names[0]:
            assert (saved[0] / name).read_bytes() == (saved[1] / name).read_bytes(), (form, name)
        if form != "encoder":
            read = PeftModel.from_pretrained(base(), str(tmp_path / form / "final"))
            assert torch.isfinite(read(input_ids=torch.arange(6)[None]).logits).all()


# --- what each rank runs ----------------------------------------------------------------------------------------------


SHARDED: dict[str, Any] = {"fsdp": "full_shard"}
FILE = "adapter_model.safetensors"


def goes_on_with_the_same_bits(folder: Path, **strategy: Any) -> None:
    stretch(folder / "clean", 6, False, **strategy)
    stretch(folder / "stopped", 3, False, **strategy)
    resumed = stretch(folder / "stopped", 6, True, **strategy)
    assert any(is_sharded(p) for p in resumed.model.parameters()) == bool(strategy)
    for name in (FILE, "optimizer*.safetensors"):
        for path in (folder / "clean" / "checkpoint-6").glob(name):
            assert path.read_bytes() == (folder / "stopped" / "checkpoint-6" / path.name).read_bytes(), path
    assert not list((folder / "clean" / "checkpoint-6").glob("model*")), "the base is not written"
    with pytest.raises(CheckpointError, match="another base"):
        stretch(folder / "stopped", 6, True, seed=1, **strategy)


def goes_on_under_the_other(folder: Path, strategy: dict[str, Any], other: dict[str, Any]) -> None:
    if torch.distributed.get_rank() == 0:
        (folder / "moved").mkdir()
        shutil.copytree(folder / "stopped" / "checkpoint-3", folder / "moved" / "checkpoint-3")
    torch.distributed.barrier()
    stretch(folder / "moved", 6, True, **other)
    found, expected = (load_file(folder / run / "checkpoint-6" / FILE) for run in ("moved", "clean"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9)


def main(folder: Path) -> None:
    for name, strategy, other in (("replicated", {}, SHARDED), ("sharded", SHARDED, {})):
        goes_on_with_the_same_bits(folder / name, **strategy)
        goes_on_under_the_other(folder / name, strategy, other)


def with_learnt_prompts(folder: Path, sharded: bool) -> None:
    strategy = {"fsdp": "full_shard"} if sharded else {}
    for kind in ("prompt", "prefix", "encoder"):
        whole = stretch(folder / kind / "whole", 3, False, model=prompted(kind), **strategy)
        stretch(folder / kind / "resumed", 2, False, model=prompted(kind), **strategy)
        resumed = stretch(folder / kind / "resumed", 3, True, model=prompted(kind), **strategy)
        assert any(is_sharded(p) for p in resumed.model.parameters()) == sharded
        losses = [trainer.evaluate(rows()[:8])["eval_loss"] for trainer in (whole, resumed)]
        assert losses[0] == losses[1]
        resumed.save_model(str(folder / kind / "final"))
