"""Names that scripts import from here: the trainer whose evaluations generate text."""

from windlass.config.support_names import WHY
from windlass.core.lazy import loader_of, reverse

_HOMES = {
    "windlass.finetuning.seq2seq_trainer": ("Seq2SeqTrainer",),
    "windlass.trainer.trainer": ("Trainer",),
}
_NAMES = reverse(_HOMES)
__getattr__ = loader_of(__name__, _NAMES, WHY)
__all__ = sorted(_NAMES)
