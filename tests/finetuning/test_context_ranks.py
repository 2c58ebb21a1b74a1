"""Fine-tuning on ranks that divide sequences: packed rows and completions have the reports of one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch
from tests.finetuning import test_several_ranks

from windlass import ParallelismConfig
from windlass.dist.gang import leave

pytest.importorskip("transformers")
pytest.importorskip("peft")
CASES: dict[str, dict[str, Any]] = {
    "completions": {"lora": False, "packing": False, "completion_only_loss": True},
    "packed with an adapter": {"lora": True, "packing": True},
}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("axis", "ranks"),
    [
        ("sequences", 2),
        pytest.param("layers", 2, marks=pytest.mark.slow),
        pytest.param("shards of layers", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_divide_sequences_or_layers_are_one_process(tmp_path: Path, axis: str, ranks: int) -> None:
    launch(ranks, Path(__file__), tmp_path, axis)
    for name, case in CASES.items():
        alone = test_several_ranks.figures(tmp_path / name / "alone", **case)
        for rank in range(ranks):
            found = json.loads((tmp_path / f"rank{rank}.json").read_text())
            for ours, theirs in zip(found[name], alone, strict=True):
                assert ours == pytest.approx(theirs, rel=2e-5), name


# --- what each rank runs ----------------------------------------------------------------------------------------------


def main() -> None:
    folder = Path(sys.argv[1])
    layouts = [ParallelismConfig(cp_size=2), ParallelismConfig(sp_size=2)]
    if sys.argv[2] == "layers":
        layouts = [ParallelismConfig(tp_size=2)] * 2
    if sys.argv[2] == "shards of layers":
        layouts = [ParallelismConfig(tp_size=2, dp_shard_size=2)] * 2
    found = {}
    for layout, (name, case) in zip(layouts, CASES.items(), strict=False):
        found[name] = test_several_ranks.figures(
            folder / name,
            per_device_train_batch_size=2 // layout.data_parallel_size,
            parallelism_config=layout,
            **case,
        )
        leave()  # the next case has another layout
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
