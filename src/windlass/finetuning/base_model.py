"""The model and the tokenizer of a trainer of fine-tuning: loaded by name, built from a config, or given."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.checkpoint.adapters import ADAPTER_CONFIG
from windlass.core.activity import looking_for
from windlass.core.attributes import text_config
from windlass.core.errors import ConfigError, ModelError, Problem, first_line
from windlass.core.locations import loading
from windlass.core.logs import get_job_logger
from windlass.core.optional import require
from windlass.finetuning.model_without_weights import OF_CONFIG, model_without_weights
from windlass.finetuning.tuning_config import TuningConfig
from windlass.optim.registry import bitsandbytes_library

logger = get_job_logger(__name__)

_PURPOSE = "fine-tune a language model"
_DTYPES = ("bfloat16", "float16", "float32")


def open_model(
    model: Any,
    args: TuningConfig,
    quantization_config: Any,
    *,
    empty: bool = False,
    labels: int | None = None,
) -> nn.Module:
    """Return the model to tune.

    Args:
        model: a module; a name or folder, which is loaded with the class that its config names, in float32 unless
            `model_init_kwargs["dtype"]` is set; or a config of transformers, for new weights.
        quantization_config: how a loaded model is quantized.
        empty: a model given by name has no weights, if that can be (see `model_without_weights`): another process reads
            them, and sends them.
        labels: the outputs of a sequence classifier, which is loaded or built instead; it gets a new head unless it has
            one.

    Raises:
        ConfigError: `quantization_config` is given twice, or a wrong dtype.
        ModelError: the model cannot be loaded.
    """
    if isinstance(model, nn.Module):
        _warn_of_unused(args, quantization_config)
        return model
    transformers = require("transformers", _PURPOSE)
    if isinstance(model, transformers.PreTrainedConfig):
        _warn_of_unused(args, quantization_config)
        sees = type(model) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        if labels is not None:
            auto, model = transformers.AutoModelForSequenceClassification, copy.deepcopy(model)
            model.num_labels = labels
        built: nn.Module = auto.from_config(model, dtype=torch.float32)
        return built
    if not isinstance(model, str):
        fix = "give a model, its name or folder, or a config of transformers"
        raise ConfigError(Problem("model", type(model).__name__, fix))
    if (Path(model) / ADAPTER_CONFIG).is_file() and not (Path(model) / "config.json").is_file():
        raise ModelError(
            f"{model} holds an adapter, and no model: put it on its base, peft.PeftModel.from_pretrained(base, "
            f"{model!r}, is_trainable=True), and pass that; or merge it first: windlass checkpoint export {model} "
            "MERGED --merge"
        )
    return load_model(model, load_options(args, quantization_config), empty, labels)


def load_model(
    name: str, options: dict[str, Any], empty: bool = False, labels: int | None = None
) -> nn.Module:
    """`from_pretrained` of the class that the model's config names, else of `AutoModelForCausalLM`. Raises ModelError
    if it cannot be loaded, and ConfigError for options that it does not take.

    The other arguments are those of `open_model`.
    """
    transformers = require("transformers", _PURPOSE)
    of_config = {k: v for k, v in options.items() if k in OF_CONFIG}
    outputs = {} if labels is None else {"num_labels": labels}
    # The model notes it for tokenizers and adapters, which are opened when the working directory may be another one.
    place = str(Path(name).absolute()) if Path(name).is_dir() else name
    with loading("model", name), looking_for(name):
        config = transformers.AutoConfig.from_pretrained(place, **of_config, **outputs)
    try:
        with loading("model", name, ImportError, TypeError):
            if labels is None:
                names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
                kind = getattr(transformers, names[0], transformers.AutoModelForCausalLM)
            else:
                kind = transformers.AutoModelForSequenceClassification
            if empty and (made := model_without_weights(kind, config, options)) is not None:
                return made
            loaded: nn.Module = kind.from_pretrained(place, **options, **outputs)
    except RuntimeError as error:
        if "quantization_config" not in options or isinstance(error, torch.OutOfMemoryError):
            raise
        how = type(
            getattr(options["quantization_config"], "quant_type", options["quantization_config"])
        ).__name__
        raise ModelError(
            f"the model {name!r} cannot be quantized with {how} here: it may need a GPU, or other sizes of layers. "
            f"transformers: {' '.join(str(error).split())}"
        ) from error
    except ImportError as error:  # of flash_attn, or what a quantization needs
        attention = options.get("attn_implementation")
        fix = f"needs a package that is not installed: {first_line(error)}"
        if attention is not None:
            fix += "; install it, or set attn_implementation to sdpa"
        raise ConfigError(Problem("model_init_kwargs", options, fix)) from error
    except TypeError as error:  # options that are no settings of its config are given to its constructor
        raise ConfigError(Problem("model_init_kwargs", options, f"cannot be used: {error}")) from error
    return loaded


def load_options(args: TuningConfig, quantization_config: Any) -> dict[str, Any]:
    """The options of `from_pretrained`. Raises ConfigError for a wrong dtype, or two quantizations."""
    options = dict(args.model_init_kwargs or {})  # type: ignore[arg-type]
    if quantization_config is not None:
        if "quantization_config" in options:
            fix = (
                "You set `quantization_config` both as a trainer argument and in `args.model_init_kwargs`; set it in "
                "one place, preferably as a trainer argument"
            )
            raise ConfigError(Problem("quantization_config", type(quantization_config).__name__, fix))
        options["quantization_config"] = quantization_config
    if type(options.get("quantization_config")).__name__ == "BitsAndBytesConfig":
        bitsandbytes_library("load a model in few bits")
    # The name before transformers 4.56, which scripts still use.
    if (old := options.pop("torch_dtype", None)) is not None:
        options.setdefault("dtype", old)
    options["dtype"] = _dtype(options.get("dtype", "float32"))
    options.setdefault("trust_remote_code", args.trust_remote_code)
    return options


def few_bits(scheme: str, compute: Any, **of_four: Any) -> Any:
    """Return the `BitsAndBytesConfig` of a scheme: "int8", or "nf4" or "fp4", which computes in the dtype `compute` and
    has other options.
    """
    config = require("transformers", "quantize a model").BitsAndBytesConfig
    if scheme == "int8":
        return config(load_in_8bit=True)
    return config(load_in_4bit=True, bnb_4bit_quant_type=scheme, bnb_4bit_compute_dtype=compute, **of_four)


def _dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype) or value in ("auto", None):
        return value
    if value in _DTYPES:
        return getattr(torch, value)
    raise ConfigError(Problem("model_init_kwargs.dtype", value, f"use 'auto' or one of {', '.join(_DTYPES)}"))


def _warn_of_unused(args: TuningConfig, quantization_config: Any) -> None:
    for name, value in (
        ("model_init_kwargs", args.model_init_kwargs),
        ("quantization_config", quantization_config),
    ):
        if value is not None:
            logger.warning("%s is ignored: the model is not loaded by name", name)


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def name_of(model: Any) -> str:
    """The name or folder of a model, given as a name, a config or a module; empty if it has none."""
    config = getattr(model, "config", model)
    return model if isinstance(model, str) else str(getattr(config, "_name_or_path", "") or "")


def open_tokenizer(tokenizer: Any, model: nn.Module, args: TuningConfig, with_images: bool = False) -> Any:
    """Return the given tokenizer or processor, or the one in the folder or repository of the model: a processor if
    `with_images`. Raises ConfigError if there is none, or what is given is neither of them.
    """
    transformers = require("transformers", _PURPOSE)
    if tokenizer is None:
        name = name_of(model)
        options = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
        try:
            kind = transformers.AutoProcessor if with_images else transformers.AutoTokenizer
            tokenizer = kind.from_pretrained(
                name, revision=options.get("revision", "main"), trust_remote_code=args.trust_remote_code
            )
        except (OSError, ValueError, TypeError, AttributeError) as error:
            where = f"in {name!r}" if name else "because the model has no name"
            what = "processor" if with_images else "tokenizer"
            fix = f"no {what} was found {where}; pass processing_class={what}"
            raise ConfigError(Problem("processing_class", None, fix)) from error
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if not isinstance(inner, transformers.PreTrainedTokenizerBase):
        fix = "must be either a `PreTrainedTokenizerBase` or a `ProcessorMixin`"
        raise TypeError(f"The `processing_class` {fix}, and is {type(tokenizer).__name__}")
    return tokenizer


def set_special_tokens(tokenizer: Any, args: TuningConfig) -> None:
    """Set the eos token and the padding token of the arguments on the tokenizer. Raises ConfigError if a token is not
    in the vocabulary, or the tokenizer has neither a pad nor an eos token.
    """
    for name in ("eos_token", "pad_token"):
        token = getattr(args, name, None)  # not all configurations have both
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            fix = f"is not found in the vocabulary of the given tokenizer ({type(tokenizer).__name__})"
            raise ConfigError(Problem(name, token, fix))
        setattr(tokenizer, name, token)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            fix = "the tokenizer has neither a pad token nor an eos token; set tokenizer.pad_token or args.eos_token"
            raise ConfigError(Problem("processing_class", type(tokenizer).__name__, fix))
        tokenizer.pad_token = tokenizer.eos_token


def write_special_tokens(tokenizer: Any, model: nn.Module) -> None:
    """Write the eos token and the padding token of the tokenizer to the model's configurations."""
    generation: Any = getattr(model, "generation_config", None)
    text = text_config(model)
    for owner in (text, generation):
        if owner is None:
            continue
        owner.pad_token_id = tokenizer.pad_token_id
        if tokenizer.eos_token_id is not None:
            owner.eos_token_id = tokenizer.eos_token_id if owner is text else _with_first(owner, tokenizer)


def _with_first(generation: Any, tokenizer: Any) -> Any:
    """The tokens that end a generated text, the tokenizer's first; any of them ends it."""
    given = generation.eos_token_id
    ids = [] if given is None else [given] if isinstance(given, int) else list(given)
    first = tokenizer.eos_token_id
    return first if ids in ([], [first]) else [first, *(i for i in ids if i != first)]
