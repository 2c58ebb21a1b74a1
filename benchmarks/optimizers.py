"""Each optimizer: bytes of state per parameter, and losses on real text with a fixed budget.

python benchmarks/optimizers.py [--steps N] [--only NAME ...] [--write docs/optimizers.md] [--plot FILE.svg]

The text is ../shared/data/tinyshakespeare/input.txt if it is there, else --text FILE. The model is a transformer of
characters with two layers; learning rates are in `RATES`, everything else has the documented default.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import caption, facts, report, table
from torch import Tensor, nn

from windlass import Trainer, TrainingArguments
from windlass.core.errors import MissingDependencyError

TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "tinyshakespeare" / "input.txt"
# One rate for each family, ten times less for signs, as its paper recommends, and more for those without a moment.
ADAM, SIGN = 3e-3, 3e-4
RATES = {
    "adamw_torch": ADAM, "adamw_anyprecision": ADAM, "stable_adamw": ADAM, "grokadamw": ADAM / 3, "ademamix": ADAM / 3,
    "adafactor": ADAM, "muon": ADAM, "lion_32bit": SIGN, "sgd": 0.1, "adagrad": 0.01, "rmsprop": 1e-3,
    "schedule_free_adamw": 2 * ADAM, "schedule_free_radam": 2 * ADAM, "schedule_free_sgd": 1.0,
    "adamw_torch_8bit": ADAM, "adamw_torch_4bit": ADAM, "adamw_8bit": ADAM, "lion_8bit": SIGN,
    "ademamix_8bit": ADAM / 3, "rmsprop_bnb_8bit": 1e-3,
    "galore_adamw": 1e-2, "galore_adamw_8bit": 1e-2, "galore_adafactor": 1e-2, "apollo_adamw": 1e-2,
    "lomo": 0.1, "adalomo": 1e-2,
}  # fmt: skip
PROJECTED = ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw")
OPTIONS = {"sgd": "momentum=0.9"} | dict.fromkeys(PROJECTED, "rank=16, update_proj_gap=50")
LENGTH, WIDTH, BATCH = 64, 64, 16


class Characters(nn.Module):
    """A causal transformer of characters."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits = self.lm_head(self.norm(hidden))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of the optimizer's state for each of its parameters; of a packed tensor those of its parts."""

    def size(tensor: Any) -> int:
        if hasattr(tensor, "__tensor_flatten__") and type(tensor) not in (Tensor, nn.Parameter):
            return sum(size(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        return int(tensor.numel() * tensor.element_size())

    held = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = {
        id(value): value for p in held for value in optimizer.state[p].values() if isinstance(value, Tensor)
    }
    return sum(size(value) for value in tensors.values()) / sum(p.numel() for p in held)


def samples(text: str) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], int]:
    """Rows of `LENGTH` characters with their successors: training, evaluation, and the size of the vocabulary."""
    known = {char: index for index, char in enumerate(sorted(set(text)))}
    codes = torch.tensor([known[char] for char in text])
    rows = [
        {"x": codes[i : i + LENGTH], "labels": codes[i + 1 : i + LENGTH + 1]}
        for i in range(0, len(codes) - LENGTH - 1, LENGTH)
    ]
    held_out = len(rows) // 20
    return rows[:-held_out], rows[-held_out:], len(known)


def measure(name: str, data: Any, steps: int) -> dict[str, Any]:
    train, held_out, vocabulary = data
    constant = name.startswith("schedule_free")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, optim=name, learning_rate=RATES[name], optim_args=OPTIONS.get(name), max_steps=steps, seed=0,
            optim_target_modules="all-linear" if name in PROJECTED else None,
            lr_scheduler_type="constant" if constant else "cosine", warmup_steps=max(steps // 20, 1),
            per_device_train_batch_size=BATCH, per_device_eval_batch_size=64, weight_decay=0.01, save_strategy="no",
            logging_steps=max(steps // 40, 1), report_to="none", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(), log_level="error",
        )  # fmt: skip
        trainer = Trainer(Characters(vocabulary), args, train_dataset=train, eval_dataset=held_out[:256])
        trainer.train()
        curve = [(row["step"], row["loss"]) for row in trainer.state.log_history if "loss" in row]
        loss = trainer.evaluate()["eval_loss"]
    if not math.isfinite(loss) or loss > math.log(vocabulary):
        raise SystemExit(f"{name} diverged: loss {loss}")
    if constant:
        trainer.optimizer.train()  # in evaluation mode it keeps one more copy of the weights
    return {"loss": loss, "bytes": state_bytes(trainer.optimizer), "curve": curve}


def plot(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "optimizers"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for index, (name, row) in enumerate(found.items()):
        steps, losses = zip(*row["curve"], strict=True)
        axes.plot(steps, losses, label=name, linewidth=1, linestyle=("-", "--", ":")[index // 10 % 3])
    axes.set(xlabel="update", ylabel="training loss", title="Tiny Shakespeare, characters")
    axes.legend(fontsize=6, ncols=2)
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--raw", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    data = samples(options.text.read_text("utf-8"))
    found, missing = {}, []
    # Compiling a step for each shape of this model would cost more than all runs.
    with torch.compiler.set_stance("force_eager"):
        for name in options.only:
            try:
                found[name] = measure(name, data, options.steps)
            except MissingDependencyError:
                missing.append(name)
                continue
            print(f"{name}: {found[name]['loss']:.3f}", flush=True)
    rows = [
        (f"`{name}`", f"{row['bytes']:.2f}", f"{RATES[name]:g}", f"{row['loss']:.3f}")
        for name, row in found.items()
    ]
    head = ("`optim`", "bytes of state per parameter", "learning rate", f"loss after {options.steps} updates")
    text = table(head, rows) + "\n\n" + caption(facts())
    if missing:
        text += f" Not installed: {', '.join(missing)}."
    report("optimizers", text, {**facts(), "optimizers": found}, options.write, options.raw)
    if options.plot is not None:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
