"""Tiny models of transformers with losses of every kind, and their training; also on ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.trainer.small import bert, llama, settings
from torch import Tensor, nn

from windlass import Trainer, TrainingArguments
from windlass.dist.sharded import whole

Rows = list[dict[str, Any]]


def _wav2vec2(reduction: str) -> Any:
    import transformers

    model = transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(
            vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 8), num_feat_extract_layers=2,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, ctc_loss_reduction=reduction,
            feat_extract_norm="layer", do_stable_layer_norm=True, apply_spec_augment=False, layerdrop=0.0,
            hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        )
    )  # fmt: skip
    model.wav2vec2.masked_spec_embed.requires_grad_(False)  # unused without masking
    return model


def _speech_rows() -> Rows:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i in range(16):
        labels = torch.randint(1, 12, (6,), generator=generator)
        labels[2 + i % 4 :] = -100
        rows.append({"input_values": torch.randn(400, generator=generator), "labels": labels})
    return rows


def _clip() -> Any:
    import transformers

    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**size, "vocab_size": 20, "max_position_embeddings": 16, "eos_token_id": 2},
            vision_config={**size, "image_size": 16, "patch_size": 8},
            projection_dim=8,
        )
    )


def _pair_rows() -> Rows:
    generator = torch.Generator().manual_seed(4)
    return [
        {
            "input_ids": torch.randint(3, 20, (6,), generator=generator),
            "pixel_values": torch.randn(3, 16, 16, generator=generator),
            "return_loss": True,
        }
        for _ in range(16)
    ]


def _pairs(rows: Rows) -> dict[str, Any]:
    names = ("input_ids", "pixel_values")
    return {**{name: torch.stack([row[name] for row in rows]) for name in names}, "return_loss": True}


def _mixtral() -> Any:
    import transformers

    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32, output_router_logits=True,
            router_aux_loss_coef=0.02,
        )
    )  # fmt: skip


def _resnet() -> Any:
    import transformers

    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=3)
    )


def _image_rows() -> Rows:
    generator = torch.Generator().manual_seed(5)
    return [{"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": i % 3} for i in range(16)]


def _text_rows() -> Rows:
    """Equally long rows with unequally many targets."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for i in range(16):
        ids = torch.randint(3, 20, (8,), generator=generator)
        labels = ids.clone()
        labels[3 + i % 5 :] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def _class_rows() -> Rows:
    return [{"input_ids": row["input_ids"], "labels": i % 2} for i, row in enumerate(_text_rows())]


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[], Rows]]] = {
    "wav2vec2-sum": (lambda: _wav2vec2("sum"), _speech_rows),
    "wav2vec2-mean": (lambda: _wav2vec2("mean"), _speech_rows),
    "llama": (llama, _text_rows),
    "bert": (bert, _class_rows),
    "clip": (_clip, _pair_rows),
    "mixtral": (_mixtral, _text_rows),
    "resnet": (_resnet, _image_rows),
}


def trainer_of(
    name: str,
    folder: Path,
    micro: int,
    accumulation: int,
    wrap: Callable[[Any], Any] = lambda model: model,
    kind: type[Trainer] = Trainer,
    data: Rows | None = None,
    **changes: Any,
) -> Trainer:
    make, rows = FAMILIES[name]
    torch.manual_seed(0)
    dtype = torch.float32 if name == "mixtral" else torch.float64  # its experts are not computed in fp64
    model = wrap(make().to(dtype))
    own = rows() if data is None else data
    for row in own:
        row.update(
            {k: v.to(dtype) for k, v in row.items() if isinstance(v, Tensor) and v.is_floating_point()}
        )
    chosen = settings(
        folder, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation, logging_steps=1,
        max_steps=2, learning_rate=1e-2, optim="sgd", max_grad_norm=0.0,
    )  # fmt: skip
    return kind(
        model,
        TrainingArguments(**{**chosen, **changes}),
        train_dataset=own,
        eval_dataset=own[:7],
        data_collator=_pairs if name == "clip" else None,
    )


def train(
    name: str, folder: Path, micro: int, accumulation: int, **changes: Any
) -> tuple[Tensor, list[float], float]:
    """The weights, the losses of the updates, and the loss of an evaluation."""
    trainer = trainer_of(name, folder, micro, accumulation, **changes)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return weights_of(trainer.model), losses, trainer.evaluate()["eval_loss"]


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([whole(p.detach()).flatten() for p in model.parameters()])


def main(folder: Path, strategy: str, names: list[str]) -> None:
    sharding = {"fsdp": "full_shard", "fsdp_config": {"version": 2}} if strategy == "fsdp" else {}
    trainer = None
    for name in names:
        trainer = trainer_of(name, folder / name, 4, 1, **sharding)
        trainer.train()
        found = {
            "weights": weights_of(trainer.model),
            "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
            "evaluated": trainer.evaluate()["eval_loss"],
        }
        if trainer.is_world_process_zero():
            torch.save(found, folder / f"{name}.pt")
    assert trainer is not None
    trainer.end()
