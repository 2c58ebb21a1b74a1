"""Searches over hyperparameters: spaces, samplers, a study that survives a kill, and the loop over its trials."""
