"""Cases: which features meet, written as a SPEC, and drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tests.reliability.combined.features import BY_NAME, FEATURES
from tests.reliability.combined.recipe import KINDS, Feature, Recipe

_WITH, _KILL, _DEVICE = "with", "kill", "device"
_SPREAD, _TRANSFORMERS = 0.45, 0.35  # shares of cases on several ranks, and with a model of transformers


@dataclass(frozen=True)
class Case:
    """Some features together.

    Attributes:
        kind: see `Recipe.kind`.
        values: what is asked for, by the name of the feature, in the order of the table.
        kill: how far into its instants the run is killed, in [0, 1).
    """

    kind: str
    values: tuple[tuple[str, str], ...]
    kill: float

    @property
    def spec(self) -> str:
        asked = [f"{name}={value}" for name, value in self.values]
        return ",".join([f"{_WITH}={self.kind}", *asked, f"{_KILL}={self.kill}"])

    @property
    def features(self) -> list[tuple[Feature, str]]:
        return [(BY_NAME[name], value) for name, value in self.values]

    def without(self, name: str) -> Case:
        """The same case without a feature."""
        return replace(self, values=tuple(pair for pair in self.values if pair[0] != name))

    def recipe(self) -> Recipe:
        made = Recipe(kind=self.kind, ragged=self.kind != "loop")
        if self.kind == "dpo":  # whose loss is not one of `losses.py`
            made.by_hand = None
        for feature, value in self.features:
            feature.ask(made, value)
        return made


def parse(spec: str) -> Case:
    """The case of a SPEC. Raises ValueError for a name or a value that the table does not have."""
    given = dict(part.partition("=")[::2] for part in spec.split(","))
    kind, kill = given.pop(_WITH, KINDS[0]), float(given.pop(_KILL, 0.5))
    for name, value in given.items():
        if name not in BY_NAME or value not in BY_NAME[name].values or kind not in KINDS:
            raise ValueError(
                f"{name}={value}: no such feature or value; see tests/reliability/combined/features.py"
            )
    return Case(kind, _ordered(given.items()), kill)


def draw(seed: int, number: int, accelerator: bool = False) -> Case:
    """The case of this number: the same for the same seed.

    Args:
        accelerator: it is trained on this machine's, by one process.
    """
    chance = random.Random(f"{seed} {number}")
    kind = chance.choices(KINDS, (5, 3, 3, 2))[0]
    asked = dict[str, str]()
    if kind in ("sft", "dpo") or chance.random() < _TRANSFORMERS:
        asked["model"] = "llama"
    if accelerator:
        asked[_DEVICE] = "accelerator"
    elif chance.random() < _SPREAD:
        asked["ranks"] = chance.choice(BY_NAME["ranks"].values)
    wanted = len(asked) + chance.choice((2, 3))
    left = {*asked, _DEVICE}
    names = [feature.name for feature in FEATURES if kind in feature.kinds and feature.name not in left]
    chance.shuffle(names)
    for name in names:
        feature = BY_NAME[name]
        added = {
            name: chance.choice(feature.values),
            **{n: v for n, v in feature.needs.items() if n not in asked},
        }
        if len(asked) < wanted and _can_meet(asked | added):
            asked |= added
    return Case(kind, _ordered(asked.items()), round(chance.random(), 3))


def _ordered(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    names = [feature.name for feature in FEATURES]
    return tuple(sorted(pairs, key=lambda pair: names.index(pair[0])))


def _can_meet(asked: dict[str, str]) -> bool:
    """Whether the documentation combines all of these."""
    for name, value in asked.items():
        feature = BY_NAME[name]
        for other, values in feature.apart.items():
            if other in asked and ("*" in values or value in values):
                return False
        if any(not _has(asked, *need) for need in feature.needs.items()):
            return False
    return True


def _has(asked: dict[str, str], name: str, value: str) -> bool:
    """Whether this is asked for; `fsdp2-3` is what needs `fsdp2-2`."""
    return asked.get(name, "").partition("-")[0] == value.partition("-")[0]
