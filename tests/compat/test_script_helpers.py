from __future__ import annotations

import functools
import logging
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from transformers import trainer_pt_utils, training_args
from transformers import trainer_utils as reference

from windlass.compat import script_helpers as ours
from windlass.core.errors import DataError


class Unsized:
    def __len__(self) -> int:
        raise TypeError("unsized")


@pytest.mark.parametrize("thing", [[], [1], Unsized(), iter(()), 3, None])
def test_lengths(thing: Any) -> None:
    assert ours.has_length(thing) is reference.has_length(thing)


def three(a: int, b: int = 0, *, c: int = 0) -> int:
    return a + b + c


@pytest.mark.parametrize(
    "function", [three, functools.partial(three, 1), functools.partial(three, 1, c=2), lambda: None]
)
def test_numbers_of_arguments(function: Any) -> None:
    assert ours.number_of_arguments(function) == reference.number_of_arguments(function)


@pytest.mark.parametrize("to_bool", [True, False])
@pytest.mark.parametrize(
    "word", ["yes", "True", "ON", "1", "t", "y", "no", "False", "off", "0", "f", "n", "maybe"]
)
def test_words_of_consent(word: str, to_bool: bool) -> None:
    try:
        wanted: Any = training_args.str_to_bool(word, to_bool)
    except ValueError:
        with pytest.raises(ValueError, match="true or false"):
            ours.str_to_bool(word, to_bool)
        return
    found = ours.str_to_bool(word, to_bool)
    assert (found, type(found)) == (wanted, type(wanted))
    assert ours.str_to_bool(word) is bool(wanted)


def _draws() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_workers_are_seeded_alike() -> None:
    drawn = []
    for module in (ours, reference):
        torch.manual_seed(11)
        module.seed_worker(1, num_workers=3, rank=2)
        drawn.append(_draws())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("count", [1, 3])
def test_warnings_are_given_again(count: int) -> None:
    def caught() -> list[Any]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for kind in (UserWarning, FutureWarning, DeprecationWarning)[:count]:
                warnings.warn("text", kind, stacklevel=1)
        return found

    given = []
    for module in (ours, trainer_pt_utils):
        first = caught()
        with warnings.catch_warnings(record=True) as again:
            warnings.simplefilter("always")
            module.reissue_pt_warnings(first)
        given.append([(str(w.message), w.category) for w in again])
    assert given[0] == given[1]


def test_progress_bars_of_the_hub_are_off_in_the_body_alone() -> None:
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    enable_progress_bars()
    with ours.suppress_progress_bars():
        assert are_progress_bars_disabled()
    assert not are_progress_bars_disabled()


def test_columns_are_removed_as_by_the_reference() -> None:
    samples = [{"x": i, "label": i, "text": "a"} for i in range(3)]
    found, wanted = (
        module.RemoveColumnsCollator(list, ["x", "label"], model_name="Model", description="training")(
            samples
        )
        for module in (ours, reference)
    )
    assert found == wanted
    assert ours.RemoveColumnsCollator(list, ["x"]).signature_columns == ["x"]


def test_the_given_logger_names_the_removed_columns_once(caplog: pytest.LogCaptureFixture) -> None:
    fitting, more = [{"x": 0, "label": 1}], [{"x": 0, "label": 1, "text": "a"}]
    for module in (ours, reference):
        caplog.clear()
        log = logging.getLogger("of a script")
        collate = module.RemoveColumnsCollator(list, ["x", "label"], log, "Model", "training")
        assert (collate.logger, collate.message_logged) == (log, False)
        with caplog.at_level(logging.INFO, "of a script"):
            for samples in (fitting, more, more):
                collate(samples)
        assert [(r.name, r.levelname) for r in caplog.records] == [("of a script", "INFO")]
        assert "text" in caplog.text
        assert collate.message_logged


def test_samples_without_any_column_of_the_model_are_refused() -> None:
    samples = [{"x": i, "label": i, "text": "a"} for i in range(3)]
    with pytest.raises(DataError, match="no column of the training set"):
        ours.RemoveColumnsCollator(list, ["y"])(samples)


def test_sharding_words_are_those_of_the_reference() -> None:
    assert [m.value for m in ours.FSDPOption] == [m.value for m in reference.FSDPOption]
    assert ours.FSDPOption("full_shard") == "full_shard"


def test_random_state_of_a_device_is_set_and_its_absence_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.random.get_rng_state()

    class Device:
        random = torch.random

    torch.rand(3)
    ours.set_rng_state_for_device("CPU", Device, {"cpu": before}, is_distributed=False)
    assert torch.equal(torch.random.get_rng_state(), before)
    ours._logger.addHandler(caplog.handler)
    try:
        ours.set_rng_state_for_device("CPU", Device, {}, is_distributed=False)
    finally:
        ours._logger.removeHandler(caplog.handler)
    assert "random state of CPU could not be set" in caplog.text
