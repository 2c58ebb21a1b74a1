"""Fine-tuning on `Trainer`: `SFTTrainer`, `Seq2SeqTrainer`, adapters, and the names that scripts of TRL use."""
