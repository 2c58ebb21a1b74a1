"""The guides' snippets on GaLore and LOMO as printed, read when the test runs.

The guides were translated by a machine, keywords and punctuation of their code too, which is undone here word by word.
A model of google/gemma-2b's kind with a few parameters stands for the model, and a few rows for IMDB.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.trainer.small import text_rows, weights_hash

import windlass
from windlass.optim.optimizers.adalomo import AdaLomo
from windlass.optim.optimizers.galore_adamw import GaLoreAdamW

transformers = pytest.importorskip("transformers", reason="the guides' models are transformers'")

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


class Text:
    """Stands for `trl.SFTTrainer`: rows of tokens go to the Trainer as they are."""

    def __new__(
        cls, model: Any, args: Any, train_dataset: Any, dataset_text_field: str, max_seq_length: int
    ) -> Any:
        assert dataset_text_field == "text"
        assert max_seq_length > 0
        return windlass.Trainer(model, args, train_dataset=train_dataset)


def small_model(*args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.to = lambda *_: model  # the snippets place it on device 0
    return model


class Arguments(windlass.TrainingArguments):
    """Three updates on the CPU, in place of a thousand."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            **{**kwargs, "max_steps": 3, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
        )


@pytest.mark.skipif(not SNIPPETS, reason="the guides are not beside this checkout")
@pytest.mark.parametrize("code", SNIPPETS, ids=lambda code: re.findall(r'optim = "(\w+)"', code)[0])
def test_the_snippet_trains(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes: dict[str, Any] = {
        "datasets": SimpleNamespace(load_dataset=lambda *_, **__: text_rows(16)),
        "trl": SimpleNamespace(SFTTrainer=Text),
        "transformers": SimpleNamespace(
            TrainingArguments=Arguments,
            AutoConfig=SimpleNamespace(from_pretrained=lambda *_: None),
            AutoTokenizer=SimpleNamespace(from_pretrained=lambda *_: None),
            AutoModelForCausalLM=SimpleNamespace(from_config=small_model, from_pretrained=small_model),
        ),
    }
    start = weights_hash(small_model())
    for name, content in fakes.items():
        module = ModuleType(name)
        module.__dict__.update(vars(content))
        if name == "transformers":
            module.__getattr__ = lambda other: getattr(transformers, other)  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(compile(code, "guide", "exec"), namespace)
    trainer = namespace["trainer"]
    assert trainer.state.global_step == 3
    assert weights_hash(trainer.model) != start
    kind = AdaLomo if "lomo" in code else GaLoreAdamW
    assert isinstance(trainer.optimizer, kind)
    if "rank" in code:
        assert trainer.optimizer.param_groups[-1]["rank"] == 64
        assert trainer.optimizer.param_groups[-1]["scale"] == 0.10


@pytest.mark.skipif(not SNIPPETS, reason="the guides are not beside this checkout")
def test_the_snippets_are_found() -> None:
    assert len(SNIPPETS) == 4
