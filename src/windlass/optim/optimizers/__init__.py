"""How each named optimizer is made, one file each; `optim/registry.py` names them."""
