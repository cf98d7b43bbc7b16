"""What a daemon must never load: memory and seconds of a process that lives beside every model."""

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
