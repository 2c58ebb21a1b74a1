# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""Precision, memory and compilation: how the same update is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.config.parallel.rows_training import COMPILE_MODES
from windlass.config.sections.setting import at_least, setting

# `--activation_checkpointing` without a value means True, although the default is None ("not said").
_SWITCH: dict[str, Any] = {"nargs": "?", "const": True}


@dataclass(repr=False, eq=False)
class PrecisionSection:
    bf16: bool = setting(False, "Train in bfloat16 mixed precision.")
    fp16: bool = setting(False, "Train in float16 mixed precision, with a loss scaler.")
    bf16_full_eval: bool = setting(False, "Evaluate with the whole model in bfloat16.")
    fp16_full_eval: bool = setting(False, "Evaluate with the whole model in float16.")
    tf32: bool | None = setting(
        None, "Allow TF32 in float32 matrix products; not said: leave PyTorch's setting."
    )


@dataclass(repr=False, eq=False)
class RecomputeSection:
    activation_checkpointing: bool | None = setting(
        None, "Recompute activations in the backward to save memory.", **_SWITCH
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None, "Options of recomputation, such as every_n_layers: a dict, JSON, or a JSON file.", document=True
    )
    gradient_checkpointing: bool | None = setting(
        None,
        "Older name of activation_checkpointing.",
        **_SWITCH,
        mapped="is the older name of activation_checkpointing; setting either sets both",
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None,
        "Older name of activation_checkpointing_kwargs.",
        document=True,
        mapped="is the older name of activation_checkpointing_kwargs; setting either sets both",
    )


@dataclass(repr=False, eq=False)
class CompileSection:
    torch_compile: bool = setting(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = setting(
        None, "Backend of torch.compile; setting it switches compilation on."
    )
    torch_compile_mode: str | None = setting(
        None, "Mode of torch.compile; setting it switches compilation on.", words=COMPILE_MODES
    )


@dataclass(repr=False, eq=False)
class KernelSection:
    use_liger_kernel: bool = setting(
        False,
        "Replace parts of the model by Liger kernels.",
        refused="is not built yet; torch_compile=True fuses much of the same",
    )
    liger_kernel_config: dict[str, bool] | None = setting(
        None, "Which Liger kernels.", document=True, refused="needs use_liger_kernel, which is not built yet"
    )


@dataclass(repr=False, eq=False)
class MemorySection:
    use_cache: bool = setting(False, "Let the model keep its key/value cache while training.")
    neftune_noise_alpha: float | None = setting(
        None, "Scale of NEFTune noise on the embeddings.", refused="is not built yet"
    )
    torch_empty_cache_steps: int | None = setting(
        None,
        "Empty the device's memory cache every so many updates.",
        bounds=at_least(1),
        per_rank="memory of this process alone",
    )
    auto_find_batch_size: bool = setting(
        False, "Make micro-batches smaller until memory holds them; updates keep their samples."
    )
