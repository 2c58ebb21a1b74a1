"""The short form of the combinations: some cases of one seed, and that what is wrong is found."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.dist.launch import on_ranks
from tests.reliability.combinations import combinations_in, summary
from tests.reliability.combined import questions
from tests.reliability.combined.case import Case, draw, parse
from tests.reliability.combined.features import BY_NAME, FEATURES
from tests.reliability.combined.questions import HELD, REFUSED, SHORT, examine
from tests.reliability.combined.recipe import KINDS, Outcome, Recipe
from tests.reliability.kill_matrix import memory

from windlass import EMACallback

# One of each kind: what runs, the strategy of its ranks, its loss, its data.
SHORT_FORM = (
    "with=sft,model=llama,special=lomo,full_eval=bf16_full_eval,loss=terms,kill=0.617",
    "with=loop,model=llama,ranks=ddp-3,data=stateful_stream,clipping=0.001,kill=0.575",
    "with=trainer,ranks=fsdp2-2,dropout=0.2,workers=2-stay,kill=0.321",
    "with=dpo,model=llama,schedule=warmup_stable_decay,saving=waiting,kill=0.943",
    "with=loop,adapter=ia3,terms=terms,kill=0.558",
    "with=trainer,ranks=pp_tp-4,datasets=stream,kill=0.667",
    "with=trainer,ranks=ep-2,optim=rmsprop,clipping=0.001,evaluation=steps,kill=0.55",
    "with=trainer,ranks=pp-2,optim=adamw_anyprecision,length=epochs-1.5,evaluation=steps,save_best=loss,kill=0.409",
)
LONG_FORM = 100


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memory(), prefix="windlass-combinations-") as name:
        yield Path(name)


def hold(place: Path, cases: list[Case], timeout: float = 280) -> None:
    """Examined in a fork of the process that has imported everything: to import it here takes as long as some cases."""
    (results,) = on_ranks(0, examined, place, [case.spec for case in cases], timeout=timeout)
    short = [f"--only {one['spec']}: {one['problems']}" for one in results if one["verdict"] == SHORT]
    assert not short, "\n".join(short)
    assert summary(results).startswith(f"{len(cases)} cases")
    assert sum(one["verdict"] == HELD for one in results) > 0.7 * len(cases), summary(results)


def examined(place: Path, specs: list[str]) -> list[dict[str, Any]]:
    with combinations_in(place, 2) as made:
        return made.examine([parse(spec) for spec in specs], lambda result: None)


@pytest.mark.dist
def test_pairs_and_triples_hold(place: Path) -> None:
    cases = [parse(spec) for spec in SHORT_FORM]
    asked = {pair for case in cases for pair in case.values}
    assert {case.kind for case in cases} == set(KINDS)
    ranks = {value.partition("-")[0] for name, value in asked if name == "ranks"}
    assert ranks == {"ddp", "ep", "fsdp2", "pp", "pp_tp"}
    assert {"data", "datasets", "loss", "terms", "special", "adapter"} <= {name for name, _ in asked}
    hold(place, cases)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_pairs_and_triples_hold(place: Path, seed: int) -> None:
    hold(place, [draw(seed, number) for number in range(LONG_FORM)], timeout=3500)


# --- the questions find what is wrong -------------------------------------------------------------------------------


def test_an_average_that_is_none_is_found(place: Path) -> None:
    with mock.patch.object(EMACallback, "weight_of_next", return_value=1.0):
        found = examine(parse("average=ema,evaluation=steps,kill=0.99"), place / "case")
    assert [problem for problem in found.problems if problem.startswith("the effect of average")]


def test_state_that_is_lost_is_found(place: Path) -> None:
    def forgets(self: Any, state: Any) -> None:
        pass

    with mock.patch.object(EMACallback, "load_state_dict", forgets):
        found = examine(parse("average=ema,kill=0.9"), place / "case")
    assert any("other bits" in problem for problem in found.problems), found


def test_a_refusal_without_a_fix_is_found(place: Path) -> None:
    assert (
        refused(place, "ConfigError: 1 problem in the configuration:\n  - fsdp=1: give fsdp=True").verdict
        == REFUSED
    )
    assert refused(place, "ConfigError: no").verdict == SHORT
    assert refused(place, "ModelError: no").verdict == SHORT


def refused(place: Path, text: str) -> Any:
    with mock.patch.object(questions, "attempt", return_value=Outcome(refused=text)):
        return examine(parse("with=trainer"), place / "case")


def test_a_crash_is_found(place: Path) -> None:
    with mock.patch.object(questions, "attempt", return_value=Outcome(crashed="KeyError: 'x'")):
        found = examine(parse("with=trainer"), place / "case")
    assert (found.verdict, found.problems) == (SHORT, ["crashed: KeyError: 'x'"])


# --- the table ------------------------------------------------------------------------------------------------------


def test_a_spec_repeats_its_case() -> None:
    for number in range(200):
        case = draw(0, number)
        assert parse(case.spec) == case


def test_an_unknown_feature_or_value_is_refused() -> None:
    for spec in ("optin=sgd", "optim=sdg", "with=a_trainer,optim=sgd"):
        with pytest.raises(ValueError, match="no such feature or value"):
            parse(spec)


def test_every_value_is_drawn_and_changes_the_run() -> None:
    drawn = {pair for number in range(3000) for pair in draw(0, number).values}
    known = {(feature.name, value) for feature in FEATURES for value in feature.values}
    assert drawn == known - {("device", "accelerator")}
    assert all(("device", "accelerator") in draw(0, number, accelerator=True).values for number in range(99))
    for feature in FEATURES:
        for value in feature.values:
            for kind in feature.kinds:
                asked, unasked = Recipe(kind), Recipe(kind)
                feature.ask(asked, value)
                assert asked != unasked, (feature.name, value)


def test_what_is_named_in_the_table_is_there() -> None:
    for feature in FEATURES:
        assert feature.kinds
        assert set(feature.kinds) <= set(KINDS)
        for other, values in feature.apart.items():
            assert other in BY_NAME
            assert values == ("*",) or set(values) <= set(feature.values), (feature.name, other)
        for other, value in feature.needs.items():
            assert value in BY_NAME[other].values
