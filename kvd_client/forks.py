"""Which process this is, without a system call.

``os.fork`` in a child runs the hook below before anything else; a client compares the number with the one that it
was made with.
"""

from __future__ import annotations

import os

pid = os.getpid()


def _after_fork_in_child() -> None:
    global pid
    pid = os.getpid()


os.register_at_fork(after_in_child=_after_fork_in_child)
