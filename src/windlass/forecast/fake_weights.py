"""Models whose weights have shapes and no memory, built by the code that builds the real ones."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from windlass.checkpoint.adapters import ADAPTER_CONFIG
from windlass.checkpoint.files import Files
from windlass.checkpoint.tensor_file import open_tensors
from windlass.core.attributes import attributes_of
from windlass.core.errors import ModelError
from windlass.core.optional import is_available, require
from windlass.core.tensors import is_fake
from windlass.forecast.packed_layers import pack

_LOADING_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
"""The keys of what `from_pretrained` reports beside the model."""


def new_mode() -> FakeTensorMode:
    """A mode whose tensors may meet real ones: those of a script, and constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def fake_weights(mode: FakeTensorMode) -> Iterator[None]:
    """Within the body, the parameters of all modules are made without memory, and `from_pretrained` of transformers
    reads a configuration and no weights. Raises ModelError for a lazy module, whose parameters have no shape yet.
    """
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and is_lazy(param):
            raise ModelError(
                f"{type(module).__name__}.{name} is lazy: it has no shape before the first forward, so its memory "
                "cannot be known; build the module with explicit sizes"
            )
        register(module, name, param if param is None else without_memory(param, mode))

    apply: Any = nn.Module._apply

    def apply_to_fake(module: nn.Module, change: Any, recurse: bool = True) -> Any:
        # PyTorch would swap such parameters for new ones, which other objects that know them prevent.
        fake = {name: p for name, p in module._parameters.items() if p is not None and is_fake(p)}
        order = list(module._parameters)
        for name, param in fake.items():
            with torch.no_grad():
                param.data = change(param.detach())
            del module._parameters[name]
        try:
            return apply(module, change, recurse)
        finally:
            module._parameters.update({n: fake.get(n, module._parameters.get(n)) for n in order})

    replaced = attributes_of(nn.Module, register_parameter=register_fake, _apply=apply_to_fake)
    with replaced, _unloaded(mode), _undrawn():
        yield


def without_memory(param: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    """A parameter like this one without memory; the same one each time, so that ties stay. On the CPU, whatever its
    device is: what is planned for another device has the same shapes there.
    """
    if is_fake(param) or isinstance(param, DTensor):
        return param
    if param.device.type not in ("cpu", "meta"):
        raise ModelError(
            f"a parameter is on {param.device} already; build the model on the CPU to plan its run"
        )
    known: nn.Parameter | None = getattr(param, "_without_memory", None)
    if known is None:
        with mode:
            empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="cpu")
        known = nn.Parameter(empty, requires_grad=param.requires_grad)
        param._without_memory = known  # type: ignore[attr-defined]
    return known


def take_memory(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace the parameters of `model` that have memory, in place. Buffers stay: code may read their values."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = without_memory(param, mode)


def _undrawn() -> contextlib.AbstractContextManager[None]:
    """PyTorch draws a truncated normal distribution again until all values are within its limits."""
    module: Any = nn.init
    own = module._no_grad_trunc_normal_

    def draw(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return tensor if is_fake(tensor) else own(tensor, *args, **options)

    return attributes_of(module, _no_grad_trunc_normal_=draw)


def _unloaded(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """`from_pretrained` of transformers makes a model of the configuration, on the CPU, without memory."""
    if not is_available("transformers"):
        return contextlib.nullcontext()

    def from_pretrained(cls: Any, name: Any, /, *args: Any, config: Any = None, **options: Any) -> Any:
        given = options.pop("quantization_config", None)
        dtype = options.pop("dtype", None) or options.pop("torch_dtype", None)
        informs = options.pop("output_loading_info", False)
        _refuse_adapter(name, options)
        if hasattr(config, "to_dict"):
            config = copy.deepcopy(config)  # of the caller, who may make another model of it
        else:
            place = name if config is None else config
            config, options = cls.config_class.from_pretrained(place, return_unused_kwargs=True, **options)
        quantization = _form(given or getattr(config, "quantization_config", None))
        config.name_or_path = name  # by which the tokenizer of a model is found
        if dtype in (None, "auto"):
            dtype = config.dtype or _stored_dtype(Path(name, options.get("subfolder") or ""))
        chosen = {} if dtype is None else {"dtype": dtype}
        for option in ("attn_implementation", "experts_implementation"):
            if options.get(option) is not None:
                chosen[option] = options[option]
        with mode:
            model = cls._from_config(config, **chosen)
            _keep_in_fp32(model)
            if quantization is not None:
                pack(model, quantization)
        # As `from_pretrained` returns it.
        model.eval()
        # No weight was read that could be missing.
        return (model, {key: set[Any]() for key in _LOADING_INFO}) if informs else model

    kind: Any = require("transformers", "look at a model").PreTrainedModel
    return attributes_of(kind, from_pretrained=classmethod(from_pretrained))


def _refuse_adapter(name: Any, options: Mapping[str, Any]) -> None:
    """Raise ModelError for an adapter: `from_pretrained` puts it on its base, which would be planned without it."""
    # An automatic class has replaced the name by that of the base.
    found = (options.get("adapter_kwargs") or {}).get("_adapter_model_path")
    if found is None and not Path(name, options.get("subfolder") or "", ADAPTER_CONFIG).is_file():
        return
    place = str(found or name)
    raise ModelError(
        f"{place} holds an adapter, which a plan does not load with the model: plan the base with "
        f"peft.PeftModel.from_pretrained(base, {place!r}, is_trainable=True), or of the merged model "
        f"(windlass checkpoint export {place} MERGED --merge)"
    )


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """That of the first weights in a folder, which decide it if the configuration does not."""
    for file in sorted(folder.glob("*.safetensors"))[:1]:
        with open_tensors(file, Files()) as tensors:
            found = (tensors.shaped(name).dtype for name in tensors.names)
            return next((dtype for dtype in found if dtype.is_floating_point), None)
    return None


def _keep_in_fp32(model: Any) -> None:
    """As loading does with the weights that the class of a model names, for some dtypes of the others."""
    kept = [name.replace("*", ".*") for name in model._get_dtype_plan(model.config.dtype)]
    for name, parameter in model.named_parameters():
        if any(re.search(each, name) for each in kept):
            parameter.data = parameter.data.float()


def _form(quantization: Any) -> Any:
    """How weights are quantized, by an option or a configuration, which may be a mapping; None if they are whole."""
    if not isinstance(quantization, dict):
        return quantization
    return require("transformers.quantizers", "look at a model").AutoQuantizationConfig.from_dict(
        quantization
    )


_LARGEST_KNOWN = 2**20
"""Elements of the largest tensor that is computed with values: masks and positions of a batch, and no activations."""


def with_values(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor of a batch without memory, whose values are known while `known_values` is open: masks, positions, labels
    decide what a forward computes.
    """
    known = not tensor.is_floating_point() and tensor.numel() <= _LARGEST_KNOWN
    if known:
        # A view would be made of its base, which is made once, and would have no values the second time.
        with unset_fake_temporarily():
            tensor = tensor.clone()
    return mode.fake_tensor_converter.from_real_tensor(mode, tensor, make_constant=known)


@contextlib.contextmanager
def known_values() -> Iterator[None]:
    """Within the body, what follows from the values of a batch alone is computed, and transformers chooses its kernels
    as for tensors with memory.
    """
    from torch._subclasses import fake_tensor

    helpers: Any = sys.modules.get("transformers.utils.import_utils")
    chosen = {"is_fake_tensor": lambda value: False} if hasattr(helpers, "is_fake_tensor") else {}
    # By default PyTorch keeps the values of one element only.
    limit = attributes_of(fake_tensor, CONSTANT_NUMEL_LIMIT=_LARGEST_KNOWN)
    with limit, attributes_of(helpers, **chosen):
        yield
