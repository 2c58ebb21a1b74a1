"""Windlass trains and fine-tunes PyTorch models, and never lets the load slip back.

Every public name is here: `from windlass import Trainer, TrainingArguments`. Names are loaded on first use, so that
`import windlass` does not import torch.
"""

# Imported here for what it notes of this moment.
from windlass.core import started as started
from windlass.core.lazy import lazy_names
from windlass.core.tracebacks import install

__version__ = "0.1.0"

_OF_TRL = "a script that imports TRL's own trains on this engine when it is started by `windlass run`"
_TRAINERS_OF_TRL = ("GRPO", "RLOO", "Distillation")
_REFUSED = {
    **{f"{method}{part}": _OF_TRL for method in _TRAINERS_OF_TRL for part in ("Trainer", "Config")},
}
install()
__getattr__, __dir__, __all__ = lazy_names(__name__, _REFUSED)
