from __future__ import annotations

from typing import Any

import datasets
from tests.data.cases import Stream

from windlass.data.datasets_nodes import has_shuffle_buffer, with_nodes_of_its_own


def rows() -> Any:
    return datasets.Dataset.from_dict({"i": list(range(12))}).to_iterable_dataset(num_shards=3)


def test_a_pass_over_the_clone_leaves_the_original_where_it_was() -> None:
    stream = rows().map(lambda row: row)
    running = iter(stream)
    next(running)
    clone = with_nodes_of_its_own(stream)
    assert [row["i"] for row in clone] == list(range(12))
    assert next(running) == {"i": 1}
    again = rows().map(lambda row: row)
    again.load_state_dict(stream.state_dict())
    assert next(iter(again)) == {"i": 2}


def test_the_clone_counts_epochs_for_itself() -> None:
    stream = rows().shuffle(seed=1, buffer_size=6)
    clone = with_nodes_of_its_own(stream)
    clone.set_epoch(1)
    assert (stream.epoch, clone.epoch) == (0, 1)
    own = rows().shuffle(seed=1, buffer_size=6)
    own.set_epoch(1)
    assert list(clone) == list(own) != list(stream)


def test_any_other_dataset_is_left_alone() -> None:
    stream = Stream(range(3))
    assert with_nodes_of_its_own(stream) is stream
    assert not has_shuffle_buffer(stream)


def test_a_shuffle_buffer_is_found_wherever_it_is() -> None:
    shuffled = rows().shuffle(seed=1, buffer_size=4)
    assert not has_shuffle_buffer(rows())
    assert not has_shuffle_buffer(rows().shuffle(seed=1, buffer_size=1))
    assert has_shuffle_buffer(shuffled)
    assert has_shuffle_buffer(shuffled.map(lambda row: row).take(3))
    assert has_shuffle_buffer(datasets.interleave_datasets([rows(), shuffled]))
