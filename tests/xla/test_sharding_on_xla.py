"""Parameters sharded over four devices by PyTorch/XLA's compiler: `CPU_NUM_DEVICES=4`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.xla.models import (
    TOLERANCE,
    counters,
    furthest,
    losses,
    needs_xla,
    new_model,
    new_trainer,
    rows,
    weights,
)
from torch.utils.data import DataLoader

from windlass import Accelerator, HfArgumentParser, TrainerCallback, TrainingArguments
from windlass.compat.plugin_fsdp import FullyShardedDataParallelPlugin
from windlass.core import xla

several = pytest.mark.skipif(
    not xla.is_selected() or xla.device_count() == 1, reason="needs several devices: CPU_NUM_DEVICES=4"
)
pytestmark = [pytest.mark.xla, needs_xla, several]
SHARDED: dict[str, Any] = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"xla": True}}


def layout(tensor: torch.Tensor) -> str:
    import torch_xla

    return str(torch_xla._XLAC._get_xla_sharding_spec(tensor))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer that has trained on the CPU."""
    trainer = new_trainer(tmp_path_factory.mktemp("cpu"), use_cpu=True)
    trainer.train()
    return trainer


class _Shape(TrainerCallback):
    """Notes how the optimizer's state lies on the devices, and what was asked of them."""

    def __init__(self) -> None:
        self.states: set[str] = set()
        self.found: list[dict[str, int]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found.append(counters())

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        self.states = {layout(s["exp_avg"]) for p, s in optimizer.state.items() if p.dim() == 2}


@pytest.mark.parametrize(
    "extra", [{}, {"xla_fsdp_grad_ckpt": True, "xla_fsdp_settings": {"flatten_parameters": True}}]
)
def test_sharded_training_is_that_of_one_process(
    tmp_path: Path, reference: Any, extra: dict[str, Any]
) -> None:
    shape = _Shape()
    config = {**SHARDED["fsdp_config"], **extra}
    trainer, forwards = new_trainer(tmp_path, callbacks=[shape], fsdp=SHARDED["fsdp"], fsdp_config=config), 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += torch.is_grad_enabled()

    trainer.model.layers[0].linear.register_forward_hook(count)
    trainer.train()
    assert forwards == 12  # of six updates of two micro-batches; recomputed ones run where gradients are
    assert losses(trainer) == pytest.approx(losses(reference), abs=TOLERANCE)
    assert furthest(weights(trainer.model), weights(reference.model)) < TOLERANCE
    matrices = [p for p in trainer.model.parameters() if p.dim() == 2]
    assert {layout(p) for p in matrices} <= {"{devices=[4,1]0,1,2,3}", "{devices=[1,4]0,1,2,3}"}
    assert shape.states == {layout(p) for p in matrices}
    assert trainer.evaluate()["eval_loss"] == pytest.approx(reference.evaluate()["eval_loss"], abs=TOLERANCE)
    saved = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(value, weights(trainer.model)[name]) for name, value in saved.items())


@pytest.mark.parametrize(
    "wraps",
    [{"fsdp_transformer_layer_cls_to_wrap": ["Layer"]}, {"fsdp_min_num_params": 100}],
    ids=["layers", "size"],
)
def test_the_flags_that_a_guide_prints(tmp_path: Path, reference: Any, wraps: dict[str, Any]) -> None:
    file = tmp_path / "fsdp_config.json"
    settings = {"flatten_parameters": True, "compute_dtype": "float32"}
    file.write_text(
        json.dumps({"xla": True, "xla_fsdp_settings": settings, "xla_fsdp_grad_ckpt": True, **wraps})
    )
    words = ["--output_dir", str(tmp_path), "--fsdp", "full shard", "--fsdp_config", str(file)]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    trainer = new_trainer(tmp_path, fsdp=args.fsdp, fsdp_config=args.fsdp_config)
    trainer.train()
    assert losses(trainer) == pytest.approx(losses(reference), abs=TOLERANCE)
    assert "devices=" in layout(trainer.model.layers[0].linear.weight)


def test_one_graph_and_one_sync_in_an_update(tmp_path: Path) -> None:
    shape = _Shape()
    trainer = new_trainer(
        tmp_path, callbacks=[shape], max_steps=7, logging_steps=50, save_strategy="no", **SHARDED
    )
    trainer.train()
    settled = shape.found[3:]
    for earlier, later in itertools.pairwise(settled):
        asked = {name: later[name] - earlier[name] for name in ("compiled", "graphs", "syncs")}
        assert asked == {"compiled": 0, "graphs": 1, "syncs": 1}


def test_a_sharded_checkpoint_continues_sharded_replicated_and_on_the_cpu(
    tmp_path: Path, reference: Any
) -> None:
    new_trainer(tmp_path, **SHARDED).train()
    checkpoint = str(tmp_path / "checkpoint-3")
    for options in (SHARDED, {}, {"use_cpu": True}):
        trainer = new_trainer(tmp_path, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert losses(trainer) == pytest.approx(losses(reference), abs=TOLERANCE)


def test_a_loop_of_the_users_own_shards_with_a_plugin() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    found = {}
    for name, options in {"xla": {"fsdp_plugin": plugin}, "cpu": {"cpu": True}}.items():
        accelerator, model = Accelerator(**options), new_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(rows(22), batch_size=8)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        found[name] = weights(model)
        if name == "xla":
            assert "devices=" in layout(model.layers[0].linear.weight)
    assert furthest(found["xla"], found["cpu"]) < TOLERANCE


def test_recomputed_layers_learn_behind_frozen_embeddings(tmp_path: Path) -> None:
    """The library's recomputation gives no gradient to a layer none of whose inputs requires one."""
    found = []
    config = {"xla": True, "xla_fsdp_grad_ckpt": True}
    for name, options in {"xla": {**SHARDED, "fsdp_config": config}, "cpu": {"use_cpu": True}}.items():
        model = new_model()
        model.embed.weight.requires_grad_(False)
        trainer = new_trainer(tmp_path / name, model, max_steps=3, save_strategy="no", **options)
        trainer.train()
        found.append(weights(model))
    assert furthest(*found) < TOLERANCE
    assert not torch.equal(found[0]["layers.0.linear.weight"], new_model().layers[0].linear.weight)
