"""The settings of DeepSpeed: a configuration as a whole, or the fields that `accelerate config` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.config.json_document import read_document
from windlass.config.parallel import kinds
from windlass.config.parallel.keys import Key, rows_of


def _document(raw: Any) -> Any:
    if isinstance(raw, Mapping):
        return dict(raw)
    if not isinstance(raw, str):
        raise ValueError(f"must be a dict, JSON, or the path of a JSON file, and is {type(raw).__name__}")
    return read_document(raw) if raw else None


_row = rows_of("deepspeed")
CONFIG = _row(
    "config", _document, None, "A configuration of DeepSpeed: a JSON file.", "deepspeed_config_file",
    fields=("deepspeed",), exported=("ACCELERATE_DEEPSPEED_CONFIG_FILE",),
)  # fmt: skip
_STAGES = kinds.either(kinds.choice("0", "1", "2", "3"), says="must be 0, 1, 2 or 3")
STAGE = _row(
    "zero_stage", lambda raw: int(_STAGES(raw)), 2, "What is divided among ranks, in steps from 0 to 3."
)
_PLACES = kinds.choice("none", "cpu", refused={"nvme": "is not built yet; use cpu"})
OFFLOAD_OPTIMIZER = _row(
    "offload_optimizer_device", _PLACES, "none", "Where the optimizer state lies: none or cpu."
)
OFFLOAD_PARAM = _row("offload_param_device", _PLACES, "none", "Where parameters of stage 3 lie: none or cpu.")
_CLIPPING = kinds.either(
    kinds.number, kinds.choice("auto", also=dict.fromkeys(("auto", "none"))), says="must be a number, or auto"
)
CLIPPING = _row(
    "gradient_clipping", _CLIPPING, None, "Global norm to which gradients are clipped.",
    exported=("ACCELERATE_GRADIENT_CLIPPING",),
)  # fmt: skip
INIT = _row(
    "zero3_init_flag", kinds.flag, None,
    "Divide models of transformers while they are built; by default at stage 3.",
    exported=("ACCELERATE_DEEPSPEED_ZERO3_INIT",),
)  # fmt: skip
SAVE_16BIT = _row(
    "zero3_save_16bit_model", kinds.flag, False, "Save whole weights in stage 3.",
    idle="is not needed: save_model always gathers whole weights",
)  # fmt: skip
FIELDS = (STAGE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, CLIPPING)
USED = Key(
    "deepspeed.used", kinds.flag, False, "Train with DeepSpeed.", "run", ("use_deepspeed",), written=False
)
DEEPSPEED = (USED, CONFIG, *FIELDS, INIT, SAVE_16BIT)


def config_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that the fields amount to.

    Args:
        fields: canonical name -> value, of those that were set.
    """
    zero: dict[str, Any] = {"stage": fields.get(STAGE.name, STAGE.default)}
    for key, section in ((OFFLOAD_OPTIMIZER, "offload_optimizer"), (OFFLOAD_PARAM, "offload_param")):
        if fields.get(key.name, "none") != "none":
            zero[section] = {"device": fields[key.name]}
    config: dict[str, Any] = {"zero_optimization": zero, "bf16": {"enabled": "auto"}}
    clipping = fields.get(CLIPPING.name)
    return config if clipping is None else {**config, "gradient_clipping": clipping}
