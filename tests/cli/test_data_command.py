from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.text.tokenizers import CHATML, byte_tokenizer

from windlass.checkpoint.files import Files
from windlass.cli.main import main
from windlass.recipes.marked_text import marked
from windlass.text.trained_pieces import trained_pieces

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes 😀"}]
RECIPE = """\
data: {train: DATA, eval: DATA}
model: {config: {model_type: llama}}
tokenizer: {name: TOKENIZER}
training: {max_steps: 1}
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.fixture
def chats(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": CHAT, "id": n}) + "\n" for n in range(5)))
    return str(path)


def test_trained_tokens_are_in_brackets(
    chats: str, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", "show", chats, f"tokenizer={tokenizer}", "assistant_only_loss=true", "--rows", "1"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "5 rows, conversational: messages (role, content), with optional tools and chat_template_kwargs",
        "--- row 0: 71 tokens, 19 trained",
        "<|im_start|>user",
        "Hi<|im_end|>",
        "<|im_start|>assistant",
        "⟦Yes 😀<|im_end|>",
        "⟧",
        "--- ⟦trained⟧ tokens have a label; all others are read, and have no loss",
    ]


def test_a_faulty_row_is_named_by_its_line(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path(chats).read_text().splitlines(keepends=True)
    lines[3] = lines[3].replace('"user"', '"bot"')
    Path(chats).write_text("".join(lines))
    for word in ((), ("--json",)):
        assert main(["data", "show", chats, "--start", "2", *word]) == 2
        assert "chats.jsonl:4: messages[0] has the unknown role 'bot'" in capsys.readouterr().err


def test_a_row_that_is_dropped_does_not_end_the_listing(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": prompt, "completion": "yes"} for prompt in ("Is it?", "Is it, after all that?", "Is it?")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data", "show", str(path), f"tokenizer={tokenizer}", "max_length=10"]
    assert main(words) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("--- row")] == [
        "--- row 0: 10 tokens, 4 trained",
        "--- row 1: dropped, because it has no token to train on, truncated",
        "--- row 2: 10 tokens, 4 trained",
    ]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["samples"]
    assert [(one["trained"], one["dropped"]) for one in found] == [(4, False), (0, True), (4, False)]


def test_samples_for_programs(chats: str, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "data",
        "show",
        chats,
        f"tokenizer={tokenizer}",
        "assistant_only_loss=true",
        "--rows",
        "1",
        "--json",
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["samples"]
    assert (found["count"], one["row"], one["tokens"], one["trained"], one["truncated"]) == (
        5,
        0,
        71,
        19,
        False,
    )
    assert one["pieces"] == [
        ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False],
        ["Yes 😀<|im_end|>\n", True],
    ]
    assert main(["data", "show", chats, "--rows", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["samples"]
    assert row["messages"] == CHAT


def test_colours_are_kept_and_control_characters_of_the_text_are_not() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("a\x1b[31mb")["input_ids"]
    pieces = trained_pieces(ids, [*([-100] * (len(ids) - 1)), ids[-1]], tokenizer)
    text = marked(pieces, ("\x1b[32m", "\x1b[0m"))
    assert text.endswith("\x1b[32mb\x1b[0m")
    assert text.count("\x1b") == 2


def test_a_file_is_shown_without_a_tokenizer(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", chats, "--start", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "--- row 4",
        "user: Hi",
        "assistant: Yes 😀",
        "Set tokenizer=NAME to see the tokens that a model is trained on.",
    ]


def test_the_data_of_a_recipe_is_shown(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "one"}\n{"text": "two"}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("DATA", str(data)).replace("TOKENIZER", tokenizer))
    assert main(["data", "show", str(recipe), "--split", "eval"]) == 0
    assert "⟦one<eos>two<eos>⟧" in capsys.readouterr().out
    assert main(["data", "prepare", str(recipe)]) == 2
    assert "tokenizes its text when training starts" in capsys.readouterr().err


MODEL = """
model: {config: {model_type: bert, hidden_size: 8}}
tokenizer: {train: {vocab_size: 300}}
training: {max_steps: 1}
"""
DATA = {
    "classification": "{train: rows.tsv, columns: [text, label], eval_fraction: 0.1}",
    "masked-lm": "{train: text.txt, block_size: 24, mlm_probability: 0.5}",
    "causal-lm": "{train: text.txt, block_size: 24, eval_fraction: 0.1}",
    "seq2seq": "{train: pairs.tsv, columns: [text, target], max_length: 5}",
}
SHOWN = {
    "classification": [
        r"36 samples for task classification, classes: bad, good",
        r"--- sample 35",
        r"text +\[CLS\] (good|bad) film 39 \[SEP\]",
        r"label +(good \(class 1|bad \(class 0) of 2\)",
        r"tokens +\d+: \[CLS\] (good|bad) film .* \[SEP\]",
    ],
    "masked-lm": [
        r"\d+ samples for task masked-lm",
        r"--- sample 1",
        r"block +24 tokens, \d+ of them to predict; each epoch draws others",
        r".*(\[MASK\] ?)+⟦=[a-z ]+⟧.*",
        r"--- ⟦marked⟧ is what was there before, .*",
    ],
    "causal-lm": [
        r"\d+ samples for task causal-lm",
        r"--- sample 0",
        r"block +24 tokens",
        r"⟦the cat sat on the mat and the",
        *(r"dog did not|the cat sat on the mat and the",) * 2,
        r".*⟧",
        r"--- ⟦marked⟧ tokens have a label: .*",
    ],
    "seq2seq": [
        r"38 samples for task seq2seq",
        r"--- sample 0",
        r"source +\d tokens: ein haus.*",
        r"target +\d tokens: a house.*",
    ],
}


@pytest.mark.parametrize("task", DATA)
def test_each_task_shows_what_its_model_gets(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{'good' if index % 2 else 'bad'} film {index}\t{'good' if index % 2 else 'bad'}\n"
        for index in range(40)
    ]
    (tmp_path / "rows.tsv").write_text("".join(rows))
    (tmp_path / "pairs.tsv").write_text("".join(f"ein haus {n}\ta house {n}\n" for n in range(40)))
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the\ndog did not\n" * 20)
    model = MODEL.replace("bert", "gpt2") if task == "causal-lm" else MODEL  # an encoder is refused there
    (tmp_path / "r.yaml").write_text(f"task: {task}\ndata: {DATA[task]}{model}")
    start = re.search(r"sample (\d+)", SHOWN[task][1])
    assert start is not None
    assert main(["data", "show", "r.yaml", "--rows", "1", "--start", start[1]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SHOWN[task])
    for line, pattern in zip(lines, SHOWN[task], strict=True):
        assert re.fullmatch(pattern, line), line
    assert main(["data", "show", "r.yaml", "--split", "test"]) == 2
    assert "there is no split 'test'; there is: train, eval" in capsys.readouterr().err


def test_images_are_shown_by_their_sizes_and_classes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert main(["data", "show", "digits", "--rows", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("samples for task image-classification, classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9")
    assert re.fullmatch(r"image +8 x 8, 1 channels, values from -1 to [\d.]+", lines[2])
    assert re.fullmatch(r"label +(\d) \(class \1 of 10\)", lines[3])
    assert len(lines) == 7


def test_the_tiny_form_of_a_recipe_needs_no_model_of_the_hub(
    chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "show", "sft-lora", f"data.train={chats}", "--tiny", "data.eval_fraction=0.2"]) == 0
    printed = capsys.readouterr().out
    assert "user:\nHi" in printed
    assert "⟦Yes 😀" in printed


def test_a_file_has_no_tiny_form(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "show", chats, "--tiny", "a=1", "more"])
    assert "unrecognized arguments: more;" in capsys.readouterr().err
    assert main(["data", "show", chats, "--tiny"]) == 2
    assert "is the tiny form of a recipe, and this is a file of data" in capsys.readouterr().err


def full(self: Files, path: Path) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_is_prepared_once(
    tmp_path: Path,
    chats: str,
    tokenizer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path))
    cache = tmp_path / "text"
    words = ["data", "prepare", chats, f"tokenizer={tokenizer}", "max_length=70"]
    with monkeypatch.context() as patched:
        patched.setenv("WINDLASS_HOME", f"{chats}/home")  # below a file
        assert main(words) == 2
    assert "cannot hold what is prepared" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(Files, "make_folder", full)
        assert main(words) == 2
    said = capsys.readouterr()
    assert "No space left on device" in said.err
    assert "kept" not in said.out
    assert main([*words, "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["splits"]["train"]
    assert (counts["rows"], counts["longest"]) == (5, 70)
    for _ in range(2):
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "train: 5 rows, 350 tokens (100% trained), longest 70; 5 truncated, 0 dropped" in lines
        assert lines[-2].split() == ["64", "to", "127", "tokens", "5", "#" * 40]
        assert lines[-1] == f"kept in {cache}"
        assert len(list(cache.iterdir())) == 1


def test_columns_of_a_file_are_named_as_in_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n1 + 1?,2\n")
    file = str(tmp_path / "rows.csv")
    words = ["data", "show", file, "data.prompt_column=question", "data.completion_column=answer"]
    assert main(words) == 0
    assert "completion: 2" in capsys.readouterr().out


def test_messages_of_a_file_are_named_as_in_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"turns": [{"from": "human", "value": "1 + 1?"}]}\n')
    names = ["column=turns", "role=from", "content=value", "roles={human: user}"]
    words = [f"data.messages.{name}" for name in names]
    assert main(["data", "show", str(tmp_path / "rows.jsonl"), *words]) == 0
    assert "user: 1 + 1?" in capsys.readouterr().out
    (tmp_path / "rows.jsonl").write_text('{"turns": [{"from": ["human"], "value": "1 + 1?"}]}\n')
    assert main(["data", "show", str(tmp_path / "rows.jsonl"), *words]) == 2
    assert "messages[0] must be a mapping with a role" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "CHATS"], "name one: tokenizer=NAME"),
        (["show", "CHATS", "max_lenght=3"], "did you mean 'max_length'?"),
        (["show", "CHATS", "tokenizer=3"], "quote it to make it text"),
        (["show", "CHATS", "data.messages={colum: m}"], "did you mean data.messages.column?"),
        (["show", "CHATS", "data.messages.column=m"], "column 'm' must hold a list of messages"),
        (["show", "nowhere.jsonl"], "no such file"),
        (["show", "CHATS", "--split", "eval"], "there is no split 'eval'"),
        (["show", "CHATS", "--start", "9"], "--start=9: must be from 0 to 4: there are 5 rows"),
        (["show", "CHATS", "--rows", "0"], "--rows=0: must be at least 1"),
        (["show", "CHATS", "max_length=long"], "max_length='long': must be a whole number"),
        (["show", "CHATS", "data.max_samples=0"], "data.max_samples=0: must be at least 1"),
        (["show", "CHATS", "data.format=jsnl"], "data.format='jsnl'"),
    ],
)
def test_what_cannot_be_done_is_refused(
    words: list[str], message: str, chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *(chats if word == "CHATS" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
