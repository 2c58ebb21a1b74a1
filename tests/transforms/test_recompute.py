"""Recomputation: the same bits, fewer activations, and a clear no where it cannot be."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from windlass.core.errors import ConfigError
from windlass.transforms.recompute import apply_recompute, recomputes_reentrantly


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return x + self.drop(torch.tanh(self.linear(x))) * scale


class Plain(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(depth)])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 11))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())


class Llama(nn.Module):
    """A tiny model with a switch of its own, and dropout in its attention."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, vocab_size=11,
            attention_dropout=0.3, use_cache=False,
        )  # fmt: skip
        self.inner = transformers.LlamaForCausalLM(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, labels=input_ids).loss  # type: ignore[no-any-return]


def gradients(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of two micro-batches, and one draw after them: the generator must end in the same place."""
    torch.manual_seed(1)
    ids = torch.randint(0, 11, (2, 2, 6), generator=torch.Generator().manual_seed(2))
    losses = []
    for micro in ids:
        loss = model(micro)
        loss.backward()
        losses.append(loss.detach())
    drawn = torch.rand(1)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return torch.stack([*losses, drawn[0]]), found


def assert_same_bits(model: nn.Module, apply: Callable[[], Any]) -> None:
    loss, expected = gradients(model)
    apply()
    again, found = gradients(model)
    assert torch.equal(loss, again)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"every_n_layers": 2}, {"offload": True}, {"selective": True}, {"selective": ["tanh"]}]
)
def test_a_plain_module_has_the_same_gradients(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Plain()
    assert_same_bits(model, lambda: apply_recompute(model, options))


@pytest.mark.parametrize("options", [{}, {"every_n_layers": 2}, {"selective": True}, {"offload": True}])
def test_a_hugging_face_model_has_the_same_gradients(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Llama()
    assert_same_bits(model, lambda: apply_recompute(model.inner, options))
    on = [layer.gradient_checkpointing for layer in model.inner.model.layers]
    assert on == [index % options.get("every_n_layers", 1) == 0 for index in range(4)]


@pytest.mark.parametrize(("every", "calls"), [(1, [2, 2, 2, 2]), (2, [2, 1, 2, 1]), (3, [2, 1, 1, 2])])
def test_exactly_every_nth_block_runs_twice(every: int, calls: list[int]) -> None:
    model = apply_recompute(Plain(), {"every_n_layers": every})
    model(torch.zeros(1, 3, dtype=torch.long)).backward()
    assert [block.calls for block in model.blocks] == calls  # type: ignore[union-attr]


def test_selective_recomputation_repeats_nothing_that_is_kept() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name().removeprefix("aten::").partition(".")[0]
            counts["products"] += name in ("mm", "addmm")
            counts["tanh"] += name == "tanh"
            return func(*args, **(kwargs or {}))

    found = []
    for options in (None, {"selective": True}, {"selective": ["tanh"]}, {}):
        model, counts = Plain(), {"products": 0, "tanh": 0}
        if options is not None:
            apply_recompute(model, options)
        with Counts():
            gradients(model)
        found.append(counts)
    plain, products, tanh, everything = found
    assert plain["products"] == products["products"] < tanh["products"] == everything["products"]
    assert plain["tanh"] == tanh["tanh"] < products["tanh"] == everything["tanh"]


def test_activations_are_forgotten() -> None:
    def kept(model: nn.Module) -> int:
        sizes: list[int] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model(torch.zeros(4, 16, dtype=torch.long))
        return sum(sizes)

    plain = kept(Plain())
    assert kept(apply_recompute(Plain())) < 0.7 * plain


def test_evaluation_runs_each_block_once_and_names_stay() -> None:
    model = Plain()
    names = list(model.state_dict())
    apply_recompute(model)
    assert list(model.state_dict()) == names
    assert isinstance(model.blocks[0], Block)
    assert type(model.blocks[0]).__name__ == "Block"
    model.eval()
    model(torch.zeros(1, 3, dtype=torch.long)).backward()
    assert [block.calls for block in model.blocks] == [1, 1, 1, 1]  # type: ignore[union-attr]


def test_applied_twice_it_recomputes_once() -> None:
    model = apply_recompute(apply_recompute(Plain()))
    model(torch.zeros(1, 3, dtype=torch.long)).backward()
    assert [block.calls for block in model.blocks] == [2, 2, 2, 2]  # type: ignore[union-attr]


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("options", [{}, {"offload": True}, {"selective": True}])
def test_a_copy_uses_its_own_weights(
    copied: Callable[[nn.Module], nn.Module], options: dict[str, Any]
) -> None:
    model = apply_recompute(Plain(), options)
    twin = copied(model)
    assert type(twin.blocks[0]) is type(model.blocks[0])  # type: ignore[index]
    assert [block.calls for block in twin.blocks] == [0] * 4  # type: ignore[union-attr]
    twin(torch.zeros(1, 3, dtype=torch.long)).backward()
    assert all(p.grad is not None for p in twin.blocks.parameters())  # type: ignore[union-attr]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))]
)
def test_a_module_without_repeated_blocks_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="has no repeated blocks to recompute"):
        apply_recompute(model)


class Unsupported(nn.Module):
    supports_gradient_checkpointing = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None: ...


class Old(nn.Module):
    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.given = gradient_checkpointing_kwargs


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Plain, {"offload": "no"}, "offload='no': must be True or False"),
        (Plain, {"use_reentrant": True}, "use_reentrant=True: re-entrant"),
        (Old, {"selective": True, "use_reentrant": True}, "selective=True: does not work with use_reentrant"),
        (Plain, {"use_reentrant": "no"}, "use_reentrant='no': must be True or False"),
        (Plain, {"determinism_check": "all"}, "determinism_check='all': must be default or none"),
        (Plain, {"stride": 2}, "stride=2: known options"),
        (Plain, {"selective": ["mm", "tahn"]}, "selective='tahn': must be True, or a list of operators"),
        (Plain, {"selective": "mm"}, "selective='mm': must be True, or a list of operators"),
        (Unsupported, {}, "Unsupported does not support it"),
        (Old, {"offload": True}, "Old.gradient_checkpointing_enable sets no _gradient_checkpointing_func"),
        (Old, {"every_n_layers": 2}, "Old.gradient_checkpointing_enable has no such option"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    make: Callable[[], nn.Module], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_recompute(make(), options)
    assert message in str(caught.value)


def test_a_switch_of_the_older_kind_is_used() -> None:
    model = Old()
    apply_recompute(model)
    assert model.given == {"use_reentrant": False}


@pytest.mark.parametrize("offload", [False, True])
def test_recomputation_within_the_backward_is_known(offload: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    for reentrant in (False, True):
        model = transformers.AutoModelForCausalLM.from_config(config)
        apply_recompute(model, {"use_reentrant": reentrant or None, "offload": offload})
        assert recomputes_reentrantly(model) is reentrant
        with pytest.raises(
            ConfigError, match="stride=2: known options"
        ):  # the blocks would take it, and do nothing
            apply_recompute(model, {"stride": 2})


@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}])
def test_statistics_of_a_hugging_face_model_are_those_of_one_forward(options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    off = dict.fromkeys(("layerdrop", "hidden_dropout", "attention_dropout", "feat_proj_dropout", "mask_time_prob",
                         "activation_dropout", "conformer_conv_dropout"), 0.0)  # fmt: skip
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, conv_dim=(8,),
        conv_stride=(5,), conv_kernel=(10,), num_feat_extract_layers=1, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, conv_depthwise_kernel_size=3, **off,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.Wav2Vec2ConformerModel(config).train()
    model, sound = apply_recompute(copy.deepcopy(plain), options), torch.randn(2, 200)
    for each in (plain, model):
        each(sound).last_hidden_state.square().sum().backward()
    assert any(name.endswith("running_mean") for name, _ in plain.named_buffers())
    # Without gradients, as in the first run of a re-entrant block, a convolution may round otherwise.
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)


class Norms(nn.Module):
    """Running statistics of a norm that does not compute with them, and an average that the forward subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        self.last = x.detach().clone()
        return x + self.norm(torch.tanh(self.layer(x - self.mean.clone())))


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"selective": True}])
def test_buffers_are_those_of_one_forward(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Norms(), Norms())
    model = apply_recompute(copy.deepcopy(plain), options)
    for _ in range(2):
        x = torch.randn(6, 4)
        for each in (plain, model):
            each(x).square().sum().backward()
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
