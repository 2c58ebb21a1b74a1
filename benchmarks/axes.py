"""What dividing a model costs and saves, counted: bytes that a rank sends in one update, by axis, beside what the axis
needs by theory; and the memory of a step on long rows, by the number of ranks that divide them.

Each layout runs on gloo processes of one thread. Bytes are those of the collectives' arguments: a ring of n ranks
sends 2 (n-1)/n of what it sums, (n-1) times what each gathers, and (n-1)/n of what is exchanged or summed and
scattered. Memory is the highest sum of allocated tensors above the start of the update. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import caption, facts, report, table

LAYERS, WIDTH, INNER, HEADS, KEYS, VOCABULARY = 2, 256, 704, 8, 4, 1024
FLOAT = 4  # bytes
SENT: dict[str, dict[str, int]] = {
    "replicas": {"dp_replicate_size": 2}, "shards": {"dp_shard_size": 2}, "tensor": {"tp_size": 2},
    "tensor of 4": {"tp_size": 4}, "ring": {"cp_size": 2}, "ring of 4": {"cp_size": 4}, "heads": {"sp_size": 2},
    "heads of 4": {"sp_size": 4}, "rings of heads": {"cp_size": 2, "sp_size": 2},
    "shards x tensor": {"dp_shard_size": 2, "tp_size": 2},
}  # fmt: skip
ROWS: dict[str, dict[str, int]] = {
    "1": {}, "ring of 2": {"cp_size": 2}, "ring of 4": {"cp_size": 4}, "heads, 2": {"sp_size": 2},
    "heads, 4": {"sp_size": 4},
}  # fmt: skip


# --- by theory --------------------------------------------------------------------------------------------------------


def parameters(tensor: int) -> tuple[int, int]:
    """Elements of divided layers (a rank's part), and of whole ones."""
    keys = WIDTH * KEYS // HEADS
    layer = 2 * WIDTH * WIDTH + 2 * WIDTH * keys + 3 * WIDTH * INNER
    return (LAYERS * layer + 2 * VOCABULARY * WIDTH) // tensor, (2 * LAYERS + 1) * WIDTH


def theory(layout: dict[str, int], tokens: int) -> float:
    """Bytes that a rank sends for activations and gradients in an update of one row of `tokens` tokens."""
    tensor, ring, heads = (layout.get(f"{axis}_size", 1) for axis in ("tp", "cp", "sp"))
    shards, replicas = layout.get("dp_shard_size", 1), layout.get("dp_replicate_size", 1)
    mine, keys = tokens // (ring * heads), WIDTH * KEYS // HEADS
    cut, whole = parameters(tensor)
    sent = 0.0
    if tensor > 1:
        # Forward: the embedding, and two sums in each layer; backward: two in each layer, and the head.
        sums = (4 * LAYERS + 2) * mine * WIDTH + whole // shards
        sent += 2 * (tensor - 1) / tensor * sums
    if heads > 1:
        # Queries, keys, values and results, there and back.
        sent += 2 * LAYERS * (heads - 1) / heads * mine * 2 * (WIDTH + keys)
    if ring > 1:
        # Keys and values travel in the forward and again in the backward, and their gradients back.
        sent += LAYERS * 3 * (ring - 1) * mine * 2 * keys
    copies = replicas * (1 if shards > 1 else ring * heads)
    if copies > 1:
        sent += 2 * (copies - 1) / copies * (cut + whole)
    if shards > 1:
        # One unit: its parameters are gathered once, and its gradients scattered.
        sent += 2 * (shards - 1) / shards * (cut + whole)
    return sent * FLOAT


# --- what each rank runs ----------------------------------------------------------------------------------------------


def counting_mode() -> Any:
    """A mode that adds up the bytes which this rank sends of single precision."""
    import torch
    from torch.distributed import ProcessGroup
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sent(TorchDispatchMode):
        total = 0.0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name().removeprefix("c10d::")
            if name != func.name():
                self._count(name, args)
            return func(*args, **(kwargs or {}))

        def _count(self, name: str, args: Any) -> None:
            tensors = {
                "allgather_": 1,
                "_allgather_base_": 1,
                "_reduce_scatter_base_": 1,
                "alltoall_base_": 1,
            }
            given = args[tensors.get(name, 0)]
            given = [given] if isinstance(given, torch.Tensor) else given
            size = sum(t.numel() * t.element_size() for t in given if t.dtype is torch.float32)
            [ranks] = {
                ProcessGroup.unbox(a).size()
                for a in args
                if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a)
            }
            shares = {
                "allreduce_": 2 * (ranks - 1) / ranks, "allgather_": ranks - 1, "_allgather_base_": ranks - 1,
                "_reduce_scatter_base_": (ranks - 1) / ranks, "alltoall_base_": (ranks - 1) / ranks, "send": 1,
            }  # fmt: skip
            self.total += shares.get(name, 0.0) * size

    return Sent()


def peak_of(events: Any) -> int:
    """The highest sum of allocations, above that at the start."""
    total = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


def rank_main(layout: dict[str, int], tokens: int, out: str) -> None:
    import torch
    import transformers

    from windlass import Accelerator, ParallelismConfig
    from windlass.transforms import ring_attention
    from windlass.transforms.lean_loss import lean_causal_lm_loss

    torch.set_num_threads(1)
    ring_attention.TILE = 256
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEYS, max_position_embeddings=tokens,
    )  # fmt: skip
    given = {"parallelism_config": ParallelismConfig(**layout)} if layout else {}
    accelerator = Accelerator(cpu=True, **given)
    model = transformers.LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    ids = torch.randint(VOCABULARY, (1, tokens))
    batch = {"input_ids": ids, "labels": ids}

    def update() -> None:
        loss, _ = lean_causal_lm_loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    update()
    sent = counting_mode()
    with sent:
        update()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        update()
    found = {"sent": sent.total, "peak": peak_of(profile.profiler.kineto_results.events())}
    Path(out, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    accelerator.end_training()


def measure(layout: dict[str, int], tokens: int) -> dict[str, float]:
    """The largest figures of any rank."""
    ranks = 1
    for size in layout.values():
        ranks *= size
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(__file__).resolve()), "--rank", json.dumps([layout, tokens, folder])]
        start = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        )
        done = subprocess.run(
            [sys.executable, *start, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {key: max(one[key] for one in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="of the row whose bytes are counted")
    parser.add_argument("--long", type=int, default=8192, help="of the row whose memory is counted")
    parser.add_argument("--only", default="", help="layouts, separated by commas")
    parser.add_argument("--write", type=Path, help="rewrite this page's section")
    parser.add_argument("--json", type=Path, help="write the figures as JSON")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(*json.loads(options.rank))
        return
    chosen = set(filter(None, options.only.split(",")))
    sent = {
        name: measure(it, options.tokens)["sent"] for name, it in SENT.items() if not chosen or name in chosen
    }
    lines = [
        [name, f"{found / 1e6:.3f}", f"{theory(SENT[name], options.tokens) / 1e6:.3f}",
         f"{100 * (found / theory(SENT[name], options.tokens) - 1):+.2f} %"]
        for name, found in sent.items()
    ]  # fmt: skip
    text = table(["layout", "MB sent by a rank", "theory, MB", "difference"], lines)
    peaks = {
        name: measure(it, options.long)["peak"] for name, it in ROWS.items() if not chosen or name in chosen
    }
    if peaks:
        first = next(iter(peaks.values()))
        lines = [[name, f"{it / 2**20:.0f}", f"{it / first:.3f}"] for name, it in peaks.items()]
        text += "\n\n" + table(["ranks to a row", "peak of an update, MiB", "of one rank's"], lines)
    found = facts(("torch", "windlass", "transformers"))
    text += "\n\n" + caption(found)
    report("axes", text, {**found, "sent": sent, "peaks": peaks}, options.write, options.json)


if __name__ == "__main__":
    main()
