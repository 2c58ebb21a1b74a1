"""Fine-tuning on images beside TRL: samples per second of processor time, and the memory of a run.

Both train the same small LLaVA (three layers of width 128, vocabulary 4,096; 64 tokens an image) with the same
loss, optimizer and batches of 8 on the same 400 conversations: JPEG files of 64 to 320 pixels, a fifth of the rows with
two images and a fifth with none, answers of very different lengths. Each runs in a fresh process of one thread; they
take turns for `--rounds` rounds, and the best round of each counts. Processor time of `--updates` updates is measured
after the first three; memory is what the process has at most above what it had before the trainer was made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import caption, facts, report, table

LABELS = {
    "windlass": "windlass",
    "windlass_grouped": "windlass, batches of similar lengths",
    "trl": "TRL",
}
SKIPPED, ROWS, BATCH, VOCABULARY = 3, 400, 8, 4_096
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% elif m['role'] == 'assistant' %}{% generation %}{{ part['text'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ part['text'] + '\n' }}{% endif %}{% endfor %}{% endfor %}"
)


def parts() -> tuple[Any, Any]:
    """The model and its processor."""
    import tokenizers as tk
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    inner = tk.Tokenizer(tk.models.WordLevel({f"w{i}": i for i in range(VOCABULARY - 4)}, unk_token="w0"))
    inner.pre_tokenizer = tk.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", unk_token="w0"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    side = {"height": 64, "width": 64}
    processor = transformers.LlavaProcessor(
        CLIPImageProcessorPil(size=side, crop_size=side),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"image_size": 64, "patch_size": 8, "projection_dim": 128}
    config = transformers.LlavaConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 1024,
            **sizes,
        },
        vision_config={"model_type": "clip_vision_model", **sizes, **vision},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config), processor


def dataset(folder: Path) -> Any:
    """The rows, with paths of images."""
    from datasets import Dataset, Features, Image, List, Value
    from PIL import Image as Pillow

    draw = np.random.default_rng(0)
    rows = []
    for at in range(ROWS):
        files = []
        for number in range((1, 1, 0, 1, 2)[at % 5]):
            width, height = draw.integers(64, 321, 2)
            smooth = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            files.append(str(folder / f"{at}-{number}.jpg"))
            Pillow.fromarray(smooth).resize((int(width), int(height))).save(files[-1])
        words = np.clip(draw.lognormal(np.log(30), 1.0, 2).astype(int), 2, 400)
        question, answer = (" ".join(f"w{i}" for i in draw.integers(0, VOCABULARY - 4, n)) for n in words)
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"images": files, "messages": said})
    text = {"role": Value("string"), "content": Value("string")}
    return Dataset.from_list(rows, features=Features({"images": List(Image()), "messages": List(text)}))


class EnoughError(Exception):
    """Ends a run, from within any trainer."""


def run(name: str, updates: int) -> dict[str, Any]:
    """One round of one contender: samples and tokens per second of processor time, and the memory of the run."""
    if name == "trl":
        from trl import SFTConfig, SFTTrainer
    else:
        from windlass import SFTConfig, SFTTrainer
    model, processor = parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    stamps: list[float] = []

    def stamp(*_: Any) -> None:
        stamps.append(time.process_time())
        if len(stamps) > SKIPPED + updates:
            raise EnoughError

    optimizer.register_step_post_hook(stamp)
    grouped = {"train_sampling_strategy": "group_by_length"} if name.endswith("grouped") else {}
    with tempfile.TemporaryDirectory() as place:
        rows = dataset(Path(place))
        args = SFTConfig(
            f"{place}/run",
            max_steps=10_000,
            per_device_train_batch_size=BATCH,
            save_strategy="no",
            report_to="none",
            lr_scheduler_type="constant",
            logging_steps=100,
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=None,
            assistant_only_loss=True,
            **grouped,
        )
        before, begin = _memory(), time.process_time()
        trainer = SFTTrainer(
            model, args, train_dataset=rows, processing_class=processor, optimizers=(optimizer, None)
        )
        prepared = time.process_time() - begin
        with contextlib.suppress(EnoughError):
            trainer.train()
    spent = stamps[-1] - stamps[SKIPPED]
    return {
        "samples_per_second": BATCH * updates / spent,
        "preparation": prepared,
        "memory": _memory() - before,
    }


def _memory() -> int:
    """The most that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def once(name: str, updates: int) -> dict[str, Any]:
    """One round in a process of its own."""
    command = [sys.executable, __file__, "--one", name, "--updates", str(updates)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def render(figures: dict[str, Any]) -> str:
    found = figures["contenders"]
    head = ["trainer", "samples/s", "ratio to TRL", "preparation, s", "memory of the run, MB"]
    rows = [
        [
            LABELS[name],
            f"{it['samples_per_second']:.1f}",
            f"{it['samples_per_second'] / found['trl']['samples_per_second']:.2f}",
            f"{it['preparation']:.1f}",
            f"{it['memory'] / 1e6:.0f}",
        ]
        for name, it in found.items()
    ]
    return f"{table(head, rows)}\n\n{caption(figures)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=30, help="measured in one round of one contender")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=LABELS, help="run one round of one contender, in this process")
    parser.add_argument("--write", type=Path, help="the page whose section is rewritten")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(run(options.one, options.updates)))
        return
    found: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for name in LABELS:
            now = once(name, options.updates)
            best = found.setdefault(name, now)
            best["samples_per_second"] = max(best["samples_per_second"], now["samples_per_second"])
            best["preparation"] = min(best["preparation"], now["preparation"])
            best["memory"] = min(best["memory"], now["memory"])
    figures = {**facts(("torch", "windlass", "transformers", "trl")), "contenders": found}
    report("sft-images", render(figures), figures, options.write, options.json)


if __name__ == "__main__":
    main()
