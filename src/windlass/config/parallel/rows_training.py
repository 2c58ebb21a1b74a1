"""The settings of training: precision, sharding, DDP, compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.config.parallel import kinds
from windlass.config.parallel.keys import Key, rows_of

NO_MEGATRON = (
    "needs Megatron-LM, which is not built yet; distributed_type: FSDP shards the model by its layers"
)
_DTYPES = kinds.choice(
    "bf16", "fp16", "fp32",
    also={f"{prefix}{word}": short for prefix in ("", "torch.")
          for word, short in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("half", "fp16"))},
)  # fmt: skip

# --- the run --------------------------------------------------------------------------------------------------------

# Values of `distributed_type` that mean plain data parallelism.
_PROCESSES = ("no", "multi_gpu", "multi_cpu", "multi_xpu", "multi_npu", "multi_mlu", "multi_musa", "multi_sdaa",
              "multi_hpu", "multi_neuron", "false")  # fmt: skip
_STRATEGIES = kinds.choice(
    "ddp", "fsdp", "deepspeed", "xla",
    also={"true": "fsdp", "tpu": "xla", **dict.fromkeys(_PROCESSES)},
    refused={
        "megatron_lm": NO_MEGATRON,
        "tp": "needs tensor parallelism, which is not built yet",
    },
)  # fmt: skip
PRECISIONS = ("no", "bf16", "fp16", "fp8")
_PRECISIONS = kinds.choice(*PRECISIONS, also={"fp32": "no", "false": "no"})
_ACCUMULATION = kinds.either(
    kinds.positive, kinds.choice("auto", also={"auto": None}), says="must be a whole number above 0"
)
STRATEGY = Key(
    "strategy", _STRATEGIES, "ddp",
    "How the model is distributed: each process holds all of it (ddp), or a shard (fsdp, deepspeed); or it is split "
    "over the devices of one process (xla).",
    "run", ("distributed_type", "use_fsdp", "strategy"),
)  # fmt: skip
PRECISION = Key(
    "precision", _PRECISIONS, "no",
    "The dtype of forward and backward; weights and optimizer state keep theirs. fp8: float8 in linear layers, else "
    "bf16.",
    "run", ("mixed_precision",), fields=("bf16", "fp16", "fp8"), written="no",
)  # fmt: skip
CPU = Key(
    "cpu", kinds.flag, False, "Train on the CPU even if there is an accelerator.",
    "run", ("use_cpu", "cpu"), fields=("use_cpu",), written=False,
)  # fmt: skip
ACCUMULATION = Key(
    "accumulation", _ACCUMULATION, None, "Micro-batches per update and process.",
    "run", ("gradient_accumulation_steps",), fields=("gradient_accumulation_steps",),
)  # fmt: skip
DEBUG = Key(
    "debug", kinds.flag, False, "Check before each collective operation that all ranks have tensors of the same shape.",
    "run", ("debug", "debug_mode"), written=False,
)  # fmt: skip
RUN = (STRATEGY, PRECISION, CPU, ACCUMULATION, DEBUG)

# --- FSDP -----------------------------------------------------------------------------------------------------------

SHARDING_WORDS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
SHARDING = kinds.choice(*SHARDING_WORDS, also=kinds.numbered(SHARDING_WORDS))
_NUMBER_OF_RANKS = kinds.either(kinds.positive, says="")


def _resharding(raw: object) -> object:
    """True or false, a number of ranks, or one of FSDP1's strategies, which files of version 1 have here."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, int) and raw > 1:
        return raw
    readers = (kinds.flag, SHARDING, _NUMBER_OF_RANKS)
    return kinds.either(*readers, says="must be true, false, or a number of ranks to reshard to")(raw)


_LAYERS_AHEAD = kinds.either(kinds.flag, kinds.natural, says="must be true, false, or how many layers ahead")


def _ahead(raw: object) -> object:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) else _LAYERS_AHEAD(raw)


PREFETCH_WORDS = ("backward_pre", "backward_post", "no_prefetch")
_PREFETCH = kinds.either(
    kinds.choice(
        *PREFETCH_WORDS, also={"none": "no_prefetch", "false": "no_prefetch", "true": "backward_pre"}
    ),
    kinds.natural,
    says="must be backward_pre, backward_post, no_prefetch, or how many layers ahead",
)
WRAPPING = {"transformer": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"}
_WRAP = kinds.either(
    kinds.choice(
        *WRAPPING,
        also={
            **{spelling.lower(): word for word, spelling in WRAPPING.items()},
            **kinds.numbered(WRAPPING),
            "transformer_auto_wrap_policy": "transformer",
            "size_based_auto_wrap_policy": "size",
        },
    ),
    says="must be one of none, transformer, size: a function of one's own is not called; name the layers' classes in "
    "transformer_cls_names_to_wrap",
)
STATES = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}
_STATE = kinds.choice(
    *STATES,
    also={**{spelling.lower(): word for word, spelling in STATES.items()}, "1": "full", "3": "sharded"},
    refused=dict.fromkeys(
        ("local_state_dict", "2"), "is FSDP1's raw layout, which FSDP2 does not have; use SHARDED_STATE_DICT"
    ),
)


def _offloading(raw: object) -> bool:
    """A truth value, or an object of PyTorch that means one."""
    kind = type(raw).__name__
    if kind == "CPUOffload":
        return bool(raw.offload_params)  # type: ignore[attr-defined]
    if kind in ("CPUOffloadPolicy", "OffloadPolicy"):
        return kind == "CPUOffloadPolicy"
    return kinds.flag(raw)


DTYPE_ROLES = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")


def dtypes_of(policy: Any) -> dict[str, Any]:
    """The dtype of each role, from one word or torch dtype for all, a mapping, or PyTorch's own object."""
    if isinstance(policy, str) or type(policy).__name__ == "dtype":
        return dict.fromkeys(DTYPE_ROLES[:3], policy)
    found = (
        policy if isinstance(policy, Mapping) else {role: getattr(policy, role, None) for role in DTYPE_ROLES}
    )
    return {role: dtype for role, dtype in found.items() if dtype is not None}


def _in_capitals(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


_fsdp = rows_of("fsdp")
FSDP_VERSION = _fsdp(
    "version", kinds.choice("1", "2"), "2",
    "The version of FSDP whose spellings a file uses; FSDP2 is always what runs.", written="1", write=int,
)  # fmt: skip
FSDP_SHARDING = _fsdp(
    "sharding", SHARDING, "full_shard",
    "What is sharded: parameters too (full_shard), only gradients and state (shard_grad_op), within a machine only "
    "(hybrid_shard), nothing (no_shard).", "sharding_strategy", written="full_shard",
)  # fmt: skip
FSDP_RESHARD = _fsdp(
    "reshard_after_forward", _resharding, True,
    "Free gathered parameters after each forward; a number reshards to that many ranks.", written=True,
)  # fmt: skip
FSDP_WRAP = _fsdp(
    "wrap", _WRAP, "none",
    "Which submodules are gathered separately: layers by class, modules above a size, or only the whole model.",
    "auto_wrap_policy", "wrap", write=WRAPPING.get,
)  # fmt: skip
FSDP_LAYERS = _fsdp(
    "layers", kinds.words, (),
    "Class names of the layers that are gathered separately; by default the model's own list.",
    "transformer_layer_cls_to_wrap", "transformer_cls_to_wrap", "transformer_cls_names_to_wrap", "layers",
    write=",".join,
)  # fmt: skip
FSDP_MIN_PARAMETERS = _fsdp(
    "min_parameters", kinds.natural, 100_000_000,
    "The smallest number of parameters of a submodule that is gathered separately, if wrapping is by size.",
    "min_num_params", written=100_000_000,
)  # fmt: skip
FSDP_OFFLOAD = _fsdp(
    "cpu_offload", _offloading, False,
    "Keep parameters, gradients and optimizer state in host memory between uses.", "offload_params", "cpu_offload",
    written=False,
)  # fmt: skip
FSDP_STATE = _fsdp(
    "state", _STATE, "sharded", "Format of the model in checkpoints: whole tensors, or the shards of each rank.",
    "state_dict_type", "state", write=STATES.get,
)  # fmt: skip
FSDP_BACKWARD_PREFETCH = _fsdp(
    "backward_prefetch", _PREFETCH, "backward_pre",
    "How many layers ahead the backward gathers; by default FSDP2 gathers the next one (backward_pre).",
    "backward_prefetch", "backward_prefetch_policy", write=_in_capitals,
)  # fmt: skip
FSDP_FORWARD_PREFETCH = _fsdp(
    "forward_prefetch",
    _ahead,
    False,
    "How many layers ahead the forward gathers; true is one.",
    written=False,
)
FSDP_RAM_EFFICIENT = _fsdp(
    "cpu_ram_efficient_loading", kinds.flag, False,
    "Only the first rank loads the weights into host memory, and sends them to the others.", written=True,
)  # fmt: skip
FSDP_RECOMPUTE = _fsdp(
    "activation_checkpointing", kinds.flag, False,
    "Recompute the activations of each wrapped layer in the backward instead of keeping them.", written=False,
)  # fmt: skip
FSDP_RECOMPUTE_OFFLOAD = _fsdp(
    "activation_checkpointing_offload", kinds.flag, False,
    "With activation_checkpointing, keep the inputs of the layers in host memory.", written=False,
)  # fmt: skip
FSDP_IGNORED = _fsdp(
    "ignored_modules", kinds.names_or_pattern, None,
    "Modules that are not sharded: names, or a regular expression that matches names.",
)  # fmt: skip
FSDP_PARAM_DTYPE = _fsdp(
    "param_dtype", _DTYPES, None, "Dtype of gathered parameters; by default that of the precision."
)
FSDP_REDUCE_DTYPE = _fsdp(
    "reduce_dtype", _DTYPES, None,
    "Dtype in which gradients are averaged; by default that of the parameters.",
)  # fmt: skip
FSDP_OUTPUT_DTYPE = _fsdp("output_dtype", _DTYPES, None, "Dtype to which outputs are cast.")
FSDP_XLA = _fsdp(
    "xla", kinds.flag, False, "Shard over the devices of PyTorch/XLA, and fail if there are none."
)
FSDP_XLA_SETTINGS = _fsdp(
    "xla_fsdp_settings", kinds.options, {},
    "Options of PyTorch/XLA's wrapper for one process per device; most have no effect on its compiler.",
)  # fmt: skip
FSDP_XLA_RECOMPUTE = _fsdp(
    "xla_fsdp_grad_ckpt", kinds.flag, False,
    "Recompute the activations of each wrapped layer in the backward, under PyTorch/XLA.",
)  # fmt: skip
FSDP = (
    FSDP_VERSION, FSDP_SHARDING, FSDP_RESHARD, FSDP_WRAP, FSDP_LAYERS, FSDP_MIN_PARAMETERS, FSDP_OFFLOAD, FSDP_STATE,
    FSDP_BACKWARD_PREFETCH, FSDP_FORWARD_PREFETCH, FSDP_RAM_EFFICIENT, FSDP_RECOMPUTE, FSDP_RECOMPUTE_OFFLOAD,
    FSDP_IGNORED,
    FSDP_PARAM_DTYPE, FSDP_REDUCE_DTYPE, FSDP_OUTPUT_DTYPE,
    FSDP_XLA, FSDP_XLA_SETTINGS, FSDP_XLA_RECOMPUTE,
    _fsdp("xla_fsdp_v2", kinds.flag, False, "Shard by SPMD under PyTorch/XLA.",
          idle="is not needed: under PyTorch/XLA the compiler always shards (SPMD)"),
    _fsdp("use_orig_params", kinds.flag, True, "FSDP1: expose the original parameters.", written=True,
          idle="has no effect in FSDP2, which always keeps the original parameters"),
    _fsdp("sync_module_states", kinds.flag, True, "FSDP1: broadcast the initial weights.", written=True,
          idle="has no effect in FSDP2: all ranks always start from the same state"),
    _fsdp("limit_all_gathers", kinds.flag, True, "FSDP1: limit concurrent gathers.",
          idle="has no effect in FSDP2, which limits its memory by itself"),
    _fsdp("buffer_dtype", _DTYPES, None, "FSDP1: dtype of buffers.",
          idle="has no effect in FSDP2, which does not cast buffers"),
)  # fmt: skip

# --- the mesh -------------------------------------------------------------------------------------------------------

_mesh = rows_of("mesh")
MESH_REPLICAS = _mesh(
    "replicas", kinds.positive, 1, "Replicas of the model over all processes.", "dp_replicate_size", "dp_replicate",
    written=1,
)  # fmt: skip
MESH_SHARDS = _mesh(
    "shards", kinds.positive, 1, "Processes that share one replica of the model (FSDP).", "dp_shard_size", "dp_shard",
    written=1,
)  # fmt: skip
# Axes along which processes share a batch: abbreviation -> (name, options with their defaults).
_UNBUILT_AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("tensor parallelism", {"tp_handler": None}),
    "cp": ("context parallelism", {"cp_backend": "torch", "cp_comm_strategy": "allgather", "cp_handler": None}),
    "sp": ("sequence parallelism", {
        "sp_backend": "deepspeed", "sp_seq_length": "None", "sp_seq_length_is_variable": True,
        "sp_attn_implementation": "sdpa", "sp_handler": None,
    }),
}  # fmt: skip
UNBUILT_AXES = tuple(
    _mesh(axis, kinds.positive, 1, f"Processes of {what}.", f"{axis}_size", axis, written=1,
          refused=f"{what} is not built yet; set it to 1")
    for axis, (what, _) in _UNBUILT_AXES.items()
)  # fmt: skip
MESH = (
    MESH_REPLICAS, MESH_SHARDS, *UNBUILT_AXES,
    *(
        _mesh(word, kinds.anything, None, "An option of it.", written=usual, refused=f"{what} is not built yet")
        for what, options in _UNBUILT_AXES.values() for word, usual in options.items()
    ),
    Key("mesh.used", kinds.flag, False, "Enables the sizes above.", "run", ("use_parallelism_config",)),
)  # fmt: skip

# --- DDP ------------------------------------------------------------------------------------------------------------

_ddp = rows_of("ddp")
DDP_FIND_UNUSED = _ddp(
    "find_unused_parameters", kinds.flag, False,
    "Search each forward for parameters that it does not use; a Trainer does unless set.",
    fields=("ddp_find_unused_parameters",),
)  # fmt: skip
DDP_BUCKET = _ddp(
    "bucket_cap_mb", kinds.positive, None, "Size of the gradient buckets in MiB.",
    fields=("ddp_bucket_cap_mb",),
)  # fmt: skip
DDP_BUFFERS = _ddp(
    "broadcast_buffers", kinds.flag, None, "Broadcast the buffers of the first rank before each forward.",
    fields=("ddp_broadcast_buffers",),
)  # fmt: skip
DDP_STATIC = _ddp(
    "static_graph", kinds.flag, False, "Assert that each step uses the same parameters.", fields=("ddp_static_graph",),
)  # fmt: skip
DDP_TIMEOUT = _ddp(
    "timeout", kinds.positive, 1800,
    "Seconds after which a collective operation, or a wait for data or for a background save, fails.",
    fields=("ddp_timeout",),
)  # fmt: skip
DDP_HOOK = _ddp(
    "comm_hook", kinds.choice("no", "fp16", "bf16", "power_sgd", "batched_power_sgd"), "no",
    "Compression of gradients during communication.",
)  # fmt: skip
DDP_WRAPPER = _ddp(
    "comm_wrapper",
    kinds.choice("no", "fp16", "bf16"),
    "no",
    "Dtype in which a compressed gradient is sent.",
)
DDP_OPTIONS = _ddp(
    "comm_options", kinds.options, {}, "Options of PowerSGD.", "comm_state_option", "comm_options"
)
DDP = (DDP_FIND_UNUSED, DDP_BUCKET, DDP_BUFFERS, DDP_STATIC, DDP_TIMEOUT, DDP_HOOK, DDP_WRAPPER, DDP_OPTIONS)

# --- compilation ----------------------------------------------------------------------------------------------------


def _backend(raw: object) -> str:
    """In the compiler's spelling; accelerate writes it in capitals."""
    word = str(getattr(raw, "value", raw))
    return word.lower() if word.isupper() else word


_compile = rows_of("dynamo", "compile")
COMPILE_BACKEND = _compile(
    "backend", _backend, "no", "Backend of torch.compile; setting it enables compilation.",
    fields=("torch_compile_backend", "torch_compile"), written="no", write=str.upper,
)  # fmt: skip
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
COMPILE_MODE = _compile(
    "mode", kinds.choice(*COMPILE_MODES), "default", "Mode of the inductor backend.", fields=("torch_compile_mode",),
    written="default",
)  # fmt: skip
COMPILE_BLOCKS = _compile(
    "blocks", kinds.flag, False, "Compile the repeated blocks, one graph for all, and not the whole model.",
    "use_regional_compilation", fields=("torch_compile_blocks",), written=False,
)  # fmt: skip
COMPILE_FULLGRAPH = _compile(
    "fullgraph", kinds.flag, False, "An operation that the compiler cannot put into one graph is an error.",
    "use_fullgraph", "fullgraph", written=False,
)  # fmt: skip
COMPILE_DYNAMIC = _compile(
    "dynamic", kinds.flag, False, "Compile for any size from the first graph on. Otherwise from a second size on.",
    "use_dynamic", "dynamic", written=False,
)  # fmt: skip
COMPILE_OPTIONS = _compile("options", kinds.plain_options, {}, "Options of the backend, in place of a mode.")
COMPILE_DISABLED = _compile("disable", kinds.flag, False, "Do not compile.", written=False)
COMPILE = (
    COMPILE_BACKEND, COMPILE_MODE, COMPILE_BLOCKS, COMPILE_FULLGRAPH, COMPILE_DYNAMIC, COMPILE_OPTIONS,
    COMPILE_DISABLED,
)  # fmt: skip
