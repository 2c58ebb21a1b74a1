"""The settings of compilation and of matrix products in 8-bit floats; those of other libraries are refused."""

from __future__ import annotations

from windlass.config import kinds
from windlass.config.parallel.keys import Rows


def _backend(raw: object) -> str:
    """In the compiler's spelling; accelerate writes it in capitals."""
    word = str(getattr(raw, "value", raw))
    return word.lower() if word.isupper() else word


_compile = Rows("dynamo", "compile.")
COMPILE_BACKEND = _compile(
    "backend",
    _backend,
    "no",
    "Backend of torch.compile; setting it enables compilation.",
    fields=("torch_compile_backend", "torch_compile"),
    write=str.upper,
)
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
COMPILE_MODE = _compile(
    "mode",
    kinds.OneOf(*COMPILE_MODES),
    "default",
    "Mode of the inductor backend.",
    fields=("torch_compile_mode",),
)
COMPILE_BLOCKS = _compile.switch(
    "blocks",
    "Compile the repeated blocks, one graph for all, and not the whole model.",
    "use_regional_compilation",
    fields=("torch_compile_blocks",),
)
COMPILE_FULLGRAPH = _compile.switch(
    "fullgraph",
    "An operation that the compiler cannot put into one graph is an error.",
    "use_fullgraph",
    "fullgraph",
)
COMPILE_DYNAMIC = _compile.switch(
    "dynamic",
    "Compile for any size from the first graph on. Otherwise from a second size on.",
    "use_dynamic",
    "dynamic",
)
COMPILE_OPTIONS = _compile("options", kinds.plain_options, {}, "Options of the backend, in place of a mode.")
COMPILE_DISABLED = _compile.switch("disable", "Do not compile.")
COMPILE = tuple(_compile)


_NO_ENGINE = "is not built; torchao trains in float8 on the same GPUs: use the backend ao"
TRANSFORMER_ENGINE = f"needs Transformer Engine, which {_NO_ENGINE}"
MS_AMP = f"needs MS-AMP, which is no longer maintained and {_NO_ENGINE}"

_float8 = Rows("fp8")
FP8_BACKEND = _float8(
    "backend",
    kinds.OneOf(
        "ao", also={"torchao": "ao", "no": None}, refused={"te": TRANSFORMER_ENGINE, "msamp": MS_AMP}
    ),
    "ao",
    "The library of matrix products in float8.",
)
FP8_RECIPE = _float8(
    "recipe",
    kinds.OneOf("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    "tensorwise",
    "What shares a scale: a tensor (fastest), a row, or a row with gradients of weights in bf16 (most accurate).",
)
FP8_EMULATE = _float8.switch(
    "emulate", "Round to float8 and multiply in the dtype before: slow, for tests on devices without float8."
)
FP8_PAD = _float8(
    "pad_inner_dim", kinds.flag, True, "Pad the number of tokens to the multiple of 16 that the kernels need."
)
FP8_ALL_GATHER = _float8.switch(
    "enable_fsdp_float8_all_gather",
    "FSDP: gather parameters in float8.",
    idle="has no effect: sharded parameters are gathered in bf16, which gives the same results",
)
FP8_OPTIONS = tuple(_float8)


_float8.refuse(
    TRANSFORMER_ENGINE,
    "override_fprop",
    "override_dgrad",
    "override_wgrad",
    override_linear_precision="(False, False, False)",
    use_autocast_during_eval=False,
    margin=0,
    interval=1,
    format="HYBRID",
    amax_history_len=1024,
    amax_history_length=1024,
    amax_compute_algo="most_recent",
    amax_compute_algorithm="most_recent",
)
_float8.refuse(MS_AMP, opt_level="O2", optimization_level="O2")
FLOAT8 = tuple(_float8)
