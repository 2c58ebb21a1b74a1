"""Run a script as Python does, and record its first updates: rows, learning rates, losses, gradients and weights.

    python recorder.py SETTINGS SCRIPT [ARGUMENT ...]

`windlass compare` starts this file by its path, once with the libraries that the script imports and once under
`windlass run`. It watches PyTorch alone (forwards, backwards and optimizer steps), so it measures every library alike,
and it imports nothing of Windlass: the first of the two runs must not have it.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import random
import resource
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Parts that wrappers of PyTorch add to the names of parameters."""


class Recorder:
    """What PyTorch did since the script started, one record for each optimizer update.

    Attributes:
        arguments: those of the Trainer that the script made last.
        inside_backward: a backward is under way; what is called in it is computed again.
        pending_rows: digests of the rows of the update under way, by backward.
        updates: of each finished update: `rows` (digests of samples, by backward), `rates`, `loss` (the sum of what
            backwards were started from), `norm` (of the gradients that the optimizer got), `digests` (weights after
            the update, by parameter), `seconds` (from its first forward to its last step) and `pause` (from the
            update before to that forward). Until they are written, updates have lists
            of tensors in place of two of these, `losses` and `squares` of norms, and when they `began` and how many
            `optimizers` made a step.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.updates: list[dict[str, Any]] = []
        self.arguments: Any = None
        self._read: set[str] = set()
        self._known: WeakSet[nn.Module] = WeakSet()
        self._model: nn.Module | None = None
        self._names: dict[int, str] = {}
        self._unnamed: dict[int, str] = {}  # parameters of no module
        self.inside_backward = False
        self._seen: list[str] = []  # rows since the last backward
        self._reader: nn.Module | None = None  # what got them
        self.pending_rows: list[list[str]] = []
        self._losses: list[Tensor] = []
        self._started: float | None = None  # the first forward since the last step
        self._ended = time.perf_counter()  # of the last step, or of what is before the first
        self._own = 0.0  # seconds of this recorder since the update began
        self._resident = 0
        self._finished = False

    # --- what PyTorch calls -----------------------------------------------------------------------------------------

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the rows that the model gets in a forward that gradients flow from."""
        now = time.perf_counter()
        if self._started is None:
            self._started, self._own = now, 0.0
            self._resident = self._resident or _resident_bytes()
        # What the script passes from one module to another, as to its loss, is computed and no row.
        if self._reader is None:
            self._reader = module
        if module is self._reader:
            self._seen += _digests_of_rows(args, kwargs)
        self._own += time.perf_counter() - now

    def backward(self, root: Tensor, gradient: Tensor | None) -> None:
        """Note the loss that a backward starts from, and the rows of the forwards before it."""
        value = root.detach() if gradient is None else root.detach() * gradient
        self._losses.append(value.double().sum())
        self.pending_rows.append(self._seen)
        self._seen, self._reader = [], None

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Begin the record of an update, or add a second optimizer to it: no backward lies between their steps."""
        now = time.perf_counter()
        if self.pending_rows or not self.updates:
            self._begin_update()
        update = self.updates[-1]
        update["rates"] += [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
        update["squares"] += [gradient.detach().double().norm() ** 2 for gradient in gradients]
        self._own += time.perf_counter() - now

    def _begin_update(self) -> None:
        if len(self.updates) == self.settings["updates"]:
            self._leave()  # fewer optimizers made a step in the last one than before
        pause = self._started - self._ended if self.updates and self._started is not None else None
        if self._started is None:  # no module is called: an update lasts from the end of the one before
            self._started, self._own = self._ended, 0.0
        self.updates.append({"rows": self.pending_rows, "rates": [], "digests": {}, "pause": pause})
        self.updates[-1] |= {"losses": self._losses, "squares": [], "began": self._started, "optimizers": 0}
        self.pending_rows, self._losses = [], []

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the weights, and leave the process after the last update that was asked for."""
        now = time.perf_counter()
        update = self.updates[-1]
        update["seconds"] = now - update["began"] - self._own
        for parameter in _parameters(optimizer):
            update["digests"][self._name(parameter)] = _digest(parameter)
        update["optimizers"] += 1
        self._started, self._ended = None, time.perf_counter()
        self._own += self._ended - now
        # Only the update before shows how many optimizers there are: after a single one, the next backward's step does.
        is_last = 1 < len(self.updates) == self.settings["updates"]
        if is_last and update["optimizers"] >= self.updates[-2]["optimizers"]:
            self._leave()

    def _leave(self) -> NoReturn:
        self.write()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # a library's own end (a save, a card, an upload) is not compared

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of a module that no other module makes. The one with most parameters is the model."""
        if module not in self._known:
            self._known.add(module)
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            if len(names) > len(self._names):
                self._model, self._names = module, names
        trains = torch.is_grad_enabled() and module.training and not self.inside_backward
        if trains and next(module.parameters(), None) is not None:
            self.forward(module, args, kwargs)

    def watch_reads(self, kind: type) -> None:
        """Note which fields are read of any object of a configuration class or of one derived from it, from their
        creation on.
        """
        read: Callable[..., Any] = kind.__getattribute__

        def watched(this: Any, name: str) -> Any:
            if name in type(this).__dataclass_fields__:
                self._read.add(name)
            return read(this, name)

        replace(kind, "__getattribute__", watched)

    def unread(self) -> list[str]:
        """Return the arguments that the script has set to another value than the default and that were not read."""
        if self.arguments is None:
            return []
        fields = [one for one in dataclasses.fields(self.arguments) if one.default is not dataclasses.MISSING]
        values = vars(self.arguments)
        return sorted(
            one.name
            for one in fields
            if one.name not in self._read and values.get(one.name, one.default) != one.default
        )

    # --- the result -------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the records as JSON, and the last weights beside them. Later calls do nothing."""
        if self._finished:
            return
        self._finished = True
        for update in self.updates:
            # Only now, as each number that is read makes the host wait for the device.
            squares, losses = ([float(value) for value in update.pop(name)] for name in ("squares", "losses"))
            update["norm"] = math.sqrt(sum(squares)) if squares else None
            update["loss"] = sum(losses) if losses else None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        record: dict[str, Any] = {
            "updates": self.updates,
            "memory": max(0, peak - self._resident) if self._resident else None,
        }
        record["unread"] = self.unread()
        if torch.cuda.is_available():
            record["device_memory"] = torch.cuda.max_memory_allocated()
        place = Path(self.settings["folder"])
        if self._model is not None:
            weights = {
                _plain(name): p.detach().cpu().contiguous().clone()
                for name, p in self._model.named_parameters()
                if p.requires_grad
            }
            save_file(weights, place / "weights.safetensors")
        (place / "record.json").write_text(json.dumps(record), "utf-8")

    def _name(self, parameter: Tensor) -> str:
        if (name := self._names.get(id(parameter))) is not None:
            return _plain(name)
        number = len(self._unnamed) + 1
        return self._unnamed.setdefault(
            id(parameter), f"parameter {number} of shape {tuple(parameter.shape)}"
        )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def _digests_of_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Return a digest of each row of a batch: of its tokens without padding, or else of all its tensors."""
    tokens, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    if isinstance(tokens, Tensor) and tokens.dim():
        # A batch without a mask has the same rows as one whose mask keeps all.
        if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
            mask = torch.ones_like(tokens)
        yield from (_digest(row[shown]) for row, shown in zip(tokens.long(), mask.bool(), strict=True))
        return
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
    for row in range(len(tensors[0]) if tensors else 0):
        parts = [_digest(tensor[row]) for tensor in tensors if len(tensor) > row]
        yield hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()


# --- how PyTorch is watched -------------------------------------------------------------------------------------------


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Put a function in the place of one of PyTorch or of a library, for the rest of this process."""
    setattr(owner, name, function)


def watch(recorder: Recorder) -> None:
    """Have PyTorch call the recorder."""
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    _watch_backward(recorder)
    _watch_calls(recorder)


def _watch_backward(recorder: Recorder) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def watched(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if recorder.inside_backward:  # of a block that is recomputed with a graph of its own
            original(tensors, grad_tensors, *args, **kwargs)
            return
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = (
            (grad_tensors,)
            if grad_tensors is None or isinstance(grad_tensors, Tensor)
            else tuple(grad_tensors)
        )
        for index, root in enumerate(roots):
            recorder.backward(root, given[index] if index < len(given) else None)
        recorder.inside_backward = True  # what is recomputed there are no new rows
        try:
            original(tensors, grad_tensors, *args, **kwargs)
        finally:
            recorder.inside_backward = False

    replace(torch.autograd, "backward", watched)


def _watch_calls(recorder: Recorder) -> None:
    original, inside = nn.Module.__call__, False

    @functools.wraps(original)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return original(self, *args, **kwargs)
        inside = True
        try:
            recorder.called(self, args, kwargs)
            return original(self, *args, **kwargs)
        finally:
            inside = False

    replace(nn.Module, "__call__", watched)


def keep_order() -> None:
    """Have loaders take samples in the order of the dataset."""
    from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

    build = DataLoader.__init__
    signature = inspect.signature(build)

    @functools.wraps(build)
    def in_order(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)  # both may be given by position
        if given.arguments.get("shuffle"):
            given.arguments["shuffle"] = False
        if isinstance(sampler := given.arguments.get("sampler"), RandomSampler):
            given.arguments["sampler"] = SequentialSampler(sampler.data_source)
        build(*given.args, **given.kwargs)

    replace(DataLoader, "__init__", in_order)


class TrainerImport(MetaPathFinder):
    """Prepares the Trainer that the script gets once a module that defines one is imported: under `windlass run` it is
    Windlass's. Before, as the import of transformers' takes seconds, which a script with another loop need not spend.
    """

    MODULES = ("transformers.trainer", "windlass.trainer.trainer")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.MODULES:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                # Not through the module: one that answers for Windlass has no such names itself.
                if "Trainer" in (defined := vars(module)):
                    prepare_trainer(self._recorder, defined["Trainer"], defined["TrainingArguments"])

            replace(spec.loader, "exec_module", executed)
        return spec


def prepare_trainer(recorder: Recorder, trainer: Any, arguments_type: type) -> None:
    """Have a Trainer write into the folder of the comparison, and save after the second update. Trackers and uploads
    are off: a comparison is not a run to keep.
    """
    build: Callable[..., None] = trainer.__init__
    settings = recorder.settings

    @functools.wraps(build)
    def prepared(self: Any, *args: Any, **kwargs: Any) -> None:
        given: list[Any] = [value for value in (*args, *kwargs.values()) if isinstance(value, arguments_type)]
        for arguments in given:
            if not settings["own_order"] and arguments.train_sampling_strategy == "random":
                arguments.train_sampling_strategy = "sequential"
            arguments.output_dir = str(Path(settings["folder"]) / "output")
            arguments.report_to, arguments.push_to_hub = [], False
            arguments.save_strategy, arguments.save_steps = "steps", 2
            recorder.arguments = arguments
        build(self, *args, **kwargs)

    replace(trainer, "__init__", prepared)
    recorder.watch_reads(arguments_type)


def without_dropout() -> None:
    """Switch dropout off: no two libraries draw the same random numbers for it."""
    attention = functional.scaled_dot_product_attention

    def kept(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input

    @functools.wraps(attention)
    def whole(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, **rest: Any
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, **rest)

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        replace(functional, name, kept)
    replace(functional, "scaled_dot_product_attention", whole)
    # Recurrent layers give their share to a kernel, and call no function of dropout.
    nothing: Any = property(lambda layer: 0.0, lambda layer, share: None)
    replace(torch.nn.RNNBase, "dropout", nothing)


def seed_everything(seed: int) -> None:
    """Begin both runs from the same random numbers, for weights that the script draws before it sets a seed."""
    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(seed)  # the generator that scripts of the libraries draw from


def main() -> None:
    settings, script, *arguments = sys.argv[1:]
    recorder = Recorder(json.loads(Path(settings).read_text("utf-8")))
    atexit.register(recorder.write)
    seed_everything(0)
    sys.meta_path.insert(0, TrainerImport(recorder))
    if not recorder.settings["own_order"]:
        keep_order()
    if not recorder.settings["dropout"]:
        without_dropout()
    watch(recorder)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
