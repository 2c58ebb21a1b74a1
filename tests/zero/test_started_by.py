"""The launchers that start a script under DeepSpeed: `windlass launch --use_deepspeed`, and DeepSpeed's own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.dist.launch import ROOT, launch_as, run_script
from tests.recipes.test_from_files import PAGES, printed_files
from tests.zero import launched_run
from tests.zero.needed import needs_deepspeed

SCRIPT = Path(launched_run.__file__)
TOLERANCE = 5e-6  # of fp32

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_deepspeed,
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    run_script(SCRIPT, folder)
    return found_in(folder)


def found_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "found.json").read_text())  # type: ignore[no-any-return]


def check(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert (found["deepspeed"], alone["deepspeed"]) == (True, False)
    assert found["loss"] == pytest.approx(alone["loss"], abs=TOLERANCE)
    assert found["grad_norm"] == pytest.approx(alone["grad_norm"], abs=TOLERANCE)


def test_flags(alone: dict[str, Any], tmp_path: Path) -> None:
    launch_as("--num_processes", 2, "--use_cpu", "--use_deepspeed", "--zero_stage", 2, SCRIPT, tmp_path)
    check(found_in(tmp_path), alone)


def test_a_file_of_accelerate_config(alone: dict[str, Any], tmp_path: Path) -> None:
    """As the guides print it, with a norm that the script sets too."""
    file = tmp_path / "deepspeed.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  gradient_accumulation_steps: 2\n"
        "  gradient_clipping: 0.5\n  offload_optimizer_device: cpu\n  offload_param_device: cpu\n"
        "  zero3_init_flag: true\n  zero_stage: 2\ndistributed_type: DEEPSPEED\ndowncast_bf16: 'no'\n"
        "machine_rank: 0\nmain_training_function: main\nnum_machines: 1\nnum_processes: 2\nrdzv_backend: static\n"
        "same_network: true\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: true\n"
    )
    launch_as("--config_file", file, SCRIPT, tmp_path)
    check(found_in(tmp_path), alone)


@pytest.mark.skipif(not PAGES.is_dir(), reason="the guides are not beside this checkout")
@pytest.mark.parametrize("at", [2, 3])  # the configuration in a file, and by the plugin's fields
def test_the_guides_files_as_printed(at: int, tmp_path: Path) -> None:
    """Four processes, as they say; the path of the configuration is the guides' author's."""
    config, file = tmp_path / "zero3.json", tmp_path / "guide.yaml"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}))
    for printed in (printed_files()[at], printed_files()[at + 4]):
        for part in (printed, printed.get("deepspeed_config") or {}):
            if "deepspeed_config_file" in part:
                part["deepspeed_config_file"] = str(config)
        file.write_text(yaml.safe_dump(printed))
        for kind in ("language", "loop"):
            launch_as("--config_file", file, SCRIPT, tmp_path, kind)
            found = found_in(tmp_path)
            assert found["deepspeed"]
            assert len(found["loss"]) == 4
            assert all(map(math.isfinite, found["loss"]))


def test_deepspeeds_own_launcher(alone: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}))
    command = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", "2", "--master_port", "29871"]
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    subprocess.run([*command, SCRIPT, tmp_path, file], env=environ, cwd=ROOT, check=True, timeout=200)
    check(found_in(tmp_path), alone)
