"""For all tests: no time limit on single examples, and bytecode for the processes that they start.

On a loaded machine an example may take any time, and drawing it as well: that is no failure. Some hundred daemons,
workers and commands are started in a run; where the environment forbids to write bytecode, each of them compiles the
whole package anew, which is a quarter of a daemon's start.
"""

import os

if "KVD_VERBS_GUEST" not in os.environ:  # whose tests draw no examples, and where the import takes seconds
    from hypothesis import HealthCheck, settings

    settings.register_profile("kvd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("kvd")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
