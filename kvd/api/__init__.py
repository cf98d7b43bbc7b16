"""The local API: a Unix socket for the inference processes of this node."""
