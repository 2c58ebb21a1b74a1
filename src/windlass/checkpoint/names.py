"""Canonical parameter names: what a parameter is called whatever wraps the model."""

from __future__ import annotations

from collections.abc import Iterable

from windlass.core.errors import CheckpointError

# Attributes under which torch.compile, FSDP and activation checkpointing keep the module they wrap.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its canonical one, in order: wrapper parts dropped anywhere, `module.` in front of *all*
    names dropped.

    A leading `module.` goes only where every name has it: that is what DDP does, while a model may well have a
    child of this name.
    """
    canonical = {name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names}
    while canonical and all(name.startswith("module.") for name in canonical.values()):
        canonical = {name: short.removeprefix("module.") for name, short in canonical.items()}
    seen: dict[str, str] = {}
    for name, short in canonical.items():
        if short in seen:
            raise CheckpointError(
                f"parameters {seen[short]!r} and {name!r} both have the canonical name {short!r}"
            )
        seen[short] = name
    return canonical


def counted(*groups: tuple[Iterable[str], str]) -> str:
    """Text for an error from names and what is wrong with them: "2 missing: a, b; 1 of another shape: c"."""
    listed = [(list(names), what) for names, what in groups]
    return "; ".join(f"{len(names)} {what}: {shorten(names)}" for names, what in listed if names)


def shorten(names: Iterable[str], limit: int = 5) -> str:
    """The first few names and how many more there are, for an error."""
    listed = list(names)
    text = ", ".join(listed[:limit])
    return text if len(listed) <= limit else f"{text} and {len(listed) - limit} more"
