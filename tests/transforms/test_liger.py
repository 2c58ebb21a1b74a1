"""Liger's kernels: what they replace, and where the model keeps its own operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import Net, arguments, rows

from windlass import Trainer
from windlass.core.errors import ConfigError, MissingDependencyError
from windlass.core.optional import is_available
from windlass.transforms import liger


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))


def test_a_cpu_keeps_the_operations_of_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for options in ({}, {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}}):
        trainer = Trainer(Net(), arguments(tmp_path, max_steps=2, **options), train_dataset=rows(16))
        trainer.train()
        found.append(trainer.model.layer.weight)
    assert torch.equal(*found)
    assert "Liger's kernels need a GPU; on cpu the model's own operations are used" in caplog.text


def test_a_choice_of_kernels_without_them_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2, liger_kernel_config={"rope": False})
    with pytest.raises(ConfigError, match="without use_liger_kernel=True"):
        Trainer(Net(), args, train_dataset=rows(16)).train()


@pytest.mark.skipif(is_available("liger_kernel"), reason="it is installed")
def test_without_the_package_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "_TRITON", ("cpu",))
    with pytest.raises(MissingDependencyError, match=r"liger_kernel.*pip install"):
        liger.apply_liger(llama(), {})


def test_parts_are_replaced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Only replaced, which any device can do: the kernels themselves need a GPU."""
    pytest.importorskip("liger_kernel", reason="Liger's kernels: pip install liger-kernel triton")
    monkeypatch.setattr(liger, "_TRITON", ("cpu",))
    model = llama()
    with pytest.raises(ConfigError, match=r"liger_kernel_config.rms_nrm=True.*did you mean 'rms_norm'"):
        liger.apply_liger(model, {"rms_nrm": True})
    liger.apply_liger(model, {"rope": False, "swiglu": False})
    assert "Liger" in type(model.model.norm).__name__ or "Liger" in str(model.model.norm)
    assert "Liger" not in str(model.model.layers[0].mlp)
    liger.apply_liger(Net(), {})
    assert "Liger has no kernels for Net" in caplog.text
