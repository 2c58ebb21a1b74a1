from __future__ import annotations

import pytest

from windlass.text.encoder import EncodedRows
from windlass.text.packing import pack_rows
from windlass.text.token_rows import TokenRows

ROWS = TokenRows.of([EncodedRows([[1, 2], [3]], [[-100, 2], [3]]), EncodedRows([[4, 5, 6]], [[4, 5, 6]])])


def test_rows_are_read_like_those_of_a_table() -> None:
    assert len(ROWS) == 3
    assert ROWS[0] == {"input_ids": [1, 2], "labels": [-100, 2]}
    assert ROWS[-1] == ROWS[2] == {"input_ids": [4, 5, 6], "labels": [4, 5, 6]}
    assert ROWS[1:] == {"input_ids": [[3], [4, 5, 6]], "labels": [[3], [4, 5, 6]]}
    assert ROWS["labels"] == [[-100, 2], [3], [4, 5, 6]]
    assert list(ROWS) == [ROWS[0], ROWS[1], ROWS[2]]
    assert ROWS.lengths.tolist() == [2, 1, 3]
    assert ROWS.column_names == ["input_ids", "labels"]
    for index in (3, -4):
        with pytest.raises(IndexError):
            ROWS[index]


def test_parts_are_joined() -> None:
    assert list(TokenRows.joined([ROWS, ROWS])) == [*ROWS, *ROWS]
    assert len(TokenRows.of([])) == 0


def test_rows_are_shuffled_as_those_of_a_table() -> None:
    datasets = pytest.importorskip("datasets")
    ids = [[n] * (n % 5 + 1) for n in range(40)]
    plain = TokenRows.of([EncodedRows(ids, ids)])
    for rows in (plain, pack_rows(plain, 7, "bfd")):
        table = datasets.Dataset.from_list(list(rows))
        assert list(rows.shuffle(seed=7)) == list(table.shuffle(seed=7))
        assert list(rows.shuffle(seed=7)) != list(rows)
