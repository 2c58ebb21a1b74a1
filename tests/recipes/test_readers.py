"""Every format gives the same records, and every broken line is named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.errors import DataError
from windlass.recipes.readers import column, read_records, texts
from windlass.recipes.schema import DataSpec

ROWS = [
    {"text": "a film", "label": "1"},
    {"text": 'not "good", no', "label": "0"},
    {"text": "ünïcode", "label": "1"},
]


def write_jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n", encoding="utf-8")
    return path


def write_csv(path: Path) -> Path:
    lines = ["label,text", *('{label},"{0}"'.format(row["text"].replace('"', '""'), **row) for row in ROWS)]
    path.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8-sig")
    return path


def write_tsv(path: Path) -> Path:
    path.write_text(
        "\n".join(["text\tlabel", *(f"{r['text']}\t{r['label']}" for r in ROWS)]), encoding="utf-8"
    )
    return path


def write_parquet(path: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{**row, "id": 3} for row in ROWS]), path)
    return path


def write_json(path: Path) -> Path:
    path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("ending", "write"),
    [
        ("jsonl", write_jsonl),
        ("json", write_json),
        ("json", write_jsonl),
        ("csv", write_csv),
        ("tsv", write_tsv),
        ("parquet", write_parquet),
    ],
)
def test_formats_agree(ending: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    records = read_records(str(write(tmp_path / f"rows.{ending}")), DataSpec())
    assert texts(records, "text") == [row["text"] for row in ROWS]
    assert column(records, "label") == [row["label"] for row in ROWS]


def test_columns_of_conversations_and_prompts_are_read_beside_others(tmp_path: Path) -> None:
    """A table with a label, or with the text column's name, has them too."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    calls = [{"name": name, "arguments": {name: 1}} for name in ("f", "g")]
    rows = [
        {"text": "a", "question": "q", "answer": "a", "messages": [{"role": "user", "call": call}]}
        for call in calls
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    spec = DataSpec(prompt_column="question", completion_column="answer")
    assert [row for _, row in read_records(str(tmp_path / "rows.parquet"), spec)] == rows, (
        "without nulls in calls"
    )


def test_columns_of_preferences_are_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    reference = {"ref_chosen_logps": -1.5, "ref_rejected_logps": -2.0, "ref_logps": -0.5}
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5, **reference}
    pq.write_table(pa.Table.from_pylist([{**row, "source": "x"}]), tmp_path / "rows.parquet")
    assert [found for _, found in read_records(str(tmp_path / "rows.parquet"), DataSpec())] == [row]


@pytest.mark.parametrize(
    ("header", "pair"), [("question,answer", ("question", "answer")), ("instruction,output", (None, None))]
)
def test_a_csv_file_of_prompts_needs_no_column_of_text(
    header: str, pair: tuple[str | None, str | None], tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text(f"{header}\na,b\n")
    spec = DataSpec(prompt_column=pair[0], completion_column=pair[1])
    ((_, row),) = read_records(str(tmp_path / "rows.csv"), spec)
    assert list(row.values()) == ["a", "b"]
    with pytest.raises(DataError, match="no column 'q' in the first line"):
        read_records(str(tmp_path / "rows.csv"), DataSpec(prompt_column="q", completion_column="a"))


def test_tsv_without_header(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text('he said "no\t0\nyes\t1\n')
    records = read_records(str(path), DataSpec(columns=["text", "label"]))
    assert records == [
        (f"{path}:1", {"text": 'he said "no', "label": "0"}),
        (f"{path}:2", {"text": "yes", "label": "1"}),
    ]


def test_csv_with_a_line_break_inside_quotes(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text,label\n"two\nlines",1\nx,0\n')
    assert texts(read_records(str(path), DataSpec()), "text") == ["two\nlines", "x"]


def test_folder_gives_file_and_label(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for label, body in (("neg", "bad"), ("pos", "good")):
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.txt").write_text(body)
    (tmp_path / "pos" / "picture.png").write_bytes(b"\x89")
    (tmp_path / "pos" / "0.txt").write_text(" \n")
    records = read_records(str(tmp_path), DataSpec())
    assert f"left out 1 file(s) without text, the first of them {tmp_path / 'pos' / '0.txt'}" in caplog.text
    assert [values for _, values in records] == [
        {"text": "bad\n", "label": "neg"},
        {"text": "good\n", "label": "pos"},
    ]


def test_hidden_files_of_a_folder_are_of_other_programs(tmp_path: Path) -> None:
    for name in ("good/a.txt", ".ipynb_checkpoints/a-checkpoint.txt", "bad/b.txt", "bad/.b.txt.swp.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a film")
    rows = [row for _, row in read_records(str(tmp_path), DataSpec())]
    assert [row["label"] for row in rows] == ["bad", "good"]


def test_few_records_of_a_folder_are_of_each_class(tmp_path: Path) -> None:
    for label in ("neg", "pos"):
        (tmp_path / label).mkdir()
        for number in range(3):
            (tmp_path / label / f"{number}.txt").write_text(f"{label} {number}")
    records = read_records(str(tmp_path), DataSpec(max_samples=4))
    assert [values["text"] for _, values in records] == ["neg 0\n", "neg 1\n", "pos 0\n", "pos 1\n"]


def test_txt_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo")
    assert [values for _, values in read_records(str(path), DataSpec())] == [{"text": "one\ntwo\n"}]


def test_max_samples(tmp_path: Path) -> None:
    records = read_records(str(write_jsonl(tmp_path / "rows.jsonl")), DataSpec(max_samples=2))
    assert len(records) == 2


def test_python_docs_are_there() -> None:
    records = read_records("", DataSpec(format="python-docs"))
    assert sum(map(len, texts(records, "text"))) > 200_000


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', ["a.jsonl:2", "not valid JSON", '{"text":']),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', ["a.jsonl:2", "a JSON object", "list"]),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', ["a.jsonl:2", "UTF-8"]),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', ["a.jsonl:2", "'text' is missing", "txt"]),
        ("a.jsonl", b'{"text": 3}\n', ["a.jsonl:1", "must hold text, not int"]),
        ("a.jsonl", b'{"text": null}\n', ["a.jsonl:1", "is empty"]),
        ("a.jsonl", b"\n\n", ["a.jsonl", "no records"]),
        ("a.csv", b"text,label\nx,1\ny\n", ["a.csv:3", "1 columns, 2 expected"]),
        ("a.csv", b"sentence,label\nx,1\n", ["a.csv:1", "no column 'text'", "sentence, label"]),
        ("a.csv", b'text,label\n"x,1\n', ["a.csv:2", "unexpected end"]),
        ("a.tsv", b"text\tlabel\nx\t1\t2\n", ["a.tsv:2", "3 columns, 2 expected"]),
        ("a.txt", b" \n", ["a.txt", "no records"]),
        ("a.csv", b"text,label,text\nx,1,y\n", ["a.csv:1", "several columns have the name 'text'"]),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n', mtime=0)[:-9],
            ["a.jsonl.gz: cannot be read", "ended before"],
        ),
        ("a.jsonl.gz", b'{"text": "x"}\n', ["a.jsonl.gz: cannot be read", "Not a gzipped file"]),
        ("a.bin", b"x", ["a.bin: unknown file ending", ".jsonl", "set data.format"]),
        ("a.parquet", b"not parquet", ["a.parquet", "parquet file"]),
    ],
)
def test_what_cannot_be_read_is_named(name: str, body: bytes, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(body)
    with pytest.raises(DataError) as caught:
        texts(read_records(str(path), DataSpec()), "text")
    assert all(word in str(caught.value) for word in words), str(caught.value)


_WORDS = st.text(st.characters(exclude_characters="\t\r\n\ufeff", exclude_categories=["Cs"]), min_size=1)


@given(rows=st.lists(st.tuples(_WORDS, st.sampled_from("01")), min_size=1, max_size=8))
def test_any_tsv_comes_back(rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tsv") / "rows.tsv"
    path.write_bytes("".join(f"{text}\t{label}\n" for text, label in rows).encode())
    records = read_records(str(path), DataSpec(columns=["text", "label"]))
    assert [(values["text"], values["label"]) for _, values in records] == rows


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("train.de", "train.en"),
        ("europarl.de-en.de", "europarl.de-en.en"),
        ("de.dev.de", "de.dev.en"),
        ("a.de.gz", "a.en.gz"),
    ],
)
def test_parallel_text_is_found_by_the_last_part_of_its_name(
    source: str, target: str, tmp_path: Path
) -> None:
    opened = gzip.open if source.endswith(".gz") else open
    for name, text in ((source, "ein Film"), (target, "a film")):
        with opened(tmp_path / name, "wt", encoding="utf-8") as file:
            file.write(f"{text}\n")
    data = DataSpec(format="parallel", text_column="de", target_column="en")
    assert [row for _, row in read_records(str(tmp_path / source), data)] == [
        {"de": "ein Film", "en": "a film"}
    ]
