"""Models that save and load in a way of their own, or have state beside tensors; and runs of them that stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import Net, arguments, rows, weights_hash
from torch import Tensor, nn

from windlass import Trainer

SAMPLES = 24


class Copied(Net):
    """A `state_dict` that returns copies."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        found = super().state_dict(*arguments, **options)
        return type(found)((name, value.detach().clone()) for name, value in found.items())


class Renamed(Net):
    """Hooks of a part save its weight transposed and under another name."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.layer.register_state_dict_post_hook(self._turn)
        self.layer.register_load_state_dict_pre_hook(self._turn_back)

    @staticmethod
    def _turn(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight").detach().t().contiguous()

    @staticmethod
    def _turn_back(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").t()


class Scaled(Net):
    """Extra state as layers in fp8 have it: it changes in every forward, and forwards depend on it."""

    def __init__(self, kind: str = "nested") -> None:
        super().__init__()
        self.kind, self.history = kind, torch.zeros(0)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training and torch.is_grad_enabled():
            self.history = torch.cat([self.history, x.detach().abs().max().reshape(1)])
        return super().forward(x * (1 + self.history.sum()), labels)

    def get_extra_state(self) -> Any:
        values = self.history.tolist()
        return {
            "nested": {"amax": self.history, "count": len(values)},
            "bytes": self.history.numpy().tobytes(),
            "tensor": self.history,
        }[self.kind]

    def set_extra_state(self, state: Any) -> None:
        if self.kind == "bytes":
            self.history = (
                torch.frombuffer(bytearray(state), dtype=torch.float32).clone() if state else torch.zeros(0)
            )
        else:
            self.history = (state["amax"] if self.kind == "nested" else state).clone()


class Normed(Net):
    """A parametrized weight, and running statistics that its state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.layer)
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.mean, labels)


class Late(Net):
    """Running statistics that its state dict leaves out, from the fourth update on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training and torch.is_grad_enabled():
            self.count += 1
            if self.count > 3:
                self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.mean, labels)


class Rotated(Net):
    """A rotation of transformers whose frequencies are those of the longest row, until a short one comes."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        sizes = {"hidden_size": 4, "num_attention_heads": 1, "max_position_embeddings": 8}
        self.rotation = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=rope))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training and torch.is_grad_enabled():
            self.count += 1
        length = (9, 9, 20, 16, 12, 5)[int(self.count) % 6]
        cosine, _ = self.rotation(x, torch.arange(length)[None])
        return super().forward(x * cosine[0, -1], labels)


class Growing(Net):
    """A buffer that grows in each update, which a method gives the size of the saved one before it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training and torch.is_grad_enabled():
            self.seen = torch.cat([self.seen, x.detach().abs().amax(1)])
        return super().forward(x * (1 + self.seen.sum()), labels)

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        self.seen = torch.zeros_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *others)


class GrowingInPlace(Growing):
    """The same, resized in `load_state_dict`, in memory that it keeps."""

    def load_state_dict(self, state: Any, *arguments: Any, **options: Any) -> Any:
        self.seen.resize_(state["seen"].shape)
        return super().load_state_dict(state, *arguments, **options)

    _load_from_state_dict = Net._load_from_state_dict


CASES: dict[str, Any] = {
    "growing": Growing,
    "growing in place": GrowingInPlace,
    "copies": Copied,
    "renamed": Renamed,
    "extra nested": lambda: Scaled("nested"),
    "extra bytes": lambda: Scaled("bytes"),
    "extra tensor": lambda: Scaled("tensor"),
    "normed": Normed,
    "late": Late,
    "rotated": Rotated,
}


def fit(model: nn.Module, folder: Path, steps: int = 6, resume: Any = None, **changes: Any) -> Trainer:
    options = {"max_steps": steps, "save_strategy": "steps", "save_steps": 3, **changes}
    data = rows(SAMPLES)
    trainer = Trainer(model, arguments(folder, **options), train_dataset=data, eval_dataset=data[:4])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers themselves, and what changes beside them, whatever the state dict makes of them."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if isinstance(model, Scaled):
        own["history"] = model.history
    return {name: tensor.detach() for name, tensor in own.items() if tensor.layout == torch.strided}


def digest(model: nn.Module) -> str:
    return weights_hash(own_tensors(model))


class Partial(Copied):
    """Leaves a trained parameter out of its state dict."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        found = super().state_dict(*arguments, **options)
        del found["layer.bias"]
        return found

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False)
