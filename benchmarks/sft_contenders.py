"""The contenders of `sft.py`. Started by it as `sft_contenders.py NAME DATA SECONDS`; prints one line of JSON."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, TOKENS, LEARNING_RATE, CLIP = 4096, 2048, 1e-3, 1.0
SKIPPED = 3  # the first updates warm caches up
ENDLESS = 100_000  # updates: the clock ends a round
GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k" / "train.jsonl"
Documents = list[dict[str, list[int]]]


def documents(kind: str) -> Documents:
    """The same documents for every contender."""
    generator = np.random.default_rng(0)
    if kind == "long tail":
        lengths = np.clip(generator.lognormal(np.log(120), 0.92, 4000).astype(int), 2, 1024)
        ids = [generator.integers(3, VOCABULARY, length).tolist() for length in lengths]
    elif kind == "gsm8k":
        rows = [json.loads(line) for line in GSM8K.read_text("utf-8").splitlines()]
        texts = [f"{row['question']}\n{row['answer']}" for row in rows]
        ids = [
            [3 + zlib.crc32(word.encode()) % (VOCABULARY - 3) for word in re.findall(r"\w+|[^\w\s]", text)]
            for text in texts
        ]
    else:
        raise SystemExit(f"unknown data {kind!r}: use 'long tail' or 'gsm8k'")
    return [{"input_ids": row, "labels": row} for row in ids]


def model_of() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=TOKENS, pad_token_id=0, **sizes)
    return LlamaForCausalLM(config)


class TimeIsUpError(Exception):
    """Ends a round, from within any trainer."""


class Clock:
    """Counts the tokens that a model is given, and the time between updates, in the same way for every contender.

    Raises TimeIsUpError in the first update that ends `seconds` after the updates that are skipped.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, seconds: float) -> None:
        self.tokens, self._seconds = 0, seconds
        self.stamps: list[tuple[float, int]] = []
        model.register_forward_pre_hook(self._count, with_kwargs=True)
        optimizer.register_step_post_hook(self._stamp)

    def _count(self, _: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        mask = inputs.get("attention_mask")
        self.tokens += int(mask.sum()) if isinstance(mask, Tensor) else inputs["input_ids"].numel()

    def _stamp(self, *_: Any) -> None:
        self.stamps.append((time.perf_counter(), self.tokens))
        if len(self.stamps) > SKIPPED + 1 and self.stamps[-1][0] - self.stamps[SKIPPED][0] >= self._seconds:
            raise TimeIsUpError

    def tokens_per_second(self) -> float:
        (begin, before), (end, after) = self.stamps[SKIPPED], self.stamps[-1]
        return (after - before) / (end - begin)


def hand(model: Any, optimizer: Any, rows: Documents) -> None:
    """Each document alone: nothing is padded, and no document sees another one."""
    order, place = torch.randperm(len(rows)).tolist(), 0
    model.train()
    for _ in range(ENDLESS):
        group: list[Tensor] = []
        while sum(map(len, group)) < TOKENS:
            group.append(torch.tensor(rows[order[place % len(rows)]]["input_ids"]))
            place += 1
        targets = sum(len(ids) - 1 for ids in group)
        for ids in group:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            (nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def _arguments(samples: int, **options: Any) -> dict[str, Any]:
    """Arguments that the three Trainers share."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": ENDLESS,
        "per_device_train_batch_size": samples,
        "save_strategy": "no",
        "report_to": "none",
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP,
        "logging_steps": 100,
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }


def _samples(rows: Documents) -> int:
    """Documents of an update."""
    return max(1, round(TOKENS * len(rows) / sum(len(row["input_ids"]) for row in rows)))


def windlass_packed(model: Any, optimizer: Any, rows: Documents) -> None:
    from datasets import Dataset

    from windlass import SFTConfig, SFTTrainer

    options = {"bf16": False, "gradient_checkpointing": False, "packing": True, "max_length": TOKENS}
    SFTTrainer(
        model,
        SFTConfig(**_arguments(1, **options)),
        train_dataset=Dataset.from_list(rows),
        processing_class=_tokenizer(),
        optimizers=(optimizer, None),
    ).train()


def _lean_trainer() -> Any:
    from windlass import Trainer
    from windlass.transforms.lean_loss import lean_causal_lm_loss

    class Lean(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            return lean_causal_lm_loss(model, inputs, num_items_in_batch)[0]

    return Lean


def windlass_budget(model: Any, optimizer: Any, rows: Documents) -> None:
    from windlass import TrainingArguments
    from windlass.data.collate_causal import DataCollatorForCausalLM
    from windlass.data.samplers import TokenBudgetSampler

    sampler = TokenBudgetSampler([len(row["input_ids"]) for row in rows], TOKENS)
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=DataCollatorForCausalLM(0))  # type: ignore[arg-type]

    class Budget(_lean_trainer()):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader)

    arguments = TrainingArguments(**_arguments(1))
    Budget(model, arguments, train_dataset=rows, optimizers=(optimizer, None)).train()


def _transformers(model: Any, optimizer: Any, rows: Documents, **options: Any) -> None:
    from transformers import Trainer, TrainingArguments

    from windlass.data.collate_causal import DataCollatorForCausalLM

    Trainer(
        model,
        TrainingArguments(**_arguments(_samples(rows), **options)),
        train_dataset=rows,
        data_collator=DataCollatorForCausalLM(0),
        optimizers=(optimizer, None),
    ).train()


def transformers_default(model: Any, optimizer: Any, rows: Documents) -> None:
    _transformers(model, optimizer, rows)


def transformers_grouped(model: Any, optimizer: Any, rows: Documents) -> None:
    _transformers(model, optimizer, rows, train_sampling_strategy="group_by_length")


def _tokenizer() -> Any:
    """TRL requests one, though the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _trl(model: Any, optimizer: Any, rows: Documents, samples: int, packing: bool) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    options = {"bf16": False, "gradient_checkpointing": False, "packing": packing, "max_length": TOKENS}
    SFTTrainer(
        model,
        SFTConfig(**_arguments(samples, **options)),
        train_dataset=Dataset.from_list(rows),
        processing_class=_tokenizer(),
        optimizers=(optimizer, None),
    ).train()


def trl_packed(model: Any, optimizer: Any, rows: Documents) -> None:
    _trl(model, optimizer, rows, 1, packing=True)


def trl_default(model: Any, optimizer: Any, rows: Documents) -> None:
    _trl(model, optimizer, rows, _samples(rows), packing=False)


CONTENDERS: dict[str, Callable[[Any, Any, Documents], None]] = {
    function.__name__: function
    for function in (
        hand, windlass_packed, windlass_budget, transformers_default, transformers_grouped, trl_packed, trl_default,
    )
}  # fmt: skip


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What libraries print goes to stderr: stdout has the figures alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def main() -> None:
    name, kind, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    with _quiet():
        rows, model = documents(kind), model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        clock = Clock(model, optimizer, seconds)
        with contextlib.suppress(TimeIsUpError):
            CONTENDERS[name](model, optimizer, rows)
    print(json.dumps({"tokens_per_second": clock.tokens_per_second(), "updates": len(clock.stamps) - 1}))


if __name__ == "__main__":
    main()
