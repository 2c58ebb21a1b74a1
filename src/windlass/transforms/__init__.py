"""What is done to a model before it trains, one file for each; `apply.py` holds the order."""
