"""``python -m kvd`` and the ``kvd`` script."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys

_INTERRUPTED = 128 + signal.SIGINT
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Run the command line; exits the process."""
    open_standard_files()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of others may have what this terminal's encoding has not
            stream.reconfigure(errors="replace")
    try:
        from kvd.cli.main import app  # here, so that Ctrl-C ends this as quietly as all that follows

        try:
            app(prog_name="kvd")
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except OSError as error:
        # Errors of files have their names; what is left is standard output, on a disk that is full.
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        sys.stderr.write(f"kvd: the output can't be written: {os.strerror(error.errno).lower()}\n")
        sys.stderr.flush()
        os._exit(1)  # the interpreter's own end would try to write it once more


def open_standard_files() -> None:
    """Put /dev/null where the caller has closed standard input, output or error: a socket or a file of the daemon that
    got such a number would receive whatever is printed, and the event loop ends the process when it closes one."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors="replace"))


if __name__ == "__main__":
    main()
