"""Which process this is, without a system call, and what can't leave it.

``os.fork`` in a child runs the hook below before anything else; a client compares the number with the one that it
was made with.
"""

from __future__ import annotations

import os
from typing import NoReturn, SupportsIndex

from kvd_client.errors import InvalidArgument

pid = os.getpid()


class OfOneProcess:
    """What can neither be pickled nor copied: it has descriptors and memory that its daemon lent to this process."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidArgument(
            f"a {type(self).__name__} can't be pickled or copied; give another process the daemon's socket_path, and "
            "let it make a Client of its own"
        )


def check(maker: int) -> None:
    """Raise :class:`InvalidArgument` where what process ``maker`` has made is used in another one."""
    if maker != pid:
        raise InvalidArgument(
            f"this client belongs to process {maker} and was used in its forked child {pid}; make a new Client after "
            "the fork",
            pid=maker,
        )


def _after_fork_in_child() -> None:
    global pid
    pid = os.getpid()


os.register_at_fork(after_in_child=_after_fork_in_child)
