"""What is never loaded: memory and seconds of a daemon that lives beside every model, and of every client's start."""

from __future__ import annotations

import subprocess
import sys


def test_the_daemon_imports_no_model_library() -> None:
    code = (
        "import sys\n"
        "import kvd.run, kvd.cli.serve\n"
        "from kvd.fabric import registry\n"
        "[registry.create(name) for name in registry.names() if name in ('tcp', 'loopback')]\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'matplotlib', 'kvd.demo', 'kvd.profiling.run'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "loaded: []\n", done.stderr


def test_importing_the_client_imports_nothing_heavy() -> None:
    code = "import sys, kvd_client; print(sorted({'kvd', 'torch', 'uvloop', 'numpy', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
