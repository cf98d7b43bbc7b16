"""How the demo fails."""

from __future__ import annotations

from kvd_client.errors import KvdError


class DemoFailed(KvdError):
    """The demo could not be run to its end; the message says why in one sentence."""

    code = "DEMO_FAILED"
