"""Changing what a module computes by its class: it stays the same object, with its names, hooks and parameters."""

from __future__ import annotations

import copyreg
from functools import cache
from typing import Any


def mix(mixin: Any, module: Any) -> None:
    """Mix a class into that of `module`, whose own methods it calls by `super()`.

    The class is replaced and not the `forward` of the instance: after `copy.deepcopy` a bound method would call the
    module that was copied.
    """
    kind: Any = type(module)
    module.__class__ = mixed(mixin, kind)


@cache
def mixed(mixin: Any, kind: Any) -> Any:
    """A class with the methods of `mixin` before those of `kind`. It has the name of `kind`, by which layers are found;
    so it is pickled by the two classes, because what pickle finds under that name is `kind`.
    """

    def reduce(module: Any, protocol: Any) -> Any:
        function, arguments, *state = super(made, module).__reduce_ex__(protocol)
        # A class may be derived from this one, as by FSDP2, or mixed into it; and `kind` may be pickled in another way.
        if type(module) is not made or function is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return function, arguments, *state
        return _new, parts, *state

    parts = (*vars(kind).get("mixed_from", (kind,)), mixin)
    namespace = {"__module__": kind.__module__, "__reduce_ex__": reduce, "mixed_from": parts}
    made: Any = type(kind.__name__, (mixin, kind), namespace)
    return made


def _new(kind: Any, *mixins: Any) -> Any:
    """An object of a mixed class, for pickle."""
    for mixin in mixins:
        kind = mixed(mixin, kind)
    return kind.__new__(kind)
