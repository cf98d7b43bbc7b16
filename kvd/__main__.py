"""``python -m kvd`` and the ``kvd`` script."""

from __future__ import annotations

from kvd.cli.main import app


def main() -> None:
    """Run the command line; exits the process."""
    app(prog_name="kvd")


if __name__ == "__main__":
    main()
