"""Text for training: what is done to rows of tokens before a model sees them. Knows tokenizers, but no models."""
