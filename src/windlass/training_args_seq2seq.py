"""Names that scripts import from here: the arguments of a run whose evaluations generate text."""

from windlass.config.support_names import WHY
from windlass.core.lazy import loader_of, reverse

_HOMES = {
    "windlass.config.arguments": ("TrainingArguments",),
    "windlass.finetuning.seq2seq_arguments": ("Seq2SeqTrainingArguments",),
}
_NAMES = reverse(_HOMES)
__getattr__ = loader_of(__name__, _NAMES, WHY)
__all__ = sorted(_NAMES)
