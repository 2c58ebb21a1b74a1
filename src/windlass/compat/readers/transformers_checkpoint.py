"""Reader of checkpoints that transformers' Trainer wrote.

    trainer_state.json                           the step, the epoch, what was logged, the best metric
    model.safetensors, pytorch_model.bin, or several of either with an index; adapter_model.safetensors
    optimizer.pt, scheduler.pt, scaler.pt        files of torch.save; see `torch_file`
    rng_state*.pth, training_args.bin            never read

Such a folder lists neither its files nor their hashes. Opening it checks what can be checked without loading tensors:
the header of every file that will be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.checkpoint import strict_json
from windlass.checkpoint.files import Files
from windlass.checkpoint.foreign import ForeignCheckpoint
from windlass.checkpoint.history import checked_state
from windlass.checkpoint.names import canonical_names, shorten
from windlass.checkpoint.optimizer_state import IMPLEMENTATION, load_optimizer_state
from windlass.checkpoint.stored import open_folder, open_weights
from windlass.compat.readers.torch_file import StoredTensor, open_torch_file
from windlass.core.errors import CheckpointError
from windlass.core.logs import get_logger
from windlass.core.types import State
from windlass.optim.groups import decay_parameter_names

Division = list[list[str]]  # the parameters' names, by group
_RATES = frozenset({"lr", "initial_lr"})
# Options that depend on the version of torch and do not identify an optimizer.
_DECOUPLED = "decoupled_weight_decay"
_OF_VERSIONS = frozenset({"params", "param_names", "maximize", _DECOUPLED})
# What torch's optimizers read of the state of a parameter that has one, and of one with such an option of its group.
_ADAM = ("step", "exp_avg", "exp_avg_sq")
_READ = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.RMSprop: ("step", "square_avg"),
    torch.optim.SGD: (),
}
_READ_WITH = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
_logger = get_logger(__name__)


def named_state(
    path: Path, tree: Any, optimizer: torch.optim.Optimizer, model: nn.Module, with_rates: bool
) -> State:
    """The state for `optimizer_state.load_optimizer_state`, with `StoredTensor`s for tensors.

    The options of a group are the saved ones if all its parameters had the same. If they had not (some decayed and
    others did not), those of `optimizer` are kept, with a warning. Raises CheckpointError if the file does not have
    such a state, or one of another optimizer or other parameters.

    Args:
        path, tree: the file and its content.
    """
    groups, entries = _parts(path, tree)
    short = canonical_names(dict(model.named_parameters()))
    shapes = {short[name]: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    canonical = [
        [[short[name] for name in names] for names in one if names] for one in _divisions(optimizer, model)
    ]
    names = _fitting(path, groups, entries, shapes, canonical)
    numbers = {
        number: name
        for group, members in zip(groups, names, strict=True)
        for number, name in zip(group["params"], members, strict=True)
    }
    present = _present_groups(optimizer, model, short)
    _check_kind(path, groups[0], optimizer.param_groups[0])
    saved = {name: group for group, members in zip(groups, names, strict=True) for name in members}
    by_name = {numbers[number]: entry for number, entry in entries.items()}
    _check_entries(path, type(optimizer), saved, by_name)
    ignored = frozenset({"params", "param_names"} | (frozenset() if with_rates else _RATES))
    return {
        "shapes": {name: list(shapes[name]) for members in present for name in members},
        "state": by_name,
        "groups": [
            {"names": members, "options": _options(members, saved, ignored, path)} for members in present
        ],
    }


def _parts(path: Path, tree: Any) -> tuple[list[dict[str, Any]], dict[Any, dict[Any, Any]]]:
    groups, entries = (
        (tree.get("param_groups"), tree.get("state")) if isinstance(tree, dict) else (None, None)
    )
    if not isinstance(groups, list) or not isinstance(entries, dict):
        raise CheckpointError(f"{path} does not hold the state of an optimizer: param_groups and state")
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise CheckpointError(f"{path} is malformed: a group lists no parameters")
    groups = [group for group in groups if group["params"]]  # e.g. if all parameters decay
    numbers = [number for group in groups for number in group["params"]]
    if not numbers or not all(type(number) is int for number in numbers) or len(set(numbers)) != len(numbers):
        raise CheckpointError(f"{path} is malformed: parameters are not numbered, or one comes twice")
    if not entries.keys() <= set(numbers) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise CheckpointError(f"{path} is malformed: there is state of a parameter that is in no group")
    return groups, entries


def _fitting(
    path: Path,
    groups: list[dict[str, Any]],
    entries: dict[Any, dict[Any, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    divisions: list[Division],
) -> Division:
    """The first division whose groups have the saved sizes and whose parameters have the saved shapes."""
    sizes = [len(group["params"]) for group in groups]
    wrong: list[str] = []
    for division in divisions:
        if [len(members) for members in division] != sizes:
            continue
        wrong = [
            f"{name} is {list(shapes[name])}"
            for group, members in zip(groups, division, strict=True)
            for number, name in zip(group["params"], members, strict=True)
            if not _may_belong(entries.get(number, {}), shapes[name])
        ]
        if not wrong:
            return division
    why = f"; of another shape: {shorten(wrong)}" if wrong else ""
    known = " or ".join(str([len(members) for members in division]) for division in divisions)
    raise CheckpointError(
        f"{path} is the state of an optimizer with groups of {sizes} parameters, which this model does not have in "
        f"that order (its groups: {known}){why}. Build model and optimizer as they were when it was saved"
    )


def _may_belong(entry: Mapping[Any, Any], shape: tuple[int, ...]) -> bool:
    """Return True if all tensors have the shape of the parameter or of its mean over one of the last two axes, or are
    one number.
    """
    # Adafactor keeps such means in place of the second moment (Shazeer and Stern 2018, arXiv:1804.04235).
    allowed = {shape, shape[:-1], (*shape[:-2], *shape[-1:])}
    tensors = [value for value in entry.values() if isinstance(value, StoredTensor)]
    return all(tensor.shape in allowed or tensor.shape in ((), (1,)) for tensor in tensors)


def _present_groups(optimizer: torch.optim.Optimizer, model: nn.Module, short: Mapping[str, str]) -> Division:
    names = {id(parameter): short[name] for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]


def _check_kind(path: Path, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Check that the saved options are those of this optimizer; its name is not saved."""
    other = (saved.keys() ^ present.keys()) - _RATES - _OF_VERSIONS - IMPLEMENTATION
    # Older versions of torch do not save it; where both have it, it tells an Adam from an AdamW.
    if _DECOUPLED in saved.keys() & present.keys() and saved[_DECOUPLED] != present[_DECOUPLED]:
        other.add(_DECOUPLED)
    if other:
        here, there = (
            [f"{key}={group[key]}" for key in sorted(other & group.keys())] for group in (present, saved)
        )
        raise CheckpointError(
            f"{path} is the state of another optimizer than this run's: it has the options {there}, and this one "
            f"{here}. Set optim to the one that it was saved with"
        )


def _check_entries(
    path: Path, kind: type, saved: Mapping[str, Mapping[str, Any]], entries: Mapping[str, Mapping[Any, Any]]
) -> None:
    """Check that nothing is missing of which an update of an optimizer of torch makes the next state."""
    if kind not in _READ:
        return
    for name, entry in entries.items():
        read = (*_READ[kind], *(key for option, key in _READ_WITH.items() if saved[name].get(option)))
        missing = [key for key in read if key not in entry]
        if missing:
            raise CheckpointError(
                f"{path} is malformed: the state of {name} lacks {shorten(missing)}, which {kind.__name__} needs. "
                "Start a new run from its weights: load them into the model and call train()"
            )


def _options(
    members: list[str], saved: Mapping[str, Mapping[str, Any]], ignored: frozenset[str], path: Path
) -> dict[str, Any]:
    """The saved options that all of `members` have in common."""
    first = saved[members[0]] if members else {}
    options = {}
    for key, value in first.items():
        differing = [name for name in members if key not in ignored and saved[name].get(key) != value]
        if differing:
            _logger.warning(
                "%s has another %s for some parameters of one group than for the others; this run's own holds for all "
                "of them (%s)",
                path,
                key,
                shorten(differing),
            )
        elif key not in ignored:
            options[key] = value
    return options


WRITER = "transformers' Trainer"
STATE_NAME = "trainer_state.json"
OPTIMIZER_NAME, SCHEDULE_NAME, SCALER_NAME = "optimizer.pt", "scheduler.pt", "scaler.pt"
# A folder with a state and one of these is a checkpoint; one with a state alone may be a saved model.
_SIGNS = (OPTIMIZER_NAME, SCHEDULE_NAME, "optimizer.bin", "training_args.bin", "latest")
# Layouts that are not read, and what they are.
_NOT_READ = {
    "pytorch_model_fsdp_0": "FSDP's sharded state dict, whose index is a pickle",
    "optimizer_0": "FSDP's sharded state dict, whose index is a pickle",
    "optimizer.bin": "FSDP's full state dict of the optimizer",
    "latest": "DeepSpeed's own layout, of which only weights are read",
}


class TransformersCheckpoint(ForeignCheckpoint):
    writer = WRITER

    def load_optimizer_of(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, *, with_rates: bool
    ) -> None:
        """Load `optimizer.pt`, which numbers parameters in the order of its groups. Raises CheckpointError if there is
        no such file, its state fits none of the known divisions of the parameters into groups, or it belongs to another
        kind of optimizer.
        """
        path = self.folder / OPTIMIZER_NAME
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing (save_only_model=True leaves it out), so a run can't be continued from it. Start a "
                "new run from its weights: load them into the model and call train()"
            )
        with open_torch_file(path, self.plain_files) as file:
            state = named_state(path, file.tree, optimizer, model, with_rates)
            load_optimizer_state(optimizer, model, file.materialised(state))
        # With this call torch converts what its earlier releases saved otherwise, such as counts that were no tensors.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    def schedule_state(self) -> State:
        state = self._content(SCHEDULE_NAME)
        if not isinstance(state, dict):
            raise CheckpointError(
                f"{self.folder / SCHEDULE_NAME} is missing or holds no state, and this run's scheduler keeps a count "
                "of its own that it must continue"
            )
        return state

    def learning_rates(self) -> list[float] | None:
        state = self._content(SCHEDULE_NAME)
        rates = state.get("_last_lr") if isinstance(state, dict) else None
        known = isinstance(rates, list) and rates and all(isinstance(rate, float) for rate in rates)
        return rates if known else None

    def scaler_state(self) -> State:
        return scaler_state(self._content(SCALER_NAME))

    def _content(self, name: str) -> Any:
        """The content of a file of torch.save, None if it does not exist. Raises CheckpointError if it holds more than
        tensors and plain values, or is damaged.
        """
        if not (self.folder / name).exists():
            return None
        with open_torch_file(self.folder / name, self.plain_files) as file:
            return file.materialised(file.tree)

    def check(self) -> None:
        """Check the header of every file that will be read. Raises CheckpointError if a file is missing or damaged."""
        with open_weights(open_folder(self.folder)):
            pass
        for name in (OPTIMIZER_NAME, SCHEDULE_NAME, SCALER_NAME):
            if (self.folder / name).exists():
                with open_torch_file(self.folder / name, self.plain_files):
                    pass


def is_of_format(folder: Path) -> bool:
    """Return True if a folder looks like a checkpoint of transformers' Trainer."""
    return (folder / STATE_NAME).exists() and any((folder / name).exists() for name in _SIGNS)


def open_checkpoint(folder: Path, files: Files) -> TransformersCheckpoint:
    """Open such a checkpoint and check that it is complete. Raises CheckpointError if it is not, or has a layout that
    cannot be read; the file is named.
    """
    for name, what in _NOT_READ.items():
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder} cannot be continued: {folder / name} is {what}. Save it again there with whole tensors (one "
                "process without sharding), or start from its weights: load them into the model and call train()"
            )
    path = folder / STATE_NAME
    # transformers writes the NaN of a loss as Python's JSON does.
    state = strict_json.read(path, files, allow_nan=True)
    checkpoint = TransformersCheckpoint(folder, checked_state(path, state), files)
    checkpoint.check()
    return checkpoint


def _divisions(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Division]:
    """How the parameters may have been put into groups: as this run does, as transformers does, or in one."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    by_id = {id(parameter): name for name, parameter in trained.items()}
    present = [[by_id[id(p)] for p in group["params"] if id(p) in by_id] for group in optimizer.param_groups]
    # transformers knows this class of norms alone, and others by the names of their parameters.
    decaying = set(decay_parameter_names(model, norms=(nn.LayerNorm,)))
    theirs = [
        [name for name in trained if name in decaying],
        [name for name in trained if name not in decaying],
    ]
    return [present, theirs, [list(trained)]]


def scaler_state(saved: Any) -> State:
    """The state of a `torch.amp.GradScaler` as `precision.scaler.LossScaler` takes it, empty if there is none. Raises
    CheckpointError if `saved` is not such a state.
    """
    if not saved:
        return {}
    scale, streak = (
        (saved.get(key) for key in ("scale", "_growth_tracker")) if isinstance(saved, dict) else (0, 0)
    )
    if not isinstance(scale, float) or not isinstance(streak, int) or not scale > 0:
        raise CheckpointError(f"{SCALER_NAME} of the checkpoint does not hold the state of a loss scaler")
    return {
        "scale": torch.tensor(scale),
        "growth_streak": torch.tensor(streak, dtype=torch.int32),
        "skipped": 0,
        "skips_in_a_row": 0,
    }
