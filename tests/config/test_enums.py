"""Words: members are strings, the same ones that scripts know, and a wrong one is answered with the choices."""

from __future__ import annotations

import json

import pytest

from windlass.config import enums


@pytest.mark.parametrize("name", ["IntervalStrategy", "SaveStrategy", "HubStrategy", "SchedulerType"])
def test_members_are_those_that_scripts_know(name: str) -> None:
    pytest.importorskip("transformers")
    from transformers import trainer_utils

    theirs = {m.name: m.value for m in getattr(trainer_utils, name)}
    assert {m.name: m.value for m in getattr(enums, name)} == theirs


def test_optimizer_members_are_those_that_scripts_know() -> None:
    pytest.importorskip("transformers")
    from transformers.training_args import OptimizerNames

    theirs = {m.name: m.value for m in OptimizerNames}
    assert {m.name: m.value for m in enums.OptimizerNames} == {**theirs, "MUON": "muon"}


def test_members_are_their_words() -> None:
    assert enums.IntervalStrategy.STEPS == "steps"
    assert f"{enums.SaveStrategy.BEST}" == "best"
    assert json.dumps(enums.SchedulerType.LINEAR) == '"linear"'
    assert enums.EvaluationStrategy is enums.IntervalStrategy


def test_a_wrong_word_is_answered_with_the_choices() -> None:
    with pytest.raises(
        ValueError, match=r"'step' is not a valid IntervalStrategy.*no, steps, epoch; did you mean 'steps'\?"
    ):
        enums.IntervalStrategy("step")
