"""Every error that kvd reports, as one small tree with stable codes.

The codes cross sockets (client to daemon, daemon to daemon) and appear in metrics and logs, so a code is never
renamed or reused. The tree lives in the client package because both sides need it and the client imports nothing
of the daemon; ``kvd.errors`` re-exports it.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar


class KvdError(Exception):
    """Base of all errors. ``message`` is one sentence that says what was wrong, where, and what to do.

    ``fields`` names the things concerned (``request``, ``peer``, ``layer``, ``offset`` …) with plain values, so that
    logs and callers need not parse the sentence.
    """

    code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, Any] = fields

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class InvalidArgument(KvdError):
    """The caller asked for something that makes no sense: a shape, range or name that does not fit."""

    code = "INVALID_ARGUMENT"


class ConfigError(KvdError):
    """The configuration can't be used; the message names the file and the key."""

    code = "CONFIG"


class InvalidProfile(KvdError):
    """A profile file is damaged, cut off, or of something else; ``fields`` has ``file`` and ``field``."""

    code = "INVALID_PROFILE"


class ProtocolError(KvdError):
    """The other side sent bytes that are not the protocol; the connection is closed."""

    code = "PROTOCOL"


class VersionMismatch(KvdError):
    """Both sides speak the protocol, in versions that do not fit; ``fields`` lists what differs."""

    code = "VERSION_MISMATCH"


class FingerprintMismatch(KvdError):
    """Two nodes (or two sides of a transfer) disagree on what must be equal; ``fields`` lists each difference."""

    code = "FINGERPRINT_MISMATCH"


class PermissionDenied(KvdError):
    """The local process may not use this daemon (its group or user is not the configured one)."""

    code = "PERMISSION_DENIED"


class AuthenticationFailed(KvdError):
    """A peer could not prove that it holds the shared key."""

    code = "AUTHENTICATION_FAILED"


class AddressInUse(KvdError):
    """The port or socket path that the daemon should listen on is taken."""

    code = "ADDRESS_IN_USE"


class DaemonUnreachable(KvdError):
    """No daemon answers at the socket."""

    code = "DAEMON_UNREACHABLE"


class DaemonLost(KvdError):
    """The connection to the daemon ended; every transfer opened over it has ended with it."""

    code = "DAEMON_LOST"


class PeerUnknown(KvdError):
    """A node id that is not among the configured peers."""

    code = "PEER_UNKNOWN"


class PeerUnreachable(KvdError):
    """The peer's address could not be reached within the connect timeout."""

    code = "PEER_UNREACHABLE"


class PeerLost(KvdError):
    """The session with the peer ended while it was needed."""

    code = "PEER_LOST"


class PeerRestarted(KvdError):
    """The peer answers with a new boot id: what it knew of this transfer is gone."""

    code = "PEER_RESTARTED"


class ProcessLost(KvdError):
    """The inference process at the other end of the transfer went away."""

    code = "PROCESS_LOST"


class NotFound(KvdError):
    """No such transfer, handle or request; or no such cache, device, profile or recording."""

    code = "NOT_FOUND"


class AlreadyExists(KvdError):
    """The request (or this rank of it) has been opened already on this node in the same role."""

    code = "ALREADY_EXISTS"


class RendezvousTimeout(KvdError):
    """The other side of the transfer did not open it in time."""

    code = "RENDEZVOUS_TIMEOUT"


class DeadlineExceeded(KvdError):
    """The transfer was not delivered before its deadline; or a wait for it ended, with ``fields['timeout_s']``, and it
    goes on."""

    code = "DEADLINE_EXCEEDED"


class Aborted(KvdError):
    """One of the two processes gave the transfer up."""

    code = "ABORTED"


class LeaseExpired(KvdError):
    """The memory behind a handle or view has been given back."""

    code = "LEASE_EXPIRED"


class UnsupportedLayout(KvdError):
    """The two sides' layouts cannot be converted into each other; ``fields`` lists them."""

    code = "UNSUPPORTED_LAYOUT"


class OutOfMemory(KvdError):
    """The pool has no room; ``fields`` has ``need`` and ``free`` in bytes, and ``retry_after_s`` if waiting helps."""

    code = "OUT_OF_MEMORY"


class DeviceUnavailable(KvdError):
    """A device that the configuration names is not there, or its driver refuses; ``fields`` has ``path``."""

    code = "DEVICE_UNAVAILABLE"


class Busy(KvdError):
    """A limit is reached, and nothing has been begun; try again after ``fields['retry_after_s']``."""

    code = "BUSY"


class ShuttingDown(KvdError):
    """The daemon drains: running transfers end, new ones are refused."""

    code = "SHUTTING_DOWN"


class FabricError(KvdError):
    """The fabric failed below the protocol: a broken connection, a device error."""

    code = "FABRIC"


class RemoteAccessError(FabricError):
    """The far side refused a write or read: unknown key, or outside what was granted."""

    code = "REMOTE_ACCESS"


class ChecksumMismatch(FabricError):
    """Bytes arrived otherwise than they were sent; they have not been, and will not be, marked as in place."""

    code = "CHECKSUM_MISMATCH"


def _tree(cls: type[KvdError]) -> dict[str, type[KvdError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found.update(_tree(sub))
    return found


@functools.cache
def _classes() -> dict[str, type[KvdError]]:
    return _tree(KvdError)


def error_from_code(code: str, message: str, fields: dict[str, Any] | None = None) -> KvdError:
    """The exception for a code that crossed a socket; an unknown code (a newer daemon) becomes a plain ``KvdError``."""
    cls = _classes().get(code, KvdError)
    clean = {str(k): v for k, v in (fields or {}).items()}
    error = cls(message)
    error.fields = clean
    return error
