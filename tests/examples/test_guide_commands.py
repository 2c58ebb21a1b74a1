"""The guides' command lines for `run_glue.py`, as printed, on stand-ins for the model and the data that they name."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch_as, run_script

for package in ("transformers", "tokenizers", "datasets", "sklearn"):
    pytest.importorskip(package)

MODELS = ("google-bert/bert-base-cased", "bert-base-cased")


@pytest.fixture(scope="module")
def guides(shared_data: Path) -> list[str]:
    return [path.read_text("utf-8") for path in sorted((shared_data.parent / "guides").glob("*.txt"))]


def commands(guides: list[str]) -> list[list[str]]:
    """The words of each command line that runs `run_glue.py`, once."""
    found = []
    for block in (block for guide in guides for block in re.findall(r"```\w*\n(.*?)```", guide, re.DOTALL)):
        lines = [line.strip().removesuffix("\\") for line in block.splitlines()]
        starts = [i for i, line in enumerate(lines) if line.startswith(("python ", "accelerate launch"))]
        if "run_glue.py" in block and starts:
            # One guide forgets a backslash after the script.
            found.append(shlex.split(" ".join(lines[starts[0] :])))
    return [list(words) for words in dict.fromkeys(map(tuple, found))]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the names of the guides' model and data set are folders: a tiny BERT, and 16 pairs."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp("hub")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]"
    )
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    for name in MODELS:
        transformers.BertModel(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    glue = folder / "nyu-mll" / "glue"
    glue.mkdir(parents=True)
    files: list[dict[str, Any]] = []
    for split in ("train", "validation", "test"):
        rows = [
            {"sentence1": "a b c", "sentence2": "a d" if i % 2 else "e f", "label": i % 2} for i in range(16)
        ]
        (glue / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        files.append({"split": split, "path": f"{split}.jsonl"})
    card = json.dumps({"configs": [{"config_name": "mrpc", "data_files": files}]})
    (glue / "README.md").write_text(f"---\n{card}\n---\n", "utf-8")
    return folder


def test_the_commands_are_found(guides: list[str]) -> None:
    found = commands(guides)
    assert {words[0] for words in found} == {"python", "accelerate"}
    assert any("--use_fsdp" in words for words in found)


@pytest.mark.dist
@pytest.mark.parametrize(
    "kind", ["python", pytest.param("launch", marks=pytest.mark.slow), "launch with flags"]
)
def test_as_printed(
    kind: str, guides: list[str], hub: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(hub / "cache"))
    chosen = {
        "python": [words for words in commands(guides) if words[0] == "python"],
        "launch": [w for w in commands(guides) if w[0] == "accelerate" and "--use_fsdp" not in w],
        "launch with flags": [w for w in commands(guides) if "--use_fsdp" in w],
    }[kind]
    words = [word.replace("$TASK_NAME", "mrpc").replace("/tmp/", f"{tmp_path}/") for word in chosen[0]]
    at = next(i for i, word in enumerate(words) if word.endswith("run_glue.py"))
    script, before, after = root / "examples" / "run_glue.py", words[:at], words[at + 1 :]
    if kind == "python":
        run_script(script, *after, cwd=hub)
    else:
        assert before[:2] == ["accelerate", "launch"]
        launch_as(*before[2:], script, *after, cwd=hub)
    results = json.loads((tmp_path / "mrpc" / "all_results.json").read_text())
    assert {"eval_accuracy", "eval_f1", "train_loss"} <= results.keys()
    assert results["epoch"] == 3.0
