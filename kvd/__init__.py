"""kvd: a daemon that moves KV caches between the nodes of disaggregated LLM inference."""

__version__ = "0.1.0"
