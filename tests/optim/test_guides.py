"""The guides' snippets on GaLore and LOMO, which tune with `SFTTrainer`, as printed, read when the test runs.

The guides were translated by a machine, keywords and punctuation of their code too, which is undone here word by word.
Folders have the names of the guides' model and dataset: a small Llama with its tokenizer, and a few rows of text.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.finetuning import small
from tests.trainer.small import weights_hash

import windlass
from windlass.optim.optimizers.adalomo import AdaLomo
from windlass.optim.optimizers.galore_adamw import GaLoreAdamW

transformers = pytest.importorskip("transformers", reason="the guides' models are transformers'")
pytest.importorskip("datasets", reason="the guides load theirs with it")

GUIDES = Path(__file__).resolve().parents[3] / "shared" / "guides"
BLOCK = re.compile(r"^```python\n(.*?)(?:^```$|\Z)", re.MULTILINE | re.DOTALL)
# What the translation made of English words, longer ones first.
WORDS = {
    "استيراد مجموعات البيانات": "import datasets", "استيراد الشعلة": "import torch", "استيراد ترل": "import trl",
    "من المحولات استيراد": "from transformers import", "المدرب. train": "trainer.train", "المدرب": "trainer",
    "نموذج = النموذج": "model = model", "،": ",",
}  # fmt: skip


def snippets() -> list[str]:
    pages = sorted(GUIDES.glob("*.txt")) if GUIDES.is_dir() else []
    found = [code for page in pages for code in BLOCK.findall(page.read_text("utf-8"))]
    chosen = []
    for code in found:
        if "galore" in code or "lomo" in code:
            for word, english in WORDS.items():
                code = code.replace(word, english)
            chosen.append(code)
    return chosen


SNIPPETS = snippets()


class Arguments(windlass.TrainingArguments):
    """Three updates on the CPU, in place of a thousand."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            **{**kwargs, "max_steps": 3, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
        )


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, in which the guides' names are folders."""
    # Smaller than the rank of the snippets, and with grouped keys and values, which have a smaller side still.
    small.saved(tmp_path / "google" / "gemma-2b", num_hidden_layers=1, num_key_value_heads=1)
    (tmp_path / "imdb").mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in small.texts(16))
    (tmp_path / "imdb" / "train.jsonl").write_text(rows, "utf-8")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(not SNIPPETS, reason="the guides are not beside this checkout")
@pytest.mark.parametrize("code", SNIPPETS, ids=lambda code: re.findall(r'optim = "(\w+)"', code)[0])
@pytest.mark.filterwarnings("ignore:arguments of SFTTrainer that are now in SFTConfig")
def test_the_snippet_trains(code: str, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[str] = []

    def stays(model: Any, *_: Any) -> Any:
        starts.append(weights_hash(model))
        return model

    monkeypatch.setattr(transformers.LlamaForCausalLM, "to", stays)  # the snippets place it on device 0
    for name, content in {
        "trl": {"SFTTrainer": windlass.SFTTrainer}, "transformers": {"TrainingArguments": Arguments}
    }.items():  # fmt: skip
        module = ModuleType(name)
        module.__dict__.update(content)
        module.__getattr__ = lambda other: getattr(transformers, other)  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)
    namespace: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(code, "guide", "exec"), namespace)
    trainer = namespace["trainer"]
    assert trainer.state.global_step == 3
    assert trainer.args.max_length in (512, 1024)
    assert trainer.processing_class.eos_token == "<eos>"
    assert weights_hash(trainer.model) != starts[0]
    kind = AdaLomo if "lomo" in code else GaLoreAdamW
    assert isinstance(trainer.optimizer, kind)
    if "rank" in code:
        assert trainer.optimizer.param_groups[-1]["rank"] == 64
        assert trainer.optimizer.param_groups[-1]["scale"] == 0.10


@pytest.mark.skipif(not SNIPPETS, reason="the guides are not beside this checkout")
def test_the_snippets_are_found() -> None:
    assert len(SNIPPETS) == 4
