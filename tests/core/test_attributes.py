"""Attributes are put back as they were, after an error too."""

from __future__ import annotations

import pytest

from windlass.core.attributes import attributes_of


class Base:
    word = "base"

    @classmethod
    def made(cls) -> str:
        return cls.__name__


class Owner(Base):
    pass


def test_an_attribute_has_the_value_within_the_body_alone() -> None:
    owner = Owner()
    with attributes_of(owner, word="other"):
        assert (owner.word, Owner.word) == ("other", "base")
    assert owner.word == "base"


def test_a_class_method_is_one_again_after_an_error() -> None:
    def fail() -> None:
        with attributes_of(Base, made=staticmethod(lambda: "other"), word=""):
            assert (Owner.made(), Base.word) == ("other", "")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert (Owner.made(), Base.made(), Base.word) == ("Owner", "Base", "base")


def test_an_unknown_attribute_is_refused_and_nothing_is_set() -> None:
    with pytest.raises(AttributeError), attributes_of(Base, word="other", absent=1):
        pass
    assert Base.word == "base"
