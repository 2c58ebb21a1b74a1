"""The settings of training: precision, sharding, DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.config import kinds
from windlass.config.enums import DistributedType
from windlass.config.parallel.keys import NO_MEGATRON, Key, Rows
from windlass.config.plan import SCHEDULES

_DTYPES = kinds.OneOf(
    "bf16",
    "fp16",
    "fp32",
    also={
        f"{prefix}{word}": short
        for prefix in ("", "torch.")
        for word, short in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("half", "fp16"))
    },
)

# --- the run --------------------------------------------------------------------------------------------------------

# Values of `distributed_type` that mean plain data parallelism.
_PROCESSES = ("no", "false", *(kind.lower() for kind in DistributedType if kind.startswith("MULTI_")))
_STRATEGIES = kinds.OneOf(
    "ddp",
    "fsdp",
    "deepspeed",
    "xla",
    also={"true": "fsdp", "tpu": "xla", **dict.fromkeys(_PROCESSES)},
    refused={"megatron_lm": NO_MEGATRON, "tp": "is requested by parallelism_config_tp_size; leave it out"},
)
PRECISIONS = ("no", "bf16", "fp16", "fp8")
_PRECISIONS = kinds.OneOf(*PRECISIONS, also={"fp32": "no", "false": "no"})
_ACCUMULATION = kinds.Either(
    kinds.positive, kinds.OneOf("auto", also={"auto": None}), says="must be a whole number above 0"
)
_run = Rows("run", "")
STRATEGY = _run(
    "strategy",
    _STRATEGIES,
    "ddp",
    "How the model is distributed: each process holds all of it (ddp), or a shard (fsdp, deepspeed); or it is split "
    "over the devices of one process (xla).",
    "distributed_type",
    "use_fsdp",
    "strategy",
)
PRECISION = _run(
    "precision",
    _PRECISIONS,
    "no",
    "The dtype of forward and backward; weights and optimizer state keep theirs. fp8: float8 in linear layers, else "
    "bf16.",
    "mixed_precision",
    fields=("bf16", "fp16", "fp8"),
)
CPU = _run.switch(
    "cpu", "Train on the CPU even if there is an accelerator.", "use_cpu", "cpu", fields=("use_cpu",)
)
ACCUMULATION = _run(
    "accumulation",
    _ACCUMULATION,
    None,
    "Micro-batches per update and process.",
    "gradient_accumulation_steps",
    fields=("gradient_accumulation_steps",),
)
DEBUG = _run.switch(
    "debug",
    "Check before each collective operation that all ranks have tensors of the same shape.",
    "debug",
    "debug_mode",
)
RUN = tuple(_run)

# --- FSDP -----------------------------------------------------------------------------------------------------------

SHARDING_WORDS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
SHARDING = kinds.OneOf(*SHARDING_WORDS, also=kinds.numbered(SHARDING_WORDS))
_NUMBER_OF_RANKS = kinds.Either(kinds.positive, says="")


def _resharding(raw: object) -> object:
    """True or false, a number of ranks, or one of FSDP1's strategies, which files of version 1 have here."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, int) and raw > 1:
        return raw
    readers = (kinds.flag, SHARDING, _NUMBER_OF_RANKS)
    return kinds.Either(*readers, says="must be true, false, or a number of ranks to reshard to")(raw)


_LAYERS_AHEAD = kinds.Either(kinds.flag, kinds.natural, says="must be true, false, or how many layers ahead")


def _ahead(raw: object) -> object:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) else _LAYERS_AHEAD(raw)


PREFETCH_WORDS = ("backward_pre", "backward_post", "no_prefetch")
_PREFETCH = kinds.Either(
    kinds.OneOf(
        *PREFETCH_WORDS, also={"none": "no_prefetch", "false": "no_prefetch", "true": "backward_pre"}
    ),
    kinds.natural,
    says="must be backward_pre, backward_post, no_prefetch, or how many layers ahead",
)
WRAPPING = {"transformer": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"}
_WRAP = kinds.Either(
    kinds.OneOf(
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
_STATE = kinds.OneOf(
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


_fsdp = Rows("fsdp")
FSDP_VERSION = _fsdp(
    "version",
    kinds.OneOf("1", "2"),
    "2",
    "The version of FSDP whose spellings a file uses; FSDP2 is always what runs.",
    written="1",
    write=int,
)
FSDP_SHARDING = _fsdp(
    "sharding",
    SHARDING,
    "full_shard",
    "What is sharded: parameters too (full_shard), only gradients and state (shard_grad_op), within a machine only "
    "(hybrid_shard), nothing (no_shard).",
    "sharding_strategy",
)
FSDP_RESHARD = _fsdp(
    "reshard_after_forward",
    _resharding,
    True,
    "Free gathered parameters after each forward; a number reshards to that many ranks.",
)
FSDP_WRAP = _fsdp(
    "wrap",
    _WRAP,
    "none",
    "Which submodules are gathered separately: layers by class, modules above a size, or only the whole model.",
    "auto_wrap_policy",
    "wrap",
    write=WRAPPING.get,
)
FSDP_LAYERS = _fsdp(
    "layers",
    kinds.words,
    (),
    "Class names of the layers that are gathered separately; by default the model's own list.",
    "transformer_layer_cls_to_wrap",
    "transformer_cls_to_wrap",
    "transformer_cls_names_to_wrap",
    "layers",
    write=",".join,
)
FSDP_MIN_PARAMETERS = _fsdp(
    "min_parameters",
    kinds.natural,
    100_000_000,
    "The smallest number of parameters of a submodule that is gathered separately, if wrapping is by size.",
    "min_num_params",
)
FSDP_OFFLOAD = _fsdp(
    "cpu_offload",
    _offloading,
    False,
    "Keep parameters, gradients and optimizer state in host memory between uses.",
    "offload_params",
    "cpu_offload",
)
FSDP_STATE = _fsdp(
    "state",
    _STATE,
    "sharded",
    "Format of the model in checkpoints: whole tensors, or the shards of each rank.",
    "state_dict_type",
    "state",
    write=STATES.get,
)
FSDP_BACKWARD_PREFETCH = _fsdp(
    "backward_prefetch",
    _PREFETCH,
    "backward_pre",
    "How many layers ahead the backward gathers; by default FSDP2 gathers the next one (backward_pre).",
    "backward_prefetch",
    "backward_prefetch_policy",
    write=_in_capitals,
)
FSDP_FORWARD_PREFETCH = _fsdp(
    "forward_prefetch", _ahead, False, "How many layers ahead the forward gathers; true is one."
)
FSDP_RAM_EFFICIENT = _fsdp.switch(
    "cpu_ram_efficient_loading",
    "Only the first rank of each machine loads the weights into host memory, and sends them to the others.",
    written=True,
)
FSDP_RECOMPUTE = _fsdp.switch(
    "activation_checkpointing",
    "Recompute the activations of each wrapped layer in the backward instead of keeping them.",
)
FSDP_RECOMPUTE_OFFLOAD = _fsdp.switch(
    "activation_checkpointing_offload",
    "With activation_checkpointing, keep the inputs of the layers in host memory.",
)
FSDP_IGNORED = _fsdp(
    "ignored_modules",
    kinds.names_or_pattern,
    None,
    "Modules that are not sharded: names, or a regular expression that matches names.",
)
FSDP_PARAM_DTYPE = _fsdp(
    "param_dtype", _DTYPES, None, "Dtype of gathered parameters; by default that of the precision."
)
FSDP_REDUCE_DTYPE = _fsdp(
    "reduce_dtype", _DTYPES, None, "Dtype in which gradients are averaged; by default that of the parameters."
)
FSDP_OUTPUT_DTYPE = _fsdp("output_dtype", _DTYPES, None, "Dtype to which outputs are cast.")
FSDP_XLA = _fsdp.switch("xla", "Shard over the devices of PyTorch/XLA, and fail if there are none.")
FSDP_XLA_SETTINGS = _fsdp(
    "xla_fsdp_settings",
    kinds.options,
    {},
    "Options of PyTorch/XLA's wrapper for one process per device; most have no effect on its compiler.",
)
FSDP_XLA_RECOMPUTE = _fsdp.switch(
    "xla_fsdp_grad_ckpt",
    "Recompute the activations of each wrapped layer in the backward, under PyTorch/XLA.",
)
_WITHOUT_EFFECT = (
    _fsdp.switch("xla_fsdp_v2", "Shard by SPMD under PyTorch/XLA.",
          idle="is not needed: under PyTorch/XLA the compiler always shards (SPMD)"),
    _fsdp("use_orig_params", kinds.flag, True, "FSDP1: expose the original parameters.",
          idle="has no effect in FSDP2, which always keeps the original parameters"),
    _fsdp("sync_module_states", kinds.flag, True, "FSDP1: broadcast the initial weights.",
          idle="has no effect in FSDP2: all ranks always start from the same state"),
    _fsdp("limit_all_gathers", kinds.flag, True, "FSDP1: limit concurrent gathers.",
          idle="has no effect in FSDP2, which limits its memory by itself"),
    _fsdp("buffer_dtype", _DTYPES, None, "FSDP1: dtype of buffers.",
          idle="has no effect in FSDP2, which does not cast buffers"),
)  # fmt: skip
FSDP = tuple(_fsdp)

# --- the mesh -------------------------------------------------------------------------------------------------------

_mesh = Rows("mesh")


def _axis(word: str, doc: str, name: str = "") -> Key:
    """Add the size of an axis of the processes."""
    return _mesh(name or word, kinds.positive, 1, doc, f"{word}_size", word)


MESH_REPLICAS = _axis("dp_replicate", "Replicas of the model over all processes.", "replicas")
MESH_SHARDS = _axis("dp_shard", "Processes that share one replica of the model (FSDP).", "shards")
MESH_TENSOR = _axis("tp", "Processes that divide the layers of one model, by the plan that it carries.")
TENSOR_POSITIONS = _mesh.switch(
    "tp_sequence_parallel",
    "Between the layers that tp_size processes divide, each computes some positions: norms, residuals, dropout.",
    "tp_sequence_parallel",
    "enable_sequence_parallel",
)
MESH_CONTEXT = _axis(
    "cp", "Processes that divide the sequences of a batch; keys and values travel round a ring of them."
)
MESH_SEQUENCE = _axis(
    "sp", "Processes that divide the sequences of a batch, and exchange heads for the attention (Ulysses)."
)
MESH_PIPELINE = _axis(
    "pp", "Processes that divide the layers of a model; micro-batches pass from one to the next (pipeline)."
)
MESH_EXPERT = _axis("ep", "Processes that divide the experts of a mixture; they train on different samples.")
# The axes whose processes compute the same samples together.
MODEL_AXES = (MESH_TENSOR, MESH_CONTEXT, MESH_SEQUENCE, MESH_PIPELINE)
PP_SCHEDULE = _mesh(
    "pp_schedule",
    kinds.OneOf(*map(str.lower, SCHEDULES)),
    "1f1b",
    "The order of forwards and backwards in a pipeline, by its name in torch.distributed.pipelining.",
)
PP_STAGES = _mesh(
    "pp_stages_per_process",
    kinds.positive,
    None,
    "Stages of the pipeline that each process computes; by default 2 with a schedule that needs several, else 1.",
)
PP_SPLIT_POINTS = _mesh(
    "pp_split_points",
    kinds.words,
    (),
    "Names of the modules with which the second and later stages begin; by default layers are shared out evenly.",
)
_RING = "does not change the exchange: keys and values travel round a ring, with the same results"
_ROWS = "has no effect: rows of any length are padded and divided"
_mesh("cp_backend", kinds.OneOf("torch"), "torch", "Implementation of context parallelism.")
_mesh(
    "cp_comm_strategy",
    kinds.OneOf("allgather", "alltoall"),
    "allgather",
    "How keys and values are exchanged.",
    idle=_RING,
)
_mesh("sp_backend", kinds.OneOf("deepspeed"), "deepspeed", "Implementation of sequence parallelism.")
_mesh("sp_seq_length", kinds.Either(kinds.positive, kinds.OneOf("none", also={"none": None}), says="must be a length"),
      None, "Length of a row.", written="None", idle=_ROWS)  # fmt: skip
_mesh("sp_seq_length_is_variable", kinds.flag, True, "Rows differ in length.", idle=_ROWS)
_mesh(
    "sp_attn_implementation",
    kinds.OneOf("sdpa", "eager", "flash_attention_2", "flash_attention_3"),
    "sdpa",
    "The attention that sequence parallelism uses.",
    idle="has no effect: attention over divided rows is one of Windlass's own",
)


def _nothing(raw: object) -> None:
    """An object of options, whose fields have settings of their own."""


HANDLERS = ("tp_handler", "cp_handler", "sp_handler", "pp_handler")
for _word in HANDLERS:
    _mesh(_word, _nothing, None, "An object of options.")
MESH = (
    *_mesh,
    Rows("run", "mesh.").switch(
        "used", "Lay out the processes by dp_replicate_size and dp_shard_size.", "use_parallelism_config"
    ),
)

# --- DDP ------------------------------------------------------------------------------------------------------------

_ddp = Rows("ddp")
DDP_FIND_UNUSED = _ddp.switch(
    "find_unused_parameters",
    "Search each forward for parameters that it does not use; a Trainer does unless set.",
    fields=("ddp_find_unused_parameters",),
)
DDP_BUCKET = _ddp(
    "bucket_cap_mb",
    kinds.positive,
    None,
    "Size of the gradient buckets in MiB.",
    fields=("ddp_bucket_cap_mb",),
)
DDP_BUFFERS = _ddp(
    "broadcast_buffers",
    kinds.flag,
    None,
    "Broadcast the buffers of the first rank before each forward.",
    fields=("ddp_broadcast_buffers",),
)
DDP_STATIC = _ddp.switch(
    "static_graph", "Assert that each step uses the same parameters.", fields=("ddp_static_graph",)
)
DDP_TIMEOUT = _ddp(
    "timeout",
    kinds.positive,
    1800,
    "Seconds after which a collective operation, or a wait for data, a background save or a tracker, fails.",
    fields=("ddp_timeout",),
)
DDP_HOOK = _ddp(
    "comm_hook",
    kinds.OneOf("no", "fp16", "bf16", "power_sgd", "batched_power_sgd"),
    "no",
    "Compression of gradients during communication.",
)
DDP_WRAPPER = _ddp(
    "comm_wrapper", kinds.OneOf("no", "fp16", "bf16"), "no", "Dtype in which a compressed gradient is sent."
)
DDP_OPTIONS = _ddp(
    "comm_options", kinds.options, {}, "Options of PowerSGD.", "comm_state_option", "comm_options"
)
DDP = tuple(_ddp)
