"""Fine-tuning on ranks that divide sequences: packed rows and completions have the reports of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import on_ranks
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
    everywhere = on_ranks(ranks, main, tmp_path, axis)
    for name, case in CASES.items():
        alone = test_several_ranks.figures(tmp_path / name / "alone", **case)
        for found in everywhere:
            for ours, theirs in zip(found[name], alone, strict=True):
                assert ours == pytest.approx(theirs, rel=2e-5), name


# --- what each rank runs ----------------------------------------------------------------------------------------------


def main(folder: Path, axis: str) -> dict[str, Any]:
    layouts = [ParallelismConfig(cp_size=2), ParallelismConfig(sp_size=2)]
    if axis == "layers":
        layouts = [ParallelismConfig(tp_size=2)] * 2
    if axis == "shards of layers":
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
    return found
