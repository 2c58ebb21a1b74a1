"""Functions written for a new interpreter, and read again."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import json
import threading
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import pytest
import torch

from windlass.compat.function_transfer import pack_call, unpack_call
from windlass.core.errors import ConfigError


def through(value: Any) -> Any:
    """Return `value` as a new interpreter would receive it."""
    _, (received,) = unpack_call(pack_call(json.dumps, (value,)))
    return received


def test_an_importable_function_is_sent_by_name() -> None:
    assert through(json.dumps) is json.dumps
    assert through(torch.nn.Linear) is torch.nn.Linear
    assert through(type(None)) is type(None)
    assert through(json) is json


def test_a_local_function_keeps_closure_defaults_and_attributes() -> None:
    factor = 3

    def scaled(x: int, *, plus: int = 1) -> int:
        """Scale."""
        return factor * x + plus

    scaled.note = "here"  # type: ignore[attr-defined]
    received = through(scaled)
    assert received is not scaled
    assert (received(2), received(2, plus=5)) == (7, 11)
    assert (received.__doc__, received.note, received.__qualname__) == ("Scale.", "here", scaled.__qualname__)
    assert received.__globals__ is scaled.__globals__, "those of the imported module"


def test_functions_that_refer_to_themselves_and_share_variables() -> None:
    count = 0

    def down(n: int) -> int:
        nonlocal count
        count += 1
        return 0 if n == 0 else down(n - 1)

    def counted() -> int:
        return count

    new_down, new_counted = through((down, counted))
    new_down(4)
    assert (new_counted(), counted()) == (5, 0)


def test_a_variable_without_a_value_stays_so() -> None:
    def reads() -> Any:
        return late

    received = through(reads)
    late = 1
    assert reads() == 1
    with pytest.raises(NameError, match="late"):
        received()


def test_wrapped_functions_keep_what_wraps_them() -> None:
    @torch.no_grad()
    def plain() -> bool:
        return torch.is_grad_enabled()

    assert through(plain)() is False
    assert through(functools.partial(lambda x, y: x - y, 5))(2) == 3


def test_functions_that_keep_their_results() -> None:
    @functools.lru_cache(maxsize=7, typed=True)
    def fibonacci(n: int) -> int:
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    fibonacci(5)
    received = through(fibonacci)
    assert received.cache_info().currsize == 0
    assert (received(10), received.cache_parameters()) == (55, {"maxsize": 7, "typed": True})
    assert received.cache_info().misses == 11, "it calls itself through the cache"

    class Table:
        @functools.cached_property
        def rows(self) -> list[int]:
            return [1, 2]

    table = through(Table)()
    assert table.rows is table.rows == [1, 2]


def test_local_classes() -> None:
    class Base(abc.ABC):
        @abc.abstractmethod
        def size(self) -> int: ...

        @property
        def doubled(self) -> int:
            return 2 * self.size()

        @classmethod
        def made(cls) -> Base:
            return cls()

        @staticmethod
        def fixed() -> int:
            return 7

    class Child(Base):
        __slots__ = ("kept",)

        def __init__(self) -> None:
            super().__init__()
            self.kept = 4

        def size(self) -> int:
            return self.kept

    received = through(Child)
    made = received.made()
    assert (made.doubled, made.fixed(), type(made) is received) == (8, 7, True)
    with pytest.raises(TypeError, match="abstract"):
        received.__bases__[0]()
    assert through(Child()).size() == 4


def test_local_dataclasses_and_named_tuples_stay_such() -> None:
    @dataclasses.dataclass
    class Options:
        rows: int
        names: list[str] = dataclasses.field(default_factory=list)

    class Pair(NamedTuple):
        left: int
        right: int = 2

    pair = through(Pair(1))
    assert (pair.left, pair.right, type(pair)(4)) == (1, 2, (4, 2))

    received = through(Options(3, ["a"]))
    assert dataclasses.asdict(received) == {"rows": 3, "names": ["a"]}
    assert type(received)(2) == type(received)(2, [])


def test_tensors_are_copied() -> None:
    tensor = torch.arange(4.0)
    received = through(tensor)
    tensor.zero_()
    assert received.tolist() == [0, 1, 2, 3]


def test_what_cannot_be_sent_is_named_with_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def locks() -> None:
        lock.acquire()

    with pytest.raises(ConfigError, match=r"locks.*type lock") as caught:
        pack_call(locks, ())
    assert caught.value.problems[0].field == "function"

    class Colour(enum.Enum):
        RED = 1

    with pytest.raises(ConfigError, match=r"the enumeration .*Colour is not defined in a module"):
        pack_call(lambda: Colour.RED, ())

    kind = TypeVar("kind")

    class Box(Generic[kind]):
        pass

    class Row(TypedDict):
        text: str

    for cls in (Box, Row):
        with pytest.raises(ConfigError, match=rf"{cls.__name__}, a generic class or a typed dict"):
            pack_call(lambda cls=cls: cls, ())
    monkeypatch.setattr(kind, "__module__", "__main__")
    with pytest.raises(ConfigError, match="kind of typing is not defined in a module"):
        pack_call(lambda: kind, ())
