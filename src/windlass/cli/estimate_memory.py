"""`windlass estimate-memory`: the memory of a model, computed without its weights."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.cli.command_line import CommandParser, answer, in_words
from windlass.core.errors import ConfigError, ModelError, Problem, first_line, named, refuse
from windlass.core.optional import require
from windlass.core.output import table
from windlass.core.outside import load_outside
from windlass.core.whole_file import parse_json

if TYPE_CHECKING:
    from windlass.forecast.forecast import Forecast

# Bits of a parameter when loaded, and bytes of a parameter in training with Adam (None: not a dtype for training):
# weights, gradients and two moments in fp32 are 16; autocast adds a 16-bit copy of the weights.
DTYPES: dict[str, tuple[int, int | None]] = {
    "float32": (32, 16),
    "float16": (16, 18),
    "bfloat16": (16, 18),
    "int8": (8, None),
    "int4": (4, None),
}


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and how.

    Attributes:
        batch_size, length: samples of a process in a forward, and tokens of each.
        weights, precision: dtype of the weights, and of autocast ("no" for none).
        lora_r: rank of adapters on all linear layers; None trains all weights.
        quantization: of the base below adapters.
        sharding: what is divided among `num_processes`: none; grad: all, but weights are whole from their first use in
            the forward to the end of the backward; full: all, as FSDP does.
    """

    batch_size: int
    length: int = 1024
    weights: str = "float32"
    precision: str = "no"
    lora_r: int | None = None
    quantization: str | None = None
    recompute: bool = False
    num_processes: int = 1
    sharding: str = "none"

    def check(self) -> None:
        """Raise ConfigError for values that do not fit each other."""
        counts = {name: getattr(self, name) for name in ("batch_size", "length", "num_processes", "lora_r")}
        problems = [
            Problem(f"--{name}", value, "must be at least 1")
            for name, value in counts.items()
            if value is not None and value < 1
        ]
        if self.quantization is not None and self.lora_r is None:
            fix = "weights of few bits are not trained themselves; set --lora_r too"
            problems.append(Problem("--quantization", self.quantization, fix))
        if self.sharding != "none" and self.num_processes == 1:
            problems.append(
                Problem("--sharding", self.sharding, "divides among processes; set --num_processes too")
            )
        refuse(problems)


# Options that only count in the table of a training.
_DETAILS = {item.name: item.default for item in fields(Training) if item.name != "batch_size"}
_WHY_MORE = (
    "With bf16 or fp16, weights, gradients and moments stay in float32, and autocast\n"
    "adds a 16-bit copy of the weights: more memory for weights, less for\n"
    "activations. A small batch may thus need more than in float32."
)
_NOT_COUNTED = (
    "As `windlass plan` finds it for a recipe or a script: one update of the model on\n"
    "a device, on tensors without memory. Not counted: what the device's runtime and\n"
    "its allocator reserve."
)
_HEAD = "{class} of {model}: {parameters:,} parameters"
HEADERS = ("dtype", "largest layer", "whole model", "training with Adam")


def estimate_memory_command(words: list[str]) -> int:
    options = build_parser().parse_args(words)
    if options.library_name not in (None, "transformers"):
        fix = "only models of transformers can be built from a config alone"
        raise ConfigError(Problem("--library_name", options.library_name, fix))
    if options.batch_size is not None and options.dtypes is not None:
        fix = "chooses rows of the table without --batch_size; leave one of the two out"
        raise ConfigError(Problem("--dtypes", " ".join(options.dtypes), fix))
    detailed = [name for name, default in _DETAILS.items() if getattr(options, name) != default]
    if options.batch_size is None and detailed:
        fix = f"is needed with --{detailed[0]}: samples of one process in a forward"
        raise ConfigError(Problem("--batch_size", None, fix))
    model = build_empty(options.model, options.trust_remote_code)
    parameters = sum(param.numel() for param in model.parameters())
    facts = {"model": options.model, "class": type(model).__name__, "parameters": parameters}
    if options.batch_size is not None:
        if getattr(model, "main_input_name", None) != "input_ids":
            raise ModelError(
                f"{type(model).__name__} cannot be run on input_ids and labels alone; `windlass plan` predicts the "
                "memory of a script that trains it"
            )
        if not model.config.architectures:
            raise ModelError(
                f"{options.model} names no class in `architectures`, so {type(model).__name__} is made of it, which "
                'has no loss: add the class that is trained, such as "architectures": ["LlamaForCausalLM"]'
            )
        if getattr(model.config, "quantization_config", None) is not None and options.quantization is None:
            fix = f"the weights of {options.model} are stored in few bits: name the form (nf4, fp4, int8), and --lora_r"
            raise ConfigError(Problem("--quantization", None, fix))
        _check_length(model, options.length)
        return _answer_training(options, facts)
    dtypes = options.dtypes or list(DTYPES)
    sizes = estimate(model, dtypes)
    lines = [
        _HEAD.format(**facts),
        *table([HEADERS, *(row.cells() for row in sizes)], str.rjust),
        "Training: weights, gradients and Adam's moments of all parameters;\nwith --batch_size also activations.",
        *([_WHY_MORE] if {"float16", "bfloat16"} & set(dtypes) else []),
    ]
    return answer(options, {**facts, "bytes": {row.dtype: row._asdict() for row in sizes}}, lines)


def _check_length(model: Any, length: int) -> None:
    from windlass.transforms.model_limits import ModelLimits

    limits = ModelLimits.of(model)
    if limits.positions_learned and length > (limits.positions or length):
        fix = (
            f"the model has {limits.positions} positions (max_position_embeddings), and no row may be longer"
        )
        raise ConfigError(Problem("--length", length, fix))


def _answer_training(options: argparse.Namespace, facts: dict[str, Any]) -> int:
    from windlass.cli.plan_text import memory_lines

    training = Training(options.batch_size, **{name: getattr(options, name) for name in _DETAILS})
    forecast = plan_training(lambda: build_whole(options.model, options.trust_remote_code), training)
    casts = options.precision != "no" and options.weights == "float32" and options.quantization is None
    lines = [_HEAD.format(**facts), *memory_lines(forecast), _NOT_COUNTED, *([_WHY_MORE] if casts else [])]
    return answer(options, {**facts, "memory": forecast.to_dict()["memory"]}, lines)


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="windlass estimate-memory",
        example="windlass estimate-memory config.json",
        description="Estimate the memory of a model by dtype. The model is built from its config without weights.",
    )
    add = parser.add_argument
    shown = f"the dtypes to show, of {', '.join(DTYPES)} (default: all)"
    add("model", help="a config.json, a folder with one, a run's folder, or a model's name on the Hub")
    add("--dtypes", nargs="+", choices=DTYPES, metavar="DTYPE", help=shown)
    parser.set_defaults(**_DETAILS)
    add_to = parser.add_argument_group("training with Adam, in detail").add_argument
    add_to("--batch_size", type=int, metavar="N", help="samples of one process in a forward")
    add_to("--length", type=int, metavar="N", help="tokens in a sample (default: 1024)")
    add_to("--weights", choices=("float32", "bfloat16", "float16"), help="their dtype (default: float32)")
    add_to("--precision", choices=("no", "bf16", "fp16"), help="of autocast (default: no)")
    add_to("--lora_r", type=int, metavar="R", help="train adapters of this rank on all linear layers")
    add_to("--quantization", choices=("nf4", "fp4", "int8"), help="of the base below adapters (QLoRA)")
    add_to("--recompute", action="store_true", help="with activation checkpointing")
    add_to("--num_processes", type=int, metavar="N", help="processes that train together (default: 1)")
    sharding = (
        "what they divide: none; grad: all, but weights are whole from forward to backward; full: as FSDP (default: "
        "none)"
    )
    add_to("--sharding", choices=("none", "grad", "full"), help=sharding)
    add("--json", action="store_true", help="as one JSON object, sizes in bytes")
    add("--library_name", help="transformers (the default)")
    add("--trust_remote_code", action="store_true", help="run the modelling code that comes with the model")
    return parser


def build_empty(name: str, trust_remote_code: bool = False) -> Any:
    """Build the model of a config in fp32 on the meta device, of the class that the config names, if it does.

    Raises ModelError if there is no such config.
    """
    with load_outside("models without data").init_empty_weights():
        return build_whole(name, trust_remote_code)


def build_whole(name: str, trust_remote_code: bool = False) -> Any:
    """As `build_empty`, where the caller has parameters made."""
    transformers = require("transformers", "build a model from its config")
    from windlass.checkpoint.adapters import ADAPTER_CONFIG
    from windlass.finetuning.trained_model import find_model

    path = Path(name)
    if path.suffix == ".json" and not path.is_file():
        raise ModelError(f"{name} does not exist")
    if path.is_file() and path.name != "config.json":
        raise ModelError(f"{name}: the file of a model's config is called config.json")
    source = path.parent if path.is_file() else Path(find_model(name))
    # A model of another kind may have a file of this name, too.
    is_adapter = (source / ADAPTER_CONFIG).is_file()
    if source.is_dir() and not is_adapter and "model_type" not in _values_of(source / "config.json"):
        raise ModelError(
            f"{source} has no config.json with a model_type: its model is not one of transformers, and cannot be built "
            "from files. `windlass plan` predicts the memory of the script that trains it, or of a recipe"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(source) if source.exists() else name, trust_remote_code=trust_remote_code
        )
        model = _constructor(transformers, config, trust_remote_code)(config)
    except (OSError, ValueError, KeyError) as error:
        reason = first_line(error)
        raise ModelError(f"no model can be built from {name!r}: {reason}") from error
    except Exception as error:  # models compute with the values of their config, and check few of them
        raise ModelError(f"no model can be built from {name!r}: {named(error)}") from error
    # Tied weights count once, as they are in memory.
    model.tie_weights()
    return model.float()


def _values_of(file: Path) -> dict[str, Any]:
    """The map that a file of JSON holds; empty if there is no such file, or no map."""
    try:
        found = parse_json(file.read_text("utf-8")) if file.is_file() else None
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {first_line(error)}") from error


def _constructor(transformers: Any, config: Any, trust_remote_code: bool) -> Any:
    named = next(iter(getattr(config, "architectures", None) or []), None)
    if named is not None and not getattr(config, "auto_map", None) and hasattr(transformers, named):
        return getattr(transformers, named)
    return lambda config: transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)


class Sizes(NamedTuple):
    """Bytes of a model in one dtype; `training` is None for a dtype that is not trained in."""

    dtype: str
    largest_layer: float
    model: float
    training: float | None

    def cells(self) -> tuple[str, ...]:
        trained = "-" if self.training is None else in_words(self.training)
        return self.dtype, in_words(self.largest_layer), in_words(self.model), trained


def estimate(model: Any, dtypes: list[str]) -> list[Sizes]:
    """Return the sizes in each dtype of the largest layer, the model and training."""
    whole, (largest, _) = load_outside("sizes of modules").calculate_maximum_sizes(model)
    rows = []
    for dtype in dtypes:
        bits, training = DTYPES[dtype]
        trained = None if training is None else whole // 4 * training
        rows.append(Sizes(dtype, largest * bits / 32, whole * bits / 32, trained))
    return rows


# --- the table of a training ------------------------------------------------------------------------------------------

_UPDATES = 2


def plan_training(build: Callable[[], Any], training: Training) -> Forecast:
    """The forecast of a training with Adam on a device. `build` makes the model, whose weights get no memory. Raises
    ConfigError for what a run would refuse, and ModelError if the model cannot be run on token ids alone.
    """
    from windlass.forecast.forecast import Forecast
    from windlass.forecast.tracing import trace_of

    training.check()
    with tempfile.TemporaryDirectory() as folder:
        trace = trace_of(
            lambda: _trainer(build(), training, folder).train(), training.num_processes, on_device=True
        )
    return Forecast(trace)


def _trainer(model: Any, training: Training, folder: str) -> Any:
    import torch

    from windlass.config.arguments import TrainingArguments
    from windlass.trainer.trainer import Trainer

    args = TrainingArguments(
        folder,
        max_steps=_UPDATES,
        per_device_train_batch_size=training.batch_size,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        activation_checkpointing=training.recompute,
        fsdp=training.sharding != "none",
        fsdp_config={"reshard_after_forward": training.sharding == "full"}
        if training.sharding != "none"
        else None,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        log_level="warning",
    )
    row = dict.fromkeys(("input_ids", "labels"), torch.zeros(training.length, dtype=torch.long))
    rows = [row] * training.batch_size * training.num_processes * _UPDATES
    return Trainer(_prepared(model, training), args, train_dataset=rows)


def _prepared(model: Any, training: Training) -> Any:
    import torch

    from windlass.checkpoint.adapters import peft_library
    from windlass.finetuning.base_model import few_bits
    from windlass.finetuning.peft_adapters import add_adapter

    dtype = getattr(torch, training.weights)
    model = model.to(dtype)
    if training.quantization is not None:
        from windlass.forecast.packed_layers import pack

        compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(training.precision, dtype)
        pack(model, few_bits(training.quantization, compute))
    if training.lora_r is None:
        return model
    lora = peft_library("count an adapter").LoraConfig(r=training.lora_r, target_modules="all-linear")
    return add_adapter(model, lora, [])
