"""For all tests: child processes may keep the bytecode that they compile.

Some hundred daemons, workers and commands are started in a run. Where the environment forbids to write bytecode, each
of them compiles the whole package anew, which is a quarter of a daemon's start.
"""

import os

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
