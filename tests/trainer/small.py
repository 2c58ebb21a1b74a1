"""Small real models and data that the Trainer's tests share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from windlass import TrainerCallback, TrainingArguments
from windlass.core.events import EVENTS


def rows(count: int, width: int = 4, classes: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of a classification that can be learned: the label follows from the features."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, width, generator=generator)
    return [{"x": x, "labels": int(x[:classes].argmax())} for x in features]


def token_rows(count: int, length: int = 6, vocabulary: int = 20, labels: int = 2) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, vocabulary, (count, length), generator=generator)
    return [
        {"input_ids": row.tolist(), "attention_mask": [1] * length, "labels": int(row[0]) % labels}
        for row in ids
    ]


class Net(nn.Module):
    """A linear classifier; what it returns is chosen by `form`: "dict", "tuple" or "object"."""

    def __init__(self, form: str = "dict", width: int = 4, classes: int = 3, seed: int = 3) -> None:
        super().__init__()
        self.form = form
        self.layer = nn.Linear(width, classes)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(classes, width, generator=generator) * 0.1)
            self.layer.bias.zero_()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layer(x)
        if labels is None:
            return {"dict": {"logits": logits}, "tuple": (logits,)}.get(
                self.form, SimpleNamespace(logits=logits)
            )
        loss = nn.functional.cross_entropy(logits, labels)
        if self.form == "object":
            return SimpleNamespace(loss=loss, logits=logits)
        return {"loss": loss, "logits": logits} if self.form == "dict" else (loss, logits)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a short quiet run, under names that transformers has too."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.05,
        "max_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "optim": "adamw_torch",
        **changes,
    }


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**settings(folder, **changes))


def bert(labels: int = 2, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(
        vocab_size=20,
        max_position_embeddings=16,
        num_labels=labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **sizes,
        **changes,
    )
    return transformers.BertForSequenceClassification(config)


def llama(tied: bool = False) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def text_rows(count: int, length: int = 8) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 20, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def tokenizer() -> Any:
    """A word-level tokenizer of transformers, made here: [PAD] is 0, [UNK] 1, then words w2..w19."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, 20)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "attention_mask"],
    )


def weights_hash(model: nn.Module | Mapping[str, Tensor]) -> str:
    state = model.state_dict() if isinstance(model, nn.Module) else model
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def recorder(base: type = TrainerCallback) -> Any:
    """An instance of a callback class that notes every event in `.seen`, with the step and what came with it."""

    def note(event: str) -> Any:
        def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append((event, state.global_step))
            self.given[event] = kwargs
            self.logs.append(dict(kwargs["logs"])) if event == "on_log" else None

        return method

    body: dict[str, Any] = {event: note(event) for event in EVENTS}
    instance = type("Recorder", (base,), body)()
    instance.seen, instance.given, instance.logs = [], {}, []
    return instance
