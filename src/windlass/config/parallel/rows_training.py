"""The settings that training itself depends on: precision, sharding, gradients' way over ranks, compilation."""

from __future__ import annotations

from windlass.config.parallel import kinds
from windlass.config.parallel.keys import Key

NO_DEEPSPEED = (
    "needs DeepSpeed, which is not built yet; distributed_type: FSDP shards parameters, gradients and state"
)
NO_MEGATRON = (
    "needs Megatron-LM, which is not built yet; distributed_type: FSDP shards the model by its layers"
)
_PRECISIONS = kinds.choice(
    "no", "fp16", "bf16", also={"fp32": "no", "false": "no"},
    refused={"fp8": "is not built yet; use bf16"},
)  # fmt: skip
_DTYPES = kinds.choice(
    "bf16", "fp16", "fp32",
    also={f"{prefix}{word}": short for prefix in ("", "torch.")
          for word, short in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("half", "fp16"))},
)  # fmt: skip

# What is launched over several processes and needs no strategy named: plain data parallelism over them.
_PROCESSES = ("no", "multi_gpu", "multi_cpu", "multi_xpu", "multi_npu", "multi_mlu", "multi_musa", "multi_sdaa",
              "multi_hpu", "multi_neuron", "false")  # fmt: skip
STRATEGY = Key(
    "strategy",
    kinds.choice(
        "ddp",
        "fsdp",
        also={"true": "fsdp", **dict.fromkeys(_PROCESSES)},
        refused={
            "deepspeed": NO_DEEPSPEED,
            "megatron_lm": NO_MEGATRON,
            "xla": "needs PyTorch/XLA, which is not built yet",
            "tp": "needs tensor parallelism, which is not built yet",
        },
    ),
    "ddp",
    "How the model is spread over processes: every one holds all of it (ddp), or its share (fsdp).",
    "run",
    ("distributed_type", "use_fsdp", "strategy"),
)
PRECISION = Key(
    "precision",
    _PRECISIONS,
    "no",
    "The dtype that forward and backward compute in; weights and optimizer state keep theirs.",
    "run",
    ("mixed_precision",),
    fields=("bf16", "fp16"),
    written="no",
)
CPU = Key(
    "cpu",
    kinds.flag,
    False,
    "Train on the CPU although there is an accelerator.",
    "run",
    ("use_cpu", "cpu"),
    fields=("use_cpu",),
    written=False,
)
ACCUMULATION = Key(
    "accumulation",
    kinds.either(
        kinds.positive, kinds.choice("auto", also={"auto": None}), says="must be a whole number above 0"
    ),
    None,
    "Micro-batches that make one update.",
    "run",
    ("gradient_accumulation_steps",),
    fields=("gradient_accumulation_steps",),
)
DEBUG = Key(
    "debug",
    kinds.flag,
    False,
    "Check before each collective operation that all ranks bring tensors of one shape.",
    "run",
    ("debug", "debug_mode"),
    written=False,
)
RUN = (STRATEGY, PRECISION, CPU, ACCUMULATION, DEBUG)

SHARDING = kinds.choice(
    "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2",
    also={"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"},
)  # fmt: skip
_NUMBER_OF_RANKS = kinds.either(kinds.positive, says="")


def _resharding(raw: object) -> object:
    """True or false, a number of ranks, or one of FSDP1's strategies, which version 1 of the files puts here."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, int) and raw > 1:
        return raw
    readers = (kinds.flag, SHARDING, _NUMBER_OF_RANKS)
    return kinds.either(*readers, says="must be true, false, or a number of ranks to reshard to")(raw)


_LAYERS_AHEAD = kinds.either(kinds.flag, kinds.natural, says="must be true, false, or how many layers ahead")


def _ahead(raw: object) -> object:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) else _LAYERS_AHEAD(raw)


_PREFETCH = kinds.either(
    kinds.choice(
        "backward_pre", "backward_post", "no_prefetch",
        also={"none": "no_prefetch", "false": "no_prefetch", "true": "backward_pre"},
    ),
    kinds.natural,
    says="must be backward_pre, backward_post, no_prefetch, or how many layers ahead",
)  # fmt: skip

FSDP_VERSION = Key(
    "fsdp.version",
    kinds.choice("1", "2"),
    "2",
    "The version of FSDP whose spellings a file uses; what runs is always FSDP2.",
    "fsdp",
    ("version",),
    written="1",
)
FSDP_SHARDING = Key(
    "fsdp.sharding",
    SHARDING,
    "full_shard",
    "What is sharded: parameters too (full_shard), only gradients and state (shard_grad_op), within a machine only "
    "(hybrid_shard), nothing (no_shard).",
    "fsdp",
    ("sharding_strategy",),
    written="full_shard",
)
FSDP_RESHARD = Key(
    "fsdp.reshard_after_forward",
    _resharding,
    True,
    "Free gathered parameters after each forward; a number reshards to so many ranks.",
    "fsdp",
    ("reshard_after_forward",),
    written=True,
)
FSDP_WRAP = Key(
    "fsdp.wrap",
    kinds.choice(
        "none", "transformer", "size",
        also={"transformer_based_wrap": "transformer", "size_based_wrap": "size", "no_wrap": "none"},
    ),
    "none",
    "Which submodules are gathered on their own: layers by class, those above a size, or only the whole model.",
    "fsdp",
    ("auto_wrap_policy", "wrap"),
)  # fmt: skip
FSDP_LAYERS = Key(
    "fsdp.layers",
    kinds.words,
    (),
    "Class names of the layers that are gathered on their own; the model's own list when none is given.",
    "fsdp",
    ("transformer_layer_cls_to_wrap", "transformer_cls_to_wrap", "transformer_cls_names_to_wrap", "layers"),
)
FSDP_MIN_PARAMETERS = Key(
    "fsdp.min_parameters",
    kinds.natural,
    100_000_000,
    "The least number of parameters that a submodule is gathered on its own for, when wrapping goes by size.",
    "fsdp",
    ("min_num_params",),
    written=100_000_000,
)
FSDP_OFFLOAD = Key(
    "fsdp.cpu_offload",
    kinds.flag,
    False,
    "Keep parameters, gradients and optimizer state in host memory between uses.",
    "fsdp",
    ("offload_params", "cpu_offload"),
    written=False,
)
FSDP_STATE = Key(
    "fsdp.state",
    kinds.choice(
        "full", "sharded",
        also={"full_state_dict": "full", "sharded_state_dict": "sharded", "1": "full", "3": "sharded"},
        refused=dict.fromkeys(("local_state_dict", "2"),
                              "is FSDP1's raw layout, which FSDP2 does not have; use SHARDED_STATE_DICT"),
    ),
    "sharded",
    "How checkpoints hold the model: whole tensors, or every rank's shards.",
    "fsdp",
    ("state_dict_type", "state"),
)  # fmt: skip
FSDP_BACKWARD_PREFETCH = Key(
    "fsdp.backward_prefetch",
    _PREFETCH,
    "backward_pre",
    "How many layers ahead the backward gathers; FSDP2 by itself gathers the next one (backward_pre).",
    "fsdp",
    ("backward_prefetch", "backward_prefetch_policy"),
)
FSDP_FORWARD_PREFETCH = Key(
    "fsdp.forward_prefetch",
    _ahead,
    False,
    "How many layers ahead the forward gathers: true for one.",
    "fsdp",
    ("forward_prefetch",),
    written=False,
)
FSDP_RAM_EFFICIENT = Key(
    "fsdp.cpu_ram_efficient_loading",
    kinds.flag,
    False,
    "Only the first rank holds the weights on the host before sharding, and sends them.",
    "fsdp",
    ("cpu_ram_efficient_loading",),
    written=True,
)
FSDP_RECOMPUTE = Key(
    "fsdp.activation_checkpointing",
    kinds.flag,
    False,
    "Recompute each wrapped layer in the backward instead of keeping what it computed.",
    "fsdp",
    ("activation_checkpointing",),
    written=False,
)
FSDP_IGNORED = Key(
    "fsdp.ignored_modules",
    kinds.names_or_pattern,
    None,
    "Modules that are not sharded: names, or a regular expression over them.",
    "fsdp",
    ("ignored_modules",),
)
FSDP_PARAM_DTYPE = Key(
    "fsdp.param_dtype", _DTYPES, None, "Dtype of gathered parameters; that of the precision when not given.",
    "fsdp", ("param_dtype",),
)  # fmt: skip
FSDP_REDUCE_DTYPE = Key(
    "fsdp.reduce_dtype", _DTYPES, None, "Dtype that gradients are averaged in; that of the parameters when not given.",
    "fsdp", ("reduce_dtype",),
)  # fmt: skip
FSDP_OUTPUT_DTYPE = Key(
    "fsdp.output_dtype", _DTYPES, None, "Dtype that the outputs are cast to.", "fsdp", ("output_dtype",)
)
FSDP = (
    FSDP_VERSION, FSDP_SHARDING, FSDP_RESHARD, FSDP_WRAP, FSDP_LAYERS, FSDP_MIN_PARAMETERS, FSDP_OFFLOAD, FSDP_STATE,
    FSDP_BACKWARD_PREFETCH, FSDP_FORWARD_PREFETCH, FSDP_RAM_EFFICIENT, FSDP_RECOMPUTE, FSDP_IGNORED,
    FSDP_PARAM_DTYPE, FSDP_REDUCE_DTYPE, FSDP_OUTPUT_DTYPE,
    Key("fsdp.use_orig_params", kinds.flag, True, "FSDP1's way of showing parameters.", "fsdp", ("use_orig_params",),
        written=True, idle="has no meaning in FSDP2, which always keeps the original parameters"),
    Key("fsdp.sync_module_states", kinds.flag, True, "FSDP1's broadcast of the first weights.", "fsdp",
        ("sync_module_states",), written=True,
        idle="has no meaning in FSDP2: ranks start from one state whatever it says"),
    Key("fsdp.limit_all_gathers", kinds.flag, True, "FSDP1's bound on gathers under way.", "fsdp",
        ("limit_all_gathers",), idle="has no meaning in FSDP2, which bounds its memory by itself"),
    Key("fsdp.buffer_dtype", _DTYPES, None, "FSDP1's dtype of buffers.", "fsdp", ("buffer_dtype",),
        idle="has no meaning in FSDP2, which leaves buffers alone"),
    Key("fsdp.activation_checkpointing_offload", kinds.flag, False,
        "Keep what recomputation starts from in host memory.", "fsdp", ("activation_checkpointing_offload",),
        written=False, refused="is not built yet; fsdp activation_checkpointing recomputes without offloading"),
)  # fmt: skip

MESH_REPLICAS = Key(
    "mesh.replicas",
    kinds.positive,
    1,
    "Whole copies of the model over all processes.",
    "mesh",
    ("dp_replicate_size", "dp_replicate"),
    written=1,
)
MESH_SHARDS = Key(
    "mesh.shards",
    kinds.positive,
    1,
    "Processes that share one copy of the model (FSDP).",
    "mesh",
    ("dp_shard_size", "dp_shard"),
    written=1,
)


def _unbuilt_axis(word: str, what: str) -> Key:
    return Key(
        f"mesh.{word}",
        kinds.positive,
        1,
        f"Processes of {what}.",
        "mesh",
        (f"{word}_size", word),
        written=1,
        refused=f"{what} is not built yet; set it to 1",
    )


_NO_CP, _NO_SP = "context parallelism is not built yet", "sequence parallelism is not built yet"
MESH = (
    MESH_REPLICAS,
    MESH_SHARDS,
    _unbuilt_axis("tp", "tensor parallelism"),
    _unbuilt_axis("cp", "context parallelism"),
    _unbuilt_axis("sp", "sequence parallelism"),
    *(
        Key(
            f"mesh.{word}",
            kinds.anything,
            None,
            "A detail of it.",
            "mesh",
            (word,),
            written=usual,
            refused=why,
        )
        for word, usual, why in (
            ("cp_backend", "torch", _NO_CP),
            ("cp_comm_strategy", "allgather", _NO_CP),
            ("sp_backend", "deepspeed", _NO_SP),
            ("sp_seq_length", "None", _NO_SP),
            ("sp_seq_length_is_variable", True, _NO_SP),
            ("sp_attn_implementation", "sdpa", _NO_SP),
            ("tp_handler", None, "tensor parallelism is not built yet"),
            ("cp_handler", None, _NO_CP),
            ("sp_handler", None, _NO_SP),
        )
    ),
    Key(
        "mesh.used",
        kinds.flag,
        False,
        "Says that the sizes above are meant.",
        "run",
        ("use_parallelism_config",),
    ),
)
DDP_FIND_UNUSED = Key(
    "ddp.find_unused_parameters",
    kinds.flag,
    False,
    "Look in every step for parameters that the loss does not reach.",
    "ddp",
    ("find_unused_parameters",),
    fields=("ddp_find_unused_parameters",),
)
DDP_BUCKET = Key(
    "ddp.bucket_cap_mb",
    kinds.positive,
    None,
    "Size of the pieces that gradients are averaged in, in MiB.",
    "ddp",
    ("bucket_cap_mb",),
    fields=("ddp_bucket_cap_mb",),
)
DDP_BUFFERS = Key(
    "ddp.broadcast_buffers",
    kinds.flag,
    None,
    "Give every rank the first one's buffers before each forward.",
    "ddp",
    ("broadcast_buffers",),
    fields=("ddp_broadcast_buffers",),
)
DDP_STATIC = Key(
    "ddp.static_graph",
    kinds.flag,
    False,
    "The same parameters are used in every step.",
    "ddp",
    ("static_graph",),
    fields=("ddp_static_graph",),
)
DDP_TIMEOUT = Key(
    "ddp.timeout",
    kinds.positive,
    1800,
    "Seconds after which a rank that waits for another gives up.",
    "ddp",
    ("timeout",),
    fields=("ddp_timeout",),
)
DDP_HOOK = Key(
    "ddp.comm_hook",
    kinds.choice("no", "fp16", "bf16", "power_sgd", "batched_power_sgd"),
    "no",
    "How gradients are compressed on their way.",
    "ddp",
    ("comm_hook",),
)
DDP_WRAPPER = Key(
    "ddp.comm_wrapper",
    kinds.choice("no", "fp16", "bf16"),
    "no",
    "The dtype that a compressed gradient travels in.",
    "ddp",
    ("comm_wrapper",),
)
DDP_OPTIONS = Key(
    "ddp.comm_options",
    kinds.options,
    {},
    "Options of PowerSGD.",
    "ddp",
    ("comm_state_option", "comm_options"),
)
DDP = (DDP_FIND_UNUSED, DDP_BUCKET, DDP_BUFFERS, DDP_STATIC, DDP_TIMEOUT, DDP_HOOK, DDP_WRAPPER, DDP_OPTIONS)


def _backend(raw: object) -> str:
    """As the compiler spells it; accelerate writes it in capitals."""
    word = str(getattr(raw, "value", raw))
    return word.lower() if word.isupper() else word


COMPILE_BACKEND = Key(
    "compile.backend",
    _backend,
    "no",
    "Compile the model with this backend of torch.compile.",
    "dynamo",
    ("backend",),
    fields=("torch_compile_backend", "torch_compile"),
    written="no",
)
COMPILE_MODE = Key(
    "compile.mode",
    kinds.text,
    "default",
    "Mode of the inductor backend.",
    "dynamo",
    ("mode",),
    fields=("torch_compile_mode",),
    written="default",
)
_NOT_COMPILED = "is not built yet; dynamo_backend compiles the whole model with graph breaks allowed"
COMPILE = (
    COMPILE_BACKEND,
    COMPILE_MODE,
    *(
        Key(f"compile.{words[0]}", read, None, what, "dynamo", words, written="False", refused=_NOT_COMPILED)
        for words, read, what in (
            (("use_fullgraph", "fullgraph"), kinds.flag, "Refuse graph breaks."),
            (("use_dynamic", "dynamic"), kinds.flag, "Compile for shapes that change."),
            (("use_regional_compilation",), kinds.flag, "Compile repeated layers once."),
            (("options",), kinds.anything, "Options of the backend."),
            (("disable",), kinds.flag, "Switch compilation off."),
        )
    ),
)
