"""Throughput on one accelerator: a Llama-style model of about one billion parameters, built from a config, in bf16.

Windlass, transformers and a loop written by hand train the same model on the same random tokens, with and without
`torch.compile`, each in a process of its own. Timed between two synchronised updates, after a warm-up. MFU counts
6 operations per parameter and token plus causal attention's 6 * layers * width * length, over the device's dense peak.
`--tiny` runs the same code on a toy model on the CPU, to show that it runs; its figures mean nothing. `--axes 4` trains
with Windlass on four accelerators instead, which divide the layers or the rows of 8k to 128k tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import caption, facts, report, table

HERE = Path(__file__).resolve().parent
LOOPS = ("raw", "windlass", "transformers")
# How accelerators divide the model, and the lengths of the rows that they train on.
AXES = {"tp_size": "layers", "cp_size": "rows, ring", "sp_size": "rows, heads"}
LENGTHS = (8_192, 32_768, 131_072)
LABELS = {"raw": "PyTorch, written by hand"}
# Dense bf16 peak in TFLOP/s, from the makers' data sheets; the first name that the device's name contains counts.
PEAKS = {
    "B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0,
    "A10G": 70.0, "RTX 4090": 165.2, "RTX 3090": 71.0,
}  # fmt: skip


def device_name() -> str | None:
    """The accelerator's name, asked in another process so that this one never holds its memory."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() or None


def peak_tflops(device: str) -> float | None:
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def train(
    loop: str, compiled: bool, options: argparse.Namespace, layout: dict[str, int] | None = None
) -> dict[str, Any]:
    """One loop in a fresh process, or in one for each part of a layout: its figures, or the last line of its error."""
    asked = {
        "loop": loop, "compile": compiled, "tiny": options.tiny, "micro_batch": options.micro_batch,
        "length": options.length, "steps": options.steps, "warmup": options.warmup, "layout": layout or {},
    }  # fmt: skip
    processes = sum((layout or {}).values())
    several = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if layout else []
    )
    command = [sys.executable, *several, str(HERE / "gpu_worker.py"), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"stopped with code {done.returncode}"]
        print(done.stderr, file=sys.stderr)
        return {"loop": loop, "compile": compiled, "error": lines[-1][:120]}
    return {"loop": loop, "compile": compiled, **json.loads(done.stdout.splitlines()[-1])}


def mfu(it: dict[str, Any], peak: float | None) -> str:
    """Model FLOP utilisation in percent (PaLM, appendix B), empty where the peak is not known."""
    if peak is None:
        return ""
    per_token = 6 * it["parameters"] + 6 * it["layers"] * it["width"] * it["length"]
    return f"{100 * per_token * it['tokens_per_second'] / (peak * 1e12):.1f} %"


def render(figures: dict[str, Any]) -> str:
    head = ["loop", "torch.compile", "tokens/s", "MFU", "peak memory, GB", "loss, first to last"]
    if figures["device"] is None:
        rows: list[list[str]] = [[LABELS.get(n, n), "", "", "", "", ""] for n in LOOPS]
        note = "No accelerator was there when this page was made, so these rows are empty."
        return f"{table(head, rows)}\n\n{note} The command: `{figures['command']}`."
    rows = []
    for it in figures["runs"]:
        label, compiled = LABELS.get(it["loop"], it["loop"]), "yes" if it["compile"] else "no"
        if "error" in it:
            rows.append([label, compiled, "failed: " + it["error"], "", "", ""])
            continue
        memory = f"{it['peak_bytes'] / 1e9:.1f}" if it["peak_bytes"] else ""
        speed, losses = f"{it['tokens_per_second']:,.0f}", f"{it['first_loss']:.2f} to {it['last_loss']:.2f}"
        rows.append([label, compiled, speed, mfu(it, figures["peak_tflops"]), memory, losses])
    done = next((it for it in figures["runs"] if "error" not in it), None)
    shape = "" if done is None else f"{done['parameters'] / 1e9:.2f} B parameters, "
    shape += f"{figures['micro_batch']} sequences of {figures['length']} tokens a step, {figures['device']}. "
    return f"{table(head, rows)}\n\n{shape}{caption(figures)}"


def render_axes(figures: dict[str, Any]) -> str:
    head = ["divided", "tokens in a row", "tokens/s", "MFU of each", "peak memory of each, GB"]
    lengths = figures["lengths"]
    if figures["device"] is None:
        rows = [[label, f"{length:,}", "", "", ""] for label in AXES.values() for length in lengths]
        note = "No accelerators were there when this page was made, so these rows are empty."
        return f"{table(head, rows)}\n\n{note} The command: `{figures['command']}`."
    rows = []
    for it in figures["runs"]:
        if "error" in it:
            rows.append([it["label"], f"{it['length']:,}", "failed: " + it["error"], "", ""])
            continue
        each = {**it, "tokens_per_second": it["tokens_per_second"] / figures["axes"]}
        memory = f"{it['peak_bytes'] / 1e9:.1f}" if it["peak_bytes"] else ""
        share = mfu(each, figures["peak_tflops"])
        rows.append([it["label"], f"{it['length']:,}", f"{it['tokens_per_second']:,.0f}", share, memory])
    return f"{table(head, rows)}\n\n{figures['axes']} x {figures['device']}. {caption(figures)}"


def divided(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """One row of each length, divided in each way, with recomputed blocks."""
    options.micro_batch = 1
    for name, label in AXES.items():
        for options.length in figures["lengths"]:
            found = train("windlass", False, options, {name: options.axes})
            figures["runs"].append({**found, "label": label, "length": options.length})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a toy model on the CPU: does the code run?")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--only", default=",".join(LOOPS), help="loops, comma-separated")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled runs")
    parser.add_argument(
        "--peak-tflops", type=float, help="dense bf16 peak of a device that is not in the list"
    )
    parser.add_argument("--axes", type=int, default=0, help="accelerators that divide layers or rows")
    parser.add_argument("--write", type=Path, help="a page with a section `gpu`, or `gpu-axes`, to rewrite")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    if options.tiny:
        options.micro_batch, options.length, options.steps, options.warmup = 2, 32, 6, 2
        if options.write is not None:
            parser.error("--tiny measures nothing worth writing down: leave out --write")
    return options


def main() -> None:
    options = parse()
    device = "CPU (toy model)" if options.tiny else device_name()
    figures: dict[str, Any] = {
        **facts(), "device": device, "micro_batch": options.micro_batch, "length": options.length, "runs": [],
    }  # fmt: skip
    figures["peak_tflops"] = options.peak_tflops or peak_tflops(device or "")
    if options.axes:
        figures |= {"axes": options.axes, "lengths": (64,) if options.tiny else LENGTHS}
    if device is None:
        print("No accelerator here: nothing to measure. `--tiny` shows on the CPU that the benchmark runs.\n")
    elif options.axes:
        divided(figures, options)
    else:
        variants = [False] if options.no_compile else [False, True]
        loops = options.only.split(",")
        figures["runs"] = [train(loop, compiled, options) for compiled in variants for loop in loops]
    if options.axes:
        report("gpu-axes", render_axes(figures), figures, options.write, options.json)
    else:
        report("gpu", render(figures), figures, options.write, options.json)
    if any("error" in it for it in figures["runs"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
