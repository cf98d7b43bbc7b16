"""Fuzzing: every parser with a corpus that stays (``test_parsers.py``), and every listener of a live daemon while real
transfers run (``python -m tests.fuzz --messages 1000000``; a small count in ``test_listeners.py``)."""
