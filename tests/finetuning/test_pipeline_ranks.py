"""Fine-tuning on ranks that divide layers: packed rows and completions have the reports of one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.dist.launch import launch
from tests.finetuning import small, test_dpo_ranks, test_several_ranks
from tests.finetuning.preferences import moved, pairs, settings

from windlass.compat.plugin_parallelism import ParallelismConfig, PipelineParallelConfig
from windlass.core.errors import ConfigError
from windlass.finetuning.dpo_trainer import DPOTrainer

pytest.importorskip("transformers")
CASES: dict[str, dict[str, Any]] = {
    "packed": {"lora": False, "packing": True},
    "completions": {"lora": False, "packing": False, "completion_only_loss": True},
}
PREFERENCES: dict[str, dict[str, Any]] = {
    "reference": {"precompute_ref_log_probs": True, "ld_alpha": 0.5},
    "adapter": {"precompute_ref_log_probs": True, "lora": True, "loss_type": ["ipo"]},
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


@pytest.mark.dist
def test_preferences_in_two_stages_are_one_process(tmp_path: Path) -> None:
    """Losses, norms and all figures, with the reference that the stages compute before training."""
    pytest.importorskip("peft")
    launch(2, Path(__file__), tmp_path, "preferences", environ={"WINDLASS_HOME": str(tmp_path)})
    for name, case in PREFERENCES.items():
        alone = test_dpo_ranks.figures(tmp_path / "alone" / name, **case)
        for rank in range(2):
            found = json.loads((tmp_path / f"rank{rank}.json").read_text())[name]
            # In the first update the model is the reference: which answer it prefers is rounding.
            for reported in (found[0], alone[0]):
                reported.pop("rewards/accuracies", None)
            for ours, theirs in zip(found, alone, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-10, abs=1e-12), (name, rank)


# --- what each rank runs ----------------------------------------------------------------------------------------------


def preferences(folder: Path) -> dict[str, Any]:
    layout = ParallelismConfig(pp_size=2)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "parallelism_config": layout}
    found = {
        name: test_dpo_ranks.figures(folder / name, **sizes, **case) for name, case in PREFERENCES.items()
    }
    for field, given, changes in (
        ("precompute_ref_log_probs", None, {}),
        ("ref_model", moved(small.model()), {"precompute_ref_log_probs": True}),
    ):
        with pytest.raises(ConfigError, match=field):
            DPOTrainer(
                small.model(), given, settings(folder / field, parallelism_config=layout, **changes),
                train_dataset=pairs(), processing_class=small.tokenizer(),
            )  # fmt: skip
    return found


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    if name == "preferences":
        (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(preferences(folder)))
        return
    layout = ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig(SCHEDULES[name]))
    found = test_several_ranks.figures(
        folder / name, per_device_train_batch_size=2, parallelism_config=layout, **CASES[name]
    )
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
