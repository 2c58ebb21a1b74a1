from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.errors import ConfigError
from windlass.text.mixture import DatasetMixture

A, B = [f"a{n}" for n in range(10)], [f"b{n}" for n in range(25)]


def read(mixture: DatasetMixture, epoch: int) -> list[Any]:
    mixture.set_epoch(epoch)
    return [mixture[at] for at in range(len(mixture))]


def test_shares_are_exact() -> None:
    mixture = DatasetMixture({"a": A, "b": B}, {"a": 1, "b": 3}, length=80)
    assert mixture.counts == {"a": 20, "b": 60}
    found = Counter(read(mixture, 0))
    assert sum(found[row] for row in A) == 20
    assert {found[row] for row in A} == {2}, "each row of a source as often as any other"
    assert {found[row] for row in B} == {2, 3}
    assert DatasetMixture({"a": A, "b": B}).counts == {"a": 10, "b": 25}


def test_the_length_of_an_epoch() -> None:
    sources, weights = {"a": A, "b": B}, {"a": 0.5, "b": 0.5}
    assert len(DatasetMixture(sources, weights)) == 20
    assert DatasetMixture(sources, weights, stopping_strategy="all_exhausted").counts == {"a": 25, "b": 25}


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_an_epoch_by_the_number_of_rows_has_each_row_once(sizes: list[int]) -> None:
    # Rounding made it a row shorter or longer for a pair of sizes in fourteen, such as these.
    for each in (sizes, [1, 92], [1, 49]):
        for stopping in ("first_exhausted", "all_exhausted"):
            sources = {str(number): range(size) for number, size in enumerate(each)}
            mixture = DatasetMixture(sources, stopping_strategy=stopping)
            assert list(mixture.counts.values()) == each


def test_a_source_without_a_sample_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Its share of an epoch is less than one, in every epoch."""
    mixture = DatasetMixture({"a": A, "rare": B}, {"a": 99, "rare": 1})
    assert mixture.counts == {"a": 10, "rare": 0}
    assert (
        "the mixture has no sample of 'rare': its share of 10 samples is 0.01, less than one" in caplog.text
    )


def test_epochs_continue_where_the_one_before_ended() -> None:
    mixture = DatasetMixture({"a": A, "b": B}, {"a": 1, "b": 1})
    seen = Counter(row for epoch in range(5) for row in read(mixture, epoch) if row in B)
    assert set(seen.values()) == {2}, "50 of 25 rows in 5 epochs"


def test_each_pass_over_a_source_and_each_epoch_has_an_order_of_its_own() -> None:
    mixture = DatasetMixture({"a": A, "b": B}, {"a": 1, "b": 1}, length=20)
    (first, second), names = (read(mixture, epoch) for epoch in (0, 1)), []
    assert sorted(row for row in first if row in A) == sorted(row for row in second if row in A) == A
    assert [row for row in first if row in A] != [row for row in second if row in A]
    for epoch in (0, 1):
        mixture.set_epoch(epoch)
        names.append([mixture.position(at)[0] for at in range(20)])
    assert names[0] != names[1]


def test_a_sample_depends_on_its_position_alone() -> None:
    one = DatasetMixture({"a": A, "b": B}, {"a": 1, "b": 2}, seed=3)
    other = DatasetMixture({"a": A, "b": B}, {"a": 1, "b": 2}, seed=3)
    read(other, 0)
    assert read(other, 4) == read(one, 4), "whatever was read before"
    name, row = one.position(5)
    assert {"a": A, "b": B}[name][row] == one[5]
    assert read(DatasetMixture({"a": A, "b": B}, {"a": 1, "b": 2}, seed=4), 4) != read(one, 4)


def test_a_source_keeps_its_order_in_another_mixture() -> None:
    alone = DatasetMixture({"a": A}, seed=1, length=10)
    mixed = DatasetMixture({"b": B, "a": A}, {"a": 1, "b": 1}, seed=1, length=20)
    assert [row for row in read(mixed, 0) if row in A] == read(alone, 0)
    named = DatasetMixture({"a": A}, seed=1, seeds={"a": 77}, length=10)
    assert read(named, 0) != read(alone, 0)


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    length=st.integers(1, 300),
    epoch=st.integers(0, 3),
)
def test_counts_add_up(weights: list[float], length: int, epoch: int) -> None:
    sources = {str(n): range(n * 1000, n * 1000 + 7) for n in range(len(weights))}
    mixture = DatasetMixture(sources, {str(n): w for n, w in enumerate(weights)}, length=length)
    found = Counter(row // 1000 for row in read(mixture, epoch))
    assert len(mixture) == length
    for n, weight in enumerate(weights):
        assert found[n] == mixture.counts[str(n)]
        assert abs(found[n] - length * weight / sum(weights)) < 1 + 1e-6


def test_a_loader_reads_it_the_same_after_a_restart() -> None:
    from windlass.data.fetch import Fetch

    def make() -> Fetch:
        rows = {"a": [{"n": n} for n in range(10)], "b": [{"n": n} for n in range(100, 125)]}
        return Fetch(
            DatasetMixture(rows, {"a": 1, "b": 1}), lambda samples: [s["n"] for s in samples], seed=0
        )

    running, resumed = make(), make()
    for epoch in range(2):
        running(epoch, [0, 1])
    assert running(2, [3, 4, 5]) == resumed(2, [3, 4, 5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": {}}, "name at least one dataset"),
        ({"sources": {"a": []}}, "sources.a=0: has no rows"),
        ({"sources": {"a": iter(A)}}, "has no length"),
        ({"sources": {"a": A}, "weights": {"a": 1, "c": 2}}, "weights.c=2: no such source"),
        (
            {"sources": {"a": A, "b": B}, "weights": {"a": 1}},
            "weights.b=None: each source needs a weight above 0",
        ),
        ({"sources": {"a": A}, "weights": {"a": 0}}, "weights.a=0: each source needs a weight above 0"),
        ({"sources": {"a": A}, "seeds": {"b": 0}}, "seeds.b=0: no such source"),
        (
            {"sources": {"a": A}, "stopping_strategy": "never"},
            "must be one of first_exhausted, all_exhausted",
        ),
        ({"sources": {"a": A}, "length": 0}, "length=0: must be a whole number of 1 or more"),
        ({"sources": {"a": A}, "length": 2.5}, "length=2.5: must be a whole number of 1 or more"),
        ({"sources": {"a": A}, "weights": {"a": "1"}}, "weights.a='1': each source needs a weight above 0"),
    ],
)
def test_bad_mixtures_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DatasetMixture(**arguments)
