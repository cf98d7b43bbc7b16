"""Which packets go first where this host's own queue sorts by priority, as Linux's pfifo_fast does."""

from __future__ import annotations

import contextlib
import socket

PRIORITY = 6
"""TC_PRIO_INTERACTIVE of linux/pkt_sched.h, the highest that needs no privilege."""


def go_first(sock: socket.socket) -> None:
    """Let what ``sock`` sends pass what other connections have handed over already, where the queue permits it. For
    connections that carry little: bulk stays what all other traffic is, which could starve it else."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # a hint, which some sandboxes don't know
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, PRIORITY)
