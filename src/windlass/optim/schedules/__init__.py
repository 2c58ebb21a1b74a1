"""The shapes a learning rate can take, one file each; `registry.py` names them."""
