"""The settings of matrix products in 8-bit floats, and those of other libraries for it, which are refused."""

from __future__ import annotations

from typing import Any

from windlass.config import kinds
from windlass.config.parallel.keys import Rows

_NO_ENGINE = "is not built; torchao trains in float8 on the same GPUs: use the backend ao"
TRANSFORMER_ENGINE = f"needs Transformer Engine, which {_NO_ENGINE}"
MS_AMP = f"needs MS-AMP, which is no longer maintained and {_NO_ENGINE}"

_float8 = Rows("fp8")
BACKEND = _float8(
    "backend",
    kinds.choice(
        "ao", also={"torchao": "ao", "no": None}, refused={"te": TRANSFORMER_ENGINE, "msamp": MS_AMP}
    ),
    "ao",
    "The library of matrix products in float8.",
)
RECIPE = _float8(
    "recipe",
    kinds.choice("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    "tensorwise",
    "What shares a scale: a tensor (fastest), a row, or a row with gradients of weights in bf16 (most accurate).",
)
EMULATE = _float8.switch(
    "emulate",
    "Round to float8 and multiply in the dtype before: slow, for tests on devices without float8.",
)
PAD = _float8(
    "pad_inner_dim", kinds.flag, True, "Pad the number of tokens to the multiple of 16 that the kernels need."
)
ALL_GATHER = _float8.switch(
    "enable_fsdp_float8_all_gather",
    "FSDP: gather parameters in float8.",
    idle="has no effect: sharded parameters are gathered in bf16, which gives the same results",
)
OPTIONS = tuple(_float8)


def _refused(reason: str, written: Any, *words: str) -> None:
    """Add a known setting of another library, with the value that accelerate exports by default."""
    read = kinds.flag if words[0] == "use_autocast_during_eval" else kinds.anything
    _float8(words[0], read, None, "Not built.", *words, written=written, refused=reason)


for _product in ("fprop", "dgrad", "wgrad"):
    _refused(TRANSFORMER_ENGINE, None, f"override_{_product}")
_refused(TRANSFORMER_ENGINE, "(False, False, False)", "override_linear_precision")
_refused(TRANSFORMER_ENGINE, False, "use_autocast_during_eval")
_refused(TRANSFORMER_ENGINE, 0, "margin")
_refused(TRANSFORMER_ENGINE, 1, "interval")
_refused(TRANSFORMER_ENGINE, "HYBRID", "format")
_refused(TRANSFORMER_ENGINE, 1024, "amax_history_len", "amax_history_length")
_refused(TRANSFORMER_ENGINE, "most_recent", "amax_compute_algo", "amax_compute_algorithm")
_refused(MS_AMP, "O2", "opt_level", "optimization_level")
FLOAT8 = tuple(_float8)
