"""An adapter is added to its base: the merged model computes what base and adapter computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.finetuning.test_peft_adapters import ids, lora, quantized

from windlass import SFTTrainer
from windlass.cli.main import main
from windlass.core.errors import CheckpointError
from windlass.finetuning.merging import merge_adapter

peft = pytest.importorskip("peft")


def trained(folder: Path, base: str, **options: Any) -> Any:
    trainer = SFTTrainer(
        base, small.arguments(folder, max_steps=5), train_dataset=small.table(small.texts()), peft_config=lora(),
        **options,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return trainer.model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids()).logits


def test_a_merged_model_computes_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = trained(tmp_path / "run", small.saved(tmp_path / "base"))
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(logits(merged), logits(model), atol=1e-6)
    assert not torch.allclose(logits(merged), logits(small.model().eval()), atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "<eos>"
    words = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "parts"), "--merge"]
    assert main([*words, "--max-shard-size", "10KB"]) == 0
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    assert main([*words, "--force"]) == 2
    with pytest.raises(CheckpointError, match="there already"):
        merge_adapter(tmp_path / "run", tmp_path / "merged")


def test_few_bits_are_merged_in_the_precision_of_the_base(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    name, four_bits, _ = quantized(tmp_path / "base")
    trained(tmp_path / "run", name, quantization_config=four_bits)
    merge_adapter(tmp_path / "run", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    whole = AutoModelForCausalLM.from_pretrained(name)
    expected = peft.PeftModel.from_pretrained(whole, str(tmp_path / "run")).eval()
    assert torch.allclose(logits(merged), logits(expected), atol=1e-6)
    untouched = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(merged.get_parameter(untouched), whole.get_parameter(untouched))


def test_what_cannot_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match="holds no adapter"):
        merge_adapter(tmp_path, tmp_path / "new")
    assert (
        main(["checkpoint", "export", str(tmp_path), str(tmp_path / "a.safetensors"), "--merge", "--base=b"])
        == 2
    )
    assert "name a folder as TARGET" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "new"), "--base=b"]) == 2
    assert "add --merge" in capsys.readouterr().err
