"""Names that scripts import from here: the arguments of a run whose evaluations generate text."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.config.arguments": ("TrainingArguments",),
    "windlass.finetuning.seq2seq_arguments": ("Seq2SeqTrainingArguments",),
})  # fmt: skip
