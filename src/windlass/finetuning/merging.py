"""Models for `from_pretrained` made of a checkpoint: with its adapter merged into the base, or in few bits."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_library
from windlass.checkpoint.export import MAX_SHARD_SIZE, ExportOptions, export_folder, whole_folder
from windlass.checkpoint.files import Files
from windlass.checkpoint.names import shorten
from windlass.checkpoint.stored import Folder, find_weights
from windlass.checkpoint.strict_json import read
from windlass.config.sections.fields import QAT_SCHEMES, TRAINED_SCHEME
from windlass.core.errors import CheckpointError, ConfigError, ModelError, Problem, first_line
from windlass.core.locations import at_home, loading
from windlass.core.optional import require
from windlass.finetuning.base_model import load_model
from windlass.finetuning.peft_adapters import HEADS
from windlass.transforms.quantization_aware import apply_qat, quantized_config

_PURPOSE = "merge an adapter"


def merge_adapter(
    adapter: Path,
    target: Path,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write the base with the adapter added to its weights into the folder `target`, with the tokenizer or processor.

    The base is loaded in the precision of its files: an adapter that was trained on a base of few bits is added to the
    weights from which those were made. A base whose files are quantized is dequantized first.

    Args:
        adapter: a checkpoint or folder with `adapter_model.safetensors`.
        target: a new or empty folder.
        base: name or folder of the base; by default the one that the adapter names.
        dtype: of the result; by default that of the base.
        max_shard_size: bytes of tensors in a file.

    Raises:
        CheckpointError: there is no adapter, it cannot be merged, its base is not known or does not fit, or the folder
            is not empty.
        ModelError: the base cannot be loaded.
    """
    name, files = base or base_of(adapter), Files()
    with whole_folder(target, files, lambda: _check_new(target)) as new:
        model = load_base(adapter, name, "auto")
        if getattr(model, "quantization_method", None) is not None:
            model = model.dequantize()
        if dtype is not None:
            model = model.to(torch.promote_types(model.dtype, dtype))
        merged = merge(with_adapter(model, adapter))
        # Rounded before, a weight would not change by less than half of its last bit.
        if dtype is not None:
            merged = merged.to(dtype)
        merged.save_pretrained(new, max_shard_size=max_shard_size)
        if (tokenizer := first_tokenizer((str(adapter), name))) is not None:
            tokenizer.save_pretrained(new)
        for path in _processor_files((adapter, at_home(name))):
            shutil.copyfile(path, new / path.name)
        for path in new.rglob("*"):  # some tokenizers have folders of templates
            if path.is_file():
                files.sync_file(path)
            else:
                files.sync_folder(path)


def _check_new(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already; name a new folder")


def merge(adapted: Any) -> Any:
    """Return the base of a peft model with the adapter added to its weights. Raises CheckpointError for learnt prompts,
    which are no part of a weight, and for other adapters that cannot be added.
    """
    config = adapted.active_peft_config
    kind, instead = config.peft_type.value, "use its folder with peft as it is, without merging"
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise CheckpointError(
            f"the adapter holds prompts or prefixes that were learnt ({kind}), which are no part of any weight: "
            f"{instead}"
        )
    if getattr(config, "layer_replication", None):
        raise CheckpointError(
            f"layers of the base are used several times (layer_replication), each time with another part of the "
            f"adapter, and have one weight for all of them: {instead}"
        )
    untied = _untie_adapted(adapted)
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"peft cannot add this adapter ({kind}) to weights ({first_line(error)}): {instead}"
        ) from error
    if untied:
        merged.config.tie_word_embeddings = False
    return merged


def load_base(adapter: Path, base: str, dtype: str | torch.dtype) -> Any:
    """Load the model below an adapter, as it was when the adapter was trained: of the revision that the adapter names,
    a classifier if the adapter has the head of one, and with rows for the tokens that were added to its vocabulary.

    Args:
        base: its name or folder.
    """
    peft = peft_library(_PURPOSE)
    with loading("adapter", str(adapter)):
        config = peft.PeftConfig.from_pretrained(str(adapter))
        weights = peft.load_peft_weights(str(adapter), "cpu")
    options: dict[str, Any] = {"dtype": dtype}
    # Of the base that the adapter names: another one may have no such branch.
    if config.revision is not None and base == config.base_model_name_or_path:
        options["revision"] = config.revision
    built = (config.auto_mapping or {}).get("base_model_class", "")
    labels = None
    if config.task_type == "SEQ_CLS" or built.endswith("ForSequenceClassification"):
        heads = [weight for name, weight in weights.items() if _is_head(name)]
        labels = len(heads[-1]) if heads else None
    try:
        model: Any = load_model(base, options, labels=labels)
    except ModelError as error:
        raise ModelError(
            f"{error}. It is the base of the adapter {adapter}; --base names its place"
        ) from error
    if (rows := _rows(model, config, weights)) > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(rows)
    return model


def _is_head(name: str) -> bool:
    return name.endswith(".weight") and bool(set(name.split(".")) & set(HEADS))


def _rows(model: Any, config: Any, weights: Mapping[str, Tensor]) -> int:
    """The least rows of the embedding on which an adapter was trained."""
    trained = getattr(config, "trainable_token_indices", None) or []
    tokens = [token for some in trained.values() for token in some] if isinstance(trained, dict) else trained
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    whole = [
        len(weight) for name, weight in weights.items() if name.endswith(tuple(f"{n}.weight" for n in names))
    ]
    return max([*whole, *(token + 1 for token in tokens)], default=0)


def with_adapter(model: Any, adapter: Path) -> Any:
    """Put the adapter of a folder on its base. Raises CheckpointError if the model has no place for a weight of it, and
    ModelError if the files of the adapter are damaged.
    """
    peft = peft_library(_PURPOSE)
    with loading("adapter", str(adapter)), warnings.catch_warnings():
        # Of weights that do not fit, which are an error below.
        warnings.filterwarnings("ignore", "Some weights of .* were not initialized")
        weights = peft.load_peft_weights(str(adapter), "cpu")
        adapted = peft.PeftModel.from_pretrained(
            model, str(adapter), is_trainable=False, ignore_mismatched_sizes=True
        )
    placed = peft.get_peft_model_state_dict(adapted, save_embedding_layers=True)
    differ = [name for name, weight in weights.items() if weight.shape != placed.get(name, weight).shape]
    if differ:
        sizes = f"{list(weights[differ[0]].shape)} there and {list(placed[differ[0]].shape)} on this base"
        raise CheckpointError(
            f"{adapter} does not fit its base: {shorten(sorted(differ))} ({differ[0]} has the shape {sizes}). Name the "
            "model that it was trained on with --base"
        )
    if astray := weights.keys() - placed.keys():
        raise CheckpointError(
            f"{adapter} has weights that a {type(model).__name__} has no place for: {shorten(sorted(astray))}. Load "
            "the base with the class that the adapter was trained on, and put the adapter on it with peft"
        )
    return adapted


def _untie_adapted(model: Any) -> bool:
    """Separate the embedding and the head of a model that share a weight, if one of them has an adapter of its own,
    which would be added to both. Return True if they were separated.
    """
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    adapted = [layer for layer in layers if hasattr(layer, "base_layer")]
    own = [getattr(layer, "base_layer", layer) for layer in layers]
    if not adapted or None in layers or own[0].weight is not own[1].weight:
        return False
    own[1].weight = torch.nn.Parameter(own[1].weight.detach().clone(), requires_grad=False)
    return True


def first_tokenizer(places: Sequence[str]) -> Any:
    """Return the tokenizer of the first folder or name that has one; None if none has. Raises ModelError for one that
    cannot be loaded: that of the next place may have other tokens.
    """
    auto = require("transformers", "load a tokenizer").AutoTokenizer
    for place in places:
        if any(at_home(place).glob("tokenizer*.json")):
            with loading("tokenizer", place):
                return auto.from_pretrained(place)
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            return auto.from_pretrained(place)
    return None


def _processor_files(folders: Sequence[Path]) -> list[Path]:
    """What a processor of images or sound is made of besides its tokenizer, in the first of the folders that has it."""
    return next((found for folder in folders if (found := sorted(folder.glob("*processor*.json")))), [])


def base_of(adapter: Path) -> str:
    """Return the name or folder of the model that an adapter was trained on. Raises CheckpointError if there is no
    adapter, or it does not name its base.
    """
    path = adapter / ADAPTER_CONFIG
    if not path.is_file() or not (adapter / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{adapter} holds no adapter: there is no {ADAPTER_WEIGHTS} with its configuration"
        )
    config = read(path, Files(), allow_nan=True)
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not name:
        raise CheckpointError(f"{path} does not name the base of the adapter; give it with --base")
    return str(name)


_ARGUMENTS = "training_args.json"


def export_quantized(source: Folder, target: Path, scheme: str, options: ExportOptions) -> str:
    """Write the weights of `source`, quantized, with configuration and tokenizer into the folder `target`. Return the
    scheme.

    Args:
        scheme: a key of `QAT_SCHEMES`, or `TRAINED_SCHEME`.
        options: `dtype` is that of the weights that are not quantized.

    Raises:
        CheckpointError: it holds an adapter, or the folder exists.
        ConfigError: the scheme is not known, or cannot be had of this model or on this machine.
    """
    if find_weights(source) == ADAPTER_WEIGHTS:
        raise CheckpointError(
            f"{source.path} holds an adapter: merge it first (--merge), and quantize the result"
        )
    if scheme == TRAINED_SCHEME:
        scheme = _trained_for(source)
    if scheme == "float8" and not torch.cuda.is_available():
        fix = "torchao rounds weights to float8 on a GPU that multiplies in it; export there, or use int8"
        raise ConfigError(Problem("--quantize", scheme, f"needs a GPU: {fix}"))
    if scheme == "float8":  # torchao rounds weights in bfloat16 alone to it
        if options.dtype not in (None, torch.bfloat16):
            raise ConfigError(
                Problem("--dtype", str(options.dtype), "weights beside float8 are in bf16: leave it out")
            )
        options = replace(options, dtype=torch.bfloat16)
    export_folder(source, target, options, finish=lambda new, files: _quantize(new, scheme, options, files))
    return scheme


def _trained_for(source: Folder) -> str:
    """The `qat` of the run that saved the checkpoint."""
    scheme = None
    if _ARGUMENTS in source:
        path = source.path / _ARGUMENTS
        arguments = read(path, source.files, allow_nan=True)
        scheme = arguments.get("qat") if isinstance(arguments, dict) else None
    if scheme in QAT_SCHEMES:
        return str(scheme)
    fix = f"the checkpoint was not trained with qat, so name one: {', '.join(QAT_SCHEMES)}"
    raise ConfigError(Problem("--quantize", None, fix))


def _quantize(folder: Path, scheme: str, options: ExportOptions, files: Files) -> None:
    """Replace the weights in a folder of a model by quantized ones."""
    apply_qat(load_model(str(folder), {"dtype": "auto"}, empty=True), scheme)  # refuses what training refuses
    config = require("transformers", "quantize a model").TorchAoConfig(quantized_config(scheme))
    model: Any = load_model(str(folder), {"dtype": "auto", "quantization_config": config})
    new = folder / "quantized"
    model.save_pretrained(new, max_shard_size=options.max_shard_size)
    for path in list(folder.glob("*.safetensors*")):
        files.remove_file(path)
    for path in list(new.iterdir()):
        files.sync_file(path)
        files.rename(path, folder / path.name)
    new.rmdir()
