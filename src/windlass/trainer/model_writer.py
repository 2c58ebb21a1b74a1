"""The files of a model: its weights, configurations and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from windlass.accelerator.saved_parts import SavedModel
from windlass.checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter
from windlass.checkpoint.codec import naming
from windlass.checkpoint.files import written_by
from windlass.checkpoint.opening import upload_files
from windlass.checkpoint.pretrained import (
    file_layout,
    has_configurations,
    overrides_saving,
    write_configurations,
)
from windlass.checkpoint.split import SPLIT_INDEX_NAME, save_split
from windlass.checkpoint.weights import LARGEST_FILE, WEIGHTS_NAME, save_weights
from windlass.core.errors import CheckpointError
from windlass.core.locations import local_folder
from windlass.core.logs import get_job_logger, showing_place, warn_once
from windlass.core.module_state import bare, state_of
from windlass.core.tensors import bits_of
from windlass.core.whole_file import write_whole
from windlass.dist.gang import Gang
from windlass.dist.lockstep import together
from windlass.dist.sharded import is_packed, local
from windlass.transforms.alone import Alone
from windlass.transforms.strategy import Strategy

logger = get_job_logger(__name__)

WriteModel = Callable[[Path, Mapping[str, Any] | None], None]
_WHOLE = (
    "the peft model trains other weights beside its adapter, or prompts from an encoder with layers: all of its "
    "weights are saved, under names that only the same peft model has, so from_pretrained does not read them. For a "
    "folder with the adapter alone, which peft reads, call trainer.model.save_pretrained(FOLDER)"
)


@dataclass(frozen=True, slots=True)
class WrittenBeside:
    """What is written beside the weights of a model."""

    tokenizer: Any  # or a processor; None if there is none
    arguments: Callable[[], Mapping[str, Any]]  # returns those of the run, as plain data

    @property
    def savable(self) -> Any:
        """The tokenizer or processor; None if it cannot be saved."""
        return self.tokenizer if hasattr(self.tokenizer, "save_pretrained") else None

    def arguments_file(self) -> dict[str, bytes]:
        """The arguments of the run, which `from_pretrained` does not read."""
        arguments = json.dumps(self.arguments(), indent=2, sort_keys=True, default=str)
        return {"training_args.json": f"{arguments}\n".encode()}


@dataclass(frozen=True, slots=True)
class SavedByScript:
    """What a script takes part in when its run is saved, for one save."""

    beside: WrittenBeside
    # Writes the model by the script's `_save`, from weights that were gathered if there are any; None: Windlass does
    write_model: WriteModel | None
    save_model: Callable[[Path], None] | None  # the script's own one, which every rank calls with a folder
    may_wait: bool  # none of its code needs the state of the run at that time, so it may be written in the background
    committed: Callable[
        [Path], None
    ]  # called with the folder once the checkpoint is committed, after `on_save`


class ModelWriter:
    """Writes a model so that `from_pretrained` reads it; only the adapter if nothing else is trained.

    Attributes:
        model, strategy: the bare model, and how it is spread over ranks.
        saved: what checkpoints have of the model.

    Args:
        strategy: None: one process holds the whole model.
    """

    def __init__(self, model: nn.Module, strategy: Strategy | None) -> None:
        self.model, self.strategy = model, strategy or Alone(model)
        self.saved = SavedModel(model, self.strategy)
        self._layout = file_layout(bare(model))
        self._tokenizer_version: Any = None
        self._tokenizer_files: dict[str, bytes] = {}

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is all this model trains; None if it trains other weights."""
        return self.saved.adapter

    @property
    def saves_own_way(self) -> bool:
        """Return True if the model has a `save_pretrained` of its own, which writes its weights and configurations."""
        return overrides_saving(bare(self.model)) and self.adapter is None

    def named(self, state: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return the name of the weights' file and what `layout` makes it of: a part of a state dict."""
        adapter = self.adapter
        if adapter is not None and adapter.names.keys() <= state.keys():
            return ADAPTER_WEIGHTS, adapter.weights(state)
        return WEIGHTS_NAME, state if self._layout is None else self._layout.select(state)

    def layout(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """What is written of the tensors that `named` returned: under other names in files, if the model has such."""
        return tensors if self._layout is None or self.adapter is not None else self._layout.convert(tensors)

    def write(self, folder: Path, state: Mapping[str, Any] | None, beside: WrittenBeside) -> None:
        """Write all files into a folder, with the weights of `state` (empty: none) or the model's own."""
        folder.mkdir(parents=True, exist_ok=True)
        small = beside.arguments_file()
        if self.saves_own_way and state != {}:
            model: Any = bare(self.model)
            model.save_pretrained(str(folder), state_dict=None if state is None else dict(state))
        else:
            self.write_weights(folder, state)
            small |= self._configurations(folder)
        if beside.savable is not None:
            small |= _saved_by(beside.savable, folder)
        for name, content in small.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)

    def write_weights(self, folder: Path, state: Mapping[str, Any] | None) -> None:
        """Write the weights of `state` (empty: none) or the model's own."""
        weights = state_of(self.model) if state is None else state
        if weights:
            name, tensors = self.named(weights)
            if name == WEIGHTS_NAME:
                save_split(folder, self.layout(tensors), LARGEST_FILE)
            else:
                save_weights(folder, self.layout(tensors), name=name)
            _warn_of_others(folder, name)

    def check_configurations(self, fix: str) -> None:
        """Check that the configurations can be written, of which transformers refuses some settings of generation only
        then. Raises CheckpointError with the reason and the `fix`.
        """
        what = f"the configurations of {type(bare(self.model)).__name__}, which are saved with its weights"
        with naming(f"{what}, cannot be written; correct them before training{fix}"):
            self._configurations(Path())

    def check_savable(self) -> None:
        """Check what `check_configurations` does, and weights that are made of other tensors. Raises CheckpointError
        with the reason.
        """
        self.check_configurations(", or set save_strategy='no'")
        for name, weight in state_of(self.model).items() if self.adapter is None else ():
            if is_packed(weight):
                what = f"the weight {name}, a {type(weight).__name__}, is saved with each checkpoint and has no bits"
                with naming(f"{what} of its own to write; train an adapter alone, or set save_strategy='no'"):
                    bits_of(local(weight))

    def _configurations(self, target: Path) -> dict[str, bytes]:
        adapter, model = self.adapter, bare(self.model)
        if adapter is not None:
            return _written(adapter.save_config, target)  # the base model was published with its own
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            # With the configuration of the base, `from_pretrained` would find none of the names and draw new weights.
            warn_once(logger, _WHOLE)
            return {}
        return _written(partial(write_configurations, model), target) if has_configurations(model) else {}

    def small_files(self, target: Path, beside: WrittenBeside) -> dict[str, bytes]:
        """Contents of all files but the weights, by relative name.

        Args:
            target: the folder where they will be, for what transformers logs.

        A tokenizer may need a second, and no other thread may use it meanwhile: it is written here, not in the
        background, and only if it has changed.
        """
        tokenizer, small = beside.savable, beside.arguments_file() | self._configurations(target)
        if tokenizer is None:
            return small
        version = _version_of(tokenizer)
        if version is None or version != self._tokenizer_version:
            self._tokenizer_files = _saved_by(tokenizer, target)
            self._tokenizer_version = version
        return small | self._tokenizer_files


def save_final(
    place: str, files: ModelWriter, save: Callable[..., None], all_ranks: Gang, writes: bool
) -> None:
    """Write a model to a folder or a URL. Collective if ranks hold parts of the model, and then raises as
    `together` does if it cannot be written; else a rank that does not write returns at once, and need not call this.

    Args:
        save: `Trainer._save`: writes it into a folder; gets the gathered weights if there are any.
        writes: this rank writes.
    """
    state = files.saved.gathered()

    def write() -> None:
        try:
            if writes:
                folder = str(local_folder(place))
                # Overrides written without sharding in mind take only the folder.
                save(folder) if state is None else save(folder, state_dict=state)
            if all_ranks.rank == 0:
                upload_files(place)
        except OSError as error:
            fix = "choose another place, or make room and permission"
            raise CheckpointError(f"the model cannot be written to {place} ({error}): {fix}") from error

    if state is None:
        write()
    else:
        together(all_ranks, write)


def _warn_of_others(folder: Path, name: str) -> None:
    """Warn if the folder has what an earlier save left beside the weights `name`. It may be the base of an adapter, so
    it is not removed.
    """
    of_adapter, of_model = (ADAPTER_WEIGHTS, ADAPTER_CONFIG), (WEIGHTS_NAME, SPLIT_INDEX_NAME)
    others = of_model if name == ADAPTER_WEIGHTS else of_adapter
    if left := [other for other in others if (folder / other).is_file()]:
        logger.warning(
            "%s has %s of an earlier save beside %s: from_pretrained joins the adapter with those whole weights; move "
            "one of the two to another folder, unless they belong together",
            folder,
            " and ".join(left),
            name,
        )


def _saved_by(tokenizer: Any, target: Path) -> dict[str, bytes]:
    return _written(lambda folder: tokenizer.save_pretrained(str(folder)), target)


def _written(save: Callable[[Path], None], target: Path) -> dict[str, bytes]:
    """The files that `save` writes into a folder; messages that transformers logs meanwhile name `target`."""

    def write(folder: Path) -> None:
        with showing_place("transformers", folder, target):
            save(folder)

    return written_by(write)


def _version_of(tokenizer: Any) -> Any:
    """A value that changes with the tokenizer; None for other things (image processors), which are small."""
    if not hasattr(tokenizer, "special_tokens_map"):
        return None
    # As text: the values are lists and dicts of tokens that a script may change in place.
    names = ("chat_template", "padding_side", "truncation_side", "model_max_length", "init_kwargs")
    values = [str(getattr(tokenizer, name, None)) for name in names]
    return id(tokenizer), len(tokenizer), str(tokenizer.special_tokens_map), values
