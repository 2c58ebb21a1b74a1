"""Names that scripts import from here: the trainer whose evaluations generate text."""

from windlass.config.support_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, {
    "windlass.finetuning.seq2seq_trainer": ("Seq2SeqTrainer",),
    "windlass.trainer.trainer": ("Trainer",),
})  # fmt: skip
