"""The settings of compilation."""

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
    kinds.choice(*COMPILE_MODES),
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
