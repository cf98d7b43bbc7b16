"""Registered memory: arenas, leases, grants."""
