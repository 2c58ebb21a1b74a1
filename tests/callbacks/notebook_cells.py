"""A notebook that is executed by a real kernel, and can be interrupted as its stop button does."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

SETUP = """\
import time
from pathlib import Path
import torch
from torch import nn
from windlass import ProgressCallback, Trainer, TrainerCallback, TrainingArguments

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
    def forward(self, x, labels=None):
        return {"loss": ((x * self.weight - labels) ** 2).mean(), "logits": x * self.weight}

data = [{"x": torch.tensor(i / 8), "labels": torch.tensor(i / 4)} for i in range(8)]

class Waits(TrainerCallback):
    "From the third update on, waits for the interrupt."
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            Path("reached").touch()
            end = time.monotonic() + 60
            while not control.should_training_stop and time.monotonic() < end:
                time.sleep(0.01)

def trainer(*callbacks, folder="out", **options):
    args = TrainingArguments(folder, max_steps=6, logging_steps=1, per_device_train_batch_size=2, **options)
    return Trainer(Line(), args, train_dataset=data, eval_dataset=data, callbacks=[*callbacks])
"""


def execute(folder: Path, *cells: str) -> list[list[Any]]:
    """Run the cells in a kernel in `folder` and return the outputs of each. The kernel is interrupted once a cell has
    made the file `reached`.
    """
    import nbformat
    from nbclient import NotebookClient

    sources = (SETUP, *cells)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = NotebookClient(
        notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    ended = threading.Event()

    def stop() -> None:
        while not (folder / "reached").exists():
            if ended.wait(0.02):
                return
        asyncio.run(client.km.interrupt_kernel())

    watcher = threading.Thread(target=stop)
    watcher.start()
    try:
        client.execute()
    finally:
        ended.set()
        watcher.join()
    return [cell.outputs for cell in notebook.cells[1:]]
