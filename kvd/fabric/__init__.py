"""Ways to move bytes between nodes; :mod:`kvd.fabric.base` is the contract."""
