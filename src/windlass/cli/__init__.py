"""Floor 7: the command line, and the recipes that `windlass train` runs."""
