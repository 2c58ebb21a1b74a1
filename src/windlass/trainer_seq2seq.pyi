from windlass.finetuning.seq2seq_trainer import Seq2SeqTrainer as Seq2SeqTrainer
from windlass.trainer.trainer import Trainer as Trainer
