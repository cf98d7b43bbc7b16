"""Build the guest of the verbs tests: a Debian kernel and a small initramfs.

    python -m tests.verbs.build

The guest mounts the host's own file tree read-only over 9p, so no root file system is built: the Python that runs this
is the guest's, too. Debian's pyverbs is made importable in its virtual environment if none is there. What is built lies
in ``$XDG_CACHE_HOME/kvd/verbs-guest`` and is reused as long as the sources here don't change::

    vmlinux       the kernel of linux-image-amd64, unpacked
    initrd.cpio   busybox, guest/init and the modules that the guest loads

Needs the Debian packages in ``PACKAGES``.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

PACKAGES = [
    "qemu-system-x86",
    "busybox-static",
    "cpio",
    "xz-utils",
    "zstd",
    "iproute2",
    "python3-pyverbs",
    "ibverbs-providers",
]

TOOLS = ("qemu-system-x86_64", "busybox", "cpio", "xz", "dpkg-deb")

DEBIAN_PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")

MODULES = [
    "virtio_pci",
    "virtio_console",
    "virtio_rng",
    "9p",
    "9pnet_virtio",
    "overlay",
    "crc32_generic",
    "veth",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
]

UNPACK = [
    "./boot/*",
    "*/modules.builtin",
    "*/kernel/drivers/infiniband/core/*",
    "*/kernel/drivers/infiniband/sw/*",
    "*/kernel/drivers/virtio/*",
    "*/kernel/drivers/net/*.ko*",
    "*/kernel/drivers/char/*",
    "*/kernel/fs/*",
    "*/kernel/net/9p/*",
    "*/kernel/net/ipv4/*",
    "*/kernel/net/ipv6/*",
    "*/kernel/crypto/*",
    "*/kernel/lib/*",
]


class Missing(Exception):
    """What the guest needs is not installed; the message says what to do."""


def cache() -> Path:
    """The folder of everything that is built."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvd" / "verbs-guest"


def check_host() -> None:
    """Raise :class:`Missing` if a package of :data:`PACKAGES` is not installed."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise Missing(
            f"the verbs guest needs {', '.join(missing)}: apt-get install --no-install-recommends {' '.join(PACKAGES)}"
        )


def build() -> Path:
    """Build what is missing or out of date; returns the cache folder."""
    check_host()
    into = cache()
    into.mkdir(parents=True, exist_ok=True)
    link_pyverbs()
    key = hashlib.sha256(b"".join(path.read_bytes() for path in (Path(__file__), *sorted(HERE.glob("guest/*")))))
    stamp = into / "built"
    if not stamp.exists() or stamp.read_text() != key.hexdigest():
        _build_kernel(into)
        stamp.write_text(key.hexdigest())
    return into


def link_pyverbs() -> None:
    """Make Debian's pyverbs importable in this virtual environment, unless one is there already.

    PyPI has pyverbs in source only. Debian's is built for the system's Python, and any other build of the same version
    loads it; a folder of its own keeps the system's other packages out. Raises :class:`Missing`.
    """
    if importlib.util.find_spec("pyverbs") is not None:
        return
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    if not (DEBIAN_PYVERBS / f"device{suffix}").exists():
        raise Missing(
            f"no pyverbs for this Python: {DEBIAN_PYVERBS} has no modules named *{suffix}; use the system's Python "
            "version, or pip install pyverbs with libibverbs-dev"
        )
    if sys.prefix == sys.base_prefix:
        raise Missing("Debian's pyverbs is linked into virtual environments only; run this with one's python")
    folder = Path(sys.prefix) / "debian"
    folder.mkdir(exist_ok=True)
    (folder / "pyverbs").unlink(missing_ok=True)
    (folder / "pyverbs").symlink_to(DEBIAN_PYVERBS)
    (Path(sysconfig.get_path("purelib")) / "debian-pyverbs.pth").write_text(f"{folder}\n")


def _build_kernel(into: Path) -> None:
    deb = _kernel_package(into / "debs")
    work = into / "unpacked"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as tar:
        subprocess.run(["tar", "-C", work, "-x", "--wildcards", *UNPACK], check=True, stdin=tar.stdout)
    if tar.returncode:
        raise Missing(f"{deb} can't be unpacked; remove it and try again")
    for compressed in work.rglob("*.ko.xz"):  # trixie and later
        subprocess.run(["xz", "-d", compressed], check=True)

    tree = next(path for path in (work / "lib/modules", work / "usr/lib/modules") if path.is_dir())
    modules = _load_order(tree)
    root = into / "initramfs"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("bin", "dev", "proc", "sys", "mod", "lower", "rw", "new"):
        (root / name).mkdir(parents=True)
    shutil.copy2(shutil.which("busybox") or "/bin/busybox", root / "bin/busybox")
    for name in ("init", "stage2"):
        shutil.copy2(HERE / "guest" / name, root / name)
    (root / "init").chmod(0o755)
    for path in modules:
        (root / "mod" / path.name).write_bytes(_unsigned(path.read_bytes()))
    (root / "mod/list").write_text("".join(f"/mod/{path.name}\n" for path in modules))

    kernel = next(work.glob("boot/vmlinuz-*"))
    (into / "vmlinux").write_bytes(_unpacked(kernel.read_bytes()))
    names = "\n".join([".", *sorted(str(path.relative_to(root)) for path in root.rglob("*"))])
    with open(into / "initrd.cpio", "wb") as archive:
        command = ["cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0"]
        subprocess.run(command, check=True, input=names.encode(), stdout=archive, cwd=root)
    shutil.rmtree(work)
    shutil.rmtree(root)


def _kernel_package(folder: Path) -> Path:
    depends = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], check=False, text=True, capture_output=True)
    package = next((line.split()[-1] for line in depends.stdout.splitlines() if "Depends:" in line), None)
    if package is None:
        raise Missing("apt knows no linux-image-amd64; run apt-get update")
    folder.mkdir(exist_ok=True)
    command = ["apt-get", "download", "-qq", package]
    if not list(folder.glob(f"{package}_*.deb")) and subprocess.run(command, check=False, cwd=folder).returncode:
        raise Missing(f"apt-get can't download {package}; run apt-get update")
    return max(folder.glob(f"{package}_*.deb"))


def _load_order(tree: Path) -> list[Path]:
    """The files of :data:`MODULES` and of what they depend on, each after its dependencies."""
    builtin = {_name(line) for line in next(tree.rglob("modules.builtin")).read_text().split()}
    by_name = {_name(path): path for path in tree.rglob("*.ko")}
    order: dict[str, Path] = {}

    def visit(name: str) -> None:
        if name in order or name in builtin:
            return
        path = by_name[name]
        for needed in filter(None, _depends(path).split(",")):
            visit(_name(needed))
        order[name] = path

    for name in MODULES:
        visit(_name(name))
    return list(order.values())


def _name(path: str | Path) -> str:
    return Path(path).name.removesuffix(".ko").replace("-", "_")


def _depends(module: Path) -> str:
    """The value of ``depends=`` in the module's .modinfo section."""
    data = module.read_bytes()
    at = data.find(b"\0depends=")
    return data[at + 9 : data.index(b"\0", at + 1)].decode() if at >= 0 else ""


def _unsigned(module: bytes) -> bytes:
    """A module without its signature, whose check is slow under emulation."""
    magic = b"~Module signature appended~\n"
    if not module.endswith(magic):
        return module
    end = len(module) - len(magic)
    return module[: end - 12 - int.from_bytes(module[end - 4 : end], "big")]


def _unpacked(kernel: bytes) -> bytes:
    """The ELF image inside a bzImage: QEMU starts it without the decompression, seconds under emulation."""
    tools = {
        b"\xfd7zXZ\0": ["xz", "-dcq", "--single-stream"],
        b"\x28\xb5\x2f\xfd": ["zstd", "-dcq"],
        b"\x1f\x8b\x08": ["gzip", "-dcq"],
    }
    for magic, tool in tools.items():
        at = kernel.find(magic)
        while at >= 0 and shutil.which(tool[0]):
            # What follows the stream makes the tool fail at its end, so its output decides.
            image = subprocess.run(tool, input=kernel[at:], capture_output=True, check=False).stdout
            if image.startswith(b"\x7fELF"):
                return image
            at = kernel.find(magic, at + 1)
    return kernel


if __name__ == "__main__":
    try:
        print(build())
    except Missing as error:
        sys.exit(str(error))
