"""The loss without logits is the model's own, and a model for which it is not keeps its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.dist.launch import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from windlass.core.errors import ModelError
from windlass.core.world import world_from_environment
from windlass.dist.gang import join, leave
from windlass.transforms.lean_loss import lean_causal_lm_loss, lean_log_probabilities
from windlass.transforms.linear_cross_entropy import LossOptions

transformers = pytest.importorskip("transformers")

_SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "tied": ("LlamaConfig", _SIZES | {"tie_word_embeddings": True}),
    "multiplied": ("CohereConfig", _SIZES | {"logit_scale": 0.3}),
    "divided": ("GraniteConfig", _SIZES | {"logits_scaling": 3.0}),
    "soft-capping": ("Gemma2Config", _SIZES | {"head_dim": 4, "final_logit_softcapping": 0.2}),
    "experts": ("MixtralConfig", _SIZES | _EXPERTS | {"router_aux_loss_coef": 0.5}),
    "gpt2": ("GPT2Config", {"vocab_size": 23, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32}),
    "masked": ("BertConfig", {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}),
}


def _model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    config, options = _CONFIGS[name]
    torch.manual_seed(0)
    kind = transformers.AutoModelForMaskedLM if name == "masked" else transformers.AutoModelForCausalLM
    return kind.from_config(getattr(transformers, config)(**options)).to(dtype).eval()


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 23, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


@pytest.fixture(autouse=True)
def _warnings_are_logged(caplog: Any) -> None:
    caplog.set_level("WARNING", logger="windlass")


def _logged(caplog: Any) -> list[str]:
    """Windlass's own lines."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("windlass")]


def _same(model: nn.Module, ours: Tensor, theirs: Tensor, tolerance: float = 1e-6) -> None:
    """Losses and gradients are equal."""
    gradients = []
    for loss in (ours, theirs):
        model.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", list(_CONFIGS))
@pytest.mark.parametrize("count", [None, 29])
def test_loss_and_gradients_are_the_models_own(name: str, count: int | None, caplog: Any) -> None:
    model, batch = _model(name), _batch()
    own = model(**batch, **({} if count is None else {"num_items_in_batch": count}), use_cache=False)
    theirs = own.loss
    if name == "masked" and count is not None:  # its own loss takes no count
        theirs = theirs * 14 / count
    ours, figures = lean_causal_lm_loss(model, batch, count)
    assert not _logged(caplog)
    _same(model, ours, theirs)
    logits, labels = own.logits.detach(), batch["labels"]
    if name != "masked":
        logits, labels = logits[:, :-1], labels[:, 1:]
    real = labels != -100
    logs = logits[real].log_softmax(dim=-1)
    assert figures.targets == real.sum()
    assert figures.correct == (logs.argmax(dim=-1) == labels[real]).sum()
    torch.testing.assert_close(figures.entropy, -(logs.exp() * logs).sum())
    torch.testing.assert_close(figures.loss, cross_entropy(logits[real], labels[real], reduction="sum"))
    assert (figures.auxiliary is not None) == (name == "experts")


@pytest.mark.parametrize("name", [name for name in _CONFIGS if name != "masked"])
def test_log_probabilities_are_those_of_the_models_logits(name: str, caplog: Any) -> None:
    model, batch = _model(name), _batch()
    found, auxiliary = lean_log_probabilities(model, batch)
    logs = model(**batch).logits.log_softmax(dim=-1)[:, :-1]
    targets = batch["labels"][:, 1:]
    expected = logs.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)
    ours = found.log_probabilities
    torch.testing.assert_close(ours[:, :-1], expected)
    assert not ours[:, -1].any()
    assert (auxiliary is not None) == (name == "experts")
    assert not _logged(caplog)
    _same(
        model,
        (ours[0].sum() - ours[1].sum()).sigmoid(),
        (expected[0].sum() - expected[1].sum()).sigmoid(),
    )


def test_log_probabilities_of_another_head_come_from_whole_logits(caplog: Any) -> None:
    model, plain = Own(head=nn.Sequential(nn.Linear(6, 11))), Own()
    plain.load_state_dict({k.replace("head.0", "head"): v for k, v in model.state_dict().items()})
    for _ in range(2):
        found, _ = lean_log_probabilities(model, _words())
    expected, _ = lean_log_probabilities(plain, _words())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert len(_logged(caplog)) == 1


def test_logits_are_not_made() -> None:
    model, batch = _model("llama"), _batch()
    lean_causal_lm_loss(model, batch)
    outputs = []
    model.lm_head.register_forward_hook(lambda _, __, output: outputs.append(output.numel()))
    lean_causal_lm_loss(model, batch)
    assert outputs == [1]
    assert model(**batch).logits.shape == (2, 9, 23), "the model is as it was"


def test_half_precision() -> None:
    model, batch = _model("multiplied", torch.bfloat16), _batch()
    ours, _ = lean_causal_lm_loss(model, batch)
    torch.testing.assert_close(ours, model(**batch).loss, rtol=2e-3, atol=0)


def test_options() -> None:
    model, batch = _model("llama"), _batch()
    options = LossOptions(label_smoothing=0.1, class_weights=torch.linspace(0.5, 1, 23))
    logits, targets = model(**batch).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    expected = cross_entropy(logits, targets, weight=options.class_weights, label_smoothing=0.1)
    ours, _ = lean_causal_lm_loss(model, batch, options=options)
    _same(model, ours, expected)


def test_the_auxiliary_loss_has_its_coefficient() -> None:
    model, batch = _model("experts"), _batch()
    plain, figures = lean_causal_lm_loss(model, batch, router_aux_loss_coef=0.0)
    torch.testing.assert_close(plain, figures.loss / figures.targets)
    assert figures.auxiliary is not None
    whole, _ = lean_causal_lm_loss(model, batch, router_aux_loss_coef=0.25)
    torch.testing.assert_close(whole, plain + 0.25 * figures.auxiliary)


def test_labels_that_are_shifted_already() -> None:
    model, batch = _model("llama"), _batch()
    theirs = model(**batch).loss
    ours, _ = lean_causal_lm_loss(model, {**batch, "shift_labels": None})
    _same(model, ours, theirs)
    theirs = model(**batch).loss
    shifted = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    ours, _ = lean_causal_lm_loss(model, {**batch, "shift_labels": shifted})
    _same(model, ours, theirs)


def test_no_target() -> None:
    model, batch = _model("llama"), _batch()
    loss, figures = lean_causal_lm_loss(model, {**batch, "labels": torch.full_like(batch["labels"], -100)})
    loss.backward()
    assert loss == figures.targets == 0


class Own(nn.Module):
    """A language model of no library."""

    def __init__(self, penalty: float = 0.0, head: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding, self.penalty = nn.Embedding(11, 6), penalty
        self.head = head or nn.Linear(6, 11)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        if labels is None:
            return {"logits": logits}
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss + self.penalty * logits.square().mean()}


def _words() -> dict[str, Tensor]:
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def test_any_model_with_a_head(caplog: Any) -> None:
    model = Own()
    _same(model, lean_causal_lm_loss(model, _words())[0], model(**_words())["loss"])
    assert not _logged(caplog)


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Own(penalty=0.5), "on 8 tokens"), (Own(head=nn.Sequential(nn.Linear(6, 11))), "Sequential")],
    ids=["penalty", "head"],
)
@pytest.mark.parametrize("count", [None, 16])
def test_a_model_with_another_loss_keeps_it(model: Own, reason: str, count: int | None, caplog: Any) -> None:
    for _ in range(2):
        loss, figures = lean_causal_lm_loss(model, _words(), count)
        _same(model, loss, model(**_words())["loss"] * (1 if count is None else 8 / 16))
    assert figures.targets == 8
    assert len(_logged(caplog)) <= 1, "logged once"
    assert all(reason in message for message in _logged(caplog))
    with pytest.raises(ModelError, match="computes its own loss"):
        lean_causal_lm_loss(model, _words(), options=LossOptions(z_loss=0.1))


def test_a_share_without_targets_of_a_models_own_mean_is_zero() -> None:
    model, batch = Own(head=nn.Sequential(nn.Linear(6, 11))), _words()
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    assert model(**nothing)["loss"].isnan()
    loss, figures = lean_causal_lm_loss(model, nothing, 16)
    loss.backward()
    assert loss == figures.loss == figures.targets == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_wrapper_that_adds_positions(caplog: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, batch = peft.get_peft_model(_model("llama"), config), _batch()
    ours, figures = lean_causal_lm_loss(model, batch)
    torch.testing.assert_close(ours, model(**batch).loss)
    assert figures.targets == (batch["labels"] != -100).sum()
    torch.testing.assert_close(figures.loss, ours.detach() * figures.targets)
    assert len(_logged(caplog)) == 1


@pytest.mark.parametrize(
    "options", [LossOptions(label_smoothing=0.1), LossOptions(dynamic=True)], ids=["smoothed", "dynamic"]
)
@pytest.mark.parametrize("kind", ["prompt", "head"])
def test_altered_targets_of_a_model_that_makes_logits(options: LossOptions, kind: str) -> None:
    """The last learnt prompt predicts the first label of a row, and all labels count."""
    peft = pytest.importorskip("peft")
    batch = _batch()
    batch["labels"][0, :2] = -100
    config: Any = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    if kind == "head":
        config = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(_model("llama"), config)
    loss, figures = lean_causal_lm_loss(model, batch, options=options)
    logits, labels = model(**{**batch, "labels": None}).logits, batch["labels"]
    labels = labels if kind == "prompt" else labels[:, 1:]
    logs = logits[:, -labels.shape[1] - 1 : -1].log_softmax(-1)[labels != -100]
    chosen = logs.gather(1, labels[labels != -100][:, None])[:, 0]
    smoothed = 0.9 * chosen + 0.1 * logs.mean(1)
    expected = -(chosen * chosen.detach().exp() if options.dynamic else smoothed).mean()
    _same(model, loss, expected)
    assert figures.targets == len(chosen)
    torch.testing.assert_close(figures.entropy, -(logs.exp() * logs).sum().detach())


def test_an_adapter(caplog: Any) -> None:
    peft = pytest.importorskip("peft")
    model, batch = peft.get_peft_model(_model("llama"), peft.LoraConfig(target_modules=["q_proj"])), _batch()
    _same(model, lean_causal_lm_loss(model, batch)[0], model(**batch).loss)
    assert not _logged(caplog)


def test_a_head_that_was_replaced_is_measured_again() -> None:
    model = Own()
    lean_causal_lm_loss(model, _words())
    model.head = nn.Linear(6, 11, bias=False)
    _same(model, lean_causal_lm_loss(model, _words())[0], model(**_words())["loss"])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_compiled_as_a_whole_keeps_its_loss(in_place: bool, caplog: Any) -> None:
    model = Own()
    compiled: Any = torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
        compiled = model
    _same(model, lean_causal_lm_loss(compiled, _words())[0], compiled(**_words())["loss"])
    assert "compiled as a whole" in _logged(caplog)[0]


def test_a_batch_without_labels_is_refused() -> None:
    with pytest.raises(ModelError, match="no labels"):
        lean_causal_lm_loss(Own(), {"input_ids": torch.zeros(1, 2)})
    with pytest.raises(ModelError, match="no get_output_embeddings"):
        lean_causal_lm_loss(nn.Linear(2, 2), _words())


def test_modes_and_generators_stay() -> None:
    model = _model("llama").train()
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    lean_causal_lm_loss(model, _batch())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(module.training for module in model.modules())


@pytest.mark.dist
def test_replicated_and_sharded_models() -> None:
    on_ranks(2, main)


# --- what each rank runs ----------------------------------------------------------------------------------------------


def _llama(tied: bool) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=23, tie_word_embeddings=tied, **sizes))


def _ragged() -> dict[str, Tensor]:
    ids = torch.randint(3, 23, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def _sharded(model: Any, head: bool) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    if head:
        fully_shard(model.lm_head)
    return fully_shard(model)


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def main() -> None:
    gang = join(world_from_environment(), torch.device("cpu"))
    rank, size, batch = dist.get_rank(), dist.get_world_size(), _ragged()
    mine = {name: value[rank : rank + 1] for name, value in batch.items()}
    count = int((batch["labels"][:, 1:] != -100).sum())
    cases = {
        "ddp": (False, lambda m: nn.parallel.DistributedDataParallel(m)),
        "ddp that looks for unused parameters": (
            False,
            lambda m: nn.parallel.DistributedDataParallel(m, find_unused_parameters=True),
        ),
        "fsdp, tied": (True, lambda m: _sharded(m, head=False)),
        "fsdp": (False, lambda m: _sharded(m, head=False)),
        "fsdp with a head of its own": (False, lambda m: _sharded(m, head=True)),
    }
    for name, (tied, wrap) in cases.items():
        alone = _llama(tied)
        alone(**batch).loss.backward()
        model = _llama(tied)
        wrapped = wrap(model)
        for _ in range(2):  # the first one also measures the head
            model.zero_grad()
            loss, figures = lean_causal_lm_loss(wrapped, copy.copy(mine), count)
            (loss * size).backward()
        assert figures.targets == (mine["labels"][:, 1:] != -100).sum(), name
        for (parameter, own), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                _whole(own.grad), other.grad, rtol=1e-5, atol=1e-6, msg=f"{name}: {parameter}"
            )
    for name, (tied, wrap) in cases.items():
        alone = _llama(tied)
        logs, _ = lean_log_probabilities(alone, batch)
        (-nn.functional.logsigmoid(logs.log_probabilities.sum(dim=1))).sum().backward()
        model = _llama(tied)
        wrapped = wrap(model)
        logs, _ = lean_log_probabilities(wrapped, copy.copy(mine))
        (-nn.functional.logsigmoid(logs.log_probabilities.sum(dim=1)) * size).sum().backward()
        for (parameter, own), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                _whole(own.grad), other.grad, rtol=1e-5, atol=1e-6, msg=f"{name}: {parameter}"
            )
    del gang
    leave()
