# ruff: noqa: RUF009 (`setting` makes a dataclass field)
"""Precision, recomputation, compilation and memory: how an update is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.config.parallel.keys import setting_of
from windlass.config.parallel.rows_compile import COMPILE_BACKEND, COMPILE_MODES
from windlass.config.sections.setting import at_least, setting

# `--activation_checkpointing` without a value means True, although the default is None (not set).
_SWITCH: dict[str, Any] = {"nargs": "?", "const": True}


@dataclass(repr=False, eq=False)
class ComputeSection:
    # --- precision ---
    bf16: bool = setting(False, "Train in bfloat16 mixed precision.")
    fp16: bool = setting(False, "Train in float16 mixed precision, with a loss scaler.")
    bf16_full_eval: bool = setting(False, "Evaluate with the weights cast to bfloat16.")
    fp16_full_eval: bool = setting(False, "Evaluate with the weights cast to float16.")
    tf32: bool | None = setting(None, "Allow TF32 in float32 matrix products; by default PyTorch's setting.")

    # --- recomputation ---
    activation_checkpointing: bool | None = setting(None, "Recompute activations in the backward.", **_SWITCH)
    activation_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None, "Options of recomputation, such as every_n_layers: a dict, JSON, or a JSON file.", document=True
    )
    gradient_checkpointing: bool | None = setting(
        None,
        "Earlier name of activation_checkpointing.",
        **_SWITCH,
        mapped="is the earlier name of activation_checkpointing; setting either sets both",
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None,
        "Earlier name of activation_checkpointing_kwargs.",
        document=True,
        mapped="is the earlier name of activation_checkpointing_kwargs; setting either sets both",
    )

    # --- compilation ---
    torch_compile: bool = setting(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = setting_of(COMPILE_BACKEND, None)
    torch_compile_mode: str | None = setting(
        None, "Mode of torch.compile; setting it enables compilation.", words=COMPILE_MODES
    )

    # --- kernels ---
    use_liger_kernel: bool = setting(
        False, "On GPUs replace parts of the model by Liger's kernels (package liger_kernel)."
    )
    liger_kernel_config: dict[str, bool] | None = setting(
        None, "Which of Liger's kernels; by default those that it chooses for the model.", document=True
    )

    # --- memory ---
    use_cache: bool = setting(False, "Keep the key/value cache of the model during training.")
    neftune_noise_alpha: float | None = setting(
        None, "Scale of NEFTune noise on the input embeddings during training.", bounds=at_least(0)
    )
    torch_empty_cache_steps: int | None = setting(
        None,
        "Updates between two releases of cached device memory.",
        bounds=at_least(1),
        per_rank="memory of this process only",
    )
    auto_find_batch_size: bool = setting(
        False, "Reduce the micro-batch size until it fits in memory; updates keep their samples."
    )
