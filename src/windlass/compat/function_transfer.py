"""Functions for a new interpreter: those of a notebook, of `__main__` and local ones by value, all others by name.

What is written is read only by processes that this one starts itself, through a file that only its user can read. It
is written with the reducers of `multiprocessing`, which its method "spawn" uses for the same purpose.

Not with cloudpickle: it gives functions of `__main__` globals of their own, so that what they define cannot be found in
`__main__` by data workers, and it copies the globals of a local function of a module instead of using that module's.
"""

from __future__ import annotations

import copyreg
import dataclasses
import dis
import enum
import functools
import importlib
import io
import linecache
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

from windlass.core.errors import ConfigError, Problem

_MAIN = "__main__"
_GLOBAL_READS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
_CODE_PARTS = (
    "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_nlocals", "co_stacksize", "co_flags", "co_code",
    "co_consts", "co_names", "co_varnames", "co_filename", "co_name", "co_qualname", "co_firstlineno", "co_linetable",
    "co_exceptiontable", "co_freevars", "co_cellvars",
)  # fmt: skip
_FUNCTION_PARTS = (
    "__defaults__",
    "__kwdefaults__",
    "__annotations__",
    "__doc__",
    "__module__",
    "__qualname__",
)
# Classes that are found in the module `types` alone: those of Python itself do not know where they are.
_OF_TYPES: dict[type, str] = {
    types.CellType: "CellType",
    types.CodeType: "CodeType",
    types.MappingProxyType: "MappingProxyType",
}
# Made by the class statement itself, or set when the class is made.
_CLASS_LEAVES = {"__dict__", "__weakref__", "__slots__", "_abc_impl", "_backward_cls"}


def pack_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return `function` and `args` for `unpack_call` in a new interpreter. Raises ConfigError with the type of the
    value that cannot leave this process.
    """
    buffer = io.BytesIO()
    sender = _Sender(buffer)
    try:
        sender.dump((_sources_of(function), function, args))
    # Reducers of any library run here, and fail with any exception.
    except Exception as error:
        culprit = f"a value of type {type(sender.newest).__qualname__} that it uses"
        fix = f"cannot be sent to new processes ({error}): create {culprit} inside the function, or import it"
        raise ConfigError(
            Problem("function", getattr(function, "__qualname__", repr(function)), fix)
        ) from error
    return buffer.getvalue()


def unpack_call(packed: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and the arguments of `pack_call`; what was defined in `__main__` is defined there again."""
    sources, function, args = ForkingPickler.loads(packed)
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return function, args


class _Sender(ForkingPickler):
    """A writer that sends by value what a new interpreter cannot import."""

    newest: Any = None  # the value that was looked at last

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # Tensors are copied: multiprocessing would share their memory, for which both processes must be connected.
        self.dispatch_table = copyreg.dispatch_table

    def reducer_override(self, value: Any) -> Any:
        self.newest = value
        for kind, reduce in _REDUCERS:
            if isinstance(value, kind):
                return reduce(value)
        return NotImplemented


def _reduce_function(function: types.FunctionType) -> Any:
    if _is_importable(function):
        return NotImplemented
    state = {name: getattr(function, name) for name in _FUNCTION_PARTS}
    names = _globals_read(function.__code__)
    found = {n: function.__globals__[n] for n in sorted(names) if n in function.__globals__}
    home = function.__globals__.get("__name__", _MAIN)
    # One that is not there wrote its function with `exec`, as that of a named tuple is: its globals are here alone.
    home = home if home in sys.modules else _MAIN
    # The globals of an imported module are found there; those of `__main__` exist in this process only.
    sent = {n: v for n, v in found.items() if n not in _OF_MODULES} if _is_main(home) else {}
    parts = (function.__code__, home, function.__name__, function.__closure__)
    full = (state, vars(function), sent, _submodules(found, function.__code__))
    return _new_function, parts, full, None, None, _fill_function


_OF_MODULES = {"__name__", "__builtins__", "__spec__", "__loader__"}


def _new_function(
    code: types.CodeType, home: str, name: str, closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    module = sys.modules[_MAIN] if _is_main(home) else importlib.import_module(home)
    return types.FunctionType(code, vars(module), name, None, closure)


def _fill_function(function: types.FunctionType, state: Any) -> None:
    parts, attributes, sent, submodules = state
    for name, value in parts.items():
        setattr(function, name, value)
    vars(function).update(attributes)
    function.__globals__.update(sent)
    for module in submodules:
        importlib.import_module(module)


def _reduce_class(cls: type) -> Any:
    """Reduce a class of `__main__` or of a function to its name and bases first: its methods refer to it."""
    if cls in _OF_TYPES:
        return getattr, (types, _OF_TYPES[cls])
    if not (_is_main(cls.__module__) or "<locals>" in cls.__qualname__):
        return NotImplemented
    if isinstance(cls, enum.EnumMeta):
        # Its members are made with the class. By name, the new process would look for it in its own `__main__`.
        raise TypeError(f"the enumeration {cls.__qualname__} is not defined in a module")
    generic = typing.Generic in cls.__bases__ and typing.Protocol not in cls.__bases__
    if generic or typing.is_typeddict(cls):
        # They cannot be made of their bases: of `Generic[T]` the brackets are lost.
        raise TypeError(f"{cls.__qualname__}, a generic class or a typed dict, is not defined in a module")
    slots = cls.__dict__.get("__slots__")
    members = {slots} if isinstance(slots, str) else set(slots or ())
    leave = _CLASS_LEAVES | members
    state = {name: value for name, value in vars(cls).items() if name not in leave}
    start = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if slots is not None:
        start["__slots__"] = slots
    return _new_class, (type(cls), cls.__name__, cls.__bases__, start), state, None, None, _fill_class


def _new_class(metaclass: type, name: str, bases: tuple[type, ...], namespace: Mapping[str, Any]) -> type:
    return types.new_class(name, bases, {"metaclass": metaclass}, lambda body: body.update(namespace))


def _fill_class(cls: type, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        setattr(cls, name, value)


def _reduce_cell(cell: types.CellType) -> Any:
    try:
        content = (cell.cell_contents,)
    except ValueError:  # a variable that has no value yet
        return types.CellType, ()
    return types.CellType, (), content, None, None, _fill_cell


def _fill_cell(cell: types.CellType, content: tuple[Any]) -> None:
    (cell.cell_contents,) = content


def _reduce_code(code: types.CodeType) -> Any:
    return types.CodeType, tuple(getattr(code, part) for part in _CODE_PARTS)


def _reduce_module(module: types.ModuleType) -> Any:
    return importlib.import_module, (module.__name__,)


def _reduce_marker(value: Any) -> Any:
    """Reduce a marker of `dataclasses`, such as MISSING: it is compared by identity."""
    name = next((name for name, marker in vars(dataclasses).items() if marker is value), None)
    return (getattr, (dataclasses, name)) if name else NotImplemented


def _reduce_type_variable(value: Any) -> Any:
    # As for an enumeration.
    if _is_main(value.__module__):
        raise TypeError(f"{value.__name__} of typing is not defined in a module")
    return NotImplemented


def _reduce_mapping(value: types.MappingProxyType[Any, Any]) -> Any:
    return types.MappingProxyType, (dict(value),)


def _reduce_property(value: property) -> Any:
    return property, (value.fget, value.fset, value.fdel, value.__doc__)


def _reduce_method(value: classmethod[Any, Any, Any] | staticmethod[Any, Any]) -> Any:
    return type(value), (value.__func__,)


def _reduce_cached(value: Any) -> Any:
    """Reduce a function that keeps its results to one that has none yet. By itself it would be sent by name."""
    if _is_importable(value):
        return NotImplemented
    return _new_cached, (value.__wrapped__, value.cache_parameters())


def _new_cached(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**options)(function)


def _reduce_cached_property(value: functools.cached_property[Any]) -> Any:
    # Without its lock (Python 3.11). Its name is not set again: the class that has it is made before it.
    return functools.cached_property, (value.func,), {"attrname": value.attrname}


def _globals_read(code: types.CodeType) -> set[str]:
    """Return the names that the code, with the functions in it, looks up in its module."""
    # Not `co_names`, which has the names of attributes too.
    names = {i.argval for i in dis.get_instructions(code) if i.opname in _GLOBAL_READS}
    return names.union(*(_globals_read(inner) for inner in _inner(code)))


def _attributes_read(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_attributes_read(inner) for inner in _inner(code)))


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _submodules(found: Mapping[str, Any], code: types.CodeType) -> list[str]:
    """Return the modules that the code reaches as attributes of packages: importing the package is not enough."""
    read = _attributes_read(code)
    packages = tuple(f"{m.__name__}." for m in found.values() if isinstance(m, types.ModuleType))
    return [
        name
        for name in sorted(sys.modules)
        for package in packages
        if name.startswith(package) and read.issuperset(name.removeprefix(package).split("."))
    ]


def _is_main(name: str | None) -> bool:
    return name in (_MAIN, "__mp_main__")


def _is_importable(function: Any) -> bool:
    """Return True if a new interpreter finds this very function under its name."""
    if function.__module__ is None or _is_main(function.__module__):
        return False
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _sources_of(function: Callable[..., Any]) -> dict[str, list[str]]:
    """Return the lines of the notebook's cells, which are in no file, for tracebacks."""
    code = getattr(function, "__code__", None)  # a callable object has none
    globals_ = getattr(function, "__globals__", {})
    files = {code.co_filename} if code else set()
    files |= {
        value.__code__.co_filename for value in globals_.values() if isinstance(value, types.FunctionType)
    }
    return {file: linecache.getlines(file) for file in sorted(files) if not os.path.exists(file)}


_REDUCERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (types.FunctionType, _reduce_function),
    (type, _reduce_class),
    (types.CellType, _reduce_cell),
    (types.CodeType, _reduce_code),
    (types.ModuleType, _reduce_module),
    ((typing.TypeVar, typing.ParamSpec, typing.NewType), _reduce_type_variable),
    (types.MappingProxyType, _reduce_mapping),
    (property, _reduce_property),
    ((classmethod, staticmethod), _reduce_method),
    (type(functools.cache(abs)), _reduce_cached),  # their class has no public name
    (functools.cached_property, _reduce_cached_property),
    (tuple(type(vars(dataclasses)[name]) for name in ("MISSING", "_FIELD")), _reduce_marker),
)
