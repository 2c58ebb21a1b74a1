from __future__ import annotations

from typing import Any

import pytest
from tests.versions import needs
from transformers import trainer_utils as reference

from windlass.compat.batch_size import NoBatchFitsError
from windlass.compat.fitting_batch import find_executable_batch_size
from windlass.core.errors import WindlassError


def _tried(find: Any, fits: int, **options: Any) -> tuple[Any, list[int]]:
    sizes: list[int] = []

    def run(batch_size: int, extra: int = 0) -> int:
        sizes.append(batch_size)
        if batch_size > fits:
            raise RuntimeError("CUDA out of memory.")
        return batch_size + extra

    return find(run, **options)(extra=5), sizes


@needs("accelerate", "1.10", "older ones halve the size")
def test_sizes_are_tried_as_by_the_reference() -> None:
    options = {"starting_batch_size": 50, "auto_find_batch_size": True}
    found = _tried(find_executable_batch_size, 30, **options)
    assert found == _tried(reference.find_executable_batch_size, 30, **options)
    assert found[0] <= 35


def test_one_size_is_taken_as_it_is() -> None:
    for find in (find_executable_batch_size, reference.find_executable_batch_size):
        assert _tried(find, 99, starting_batch_size=7) == (12, [7])
        decorated = find(starting_batch_size=3)(lambda batch_size: batch_size)
        assert decorated() == 3


def test_if_no_batch_fits_the_error_is_also_a_runtime_error() -> None:
    with pytest.raises(NoBatchFitsError, match="no batch fits") as raised:
        _tried(find_executable_batch_size, 0, starting_batch_size=4, auto_find_batch_size=True)
    assert isinstance(raised.value, RuntimeError)
    assert isinstance(raised.value, WindlassError)


def test_other_errors_pass() -> None:
    @find_executable_batch_size(starting_batch_size=4, auto_find_batch_size=True)
    def run(batch_size: int) -> None:
        raise KeyError(batch_size)

    with pytest.raises(KeyError):
        run()
