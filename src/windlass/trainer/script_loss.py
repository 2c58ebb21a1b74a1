"""What a loss of the script's is normalised by: decided by its code and its reads, never by its value.

A loss that is not declared gets the target count of its own micro-batch, and is weighted by that micro-batch's share of
the update. So a sum that is divided by the count, a mean, and any mixture of both are exact for every split of the
update, and nothing about the loss has to be known.

The one exception is a loss that takes care of the other processes itself, as scripts written for transformers do:
divided by the count of the whole update, and multiplied by the number of processes. Code that names that number shows
in its first call whether it is one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from windlass.accelerator.accumulation import AccumulationState
from windlass.config.arguments import TrainingArguments, watched
from windlass.core.errors import ConfigError, ModelError, Problem
from windlass.core.logs import get_job_logger
from windlass.core.tensors import is_fake
from windlass.core.types import LossTerms
from windlass.core.watched_numbers import NumberUse, watched_numbers
from windlass.dist.gang import Gang
from windlass.trainer.losses import as_count

logger = get_job_logger(__name__)

_PROCESSES = frozenset({"num_processes", "world_size", "get_world_size", "WORLD_SIZE"})
MICRO_BATCHES = frozenset({"gradient_accumulation_steps", "current_gradient_accumulation_steps"})
# Functions of torch.distributed, and those of an accelerator: torch itself has a `gather` that exchanges nothing.
_EXCHANGES = frozenset({
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "reduce_scatter", "reduce_scatter_tensor", "gather_for_metrics", "pad_across_processes",
})  # fmt: skip
_OF_ACCELERATOR = frozenset({"gather", "reduce"})
_SMOOTHED = frozenset({"compute_loss", "label_smoother", "label_smoothing_factor"})
_DECLARE = (
    "Declare what it returns with the attribute `loss_is_scaled_for_ga`: True if it is divided by "
    "`num_items_in_batch` of the whole update and multiplied by the number of processes, as in transformers; False if "
    "it is a mean over its own micro-batch, whose count it then gets. With True, do not multiply in a "
    "`compute_loss_func`: `compute_loss` does it. Or return `LossTerms(sum, weight)`"
)


class ScriptLoss:
    """Decides if a loss is complete, and which count it gets.

    Args:
        accumulation: has the number of micro-batches of an update.

    Attributes:
        complete: the loss is divided by the count of the whole update and multiplied by the number of processes. False:
            it is a mean over its micro-batch, or a sum divided by that micro-batch's count. None: its first call
            decides.
        is_given_count: functions of a script get the count; those of Windlass's own trainers are none of a script.
        is_watched: each call of the loss needs `watching`.
    """

    def __init__(self, data_ranks: Gang, accumulation: AccumulationState) -> None:
        self._data_ranks, self._accumulation = data_ranks, accumulation
        self.begin(None, [])

    @property
    def shares(self) -> int:
        """Micro-batches of an update, over all processes."""
        return self._accumulation.num_steps * self._data_ranks.size

    def begin(
        self,
        declared: bool | None,
        functions: list[Callable[..., Any]],
        *,
        step: Callable[..., Any] | None = None,
        watched: bool = False,
        compiled: bool = False,
        earlier: bool | None = None,
    ) -> None:
        """Start with another loss.

        Args:
            declared: `loss_is_scaled_for_ga`.
            functions: the script's functions that compute it, if they get the count.
            step: the script's training step, if it is given the count: what it passes to backward may be its own loss.
                It may name the number of micro-batches, by which steps of other libraries divide (see `StepCheck`).
            watched: a script's code computes the loss, or passes it to backward.
            compiled: the model is compiled, and the count must be a plain tensor, so that reads of it are not noted.
            earlier: `complete` of the run that is resumed.
        """
        of_script = [function for function in functions if any(_versions(function))]
        names = names_in_code(of_script) & (_PROCESSES | MICRO_BATCHES)
        if step is not None and any(_versions(step)):
            names |= names_in_code([step]) & _PROCESSES
            of_script.append(step)
        self.complete, self._is_declared = declared, declared is not None
        if declared is None:
            self.complete = earlier if names else False
        self._is_first = watched and self._data_ranks.size > 1
        self.is_watched, self._notes = watched, bool(of_script) and not compiled
        self.is_given_count, self._names_micro_batches = bool(of_script), bool(names & MICRO_BATCHES)
        self._use: NumberUse | None = None
        self._noted: NotedCount | None = None

    def count(self, of_update: float, own: float, device: torch.device, note: bool = False) -> Tensor:
        """The count that the loss of a micro-batch with `own` targets gets: at least 1, because it is a divisor.

        Args:
            note: have `read_count` tell about this call in any case.
        """
        counts_own = self.complete is False
        count = as_count((own or 1.0) if counts_own else of_update, device)
        notes = self._notes and (note or self.complete is None or (counts_own and not own))
        self._noted = NotedCount.of(count) if notes and not is_fake(count) else None
        return count if self._noted is None else self._noted

    @property
    def read_count(self) -> bool:
        """The call under way has read its count; known for calls that decide or are noted, and for micro-batches
        without targets.
        """
        return self.is_given_count if self._noted is None else self._noted.was_read

    @contextlib.contextmanager
    def watching(self, args: TrainingArguments) -> Iterator[None]:
        """Context of a call, in which uses of the numbers of processes and of micro-batches are noted.

        Args:
            args: of the run, which the loss may read.
        """
        if self.shares == 1:
            yield
            return
        self._use = NumberUse()
        try:
            with watched_numbers(self._use), watched(args):
                yield
        finally:
            self._use = None

    def look(self, loss: Tensor | LossTerms) -> None:
        """Decide by the first call, and check in the others that the loss is what was decided. Collective in the first
        call, and if `complete` is None.

        Raises:
            ModelError: the code does not show what the loss is, or it is of another kind on another rank.
        """
        terms = isinstance(loss, LossTerms)
        if self._is_first:
            self._is_first = False
            self._check_alike(terms)
        # In a rehearsal it is not noted what the loss reads.
        if self._use is None or self._is_declared or isinstance(loss, LossTerms) or is_fake(loss):
            return
        used = self._use.processes
        if self.complete is None:
            self._decide(used, (self.divisor(loss) or 1) > 1)
        elif used and not self.complete:
            raise ModelError(
                f"the loss is computed with the number of processes ({self._data_ranks.size}), which its code does not "
                f"name, or its first call did not use. {_DECLARE}"
            )
        elif self.complete and not used and self._data_ranks.size > 1:
            raise ModelError(
                "when this run began, the loss was found to be divided by the targets of the whole update, and now it "
                f"is not multiplied by the number of processes ({self._data_ranks.size}). {_DECLARE}"
            )

    def returned(self, loss: Any) -> None:
        """Note what `compute_loss` returned to a training step of the script's."""
        if self._use is not None:
            self._use.returned(loss)

    def divisor(self, loss: Any) -> int | None:
        """The number of micro-batches by which the call under way has divided its loss, which is to be undone: losses
        are weighted by their share of the update. A complete loss is such a share when `compute_loss` returns it; only
        what a training step does with it is undone. None if it was not seen what was done.
        """
        return None if self._use is None else self._use.divisor(loss, by_step=bool(self.complete))

    def undivided(self, loss: Any) -> Any:
        """The loss of an evaluation without that division."""
        divisor = self.divisor(loss) or 1
        return loss if divisor == 1 else loss * divisor

    def _check_alike(self, terms: bool) -> None:
        """Ranks with `LossTerms` sum their weights, and would wait for those with a tensor."""
        of_terms = float(self._data_ranks.sum(torch.tensor([float(terms)], dtype=torch.float64)))
        if 0 < of_terms < self._data_ranks.size:
            raise ModelError(
                f"{of_terms:.0f} of {self._data_ranks.size} processes passed LossTerms to backward, and the "
                "others a tensor, which has another divisor: use one of the two on all processes"
            )

    def _decide(self, used: bool, divided: bool) -> None:
        if not self._notes:
            raise ModelError(
                "the code of the loss names the number of processes or of micro-batches, and the model is compiled, so "
                f"it is not known if the loss reads `num_items_in_batch`. {_DECLARE}"
            )
        seen = torch.tensor([float(used), float(self.read_count)], dtype=torch.float64)
        was_used, was_read = (total > 0 for total in self._data_ranks.sum(seen).tolist())
        # In one process a loss need not be multiplied by 1: reading the count decides.
        if was_used != was_read and (was_used or self._data_ranks.size > 1):
            what = "divides by" if was_read else "does not read"
            does = "multiplies by" if was_used else "does not multiply by"
            raise ModelError(
                f"the code of the loss names the number of processes or of micro-batches. It {what} "
                f"`num_items_in_batch`, and {does} the number of processes ({self._data_ranks.size}), so it is not "
                f"known what it is a mean over. {_DECLARE}"
            )
        self.complete = was_read
        if was_read:
            logger.info(
                "the loss is used as it is: divided by the targets of the whole update, and multiplied by the number "
                "of processes (see docs/losses.md)"
            )
        elif self._names_micro_batches and not divided:
            logger.warning(
                "the code of the loss names the number of micro-batches, by which it must not divide: its micro-batch "
                "has its share of the update's targets as its weight. Undone is a division of the whole loss by "
                "`gradient_accumulation_steps` itself, and this loss had none"
            )


class NotedCount(Tensor):
    """A count that records if it is used in a computation. There is one at a time."""

    was_read: ClassVar[bool] = False

    @classmethod
    def of(cls, count: Tensor) -> NotedCount:
        cls.was_read = False
        return count.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # its device or type
            NotedCount.was_read = True
        # Results are plain tensors: using one is not a read of the count.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def check_smoothing(
    smoothing: float, compute_loss: Callable[..., Any], function: Callable[..., Any] | None
) -> None:
    """Raise ConfigError if a script's loss takes the place of the smoothed one. An override of `compute_loss` may call
    that one, or smooth by itself.
    """
    if not smoothing:
        return
    replaced = "compute_loss_func"
    if function is None:
        replaced, names = "the overridden compute_loss", names_in_code([compute_loss])
        if not any(_versions(compute_loss)) or names & _SMOOTHED:
            return
    fix = f"has no effect: {replaced} computes the loss; smooth there (self.label_smoother does it), or set it to 0"
    raise ConfigError(Problem("label_smoothing_factor", smoothing, fix))


def check_loss_modules(model: nn.Module, smoothing: float, counts_by_default: bool) -> None:
    """Raise ConfigError if smoothing takes the place of a model's loss with options of its own; warn of labels that
    such a loss ignores and that are counted as targets.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.CrossEntropyLoss, nn.NLLLoss)):
            continue
        ignored = module.ignore_index
        options = {"weight": module.weight is not None, f"ignore_index={ignored}": ignored != -100}
        own = ", ".join(option for option, differs in options.items() if differs)
        if smoothing and own:
            fix = f"replaces the loss of the model, and so {own} of its {name!r}: smooth there (label_smoothing of "
            fix += f"torch.nn.{type(module).__name__}, or a loss of your own), or set it to 0"
            raise ConfigError(Problem("label_smoothing_factor", smoothing, fix))
        if counts_by_default and ignored != -100:
            logger.warning(
                "%r of the model ignores labels of %d, which are counted as targets: micro-batches, ranks and "
                "evaluated batches with more of them get too much weight; leave ignore_index at -100 and make these "
                "labels -100, or override count_targets",
                name,
                ignored,
            )


# --- code -------------------------------------------------------------------------------------------------------------


def exchanges(functions: list[Callable[..., Any]]) -> bool:
    """Return True if the code of a script's functions names an exchange with the other processes."""
    names = names_in_code(functions)
    return bool(names & _EXCHANGES or ("accelerator" in names and names & _OF_ACCELERATOR))


def names_in_code(functions: list[Callable[..., Any]]) -> frozenset[str]:
    """The names and strings in the code of functions of a script, of the methods that they override, and of the
    functions and methods of the same package that they name.
    """
    names: set[str] = set()
    pending, seen = [part for function in functions for part in _versions(function)], set()
    while pending:
        function, owner = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        found = set(_names_of(function.__code__))
        names |= found
        known = {**function.__globals__, **_enclosed(function)}
        functions_of_torch = [known[name] for name in found if _is_autograd_function(known.get(name))]
        helpers = [known.get(name) for name in found] + [getattr(owner, name, None) for name in found]
        helpers += [each.forward for each in functions_of_torch]
        pending += [
            (helper, owner)
            for helper in map(_unwrapped, helpers)
            if inspect.isfunction(helper) and _package(helper) == _package(function)
        ]
    return frozenset(names)


def names_in_versions(method: Callable[..., Any]) -> frozenset[str]:
    """The names and strings in the code of a script's method and of those that it overrides, without what they call."""
    return frozenset(name for function, _ in _versions(method) for name in _names_of(function.__code__))


def calls_inherited(method: Callable[..., Any]) -> bool:
    """Return True if each version of a script's method names the one that it overrides, as `super().method()` does, or
    does its work: libraries that change the text of a method execute a copy of Windlass's.
    """
    return all(
        not {function.__name__, "_do_inherited"}.isdisjoint(_names_of(function.__code__))
        for function, _ in _versions(method)
    )


def _versions(function: Any) -> Iterator[tuple[Any, Any]]:
    """The script's own function, or its method with those that it overrides, each with the class of its object."""
    bound = _without_arguments(function)
    owner = getattr(bound, "__self__", None)
    if owner is None and not inspect.isfunction(_unwrapped(bound)):
        owner, bound = bound, bound.forward if isinstance(bound, nn.Module) else type(bound).__call__
    name, own = getattr(bound, "__name__", ""), getattr(bound, "__func__", bound)
    versions = [vars(cls)[name] for cls in type(owner).__mro__ if name in vars(cls)]
    # A function that was set on the object overrides nothing.
    for version in map(_unwrapped, versions[versions.index(own) :] if own in versions else [own]):
        # Windlass's own methods need no declaration, nor does what they override.
        if not inspect.isfunction(version) or _package(version) == _package(_versions):
            return
        yield version, type(owner)
        # Code that names neither `super` nor this method does not call the one that it overrides.
        if {"super", name}.isdisjoint(_names_of(version.__code__)):
            return


def _enclosed(function: Any) -> dict[str, Any]:
    """The variables of enclosing functions that a function uses."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {}
    for name, cell in cells:
        with contextlib.suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found


def _is_autograd_function(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def _unwrapped(function: Any) -> Any:
    function = _without_arguments(function)
    return inspect.unwrap(function) if inspect.isroutine(function) else function


def _without_arguments(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _package(function: Any) -> str:
    return str(function.__module__).split(".")[0]


def _names_of(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_of(constant)
