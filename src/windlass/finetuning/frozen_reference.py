"""The reference that a model is compared with: a second model, the adapter switched off, or numbers of the batch."""

from __future__ import annotations

import contextlib
import copy
import dis
import hashlib
import inspect
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from windlass import __version__
from windlass.checkpoint.files import Files
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.locations import home_folder
from windlass.core.logs import get_job_logger
from windlass.core.optional import version_of
from windlass.dist.gang import Gang
from windlass.finetuning.answer_log_probabilities import answer_log_probabilities
from windlass.finetuning.peft_adapters import is_peft_model
from windlass.finetuning.reference_config import ReferenceConfig
from windlass.finetuning.tuned_model import TunedModel
from windlass.text.pair_encoder import PairRows
from windlass.transforms.buffers import inner_tensors
from windlass.transforms.evaluating import evaluating

REFERENCE_ADAPTER = "ref"


class Reference:
    """Computes log-probabilities of answers under the reference. Subclasses define `_model`."""

    @contextlib.contextmanager
    def _model(self, trained: nn.Module) -> Iterator[nn.Module]:
        """Context in which the yielded module is the reference. `trained` is the model, in its wrappers."""
        raise NotImplementedError
        yield

    def log_probabilities(
        self, trained: nn.Module, inputs: Mapping[str, Any], ld_alpha: float | None = None
    ) -> Tensor:
        """The log-probability of each answer, shape (rows,); see `answer_log_probabilities`."""
        # In evaluation mode also without dropout: a model may read its shares from its configuration, or draw noise for
        # its router.
        with self._model(trained) as model, evaluating(model):
            return answer_log_probabilities(model, inputs, ld_alpha).sums


class SecondModel(Reference):
    """A frozen model beside the trained one. `module` is prepared for the devices of the run."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @contextlib.contextmanager
    def _model(self, trained: nn.Module) -> Iterator[nn.Module]:
        yield self.module


class WithoutAdapter(Reference):
    """The trained model with its adapter switched off, or with the copy of the adapter that training began with.

    Args:
        adapted: the peft model.
    """

    def __init__(self, adapted: Any) -> None:
        self._adapted = adapted

    @contextlib.contextmanager
    def _model(self, trained: nn.Module) -> Iterator[nn.Module]:
        adapted = self._adapted
        # A script may have loaded its reference under that name, where TRL looks for it too.
        if REFERENCE_ADAPTER not in adapted.peft_config:
            with adapted.disable_adapter():
                yield trained
            return
        before = adapted.active_adapter
        trainable = {parameter for parameter in adapted.parameters() if parameter.requires_grad}
        adapted.set_adapter(REFERENCE_ADAPTER)
        try:
            yield trained
        finally:
            adapted.set_adapter(before)
            for parameter in adapted.parameters():  # peft makes the weights of the active adapter trainable
                parameter.requires_grad_(parameter in trainable)


class FirstModel(Reference):
    """The trained model itself, before it is trained."""

    @contextlib.contextmanager
    def _model(self, trained: nn.Module) -> Iterator[nn.Module]:
        yield trained


@dataclass(frozen=True, slots=True)
class ReferenceChoice:
    """Which reference a trainer has. A model that it is copied from is copied when this is made."""

    model: nn.Module  # the trained one
    given: nn.Module | None  # the reference that the script passed
    precomputed: bool  # the reference is needed before training alone

    @property
    def source(self) -> nn.Module:
        """The module that the reference's weights are in."""
        return self.model if self.given is None else self.given

    def prepared(
        self, accelerator: Any, in_stages: Callable[[nn.Module], bool], *, sharded: bool = False
    ) -> Reference:
        """The reference, on the devices of the run. Collective.

        Args:
            in_stages: divides a model into the stages of a pipeline; returns False without one.
            sharded: models are divided over ranks when they are prepared.
        """
        if self.given is not None:
            given = freeze(self.given)
            return SecondModel(given if in_stages(given) else accelerator.prepare(given))
        if is_peft_model(self.model):
            return WithoutAdapter(self.model)
        if self.precomputed and not sharded:
            return FirstModel()
        return SecondModel(accelerator.prepare(freeze(copy.deepcopy(self.model))))


def choose_reference(
    ref_model: nn.Module | None, base: TunedModel, args: ReferenceConfig, *, had_adapter: bool
) -> ReferenceChoice:
    """Decide what the model is compared with, and set dropout to 0 if that is asked for.

    Args:
        ref_model: the reference that the script passes, if it does.
        had_adapter: the script passes a model that has an adapter, which is trained further.

    Raises:
        ConfigError: the reference is not a model, or the model itself, or cannot be moved as `sync_ref_model` asks.
    """
    if not isinstance(ref_model, nn.Module | None):
        fix = "must be a model: AutoModelForCausalLM.from_pretrained(...) loads it"
        raise ConfigError(Problem("ref_model", ref_model, fix))
    if ref_model is base.model:
        fix = "`model` and `ref_model` cannot be the same object; leave it out, and a copy of `model` is made for you"
        raise ConfigError(Problem("ref_model", type(ref_model).__name__, fix))
    adapted = is_peft_model(base.model) and ref_model is None
    if args.sync_ref_model and adapted:
        fix = "needs a reference of its own, and with an adapter it is the model without it; leave it out"
        raise ConfigError(Problem("sync_ref_model", True, fix))
    if args.sync_ref_model and ref_model is not None and _shapes(ref_model) != _shapes(base.model):
        fix = "needs a `ref_model` with the parameters of the model, and without an adapter; leave it out"
        raise ConfigError(Problem("sync_ref_model", True, fix))
    if args.disable_dropout:
        for model in (base.model, ref_model):
            if model is not None:
                without_dropout(model)
    if adapted and had_adapter:
        keep_adapter(base.model)
    return ReferenceChoice(base.model, ref_model, args.precompute_ref_log_probs)


def freeze(model: nn.Module) -> nn.Module:
    """`model`, in evaluation mode and without gradients."""
    return model.eval().requires_grad_(False)


def _shapes(model: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in model.parameters()]


def keep_adapter(model: Any) -> None:
    """Add a frozen copy of the active adapter to a peft model, for the reference. A second call changes nothing."""
    if REFERENCE_ADAPTER in model.peft_config:
        return
    active = str(model.active_adapter)
    trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
    before = _tensors(model)
    config = copy.deepcopy(model.peft_config[active])
    config.inference_mode = True  # some kinds refuse a second adapter that is trained
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # others are computed from the base, and change it
    model.add_adapter(REFERENCE_ADAPTER, config)
    model.set_adapter(active)
    tensors = _tensors(model)
    with torch.no_grad():
        for name in tensors.keys() - before.keys():
            parts = name.split(".")
            # The name of the adapter is the last part, or it is followed by those of weights.
            parts[len(parts) - 1 - parts[::-1].index(REFERENCE_ADAPTER)] = active
            tensors[name].copy_(tensors[".".join(parts)])
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trainable)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    named = (model.named_parameters, model.named_buffers)
    return {name: tensor for each in named for name, tensor in each(remove_duplicate=False)}


# The attributes in which modules of torch, transformers and peft keep the share that a function of dropout gets.
_NAMES = """activation_dropout attention_dropout attn_drop attn_dropout attn_dropout_p attn_pdrop
    classifier_dropout_prob drop drop_path drop_prob drop_rate dropout dropout_p dropout_prob dropout_rate dropout_ratio
    emb_pdrop embedding_dropout hidden_dropout hidden_dropout_prob layerdrop module_dropout positional_dropout
    projector_dropout rank_dropout resid_pdrop residual_dropout"""
_SHARES = frozenset(_NAMES.split())


def without_dropout(model: nn.Module) -> None:
    """Set all dropout of a model to 0: its layers, and the shares that modules keep for functions. Raises ConfigError
    for one that is not known to be a share, or that is read from the configuration in each forward.
    """
    unknown = _read_in_forwards(model)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name in _SHARES or (name == "p" and "Dropout" in type(module).__name__):
                setattr(module, name, _without_shares(value))
            elif "drop" in name and _without_shares(value) != value:
                unknown.append(f"{type(module).__name__}.{name}={value}")
    if unknown:
        fix = (
            f"cannot switch off {', '.join(dict.fromkeys(unknown))}: set it to 0 before the model is built, or set "
            "disable_dropout=False"
        )
        raise ConfigError(Problem("disable_dropout", True, fix))


def _without_shares(value: Any) -> Any:
    """0 for a share; the same for those of several adapters; other values as they are."""
    if isinstance(value, dict):
        return {name: _without_shares(item) for name, item in value.items()}
    return 0.0 if isinstance(value, float) else value


def _read_in_forwards(model: nn.Module) -> list[str]:
    """The shares of dropout that forwards of the model's modules read from their configurations."""
    found = []
    for module in model.modules():
        fields = getattr(getattr(module, "config", None), "__dict__", {})
        shares = {name: value for name, value in fields.items() if "drop" in name and value}
        if any(_without_shares(value) != value for value in shares.values()):
            forward = inspect.unwrap(type(module).forward)
            read = set(shares)  # of what is not a function, such as a `functools.partial`, nothing is known
            if inspect.isfunction(forward):
                code = dis.get_instructions(forward)
                read = {field.argval for owner, field in pairwise(code) if owner.argval == "config"}
            found += [f"config.{name}={shares[name]}" for name in shares if name in read]
    return found


logger = get_job_logger(__name__)
_HASH = hashlib.sha256().digest_size
_PLACES = frozenset({"_name_or_path", "base_model_name_or_path", "transformers_version", "peft_version"})
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "torchao", "windlass")
_MOST = 1 << 34  # bytes that are read of such a file


@dataclass(frozen=True, slots=True)
class ReferencePass:
    """Runs a reference over datasets."""

    accelerator: Any  # the devices
    all_ranks: Gang  # those that share the samples of a batch compute the same rows
    # Batch on the host -> log-probability of each of its sequences, shape (sequences,), all first answers of its rows
    # before all second ones
    compute: Callable[[Any], Tensor]
    collator: Callable[[list[Any]], Any]  # list of samples -> batch
    batch_size: int  # rows of a batch
    key: str | None  # what the results depend on, besides the rows; None: they are not kept

    def add_to(self, rows: PairRows, names: Sequence[str]) -> PairRows:
        """Return `rows` with a column for each name: the log-probabilities of its answers. Collective."""
        path = None if self.key is None else _folder() / f"{_key_of(self.key, rows)}.bin"
        found = self._kept(path, (len(names), len(rows)))
        if found is None:
            found = self._computed(rows, len(names))
            if path is not None and self.accelerator.is_local_main_process:
                _keep(path, found)
            self.accelerator.wait_for_everyone()
        for name, values in zip(names, found, strict=True):
            rows = rows.with_numbers(name, values)
        return rows

    def _kept(self, path: Path | None, shape: tuple[int, int]) -> NDArray[np.float64] | None:
        """What is on the disk, if all ranks have it."""
        values = None if path is None else _read(path, shape)
        mine = torch.tensor([float(values is not None)], device=self.accelerator.device)
        if float(self.accelerator.gather(mine).min()) == 0.0:
            return None
        logger.info("using the log-probabilities of the reference that were computed before: %s", path)
        return values

    def _computed(self, rows: PairRows, width: int) -> NDArray[np.float64]:
        """Of each answer and row. Rows of one length are computed together; all ranks make as many forwards."""
        lengths = rows.lengths
        # The longest first: memory that does not suffice ends the computation at once, and not hours later.
        order = np.argsort(-(lengths[:, 0] + lengths[:, 1:].max(axis=1)), kind="stable")
        size, data = self.batch_size, self.all_ranks.over("data")
        is_first = self.all_ranks.over("model").rank == 0
        found = np.zeros((width, len(rows)))
        for start in range(0, len(order), size * data.size):
            group = order[start : start + size * data.size]
            mine = group[data.rank :: data.size]
            # Repeated to a whole batch: a rank without rows makes the forward that the others of a sharded model need.
            filled = np.resize(mine if len(mine) else group[:1], size)
            sums = self.compute(self.collator([rows[int(at)] for at in filled])).reshape(width, size)
            if is_first:  # ranks that share a batch have the same sums, which are added up below
                found[:, mine] = sums[:, : len(mine)].cpu().double().numpy()
        return self.all_ranks.sum(torch.from_numpy(found)).numpy()


def model_hash(model: nn.Module) -> str | None:
    """The SHA-256 of all parameters and buffers of a model that is not divided over ranks, and of its configuration and
    those of its adapters, in hex. None if it has modules of other code than that of `_LIBRARIES`: such code may change
    while the weights do not.
    """
    if any(_has_own_code(module) for module in model.modules()):
        return None
    digest = hashlib.sha256(type(model).__name__.encode())
    for config in (getattr(model, "config", None), *getattr(model, "peft_config", {}).values()):
        if hasattr(config, "to_dict"):
            # Equal weights are not an equal model: an epsilon, a rotation or a scale may differ.
            facts = {name: value for name, value in config.to_dict().items() if name not in _PLACES}
            digest.update(json.dumps(facts, sort_keys=True, default=_in_words).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in inner_tensors(tensor) or [tensor]:
            flat = part.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def rounding_of_device(device: torch.device) -> tuple[str | int, ...]:
    """What the rounding of a forward on this device depends on, besides the model."""
    if device.type == "cuda":
        return (torch.cuda.get_device_name(device), torch.get_float32_matmul_precision())
    return (device.type, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())


def _has_own_code(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in _LIBRARIES or "forward" in vars(module)


def _in_words(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _folder() -> Path:
    return home_folder(os.environ) / "reference"


def _key_of(key: str, rows: PairRows) -> str:
    versions = [version_of(name) for name in _LIBRARIES[:-1]]
    digest = hashlib.sha256(json.dumps([key, rows.answers, __version__, *versions]).encode())
    for values in (rows.rows.flat["input_ids"], rows.lengths, rows.kept):
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:32]


def _read(path: Path, shape: tuple[int, int]) -> NDArray[np.float64] | None:
    """The numbers of a file; None if it is missing or damaged."""
    try:
        content = Files().read(path, _MOST)
    except (CheckpointError, OSError):
        return None
    if (
        hashlib.sha256(content[_HASH:]).digest() != content[:_HASH]
        or len(content) != _HASH + 8 * shape[0] * shape[1]
    ):
        logger.warning("%s is damaged; the log-probabilities of the reference are computed again", path)
        return None
    return np.frombuffer(content[_HASH:], dtype="<f8").reshape(shape)


def _keep(path: Path, values: NDArray[np.float64]) -> None:
    content = np.ascontiguousarray(values, dtype="<f8").tobytes()
    files = Files()
    try:
        files.ensure_folder(path.parent)
        with files.replacing(path, f"-{secrets.token_hex(8)}") as new:
            files.write(new, [hashlib.sha256(content).digest(), content])
    except OSError as error:
        logger.warning("the log-probabilities of the reference were not kept: %s", error)
