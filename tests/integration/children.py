"""Python processes of a test, to be killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

from tests.integration.api_harness import WAIT_S


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that has said that it is ready; killed at the end at the latest."""
    with subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


def kill(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait(WAIT_S)
