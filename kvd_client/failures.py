"""What each error code means for whoever gets it: the table that ``kvd errors`` prints and the README shows.

A test keeps it in step with :mod:`kvd_client.errors`.
"""

from __future__ import annotations

from typing import NamedTuple


class Failure(NamedTuple):
    """One row."""

    seen_by: str
    soon: str
    """How soon after the cause."""
    given_back: str
    """What is free again when the error is there."""
    retry: str


_NOTHING = "nothing was taken"
_BOTH = "both processes"
_CALLER = "the caller"
_MEMORY = "all but the lease, which goes back when its process releases it or dies"

FAILURES: dict[str, Failure] = {
    "INVALID_ARGUMENT": Failure(_CALLER, "at once", _NOTHING, "no: correct the call"),
    "CONFIG": Failure("`kvd serve`, `kvd config check`", "at the start", _NOTHING, "no: correct the file"),
    "INVALID_PROFILE": Failure(_CALLER, "at once", _NOTHING, "no: another profile file"),
    "PROTOCOL": Failure(
        "whoever sent it; the other side's log",
        "at once",
        "the connection, and all that was opened over it",
        "once with a new connection; again means a version or a fault",
    ),
    "VERSION_MISMATCH": Failure("both sides' logs, the sink", "at the handshake", _NOTHING, "no: one release on both"),
    "FINGERPRINT_MISMATCH": Failure(
        "the sink; both logs", "at the handshake or the open", _MEMORY, "no: `fields` list what differs"
    ),
    "UNSUPPORTED_LAYOUT": Failure("the sink", "at the open", _MEMORY, "no: layouts that convert"),
    "PERMISSION_DENIED": Failure(_CALLER, "at once", _NOTHING, "no: join the group of `api.group`"),
    "AUTHENTICATION_FAILED": Failure("the sink; both logs", "at the handshake", _NOTHING, "no: the same key on both"),
    "ADDRESS_IN_USE": Failure("`kvd serve`", "at the start", _NOTHING, "after the other process has gone"),
    "DEVICE_UNAVAILABLE": Failure(
        "`kvd serve`, `kvd doctor`", "at the start", _NOTHING, "no: the sentence says what the card or its driver lacks"
    ),
    "DAEMON_UNREACHABLE": Failure(_CALLER, "at once, or the client's timeout", _NOTHING, "when the daemon runs"),
    "DAEMON_LOST": Failure(
        "the processes of that daemon", "at once", "nothing is left to give back", "yes: open again, it reconnects"
    ),
    "PEER_UNKNOWN": Failure("the sink", "at once", _MEMORY, "no: add the node to `peers.static`"),
    "PEER_UNREACHABLE": Failure("the sink", "`peers.connect_timeout_s`", _MEMORY, "yes, or another node"),
    "PEER_LOST": Failure(
        "both, or the living side's",
        "at once if the daemon died, else `peers.timeout_s`",
        _MEMORY,
        "yes: the next open dials anew",
    ),
    "PEER_RESTARTED": Failure(
        "the living side's process", "at the next contact", _MEMORY, "after prefill has run again: its memory is gone"
    ),
    "PROCESS_LOST": Failure("the other side's process", "at once", _MEMORY, "when the process is back"),
    "NOT_FOUND": Failure(_CALLER, "at once", _NOTHING, "no: that transfer has ended or never was"),
    "ALREADY_EXISTS": Failure(_CALLER, "at once", _NOTHING, "no: another request id, or release the first"),
    "RENDEZVOUS_TIMEOUT": Failure("whoever waited", "`transfer.rendezvous_s`", _MEMORY, "when the other side is there"),
    "DEADLINE_EXCEEDED": Failure(_BOTH, "the deadline, within 0.1 s", _MEMORY, "with more time, or less to send"),
    "ABORTED": Failure(_BOTH, "at once", _MEMORY, "as the one who gave up sees fit"),
    "LEASE_EXPIRED": Failure(
        _CALLER, "at once", "the memory has gone back already", "no: nothing was read; open a new transfer"
    ),
    "OUT_OF_MEMORY": Failure(
        _CALLER, "at once", _NOTHING, "after `fields['retry_after_s']`; without it, never: raise `memory.pool`"
    ),
    "BUSY": Failure(_CALLER, "at once, before anything is begun", _NOTHING, "after `fields['retry_after_s']`"),
    "SHUTTING_DOWN": Failure(_CALLER, "at once", _NOTHING, "on another node, or when it is back"),
    "FABRIC": Failure(_BOTH, "at once", _MEMORY, "once; again means a broken device or link"),
    "REMOTE_ACCESS": Failure(
        "the source; the sink if it does not end the transfer itself", "within 5 s", _MEMORY, "yes: open again"
    ),
    "CHECKSUM_MISMATCH": Failure(
        _BOTH,
        "as soon as the bytes are there",
        _MEMORY + "; no damaged token counts as in place",
        "once; again means a faulty link, adapter or memory",
    ),
    "INTERNAL": Failure(_CALLER, "at once", "what the call had taken", "once; tell us, the daemon's log has a trace"),
}


def table() -> str:
    """All rows in Markdown."""
    lines = ["| code | who sees it | how soon | given back by then | retry? |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| `{code}` | {' | '.join(row)} |" for code, row in FAILURES.items()]
    return "\n".join(lines)
