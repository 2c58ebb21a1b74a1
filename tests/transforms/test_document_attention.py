"""Packed rows: documents do not see each other, and gradients are those of documents that are run alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.versions import needs
from torch import Tensor, nn

from windlass.core.errors import ModelError
from windlass.data.collate_causal import DataCollatorForCausalLM
from windlass.transforms.document_attention import NAME, documents_apart, refuse_leaks

transformers = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = {"head_dim": 4, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "qwen2": ("Qwen2Config", _SIZES),
    "sliding window": ("MistralConfig", _SIZES | {"sliding_window": 3}),
    "soft-capping": ("Gemma2Config", _SIZES | _MIXED | {"attn_logit_softcapping": 0.5}),
    "gemma3": ("Gemma3TextConfig", _SIZES | _MIXED),
    "experts": ("MixtralConfig", _SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0,
         "attn_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}),
    "chunks": ("Llama4TextConfig", _SIZES | {"head_dim": 4, "attention_chunk_size": 4, "num_local_experts": 2}),
    "sinks": ("GptOssConfig", _SIZES | _MIXED | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "opt": (
        "OPTConfig",
        {"vocab_size": 23, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "max_position_embeddings": 32, "word_embed_proj_dim": 16, "dropout": 0.0},
    ),
    "bloom": ("BloomConfig", {"vocab_size": 23, "hidden_size": 16, "n_layer": 1, "n_head": 2}),
    "mamba": ("MambaConfig", {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}),
    "hybrid": (
        "Qwen3NextConfig",
        _SIZES | {
            "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "linear_num_value_heads": 2,
            "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}  # fmt: skip
# Norms and soft-capping that are computed in single precision, whatever the weights have.
_SINGLE_INSIDE = {"soft-capping", "gemma3"}
_LENGTHS = (9, 3, 5, 1, 6)


def _model(name: str, dtype: torch.dtype = torch.float64) -> Any:
    config, options = _CONFIGS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**options))
    return model.to(dtype).train()


def _documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 23, (length,), generator=generator).tolist() for length in _LENGTHS]


def _packed(documents: list[list[int]]) -> dict[str, Any]:
    return DataCollatorForCausalLM(0, padding_free=True)([{"input_ids": ids} for ids in documents])


def _loss_sum(model: Any, batch: dict[str, Any]) -> Tensor:
    """Over all targets, in the precision of the logits."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


def _gradients(model: Any, loss: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    total = loss()
    total.backward()
    return total.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _alone(model: Any, documents: list[list[int]]) -> Callable[[], Tensor]:
    batches = [torch.tensor([ids]) for ids in documents if len(ids) > 1]
    return lambda: torch.stack([_loss_sum(model, {"input_ids": ids, "labels": ids}) for ids in batches]).sum()


def _close(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= tolerance * max(1.0, other.abs().max().item())


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2",
        "sliding window",
        "soft-capping",
        "gemma3",
        "gpt2",
        "gpt_neox",
        pytest.param("chunks", marks=needs("transformers", "5.23", "older ones are refused")),
        "opt",
    ],
)
def test_gradients_are_those_of_documents_alone(name: str) -> None:
    model, documents = _model(name), _documents()
    before = model.config._attn_implementation
    loss, gradients = _gradients(model, _alone(model, documents))
    with documents_apart(model):
        assert model.config._attn_implementation == NAME
        refuse_leaks(model)
        packed_loss, packed = _gradients(model, lambda: _loss_sum(model, _packed(documents)))
    tolerance = 1e-6 if name in _SINGLE_INSIDE else 1e-12
    _close([packed_loss, *packed], [loss, *gradients], tolerance)
    assert model.config._attn_implementation == before
    assert model.training


@needs("transformers", "5.23", "older ones are refused")
@pytest.mark.parametrize(
    ("options", "masked", "refused"),
    [
        ({"floor_scale": 25}, False, False),
        ({"floor_scale": 24}, False, True),
        ({"attention_chunk_size": 4}, False, False),
        ({"attention_chunk_size": 4}, True, True),
        ({"attention_chunk_size": 25}, True, False),
    ],
)
def test_a_layer_that_counts_the_tokens_of_other_documents_is_refused(
    options: dict[str, int], masked: bool, refused: bool
) -> None:
    """The scales and the chunks of Llama 4."""
    known = {"head_dim": 4, "num_local_experts": 2, "no_rope_layers": [1, 0], "attention_chunk_size": 64}
    config = transformers.Llama4TextConfig(**_SIZES | known | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    documents = _documents()
    batch = _packed(documents) | ({"attention_mask": torch.ones(1, 24, dtype=torch.int64)} if masked else {})
    with documents_apart(model):
        if refused:
            with pytest.raises(ModelError, match="counts those of other documents"):
                _loss_sum(model, batch)
        else:
            packed = _loss_sum(model, batch)
            torch.testing.assert_close(packed, _alone(model, documents)())


@pytest.mark.parametrize("name", ["llama", "gpt2", "sinks", "experts"])
def test_gradients_in_single_precision(name: str) -> None:
    model, documents = _model(name, torch.float32), _documents()
    loss, gradients = _gradients(model, _alone(model, documents))
    with documents_apart(model):
        refuse_leaks(model)
        packed_loss, packed = _gradients(model, lambda: _loss_sum(model, _packed(documents)))
    _close([packed_loss, *packed], [loss, *gradients], 1e-5)


@pytest.mark.parametrize(("attends", "rounding"), [(True, 0.5), (True, 4.0), (False, 0.5)])
def test_one_rounding_in_halves_is_no_leak(attends: bool, rounding: float) -> None:
    """A row of a matrix product may round otherwise on a GPU. In an attention that is not known, it may be a leak."""
    model = _model("llama", torch.bfloat16)

    def round_otherwise(_: nn.Module, __: tuple[()], inputs: dict[str, torch.Tensor], outputs: Any) -> None:
        if inputs["input_ids"][0, 0] == 1:
            outputs.logits += rounding * torch.finfo(torch.bfloat16).eps * outputs.logits.abs().max()

    model.register_forward_hook(round_otherwise, with_kwargs=True)
    accepted = attends and rounding < 1
    with documents_apart(model) if attends else contextlib.nullcontext():
        with contextlib.nullcontext() if accepted else pytest.raises(ModelError, match="see each other"):
            refuse_leaks(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_keep_documents_apart(reentrant: bool) -> None:
    model, documents = _model("llama"), _documents()
    loss, gradients = _gradients(model, _alone(model, documents))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with documents_apart(model):
        packed_loss, packed = _gradients(model, lambda: _loss_sum(model, _packed(documents)))
    _close([packed_loss, *packed], [loss, *gradients], 1e-12)


@pytest.mark.parametrize("name", ["llama", "sliding window", "sinks"])
def test_several_packed_rows(name: str) -> None:
    model, documents = _model(name, torch.float32), [*_documents(), *_documents()]
    lengths = [[9, 3], [5, 1, 6]]
    rows = [[token for ids in group for token in ids] for group in (documents[:2], documents[2:5])]
    samples = [{"input_ids": ids, "seq_lengths": parts} for ids, parts in zip(rows, lengths, strict=True)]
    batch = DataCollatorForCausalLM(0, return_position_ids=True)(samples)
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    alone = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in documents[:5]]
    with documents_apart(model):
        logits = model(**inputs).logits
    torch.testing.assert_close(logits[0], torch.cat(alone[:2]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[1], torch.cat(alone[2:]), rtol=1e-5, atol=1e-5)


def test_the_borders_are_made_once_for_all_layers() -> None:
    model, found = _model("llama"), list[Tensor]()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, given: found.append(given["attention_mask"].borders), with_kwargs=True
        )
    documents = _documents()
    with documents_apart(model):
        for packed in (documents, documents[:3]):
            _loss_sum(model, _packed(packed))
    assert [borders.tolist() for borders in found] == [[0, 9, 12, 17, 18, 24]] * 2 + [[0, 9, 12, 17]] * 2
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert found[0].dtype is torch.int32


@pytest.mark.parametrize("name", ["llama", "sliding window", "soft-capping", "sinks"])
def test_packed_rows_with_padding_behind_them(name: str) -> None:
    model, documents = _model(name, torch.float32), _documents()
    rows, lengths = [documents[0] + documents[1], documents[2]], [[9, 3], [5]]
    samples = [{"input_ids": ids, "seq_lengths": parts} for ids, parts in zip(rows, lengths, strict=True)]
    batch = DataCollatorForCausalLM(0, return_position_ids=True)(samples)
    loss, gradients = _gradients(model, _alone(model, documents[:3]))
    assert "attention_mask" not in batch
    for mask in ({}, {"attention_mask": torch.tensor([[1] * 12, [1] * 5 + [0] * 7])}):
        with documents_apart(model):
            packed_loss, packed = _gradients(model, lambda: _loss_sum(model, {**batch, **mask}))  # noqa: B023
        _close([packed_loss, *packed], [loss, *gradients], 1e-5)


@pytest.mark.parametrize("name", ["llama", "soft-capping", "sliding window"])
def test_rows_that_are_not_packed_give_the_same_logits(name: str) -> None:
    model = _model(name).eval()
    ids = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 0, 0]])
    mask = (ids > 0).long()
    real = mask.bool()
    whole, padded = model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits
    with documents_apart(model):
        torch.testing.assert_close(model(input_ids=ids).logits, whole, rtol=1e-7, atol=1e-7)
        ours = model(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(ours[real], padded[real], rtol=1e-7, atol=1e-7)
        generated = model.generate(ids[:1], max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, model.generate(ids[:1], max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bloom", "mamba", "hybrid"])
def test_a_model_that_does_not_keep_documents_apart_is_refused(name: str, dtype: torch.dtype) -> None:
    model = _model(name, dtype)
    with documents_apart(model), pytest.raises(ModelError, match=f"{type(model).__name__} (lets|cannot)"):
        refuse_leaks(model)
    assert all(module.training for module in model.modules())


def test_chunks_are_refused_where_transformers_counts_them_over_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _model("chunks")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.22.2")
    with pytest.raises(ModelError, match=r'attends in chunks of 4 tokens .*"transformers>=5.23"'):
        with documents_apart(model):
            pass


def test_weights_that_are_not_finite_are_not_taken_for_a_leak() -> None:
    model = _model("llama")
    model.get_input_embeddings().weight.data.fill_(float("nan"))
    with documents_apart(model), pytest.raises(ModelError, match="returns logits that are not finite"):
        refuse_leaks(model)


def test_a_model_without_positions_is_refused() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 4)

        def forward(self, input_ids: Tensor) -> Any:
            return {"logits": self.embedding(input_ids)}

    with pytest.raises(ModelError, match="Plain cannot run a packed row: TypeError"):
        refuse_leaks(Plain())


def test_the_attention_is_restored_after_an_error() -> None:
    def broken(model: Any) -> Iterator[None]:
        with documents_apart(model):
            raise KeyError
        yield

    model = _model("llama")
    with pytest.raises(KeyError):
        next(broken(nn.Sequential(model)))
    assert model.config._attn_implementation == "sdpa"


def test_it_is_not_written_to_a_configuration() -> None:
    model = _model("llama")
    with documents_apart(model):
        assert NAME not in str(model.config.to_dict())
