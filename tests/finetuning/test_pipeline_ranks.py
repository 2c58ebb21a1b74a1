"""Fine-tuning on ranks that divide layers: packed rows and completions have the reports of one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch
from tests.finetuning import test_several_ranks

from windlass.compat.plugin_parallelism import ParallelismConfig, PipelineParallelConfig

pytest.importorskip("transformers")
CASES: dict[str, dict[str, Any]] = {
    "packed": {"lora": False, "packing": True},
    "completions": {"lora": False, "packing": False, "completion_only_loss": True},
}
SCHEDULES = {"packed": "1F1B", "completions": "GPipe"}


@pytest.mark.dist
@pytest.mark.parametrize("name", ["packed", pytest.param("completions", marks=pytest.mark.slow)])
def test_two_stages_are_one_process(tmp_path: Path, name: str) -> None:
    launch(2, Path(__file__), tmp_path, name)
    alone = test_several_ranks.figures(tmp_path / "alone", **CASES[name])
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for ours, theirs in zip(found, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5)


# --- what each rank runs ----------------------------------------------------------------------------------------------


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    layout = ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig(SCHEDULES[name]))
    found = test_several_ranks.figures(
        folder / name, per_device_train_batch_size=2, parallelism_config=layout, **CASES[name]
    )
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
