"""Resolve how training is spread over processes, from arguments, files, flags and variables."""
