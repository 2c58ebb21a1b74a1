"""What is done to a model before it trains, one file for each; `assemble/build.py` holds the order."""
