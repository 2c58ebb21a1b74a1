"""Rows per second of preparing a dataset for fine-tuning: Windlass beside TRL, on one core and on two.

Both prepare the same rows with the same tokenizer, which is trained on them: prompts with completions as text, and the
same as conversations with the assistant's tokens marked; and both pack the result. TRL's preparation is the method of
its SFTTrainer, with `num_proc` set to the number of cores. Nothing is cached. Each measurement is a fresh process,
limited to its cores, and its time is that of the preparation without imports; the contenders take turns, and the best
of `--rounds` counts. The tokens and labels of both are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import caption, facts, report, table

HERE = Path(__file__).resolve().parent
DATA = HERE.parent.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
FORMS = {"text": "prompt and completion", "chat": "conversation, assistant's tokens"}
CONTENDERS = {"windlass": "Windlass", "trl": "TRL"}
LENGTH = 512
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>\\n' }}{% endgeneration %}"
    "{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def rows_of(data: Path, form: str, count: int) -> list[dict[str, Any]]:
    """`count` rows, the file's repeated with a number in front, so that no two are equal."""
    pairs = [
        (row["question"], row["answer"]) for row in map(json.loads, data.read_text("utf-8").splitlines())
    ]
    numbered = [(f"{n}. {pairs[n % len(pairs)][0]}", pairs[n % len(pairs)][1]) for n in range(count)]
    if form == "text":
        return [{"prompt": question, "completion": answer} for question, answer in numbered]
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in numbered
    ]


def tokenizer_of(data: Path) -> Any:
    """A byte-level BPE of 4,096 entries, trained on the file."""
    import tokenizers as tk
    import transformers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    inner = tk.Tokenizer(tk.models.BPE())
    inner.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tk.decoders.ByteLevel()
    letters = tk.pre_tokenizers.ByteLevel.alphabet()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=4096, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    inner.train_from_iterator(data.read_text("utf-8").splitlines(), trainer)
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=special[0], pad_token=special[0]
    )
    found.chat_template = TEMPLATE
    return found


def with_windlass(dataset: Any, tokenizer: Any, form: str, cores: int) -> tuple[Any, Any]:
    """Return the rows, and the packed rows."""
    from windlass import TextOptions, prepare_text
    from windlass.text.packing import pack_dataset

    options = TextOptions(max_length=None, assistant_only_loss=form == "chat", num_proc=cores)
    rows = prepare_text(dataset, tokenizer, options).dataset
    return rows, pack_dataset(rows, LENGTH)


def with_whole_texts(dataset: Any, tokenizer: Any, form: str, cores: int) -> tuple[Any, Any]:
    """As `with_windlass`, except that the tokenizer is called with whole texts and not with words."""
    from windlass.text.word_tokens import WordTokens

    for name in ("ids", "ids_and_ranges"):
        setattr(WordTokens, name, lambda *_, **__: None)
    return with_windlass(dataset, tokenizer, form, cores)


def with_trl(dataset: Any, tokenizer: Any, form: str, cores: int) -> tuple[Any, Any]:
    """Return the rows, and the packed rows."""
    from trl import SFTConfig, pack_dataset
    from trl.trainer.sft_trainer import SFTTrainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = SFTConfig(
            use_cpu=True, bf16=False, max_length=None, assistant_only_loss=form == "chat",
            dataset_num_proc=cores if cores > 1 else None, report_to="none",
        )  # fmt: skip
    own = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=form == "text")
    rows = SFTTrainer._prepare_dataset(own, dataset, tokenizer, args, False, None, "train")
    rows = rows.select_columns(["input_ids", "labels"])
    return rows, pack_dataset(rows, LENGTH)


WAYS = {"windlass": with_windlass, "trl": with_trl, "whole-texts": with_whole_texts}


def measure(name: str, form: str, cores: int, count: int, data: Path) -> None:
    """Prepare once; print the seconds, those of this process's processor, and a checksum of the rows as JSON."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    tokenizer = tokenizer_of(data)
    dataset = datasets.Dataset.from_list(rows_of(data, form, count))
    prepare = WAYS[name]
    prepare(dataset.select(range(64)), tokenizer, form, 1)  # imports, and the compiled template
    begin, busy = time.perf_counter(), time.process_time()
    rows, packed = prepare(dataset, tokenizer, form, cores)
    seconds, processor = time.perf_counter() - begin, time.process_time() - busy
    checksum = hash(tuple((*row["input_ids"], *row["labels"]) for row in rows))
    print(
        json.dumps({"seconds": seconds, "processor": processor, "checksum": checksum, "packed": len(packed)})
    )


def run(name: str, form: str, cores: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a fresh process."""
    words = ["--measure", name, form, str(cores), "--rows", str(options.rows), "--data", str(options.data)]
    # The tokenizer uses as many threads as there are cores where a contender does not set this itself.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("TOKENIZERS_PARALLELISM", None)
    done = subprocess.run(
        [sys.executable, str(HERE / "text_preparation.py"), *words],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stderr}\n{name} stopped with code {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Rows per second of each contender, by form and number of cores."""
    figures: dict[str, Any] = {}
    for form in FORMS:
        for cores in options.cores:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
            for _ in range(options.rounds):
                for name, measured in found.items():
                    measured.append(run(name, form, cores, options))
            if len({it["checksum"] for measured in found.values() for it in measured}) != 1:
                raise SystemExit(f"{form}: the contenders made different rows")
            figures[f"{form}, {cores}"] = {
                name: options.rows / min(it["seconds"] for it in measured) for name, measured in found.items()
            }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines with question and answer")
    parser.add_argument(
        "--measure",
        nargs=3,
        metavar=("NAME", "FORM", "CORES"),
        help=f"one measurement; NAME: {', '.join(WAYS)}",
    )
    parser.add_argument("--write", type=Path, help="the page whose section is rewritten")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    if options.measure:
        name, form, cores = options.measure
        measure(name, form, int(cores), options.rows, options.data)
        return
    figures = compare(options)
    lines = []
    for case, speed in figures.items():
        form, cores = case.split(", ")
        ratio = f"{speed['windlass'] / speed['trl']:.1f}x"
        lines.append([FORMS[form], cores, *(f"{speed[name]:,.0f}" for name in CONTENDERS), ratio])
    head = ["Rows", "Cores", *(f"{label}, rows/s" for label in CONTENDERS.values()), "Ratio"]
    found = facts()
    text = f"{table(head, lines)}\n\n{caption(found)}"
    report("preparation", text, {**found, "rows_per_second": figures}, options.write, options.json)


if __name__ == "__main__":
    main()
