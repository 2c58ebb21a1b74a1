"""One launch file, read by our launcher and by the real accelerate's: the processes find the same plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import run_script

SCRIPT = Path(__file__).with_name("planned_ranks.py")
FILE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_sharding_strategy: 1
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_use_orig_params: true
machine_rank: 0
main_process_port: 0
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: false
"""


def _plans(words: list[str], path: Path) -> list[dict[str, Any]]:
    module, *flags = words
    said = run_script(module, *flags, "--config_file", path, SCRIPT, timeout=250)
    # Two processes that print at once may share a line.
    told = [json.JSONDecoder().raw_decode(text)[0] for text in said.split("PLAN ")[1:]]
    return sorted(told, key=lambda plan: plan["rank"])


@pytest.mark.dist
@pytest.mark.parametrize(
    "words", [["windlass", "launch"], ["accelerate.commands.launch"]], ids=["ours", "theirs"]
)
def test_the_same_file_gives_the_same_plan(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(FILE)
    plans = _plans(words, path)
    assert [plan["rank"] for plan in plans] == [0, 1]
    for plan in plans:
        assert (plan["strategy"], plan["layers"], plan["compute"]) == ("fsdp", ["Block"], "bf16")
    source = str(path) if words[0] == "windlass" else "ACCELERATE_MIXED_PRECISION"
    assert source in plans[0]["origins"]["precision"]
