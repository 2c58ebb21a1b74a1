"""What subclasses of TRL's trainers override, and no trainer here calls."""

from __future__ import annotations

from collections.abc import Collection

from windlass.core.errors import Problem, refuse
from windlass.trainer.hooks import replaced

_ROWS = "prepare the rows before you pass them"
_LOSS = "override `compute_loss`"
_REFERENCE = "leave out precompute_ref_log_probs, and override `compute_loss`"

_BEFORE_TRAINING = {
    "_prepare_dataset": _ROWS,
    "_prepare_packed_dataloader": _ROWS,
    "_prepare_non_packed_dataloader": _ROWS,
    "tokenize_row": _ROWS,
    "process_row": _ROWS,
    "_precompute_ref_logps": _REFERENCE,
    "compute_reference_log_probs": _REFERENCE,
}
_IN_COMPUTE_LOSS = {
    "_compute_loss": _LOSS,
    "_compute_kl_logps": _LOSS,
    "get_batch_loss_metrics": _LOSS,
    "get_batch_logps": _LOSS,
    "concatenated_forward": _LOSS,
    "concatenated_inputs": _LOSS,
    "dpo_loss": _LOSS,
    "kto_loss": _LOSS,
    "store_metrics": "override `log`",
    "null_ref_context": _LOSS,
    "compute_ref_log_probs": _LOSS,
}


def check_overrides(trainer: object, called: Collection[str]) -> None:
    """Raise ConfigError for methods of a script that would be skipped, before any work is done.

    Those of a loss may be parts of the script's own `compute_loss`: they pass if it has one.

    Args:
        called: names that this kind of trainer calls.
    """
    known = {**_BEFORE_TRAINING, **({} if replaced(trainer, "compute_loss") else _IN_COMPUTE_LOSS)}
    kind = next(cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("windlass."))
    refuse(
        Problem(name, "overridden", f"{kind} would never call it; {known[name]}")
        for name in sorted(replaced(trainer, *known).difference(called))
    )
