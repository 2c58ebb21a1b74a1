"""`windlass generate` and `windlass chat` on runs, checkpoints and adapters."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.faults import write_parts
from tests.finetuning import small
from tests.terminal import CTRL_C, Terminal

from windlass import SFTTrainer
from windlass.checkpoint.sharded import index_name
from windlass.cli.main import main
from windlass.core.errors import CheckpointError, ModelError
from windlass.core.world import World
from windlass.finetuning.trained_model import find_model, open_trained

transformers = pytest.importorskip("transformers")
Shown = pytest.CaptureFixture[str]
GREEDY = ("--temperature", "0", "--max-new-tokens", "6")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints; the first is the best, because the greater loss is asked for."""
    folder = tmp_path_factory.mktemp("run")
    base = small.saved(folder / "base", hidden_size=32, initializer_range=0.5)
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 2,
        "learning_rate": 0.5,
    }
    options |= {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "greater_is_better": True,
    }
    rows = small.table(small.chats())
    trainer = SFTTrainer(
        base, small.arguments(folder / "run", **options), train_dataset=rows, eval_dataset=rows
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    return folder / "run"


def expected(folder: str, prompt: str, chat: bool = True, most: int = 6) -> str:
    """What transformers generates with the likeliest tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if chat:
        prompt = f"<|user|> {prompt} <eos>\n<|assistant|>"
    ids = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**ids, do_sample=False, max_new_tokens=most)[0][ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(made, skip_special_tokens=True))


def test_a_run_is_its_best_checkpoint(run: Path, tmp_path: Path) -> None:
    assert find_model(str(run)) == str(run / "checkpoint-1")
    assert find_model(str(run / "checkpoint-2")) == str(run / "checkpoint-2")
    assert find_model("owner/name") == "owner/name"
    for word in (str(tmp_path), "./nothing", "a/b/c"):
        with pytest.raises(CheckpointError, match=r"neither a model|is not a folder"):
            find_model(word)
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(CheckpointError, match=r"complete checkpoint; checkpoint-3: it has no manifest\.json"):
        find_model(str(tmp_path))


def test_the_prompt_is_a_turn_or_continued_as_it_is(run: Path, capsys: Shown) -> None:
    best = str(run / "checkpoint-1")
    assert main(["generate", str(run), "the cat", *GREEDY]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected(best, "the cat") + "\n"
    assert best in shown.err
    assert main(["generate", best, "the cat", *GREEDY, "--raw"]) == 0
    assert capsys.readouterr().out == expected(best, "the cat", chat=False) + "\n"


@pytest.mark.parametrize(
    ("file", "content", "command"),
    [
        ("model.safetensors", "cut", ["generate", "MODEL", "the cat"]),
        ("model.safetensors", "cut", ["train", "data.train=ROWS", "data.format=auto", "model=MODEL"]),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}', ["generate", "MODEL", "the cat"]),
        ("config.json", "[]", ["data", "show", "ROWS", "tokenizer=MODEL"]),
    ],
)
def test_a_damaged_model_is_an_error_of_one_line(
    file: str, content: str, command: list[str], run: Path, tmp_path: Path, capsys: Shown
) -> None:
    shutil.copytree(run / "checkpoint-1", tmp_path / "model")
    (tmp_path / "rows.txt").write_text("the cat sat\n" * 30)
    (tmp_path / "model" / file).write_text(content)
    places = {"MODEL": tmp_path / "model", "ROWS": tmp_path / "rows.txt"}
    for name, place in places.items():
        command = [word.replace(name, str(place)) for word in command]
    assert main([*command, *(["training.max_steps=1"] if command[0] == "train" else [])]) == 2
    assert re.search(r"'.*/model' cannot be loaded: \w+Error: ", capsys.readouterr().err)


def test_the_prompt_may_come_from_a_pipe(run: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat"))
    assert main(["generate", str(run), "-", *GREEDY]) == 0
    assert capsys.readouterr().out == expected(str(run / "checkpoint-1"), "the cat") + "\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("words", [("generate", "-"), ("chat",)])
def test_a_text_that_is_not_utf_8_is_refused(
    run: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], errors: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the c\xe4t\n"), "utf-8", errors))
    assert main([words[0], str(run), *words[1:], *GREEDY]) == 2
    assert "the text is not UTF-8" in capsys.readouterr().err


def test_closed_standard_input_is_an_empty_one(
    run: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", str(run), "-", "--raw", *GREEDY]) == 2
    assert "the prompt has no tokens" in capsys.readouterr().err
    assert main(["chat", str(run), *GREEDY]) == 0
    assert main(["chat", str(run), "--system", "the c\udce4t"]) == 2
    assert "the text is not UTF-8" in capsys.readouterr().err


def test_the_context_limits_the_text(run: Path, capsys: Shown) -> None:
    words = " ".join(["cat"] * 124)
    assert main(["generate", str(run), words, "--raw", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == expected(str(run / "checkpoint-1"), words, chat=False, most=4) + "\n"
    assert main(["generate", str(run), f"{words} cat cat cat cat", "--raw"]) == 2
    assert "128 tokens, which fill the model's context" in capsys.readouterr().err
    assert main(["generate", str(run), "", "--raw"]) == 2
    assert "no tokens" in capsys.readouterr().err
    assert main(["generate", str(run), "a", "--base", "other"]) == 2
    assert "--base='other'" in capsys.readouterr().err, "the run has no adapter"


@pytest.mark.parametrize(
    ("kind", "sizes", "used", "left"),
    [
        ("LlamaConfig", {"max_position_embeddings": 64}, 60, 4),
        ("LlamaConfig", {"max_position_embeddings": 64}, 65, -1),
        # The prompt is the encoder's; the decoder begins with a token of its own.
        ("BartConfig", {"max_position_embeddings": 64}, 60, 63),
        ("BartConfig", {"max_position_embeddings": 64}, 65, -1),
        ("T5Config", {}, 10**6, sys.maxsize),
    ],
)
def test_positions_that_are_left(kind: str, sizes: dict[str, int], used: int, left: int) -> None:
    from windlass.cli.text_writer import positions_left

    assert positions_left(getattr(transformers, kind)(**sizes), used) == left


def test_samples_follow_the_seed(run: Path, capsys: Shown) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        words = ["--temperature", "1.5", "--top-k", "20", "--top-p", "0.99", "--seed", seed]
        assert main(["generate", str(run), "the cat", *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "words",
    [
        ("--temperature", "-1"),
        ("--top-p", "2"),
        ("--top-k", "0"),
        ("--max-new-tokens", "0"),
        ("--seed", "18446744073709551616"),
    ],
)
def test_options_out_of_range_are_refused(words: tuple[str, str], run: Path, capsys: Shown) -> None:
    assert main(["generate", str(run), "the cat", *words]) == 2
    assert f"{words[0]}={words[1]}" in capsys.readouterr().err.replace(".0", "")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("--temperature", "inf"), "must be at least 0, and finite"),
        (("--temperature", "nan"), "must be at least 0, and finite"),
        (("--temperature", "-1"), "must be at least 0\n"),
        (("--top-p", "inf"), "must be above 0 and at most 1, and finite"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_as_such(
    words: tuple[str, str], fix: str, run: Path, capsys: Shown
) -> None:
    assert main(["generate", str(run), "the cat", *words]) == 2
    said = capsys.readouterr().err.replace(".0", "")
    assert f"{words[0]}={words[1]}: {fix}" in said


def test_a_model_that_searches_with_beams_prints_the_best(run: Path, tmp_path: Path, capsys: Shown) -> None:
    shutil.copytree(find_model(str(run)), tmp_path / "beams")
    file = tmp_path / "beams" / "generation_config.json"
    beams = {"num_beams": 3, "num_return_sequences": 2}
    file.write_text(json.dumps({**json.loads(file.read_text()), **beams}))
    words = ["generate", str(tmp_path / "beams"), "the cat", "--raw", "--max-new-tokens", "6"]
    assert main(words) == 0
    model, tokenizer = open_trained(str(tmp_path / "beams"), None, "auto")
    inputs = tokenizer("the cat", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=6)[0, inputs["input_ids"].shape[1] :]
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(ids, skip_special_tokens=True)
    for sampling in (["--temperature", "0"], ["--top-k", "2"]):
        assert main([*words, *sampling]) == 0


def test_an_adapter_is_put_on_its_base(tmp_path: Path, capsys: Shown) -> None:
    peft = pytest.importorskip("peft")
    base = small.saved(tmp_path / "base", initializer_range=0.5)
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    adapted.save_pretrained(tmp_path / "adapter")
    model, tokenizer = open_trained(find_model(str(tmp_path / "adapter")), None, "auto")
    ids = tokenizer("the cat sat", return_tensors="pt")
    with torch.no_grad():
        assert torch.allclose(model(**ids).logits, adapted.eval()(**ids).logits, atol=1e-6)
    assert main(["generate", str(tmp_path / "adapter"), "the cat", "--base", base, *GREEDY]) == 0
    asked = ["generate", str(tmp_path / "adapter"), "the cat"]
    assert main([*asked, "--base", "./nothing"]) == 2
    assert re.search(
        r"'\./nothing' cannot be .*the base of the adapter .*--base names", capsys.readouterr().err
    )
    wider = small.saved(tmp_path / "wider", hidden_size=32)
    assert main([*asked, "--base", wider]) == 2
    said = capsys.readouterr().err
    assert re.search(r"adapter does not fit its base: .*the shape \[16, 8\] there and \[32, 8\] on", said), (
        said
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("adapter_model.safetensors", "cut", r"the adapter '.*' cannot be loaded: SafetensorError: "),
        ("adapter_config.json", "{", r"adapter_config.json is not valid JSON"),
        ("adapter_config.json", "[]", r"adapter_config.json does not name the base"),
        (
            "adapter_config.json",
            '{"base_model_name_or_path": "BASE", "peft_type": "NEW"}',
            r"loaded: KeyError: 'NEW'",
        ),
        # The tokenizer of the base may have other tokens.
        ("tokenizer.json", "{", r"the tokenizer '.*/adapter' cannot be loaded: "),
        ("chat_template.jinja", "{% if %}", r"the chat template cannot render the conversation: "),
    ],
)
def test_a_damaged_adapter_is_an_error_of_one_line(
    file: str, content: str, words: str, tmp_path: Path, capsys: Shown
) -> None:
    peft = pytest.importorskip("peft")
    base = small.saved(tmp_path / "base")
    adapted = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(task_type="CAUSAL_LM")
    )
    adapted.save_pretrained(tmp_path / "adapter")
    small.tokenizer().save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / file).write_text(content.replace("BASE", base))
    assert main(["generate", str(tmp_path / "adapter"), "the cat"]) == 2
    said = capsys.readouterr().err
    assert re.search(words, said), said
    assert said.count("\n") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ["MadeElsewhere"], None])
def test_the_parts_of_a_sharded_model_are_joined(
    dtype: torch.dtype, architectures: list[str] | None, tmp_path: Path
) -> None:
    folder = tmp_path / "sharded"
    small.saved(folder, initializer_range=0.5)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    write_parts(folder, "model", whole.state_dict(keep_vars=True), World())
    (folder / "model.safetensors").unlink()
    whole.config.architectures = architectures
    whole.config.save_pretrained(folder)
    assert (folder / index_name("model")).is_file()
    model, _ = open_trained(str(folder), None, "auto")
    assert type(model) is type(whole)
    for name, value in whole.state_dict().items():
        assert model.state_dict()[name].dtype == dtype
        assert torch.equal(model.state_dict()[name], value), name
    ids = torch.arange(60)[None] % 20
    assert torch.equal(model(ids).logits, whole.eval()(ids).logits)
    asked, _ = open_trained(str(folder), None, torch.float16)
    assert {parameter.dtype for parameter in asked.parameters()} == {torch.float16}
    (folder / "config.json").write_text('{"model_type": "made_elsewhere"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_trained(str(folder), None, "auto")


def test_what_cannot_generate_is_refused(tmp_path: Path, capsys: Shown) -> None:
    config = small.config(num_labels=2)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ModelError, match="LlamaForSequenceClassification, which does not generate"):
        open_trained(str(tmp_path / "classifier"), None, "auto")
    small.model().save_pretrained(tmp_path / "bare")
    with pytest.raises(ModelError, match="no tokenizer"):
        open_trained(str(tmp_path / "bare"), None, "auto")


def test_a_chat_from_a_pipe(run: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\nthe dogs\n/clear\nthe cat"))
    assert main(["chat", str(run), *GREEDY, "--system", "a"]) == 0
    shown = capsys.readouterr().out.splitlines()
    best = str(run / "checkpoint-1")
    turns = "<|system|> a <eos>\n<|user|> the cat <eos>\n<|assistant|>"
    first = expected(best, turns, chat=False)
    second = expected(best, f"{turns} {first} <eos>\n<|user|> the dogs <eos>\n<|assistant|>", chat=False)
    assert shown == [first, second, first]


def test_a_chat_needs_a_template(tmp_path: Path, capsys: Shown) -> None:
    small.model().save_pretrained(tmp_path)
    tokenizer = small.tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert main(["chat", str(tmp_path)]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_a_chat_on_a_terminal(run: Path) -> None:
    with Terminal() as terminal:
        terminal.run("windlass", "chat", str(run), *GREEDY, cwd=run)
        terminal.until("\n>")
        terminal.type("the cat\r")
        answer = expected(str(run / "checkpoint-1"), "the cat").strip()
        terminal.until(
            f"> the cat\n{answer}\n>"
        )  # what is typed before the prompt is not the end of the input
        terminal.type("\x04")
        assert terminal.end() == 0, terminal.lines
        assert "Traceback" not in "".join(terminal.lines)
    with Terminal() as terminal:
        terminal.run("windlass", "chat", str(run), cwd=run)
        terminal.until("\n>")
        # A signal between the prompt and the wait for a key is seen by readline only with the next key.
        terminal.type(f"{CTRL_C}\r")
        assert terminal.end() == 0, terminal.lines


def test_ctrl_c_stops_an_answer(tmp_path: Path) -> None:
    endless = small.saved(tmp_path, max_position_embeddings=1 << 20, eos_token_id=None, initializer_range=0.5)
    words = (endless, "--temperature", "0", "--max-new-tokens", "1000000")
    answer = expected(endless, "the cat", most=3).strip()
    with Terminal() as terminal:
        terminal.run("windlass", "chat", *words, cwd=tmp_path)
        terminal.until("\n>")
        terminal.type("the cat\r")
        terminal.until(f"> the cat\n{answer}")
        terminal.type(CTRL_C)
        terminal.until("(stopped)\n>")
        terminal.type("\x04")
        assert terminal.end() == 0, terminal.lines
    with Terminal() as terminal:
        terminal.run("windlass", "generate", *words, "the cat", cwd=tmp_path)
        terminal.until(answer)
        terminal.type(CTRL_C)
        assert terminal.end() == 130, terminal.lines
        assert terminal.lines[-1] == "windlass: interrupted"
