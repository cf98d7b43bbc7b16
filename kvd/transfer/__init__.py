"""Transfers: the core without IO, and the engine that carries out its instructions."""
