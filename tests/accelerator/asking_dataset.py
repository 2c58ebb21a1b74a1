"""A dataset that asks an accelerator, or the state of its process, what data workers of old scripts ask."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

FACTS = (
    "num_processes", "process_index", "local_process_index", "is_main_process", "is_local_main_process",
    "is_last_process", "device", "distributed_type", "mixed_precision",
)  # fmt: skip


def facts_of(state: Any) -> dict[str, str]:
    """What is known, as text."""
    found = {name: getattr(state, name) for name in FACTS if hasattr(state, name)}
    return {name: str(getattr(value, "value", value)) for name, value in found.items()}


class Asking(Dataset[dict[str, Any]]):
    """Each sample is the facts of everything in `states`, and of new instances of the singletons in `classes`."""

    def __init__(self, states: list[Any], classes: tuple[type, ...]) -> None:
        self.states, self.classes = states, classes

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"held": [facts_of(s) for s in self.states], "new": [facts_of(cls()) for cls in self.classes]}


class Waiting(Dataset[str]):
    """A sample is the error of an exchange with the other processes."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        try:
            self.accelerator.wait_for_everyone()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"
