"""Training for weights of few bits: what is rounded, resume, several processes, and the exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dist.launch import on_ranks
from tests.finetuning import small
from torch import Tensor, nn

from windlass import SFTTrainer, Trainer
from windlass.cli.main import main
from windlass.core.errors import ConfigError
from windlass.transforms.document_attention import documents_apart
from windlass.transforms.quantization_aware import apply_qat, quantized_config

pytest.importorskip("torchao")
pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64}
SHARDED: dict[str, Any] = {
    "fsdp": "full_shard",
    "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
}


def ids() -> Tensor:
    return torch.randint(0, 36, (2, 9), generator=torch.Generator().manual_seed(0))


def trainer(folder: Path, batch: int = 4, **changes: Any) -> Any:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "qat": "int4", **changes}
    return SFTTrainer(
        small.model(**SIZES), small.arguments(folder, per_device_train_batch_size=batch, **options),
        train_dataset=small.table(small.texts(16)), eval_dataset=small.table(small.texts(5)),
        processing_class=small.tokenizer(),
    )  # fmt: skip


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(ids()).logits  # type: ignore[no-any-return]


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.state.log_history if "loss" in row]


@pytest.mark.parametrize("scheme", ["int8", "int4", "int8_weight_only", "int4_weight_only"])
def test_the_rounded_model_computes_what_the_quantized_one_does(scheme: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.quantization.qat import QATConfig

    model = small.model(**SIZES)
    plain, held = logits(model), [id(p) for p in model.parameters()]
    apply_qat(model, scheme)
    apply_qat(model, scheme)
    assert [id(p) for p in model.parameters()] == held
    assert list(model.state_dict()) == list(small.model(**SIZES).state_dict())
    assert type(model.lm_head) is nn.Linear
    rounded = logits(model)
    assert not torch.equal(rounded, plain)
    model.train()(ids(), labels=ids()).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    quantization.quantize_(model, QATConfig(quantized_config(scheme), step="convert"))
    assert torch.equal(logits(model), rounded)


def test_float8_trains_where_it_cannot_be_converted() -> None:
    model = small.model(**SIZES)
    plain = logits(model)
    apply_qat(model, "float8")
    assert not torch.equal(logits(model), plain)
    model.train()(ids(), labels=ids()).loss.backward()
    layer = model.model.layers[0].mlp.up_proj
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.abs().sum() > 0
    zeros = torch.zeros(2, 32, requires_grad=True)
    (layer(zeros) * 1e-9).sum().backward()
    expected = (1e-9 * layer.weight_fake_quantizer(layer.weight)).sum(0).expand(2, -1)
    assert torch.allclose(zeros.grad, expected, rtol=1e-5, atol=1e-15)


def test_a_run_resumes_to_the_bit_and_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    run = trainer(tmp_path / "run")
    before = run.evaluate()["eval_loss"]
    assert before != trainer(tmp_path / "plain", qat=None).evaluate()["eval_loss"], (
        "rounded before training too"
    )
    run.train()
    again = trainer(tmp_path / "run")
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    ours, theirs = again.model.state_dict(), run.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert losses(again) == losses(run) != losses_without(tmp_path / "plain")

    checkpoint = str(tmp_path / "run" / "checkpoint-4")
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert plain.dtype == torch.float32, "checkpoints hold the weights as they are trained"
    assert main(["checkpoint", "export", checkpoint, str(tmp_path / "small"), "--quantize"]) == 0
    assert "int4" in capsys.readouterr().out
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert type(read.model.layers[0].mlp.up_proj.weight).__name__ == "IntxUnpackedToInt8Tensor"
    assert torch.equal(logits(read), logits(run.model))
    assert not torch.equal(logits(read), logits(plain))
    assert (tmp_path / "small" / "tokenizer.json").is_file()


def losses_without(folder: Path) -> list[float]:
    run = trainer(folder, qat=None)
    run.train()
    return losses(run)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ["--quantize", "float8"],
            "needs a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (["--quantize", "int4"], "16 inputs"),
        (["--quantize"], "name one: int8, int4"),
        (["--quantize", "int8", "--merge"], "--quantize"),
        (["--quantize", "int8", "--tensors", "optimizer"], "--quantize"),
        (["--quantize", "int8", "--format", "safetensors"], "--quantize"),
    ],
)
def test_an_export_that_cannot_be_made(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small.saved(tmp_path / "base")
    assert main(["checkpoint", "export", str(tmp_path / "base"), str(tmp_path / "out"), *words]) != 0
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["base"], "nothing is left"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that multiplies in float8")
def test_an_export_in_float8(tmp_path: Path) -> None:
    """torchao rounds weights in bfloat16 alone to float8; the checkpoint has single precision."""
    from transformers import AutoModelForCausalLM

    small.saved(tmp_path / "base", **SIZES)
    assert (
        main(["checkpoint", "export", str(tmp_path / "base"), str(tmp_path / "out"), "--quantize", "float8"])
        == 0
    )
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").cuda()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").cuda()
    found, expected = (model(ids().cuda()).logits.float() for model in (read, plain))
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


def test_packed_documents_are_kept_apart() -> None:
    model = small.model(**SIZES).eval()
    apply_qat(model, "int4_weight_only")
    documents = ids()
    row, positions = documents.view(1, -1), torch.arange(documents.shape[1]).repeat(len(documents))[None]
    with torch.no_grad(), documents_apart(model):
        together = model(row, position_ids=positions).logits
    torch.testing.assert_close(together.view(len(documents), documents.shape[1], -1), logits(model))


def test_packed_rows_are_trained_on(tmp_path: Path) -> None:
    run = trainer(tmp_path, packing=True, max_length=32, save_strategy="no")
    run.train()
    assert len(losses(run)) == 4


@pytest.mark.parametrize(
    ("extra", "apart"),
    [
        ({"gradient_checkpointing": True}, 1e-5),
        # Compiled operations round otherwise: a weight between two levels may then go to the other one.
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "aot_eager"}, 2e-4, marks=pytest.mark.slow
        ),
    ],
)
def test_other_transforms_compute_the_same(extra: dict[str, Any], apart: float, tmp_path: Path) -> None:
    found = []
    for name, options in (("plain", {}), ("both", extra)):
        run = trainer(tmp_path / name, save_strategy="no", max_steps=2, **options)
        run.train()
        found.append(losses(run))
    assert found[1] == pytest.approx(found[0], rel=apart)


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_two_processes_have_the_losses_of_one(layout: str, tmp_path: Path) -> None:
    alone = trainer(tmp_path / "one", save_strategy="no")
    alone.train()
    found, _ = on_ranks(2, on_a_rank, tmp_path / "two", layout)
    assert found[0] == pytest.approx(losses(alone)[0], rel=1e-6)
    assert found == pytest.approx(losses(alone), rel=5e-3), "a last bit may move a value to the next step"


def gpt2() -> Any:
    """Its layers are of a class of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), "needs a model of transformers"),
        (lambda: small.model(hidden_size=48, intermediate_size=64), "has 48 inputs"),
        (gpt2, "GPT2LMHeadModel has no linear layer"),
    ],
)
def test_models_that_cannot_be_converted(made: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_qat(made(), "int4")


def test_adapters_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"qat='int8'.*adapter"):
        SFTTrainer(
            small.model(**SIZES), small.arguments(tmp_path, qat="int8"), train_dataset=small.table(small.texts()),
            processing_class=small.tokenizer(), peft_config=peft.LoraConfig(r=2, target_modules="all-linear"),
        )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"deepspeed": {"zero_optimization": {"stage": 2}}}, {"fp8": True, "fp8_config": {"emulate": True}}],
)
def test_other_engines_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qat='int4'"):
        trainer(tmp_path, **changes).train()


# --- what each rank runs ----------------------------------------------------------------------------------------------


def on_a_rank(folder: Path, layout: str) -> list[float]:
    run: Trainer = trainer(folder, 2, save_strategy="no", **(SHARDED if layout == "sharded" else {}))
    run.train()
    return losses(run)
