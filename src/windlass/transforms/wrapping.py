"""Choice of the submodules that are sharded as units: gathered before their forward and freed after it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from windlass.config.plan import ShardPlan
from windlass.core.errors import ConfigError, Problem
from windlass.core.logs import get_job_logger, warn_once
from windlass.transforms.blocks import repeated_blocks
from windlass.transforms.buffers import is_ordinary

_LAYERS = "fsdp_config.transformer_layer_cls_to_wrap"
_IGNORED = "fsdp_config.ignored_modules"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward around which to gather
_logger = get_job_logger(__name__)


def units_of(module: nn.Module, plan: ShardPlan, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """The units inside `module`, outer ones first; `module` itself is a unit as well, and not listed. Raises
    ConfigError if no module has the given classes; existing ones are listed.
    """
    if plan.wrap == "transformer":
        classes = plan.layers or _own_classes(module)
        chosen = _of_classes(module, classes) if classes else _blocks(module)
    elif plan.wrap == "size":
        chosen = _of_size(module, plan.min_parameters, ignored)
    else:
        chosen = []
    # A unit with nothing to gather would be gathered all the same, by an empty exchange.
    units = [unit for unit in chosen if any(p not in ignored for p in unit.parameters())]
    # By their numbers of modules: a module inside several others comes before some of them in the order of the model.
    return sorted(_without_split_ties(module, units), key=lambda unit: -sum(1 for _ in unit.modules()))


def ignored_parameters(module: nn.Module, ignored: str | tuple[str, ...] | None) -> set[nn.Parameter]:
    """Parameters that stay whole on every rank: those of the given modules, and those that cannot be sharded or sent:
    scalars, empty and complex ones, and frozen ones of an unusual dtype or layout. Raises ConfigError if no module has
    such a name. `ignored`: names of modules, or a regular expression for the whole name of a module.
    """
    found = {
        parameter for parameter in module.parameters() if parameter.dim() == 0 or not is_ordinary(parameter)
    }
    names = dict(module.named_modules())
    if isinstance(ignored, str):
        members = [member for name, member in names.items() if re.fullmatch(ignored, name)]
        missing: list[str] = [] if members else [ignored]
    else:
        members = [names[name] for name in ignored or () if name in names]
        missing = [name for name in ignored or () if name not in names]
    if missing:
        fix = f"no such module; there are: {listed(name for name in names if name)}"
        raise ConfigError(Problem(_IGNORED, ", ".join(missing), fix))
    for member in members:
        found.update(member.parameters())
    return found


def _own_classes(module: nn.Module) -> tuple[str, ...]:
    """The classes in `_no_split_modules` of a model or of one that it wraps, as Hugging Face's models have."""
    said = {
        name for member in module.modules() for name in (getattr(member, "_no_split_modules", None) or ())
    }
    here = {type(member).__name__ for member in module.modules()}
    return tuple(sorted(said & here)) or tuple(sorted(said))


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model without `_no_split_modules`."""
    blocks = list(repeated_blocks(module))
    found = ", ".join(sorted({type(block).__name__ for block in blocks}))
    warn_once(
        _logger,
        f"{type(module).__name__} does not say which of its layers to gather one by one: "
        + (f"these repeat, and are: {found}" if blocks else "none repeats, so it is gathered as a whole")
        + f". {_LAYERS} names others",
    )
    return blocks


def _of_classes(module: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    wanted = set(names)
    found = [m for m in module.modules() if m is not module and type(m).__name__ in wanted]
    missing = sorted(wanted - {type(member).__name__ for member in (*found, module)})
    if missing:
        fix = f"{type(module).__name__} has no module of this class. {_there_are(module)}"
        raise ConfigError([Problem(_LAYERS, name, fix) for name in missing])
    return found


def _there_are(module: nn.Module) -> str:
    inner = (m for m in module.modules() if m is not module and not isinstance(m, _CONTAINERS))
    counts = Counter(type(m).__name__ for m in inner if next(m.parameters(), None) is not None)
    return f"Classes with parameters: {listed(name for name, _ in counts.most_common())}"


def listed(names: Iterable[str], limit: int = 20) -> str:
    """The first of these names, and how many there are more."""
    known = list(names)
    more = f" and {len(known) - limit} more" if len(known) > limit else ""
    return (", ".join(known[:limit]) or "none") + more


def _of_size(module: nn.Module, least: int, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """From the leaves up: a module becomes a unit if `least` of its parameters are not in an inner unit."""
    chosen: set[nn.Module] = set()

    def remaining(member: nn.Module) -> set[nn.Parameter]:
        left = {p for p in member.parameters(recurse=False) if p not in ignored}
        for child in member.children():
            left |= remaining(child)
        size = sum(parameter.numel() for parameter in left)
        if member is module or isinstance(member, _CONTAINERS) or size < least:
            return left
        chosen.add(member)
        return set()

    remaining(module)
    return [member for member in module.modules() if member in chosen]


def _without_split_ties(module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """The units without those that share a parameter: it belongs to the module around all of them."""
    kept = list(units)
    # The parameters of a unit that is left out belong to the one around it, which may then split another tie.
    while split := _units_of_split_ties(module, set(kept)):
        kept = [unit for unit in kept if unit not in split]
    if len(kept) < len(units):
        _logger.warning(
            "%d of %d modules are not sharded on their own, because they share weights with others",
            len(units) - len(kept),
            len(units),
        )
    return kept


def _units_of_split_ties(module: nn.Module, units: set[nn.Module]) -> set[nn.Module]:
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for unit, member in _with_units(module, module, units):
        for parameter in member.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(unit)
    return {unit for shared in owners.values() if len(shared) > 1 for unit in shared} & units


def _with_units(
    member: nn.Module, unit: nn.Module, units: set[nn.Module]
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Every module in `member`, with the innermost unit around it."""
    unit = member if member in units else unit
    yield unit, member
    for child in member.children():
        yield from _with_units(child, unit, units)
