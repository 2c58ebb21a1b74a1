"""Folders of accelerate's `save_state`: recognised, and not read, because most of what they hold is pickled."""

from __future__ import annotations

from pathlib import Path

from windlass.checkpoint.manifest import MANIFEST_NAME

# Of these names it writes at least one beside the weights: random generators, plain and sharded optimizers.
_SIGNS = ("random_states_*.pkl", "optimizer*.bin", "optimizer_[0-9]*", "pytorch_model_fsdp_[0-9]*")


def explain(folder: Path) -> str | None:
    """Name the program that wrote a folder and what to do instead of loading it; None if it was not accelerate."""
    if (folder / MANIFEST_NAME).exists() or not any(any(folder.glob(sign)) for sign in _SIGNS):
        return None
    if (folder / "model.safetensors").exists() or (folder / "model.safetensors.index.json").exists():
        way = f"windlass.load_checkpoint_in_model(model, {str(folder)!r})"
    elif (folder / "pytorch_model.bin").exists():
        path = str(folder / "pytorch_model.bin")
        way = f"model.load_state_dict(torch.load({path!r}, weights_only=True))"
    else:
        way = "accelerate's own tool (accelerate merge-weights), which makes model.safetensors of them"
    return (
        f"{folder} was written by accelerate's save_state, whose optimizer, schedules and random generators are "
        f"pickles, which are not read. Load its weights before prepare() with {way}, and start the loop from "
        "them; what save_state writes from then on can be loaded"
    )
