"""Publishing on the Hub: what a run saves, uploaded beside training."""
