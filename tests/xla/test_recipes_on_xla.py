"""Recipes, and the script that docs/devices.md prints, on PyTorch/XLA's devices."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.xla.models import TOLERANCE, counters, needs_xla
from transformers import LlamaConfig, LlamaForCausalLM

from windlass.cli.main import main
from windlass.core import xla

pytestmark = [pytest.mark.xla, needs_xla]
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
RECIPE: dict[str, Any] = {
    "data": {"train": "text.txt", "block_size": 16, "eval_fraction": 0.2},
    "tokenizer": {"train": {"vocab_size": 300}},
    "model": {"config": {"model_type": "llama", **SIZES}},
    "training": {
        "max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2,
        "save_steps": 2,
    },
    "sample": {"prompt": "the cat", "max_new_tokens": 60},
}  # fmt: skip


def logged(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [value for row in rows for name, value in row.items() if name in ("loss", "eval_loss")]


def test_a_recipe_is_that_of_the_cpu_and_its_sample_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 60)
    Path("recipe.yaml").write_text(json.dumps(RECIPE))
    before = counters()["compiled"]
    assert main(["train", "recipe.yaml", "training.output_dir=xla"]) == 0
    assert 1 < counters()["compiled"] - before < RECIPE["sample"]["max_new_tokens"]
    assert main(["train", "recipe.yaml", "training.output_dir=cpu", "training.use_cpu=true"]) == 0
    assert len(logged(tmp_path / "xla")) == 6
    assert logged(tmp_path / "xla") == pytest.approx(logged(tmp_path / "cpu"), abs=TOLERANCE)


def test_attention_is_autocast_as_on_the_cpu() -> None:
    """As rotary embeddings do, queries and keys come in fp32, and values from a linear layer in bf16."""
    inputs = torch.randn(3, 2, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(4, 4).fill_diagonal_(-1.0)
    found = []
    for device in (xla.device(), torch.device("cpu")):
        query, key, value = (tensor.to(device).requires_grad_() for tensor in inputs)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            attended = torch.nn.functional.scaled_dot_product_attention(
                query, key, value.bfloat16(), attn_mask=mask.to(device)
            )
        assert attended.dtype == torch.bfloat16
        attended.float().square().sum().backward()
        found.append([attended.detach().float().cpu(), query.grad.cpu(), value.grad.cpu()])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0.05)


def test_the_script_of_the_page_on_devices(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (root / "docs" / "devices.md").read_text("utf-8")
    (script,) = re.findall(r"<!-- no-run: needs torch_xla.*?-->\n```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **SIZES))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, 8))]
    exec(compile(script, "docs/devices.md", "exec"), {"model": model, "data": data})
    assert model.device.type == "xla"
    assert (tmp_path / "runs" / "xla" / "checkpoint-6" / "model.safetensors").is_file()
