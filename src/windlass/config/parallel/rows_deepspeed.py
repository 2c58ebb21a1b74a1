"""The settings of DeepSpeed: a configuration as a whole, or the fields that `accelerate config` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.config import kinds
from windlass.config.parallel.keys import Rows


def _document(raw: Any) -> Any:
    return None if raw == "" else kinds.document(dict(raw) if isinstance(raw, Mapping) else raw)


_row = Rows("deepspeed")
CONFIG = _row(
    "config",
    _document,
    None,
    "A configuration of DeepSpeed: a JSON file.",
    "deepspeed_config_file",
    fields=("deepspeed",),
    exported=("ACCELERATE_DEEPSPEED_CONFIG_FILE",),
)
_STAGES = {str(stage): stage for stage in range(4)}
STAGE = _row(
    "zero_stage",
    kinds.OneOf(*_STAGES, also=_STAGES),
    2,
    "What is divided among ranks, in steps from 0 to 3.",
)
_PLACES = kinds.OneOf("none", "cpu", "nvme")
OFFLOAD_OPTIMIZER = _row(
    "offload_optimizer_device", _PLACES, "none", "Where the optimizer state lies: none, cpu or nvme (files)."
)
OFFLOAD_PARAM = _row(
    "offload_param_device", _PLACES, "none", "Where parameters of stage 3 lie: none, cpu or nvme (files)."
)


def _folder(raw: Any) -> str | None:
    found = kinds.text(raw)
    return None if found == "none" else found  # as `accelerate launch` exports what was not set


OPTIMIZER_FILES = _row(
    "offload_optimizer_nvme_path", _folder, None, "Folder of the optimizer's files with device nvme."
)
PARAM_FILES = _row(
    "offload_param_nvme_path", _folder, None, "Folder of the parameters' files with device nvme."
)
_CLIPPING = kinds.Either(
    kinds.number, kinds.OneOf("auto", also=dict.fromkeys(("auto", "none"))), says="must be a number, or auto"
)
CLIPPING = _row(
    "gradient_clipping",
    _CLIPPING,
    None,
    "Global norm to which gradients are clipped.",
    exported=("ACCELERATE_GRADIENT_CLIPPING",),
)
MOE = _row(
    "moe_layers",
    kinds.words,
    (),
    "Classes of layers whose parameters are gathered at once at stage 3: experts.",
    "deepspeed_moe_layer_cls_names",
    "transformer_moe_cls_names",
    exported=("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",),
)
INIT = _row(
    "zero3_init_flag",
    kinds.flag,
    None,
    "Divide models of transformers while they are built; by default at stage 3.",
    exported=("ACCELERATE_DEEPSPEED_ZERO3_INIT",),
)
SAVE_16BIT = _row.switch(
    "zero3_save_16bit_model",
    "Save whole weights in stage 3.",
    idle="is not needed: save_model always gathers whole weights",
)
FIELDS = (STAGE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, OPTIMIZER_FILES, PARAM_FILES, CLIPPING, MOE)
USED = Rows("run", "deepspeed.").switch("used", "Train with DeepSpeed.", "use_deepspeed")
DEEPSPEED = (USED, *_row)


def config_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that the fields amount to. `fields` is canonical name -> value, of those that were set."""
    said = fields_in_config(fields)
    zero = {"stage": STAGE.default, **said.pop("zero_optimization", {})}
    return {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, **said}


def fields_in_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the fields alone are in a configuration."""
    zero: dict[str, Any] = {}
    if STAGE.name in fields:
        zero["stage"] = fields[STAGE.name]
    for key, folder, section in (
        (OFFLOAD_OPTIMIZER, OPTIMIZER_FILES, "offload_optimizer"),
        (OFFLOAD_PARAM, PARAM_FILES, "offload_param"),
    ):
        device = fields.get(key.name, "none")
        if device != "none":
            zero[section] = {"device": device}
        if device == "nvme" and fields.get(folder.name):
            zero[section]["nvme_path"] = fields[folder.name]
    if fields.get(MOE.name):
        zero["leaf_module"] = {"classes": list(fields[MOE.name])}
    found: dict[str, Any] = {"zero_optimization": zero} if zero else {}
    clipping = fields.get(CLIPPING.name)
    return found if clipping is None else {**found, "gradient_clipping": clipping}
