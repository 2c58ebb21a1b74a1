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


def test_what_is_inherited_is_inherited_again() -> None:
    owner = Owner()
    with attributes_of(Owner, word="other"), attributes_of(owner, made=lambda: "own"):
        assert (Base.word, owner.word, owner.made()) == ("base", "other", "own")
    Base.word = "new"
    try:
        assert (owner.word, owner.made()) == ("new", "Owner")
    finally:
        Base.word = "base"
    assert vars(owner) == {}


def test_what_the_owner_has_itself_it_has_again() -> None:
    owner = Owner()
    owner.word = "own"
    with attributes_of(owner, word="first"), attributes_of(owner, word="second"):
        assert owner.word == "second"
    assert owner.word == "own"
