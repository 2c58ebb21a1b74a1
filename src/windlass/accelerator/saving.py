"""Checkpoints of a loop that the user owns: whole or not there at all, verified, and free of pickle."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from windlass.accelerator import restoring
from windlass.accelerator.engine import LoopEngine
from windlass.accelerator.own_files import save_tensors, save_values
from windlass.accelerator.pace import Pace
from windlass.accelerator.prepared import Prepared
from windlass.accelerator.save_lock import only_saver
from windlass.accelerator.setup import Setup
from windlass.checkpoint import codec
from windlass.checkpoint.draft import Draft
from windlass.checkpoint.manager import Checkpoint, CheckpointManager
from windlass.checkpoint.optimizer_state import save_optimizer_state, split_optimizer_state
from windlass.checkpoint.retention import Retention
from windlass.checkpoint.sharded import write_parts
from windlass.checkpoint.split import save_split
from windlass.checkpoint.store import Store
from windlass.checkpoint.weights import WEIGHTS_NAME, save_weights, weights_bytes
from windlass.core.errors import CheckpointError, ConfigError, Problem
from windlass.core.locations import is_url
from windlass.core.logs import get_logger
from windlass.core.module_state import state_of
from windlass.core.rng import rng_state
from windlass.core.threads import thread_count, warn_of_other_threads
from windlass.core.types import State
from windlass.dist.gang import Gang
from windlass.transforms.module_sizes import convert_file_size_to_int
from windlass.transforms.offload import (
    get_state_dict_offloaded_model,
    has_offloaded_params,
    load_offloaded_parameter,
)
from windlass.transforms.strategy import Strategy, own_state

_log = get_logger(__name__)
_MARGIN = 1 << 20  # bytes of JSON, headers and file system blocks beside the tensors

SaveHook = Callable[[list[nn.Module], list[dict[str, Tensor]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]
Parts = dict[str, Mapping[str, Tensor]]


class Saver:
    """The part of `Accelerator` that writes and reads files."""

    def __init__(self, setup: Setup, gang: Gang, pace: Pace, prepared: Prepared, engine: LoopEngine) -> None:
        self._gang, self._pace, self._prepared, self._engine = gang, pace, prepared, engine
        self._device, self._project = setup.device, setup.project_configuration
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()

    # --- the whole loop -----------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save everything that was prepared or registered, the generators included. Every process calls it.

        The folder appears when all of it is on the disk; one that was there before stands until then.

        Args:
            output_dir: the folder. Under `automatic_checkpoint_naming` it is `checkpoints/checkpoint_N` of the project,
                and `output_dir` is not read.
            safe_serialization: must be True: pickle is never written.

        Returns:
            The folder.

        Raises:
            ConfigError: no folder is known, or an option that cannot be honoured. CheckpointError: the folder of this
                number exists, or a state holds what cannot be saved. FolderInUse: another loop is saving there now.
                OSError: the disk refused.
        """
        self._check_options(safe_serialization, save_model_func_kwargs)
        if self._gang.rank == 0 and not self._pace.sync_gradients:
            _log.warning(
                "save_state was called in the middle of an update: the gradients of the micro-batches so far are not "
                "part of a checkpoint, and a loop that resumes from it goes on without them. Save where "
                "accelerator.sync_gradients is True."
            )
        manager, step = self._manager(output_dir), self._project.iteration
        target = manager.store.path_for(step)
        with only_saver(manager.store, step):
            exists = manager.store.agree(step, target.exists)
            if self._project.automatic_checkpoint_naming and self._gang.broadcast_object(exists):
                raise CheckpointError(
                    f"{target} exists already: load_state() goes on behind it, and ProjectConfiguration(iteration=) "
                    "says another number"
                )
            self._write_state(manager.store, step)
            if self._project.automatic_checkpoint_naming:
                manager.retain([target])
        self._project.iteration += 1
        return str(target)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` wrote into what is prepared now, on any number of processes. Every process calls it.

        Args:
            input_dir: the folder; None under `automatic_checkpoint_naming`: the newest that verifies.
            load_kwargs, load_model_func_kwargs: refused, but for `map_location`, which has no effect: everything goes
                to where its parameter lies.

        Raises:
            CheckpointError: it is not whole, or was made of other objects. ConfigError: no folder is known.
        """
        load_model_func_kwargs.pop("map_location", None)
        self._check_options(True, {**(load_kwargs or {}), **load_model_func_kwargs})
        checkpoint = self._open(input_dir)
        restoring.check_fits(checkpoint, self._prepared)
        warn_of_other_threads(checkpoint.meta, self._device.type, checkpoint.folder)
        models = [strategy.model for strategy in self._prepared.strategies]
        for hook in self._load_hooks.values():
            hook(models, str(checkpoint.folder))
        restoring.load_models(checkpoint, self._prepared, models)
        restoring.load_shared(checkpoint, self._prepared)
        restoring.load_rank(checkpoint, self._prepared, self._gang, self._device)
        self._pace.step = int(checkpoint.shared("loop")["step"])
        if self._project.automatic_checkpoint_naming:
            self._project.iteration = checkpoint.step + 1
        _log.info("Loaded the state of the loop from %s", checkpoint.folder)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these with the loop: anything with `state_dict` and `load_state_dict`, whose states are made of
        tensors, arrays, plain values, and lists and dicts of them. Those of the main process are saved.

        Raises:
            ConfigError: one of them lacks a method.
        """
        fix = "needs the methods state_dict and load_state_dict to be saved"
        problems = [
            Problem(f"objects[{index}]", type(item).__name__, fix)
            for index, item in enumerate(objects)
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        ]
        if problems:
            raise ConfigError(problems)
        self._prepared.custom += objects

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, folder)` on every process while a state is saved.

        It may write files into `folder` on the main process, which become part of the checkpoint, and take state dicts
        out of `weights` to save those itself.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, folder)` on every process before weights are loaded.

        It may take models out of `models` that it has loaded itself.
        """
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    # --- how it is written and read -----------------------------------------------------------------------------------

    def _check_options(self, safe_serialization: bool, options: Mapping[str, Any]) -> None:
        self._engine.check_may_save()
        fix = "is not an option here: checkpoints are written one way, and loaded strictly"
        problems = [Problem(name, value, fix) for name, value in options.items()]
        if not safe_serialization:
            problems.append(Problem("safe_serialization", False, "pickle is never written; leave it True"))
        if problems:
            raise ConfigError(problems)

    def _manager(self, folder: str | os.PathLike[str] | None) -> CheckpointManager:
        project = self._project
        if project.automatic_checkpoint_naming:
            if project.project_dir is None:
                fix = "automatic_checkpoint_naming needs a folder: Accelerator(project_dir=...)"
                raise ConfigError(Problem("project_dir", None, fix))
            root, name = _local(project.project_dir) / "checkpoints", "checkpoint_{step}"
        elif folder is None:
            fix = "give the folder, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            raise ConfigError(Problem("output_dir", None, fix))
        else:
            path = _local(folder)
            root, name = path.parent, path.name
        gang = self._gang
        store = Store(root, rank=gang.rank, world=gang.size, vote=gang.vote, barrier=gang.barrier, name=name)
        return CheckpointManager(store, Retention(project.total_limit))

    def _write_state(self, store: Store, step: int) -> None:
        strategies = self._prepared.strategies
        # What cannot give its state must not leave other processes waiting.
        weights, (shared, parts), per_rank = store.agree(
            step,
            lambda: (
                self._weights(),
                self._shared_state(),
                self._rank_state(),
            ),
        )
        of_ranks = {id(state) for state, s in zip(weights, strategies, strict=True) if s.saves_parts}
        needed = sum(map(weights_bytes, [*weights, *parts.values()])) + codec.state_bytes(shared) + _MARGIN
        needed += codec.state_bytes(per_rank) * self._gang.size

        def write(draft: Draft) -> None:
            store.agree(step, lambda: self._call_save_hooks(weights, draft.folder))
            for index, state in enumerate(weights):
                name = restoring.model_name(index)
                if id(state) in of_ranks:
                    parts[name] = state
                elif self._gang.rank == 0:
                    _write_weights(draft, name, state)
            if self._gang.rank == 0:
                for name, values in shared.items():
                    draft.write_state(name, values)
            draft.write_rank_state(per_rank)
            for name, tensors in parts.items():
                draft.add(write_parts(draft.folder, name, tensors, self._gang.world, store.files))

        store.write(step, {"windlass": "loop", **thread_count()}, write, needed=needed)

    def _call_save_hooks(self, weights: list[dict[str, Tensor]], folder: Path) -> None:
        for hook in self._save_hooks.values():
            hook([strategy.model for strategy in self._prepared.strategies], weights, str(folder))

    def _weights(self) -> list[dict[str, Any]]:
        self._prepared.check_restorable()
        return [_weights_of(strategy) for strategy in self._prepared.strategies]

    def _shared_state(self) -> tuple[dict[str, State], Parts]:
        """What the main process writes, and the tensors beside it of which every process writes its part."""
        parts: Parts = {}
        prepared = self._prepared
        shared: dict[str, State] = {"loop": {"step": self._pace.step, **restoring.census(prepared)}}
        for index, optimizer in enumerate(prepared.optimizers):
            name, owner = f"optimizer_{index}", prepared.owner_of(optimizer)
            if prepared.executor_of(optimizer).strategy.saves_parts:
                shared[name], parts[name] = split_optimizer_state(optimizer.optimizer, owner)
            else:
                shared[name] = save_optimizer_state(optimizer.optimizer, owner)
        for index, schedule in enumerate(prepared.schedules):
            shared[f"scheduler_{index}"] = schedule.state_dict()
        for index, item in enumerate(prepared.custom):
            shared[f"custom_checkpoint_{index}"] = item.state_dict()
        shared["scaler"] = prepared.scaler.state_dict()
        return shared, parts

    def _rank_state(self) -> State:
        prepared = self._prepared
        return {
            "rng": rng_state(self._device),
            "loaders": {"states": [loader.state_dict() for loader in prepared.loaders]},
            "buffers": {str(i): own_state(strategy) for i, strategy in enumerate(prepared.strategies)},
        }

    def _open(self, folder: str | os.PathLike[str] | None) -> Checkpoint:
        """The main process chooses and verifies for all, so that nothing is hashed twice."""
        project = self._project
        if folder is None and not project.automatic_checkpoint_naming:
            fix = "give the folder, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            raise ConfigError(Problem("input_dir", None, fix))
        chosen, problem = None, None
        if folder is None:
            manager = self._manager(None)
        else:
            path = _local(folder)
            manager = CheckpointManager(Store(path.parent, rank=self._gang.rank, name=path.name))
        if self._gang.rank == 0:
            try:
                chosen = manager.choose(True if folder is None else _local(folder))
            except (CheckpointError, OSError) as error:
                problem = str(error)
        chosen, problem = self._gang.broadcast_object([chosen, problem])
        if problem is not None:
            raise CheckpointError(problem)
        return manager.receive(chosen)

    # --- a model, or any tensors --------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state dict with whole tensors; where it is sharded, on the main process and in host memory.

        Every process calls it. Others get an empty one where the model is sharded. Offloaded weights are read.
        """
        if any(map(has_offloaded_params, model.modules())):
            return dict(get_state_dict_offloaded_model(model))
        strategy = self._prepared.strategy_of(model)
        if strategy is None or not (unwrap or strategy.sharded):
            return dict(model.state_dict())
        return strategy.whole_state()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights as safetensors, in files that `from_pretrained` reads. Every process calls it.

        Args:
            max_shard_size: files grow to this size ("5GB", "200MB", or bytes); beyond one file there is an index.
            safe_serialization: must be True: pickle is never written.
        """
        if not safe_serialization:
            raise ConfigError(Problem("safe_serialization", False, "pickle is never written; leave it True"))
        folder = _local(save_directory)
        limit = convert_file_size_to_int(max_shard_size)
        away = any(map(has_offloaded_params, model.modules()))
        read = functools.partial(load_offloaded_parameter, model) if away else None
        state = state_of(model) if away else self.get_state_dict(model)
        try:
            if self._gang.rank == 0:
                save_split(folder, state, limit, offloaded=read)
        finally:
            self._gang.barrier()

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write tensors and plain values, on the main process.

        Args:
            obj: a dict of tensors, which becomes one safetensors file; or, where `f` ends in ".json", a nest of tensors
                and plain values (its tensors go into a safetensors file of the same name).
            f: a name that ends in ".safetensors" or ".json".
            safe_serialization: either way pickle is not written.

        Raises:
            ConfigError: another ending. CheckpointError: values that cannot be saved, named.
        """
        path = Path(f)
        if path.suffix not in (".safetensors", ".json"):
            fix = "pickle is never written: end the name in .safetensors (a dict of tensors) or .json (anything plain)"
            raise ConfigError(Problem("f", str(f), fix))
        if self._gang.rank != 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            save_values(path, obj)
        else:
            save_tensors(path, obj)


def _local(folder: str | os.PathLike[str]) -> Path:
    """A folder of this machine.

    Raises:
        ConfigError: it is a URL.
    """
    if is_url(folder):
        fix = "is remote, which only the Trainer's output_dir may be; give a folder of this machine"
        raise ConfigError(Problem("folder", os.fspath(folder), fix))
    return Path(folder).expanduser().absolute()


def _write_weights(draft: Draft, name: str, state: Mapping[str, Any]) -> None:
    """Whole weights, in the folder itself or in one of the model's name."""
    if name == "model":
        draft.add({WEIGHTS_NAME: save_weights(draft.folder, state, files=draft.files)})
    else:
        draft.files.ensure_folder(draft.folder / name)  # a hook may have made it
        entry = save_weights(draft.folder / name, state, files=draft.files)
        draft.add({f"{name}/{WEIGHTS_NAME}": entry})


def _weights_of(strategy: Strategy) -> dict[str, Any]:
    """What a checkpoint holds of a model: whole tensors, on the main process; or those of which each has a part."""
    return state_of(strategy.module) if strategy.saves_parts else strategy.whole_state()
