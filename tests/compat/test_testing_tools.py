from __future__ import annotations

import subprocess
import sys
import unittest

import accelerate.test_utils as reference
import pytest
import torch
from tests.dist.same import assert_same

from windlass import Accelerator
from windlass.compat import testing_tools as ours
from windlass.compat.state import AcceleratorState


def test_commands_are_those_of_the_reference_with_the_name_replaced() -> None:
    settings = {"num_processes": 2, "cpu": True, "module": None, "monitor_interval": 0.1}
    wanted = reference.get_launch_command(**settings)
    assert ours.get_launch_command(**settings) == ["windlass", *wanted[1:]]
    assert ours.get_torch_dist_unique_port() == reference.get_torch_dist_unique_port()
    assert ours.torch_device == reference.torch_device
    assert ours.device_count == reference.device_count


def test_a_command_that_fails_is_an_error() -> None:
    done = ours.execute_subprocess_async([sys.executable, "-c", "print('fine')"], echo=False)
    assert done.stdout.strip() == "fine"
    fails = [sys.executable, "-c", "import sys; sys.stderr.write('the reason'); sys.exit(3)"]
    with pytest.raises(RuntimeError, match=r"ended with code 3(.|\n)*the reason"):
        ours.execute_subprocess_async(fails)
    with pytest.raises(subprocess.TimeoutExpired):
        ours.execute_subprocess_async([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.01)


def test_the_problem_is_that_of_the_reference() -> None:
    found, wanted = ours.RegressionDataset(2, 3, 5, seed=1), reference.RegressionDataset(2, 3, 5, seed=1)
    assert [found[i] for i in range(len(found))] == [wanted[i] for i in range(len(wanted))]
    x = torch.ones(3)
    assert_same(ours.RegressionModel(2, 1)(x).detach(), reference.RegressionModel(2, 1)(x).detach())


def test_marks_skip_a_test_that_cannot_run() -> None:
    @ours.require_multi_gpu
    class Case(unittest.TestCase):
        def test_it(self) -> None:
            raise AssertionError("several GPUs")

    enough = torch.cuda.device_count() > 1
    assert getattr(Case, "__unittest_skip__", False) is not enough
    assert ours.require_torch_min_version(version="1.0")(three) is three
    assert getattr(ours.require_torch_min_version(version="99.0")(Case), "__unittest_skip__", False)


def three() -> int:
    return 3


def test_expected_exceptions_and_printed_text() -> None:
    with ours.assert_exception(KeyError, "name"):
        raise KeyError("name")
    for body in (lambda: None, lambda: {}["other"], lambda: int("x")):
        with pytest.raises(AssertionError), ours.assert_exception(KeyError, "name"):
            body()
    assert ours.capture_call_output(print, "text") == "text\n"


def test_tensors_of_one_process_are_the_same() -> None:
    Accelerator(cpu=True)
    try:
        assert ours.are_the_same_tensors(torch.ones(2))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
