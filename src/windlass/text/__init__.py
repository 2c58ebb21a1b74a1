"""Text for fine-tuning: forms of datasets, chat templates, tokens and their labels. Knows tokenizers, no models."""
