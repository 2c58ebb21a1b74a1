"""Fine-tuning of language models: `SFTTrainer`, adapters, and the names that its scripts use."""
