"""A new interpreter that calls the function in a folder."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.trainer.resume_cases import in_a_child

from windlass.compat.function_rank import write_call
from windlass.compat.function_transfer import pack_call


def test_the_call_finds_path_arguments_and_threads(tmp_path: Path) -> None:
    def writes(name: str) -> None:
        import torch

        where = [str(torch.get_num_threads()), str(tmp_path) in sys.path, sys.argv[0]]
        (tmp_path / name).write_text(" ".join(map(str, where)))

    sys.path += [str(tmp_path), tmp_path]  # type: ignore[list-item]
    try:
        arguments = write_call(tmp_path, pack_call(writes, ("out",)), 3)
    finally:
        del sys.path[-2:]
    found = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "out").read_text() == f"3 True {sys.argv[0]}"


NOTEBOOK = """
import torch

class Product(torch.autograd.Function):
    @staticmethod
    def forward(left, right):
        return left * right

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        left, right = ctx.saved_tensors
        return gradient * right, gradient * left

def multiplies(path):
    left = torch.ones(1, requires_grad=True)
    Product.apply(left, torch.tensor([3.0])).backward()
    with open(path, "w") as file:
        file.write(f"{left.grad.item()} {__builtins__.len([])}")
"""


def test_what_a_notebook_defines_has_the_globals_of_a_module(tmp_path: Path) -> None:
    """Torch looks the built-in functions up there, for custom functions and in its compiler."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(NOTEBOOK, cell)
    arguments = write_call(tmp_path, pack_call(cell["multiplies"], (str(tmp_path / "out"),)), 1)
    assert subprocess.run([sys.executable, *arguments]).returncode == 0
    assert (tmp_path / "out").read_text() == "3.0 0"


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """As where the kernel of a notebook is killed: its processes would go on, with the devices that they hold."""

    def outlives_its_parent() -> None:
        signal.alarm(100)
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    left, lives = os.pipe()

    def work() -> None:
        arguments = write_call(tmp_path, pack_call(outlives_its_parent, ()), 1)
        subprocess.run([sys.executable, *arguments], pass_fds=[lives], check=True)

    assert in_a_child(work) == -signal.SIGKILL
    os.close(lives)
    assert multiprocessing.connection.wait([left], 60)
    os.close(left)
