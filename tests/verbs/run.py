"""Run a command in the guest of the verbs tests, and end with its exit status.

    python -m tests.verbs.run -- pytest tests/verbs -q
    python -m tests.verbs.run --smp 2 -- python -c 'import pyverbs.device'

The guest's root is the host's ``/``, read-only, with memory on top; ``/tmp`` and ``/run`` are its own. ``pytest`` and
``python`` are those of the virtual environment that runs this. Two RoCE devices are there: ``rxe0`` on 10.77.0.1 and
``rxe1`` on 10.77.0.2. Exit status: the command's (126 for all above), 125 if the guest failed, 124 after the timeout,
and 77 with one line where the host lacks what the guest needs.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.verbs import build

FAILED, TIMED_OUT, SKIPPED = 125, 124, 77

# The TSC's frequency is measured at boot, and on a busy host the guest's clock then runs several times too fast.
APPEND = (
    "console=ttyS0 quiet loglevel=4 panic=-1 nokaslr mitigations=off nopti tsc=reliable no_timer_check audit=0 "
    "apparmor=0 selinux=0 random.trust_cpu=on cryptomgr.notests rcupdate.rcu_expedited=1 cgroup_disable=memory "
    "nowatchdog reboot=t clocksource=hpet lpj=4000000"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smp", default="1", help="CPUs; 2 cost twice the time and are for finding races")
    parser.add_argument("--memory", default="2048", help="of the guest, MiB")
    parser.add_argument("--timeout", type=float, default=600, help="seconds")
    parser.add_argument("--count", action="store_true", help="let the guest's clock count instructions, 1 ns each")
    parser.add_argument("--log", type=Path, help="file for the kernel's messages")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    try:
        made = build.build()
    except build.Missing as error:
        print(f"skipped: {error}", file=sys.stderr)
        return SKIPPED
    # The guest can't write here, and would compile everything each time, which takes an emulated CPU tens of seconds.
    for package in ("kvd", "kvd_client", "tests"):
        compileall.compile_dir(build.ROOT / package, quiet=2)
    with tempfile.TemporaryDirectory(prefix="kvd-guest-") as control:
        _write_control(Path(control), options)
        try:
            # A status is reported by a device that ends QEMU with 2 * status + 1.
            status = subprocess.run(
                _qemu(made, control, options), stdin=subprocess.DEVNULL, timeout=options.timeout, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"the guest did not end within {options.timeout:g} s", file=sys.stderr)
            return TIMED_OUT
    if status > 0 and status & 1:
        return status >> 1
    print(f"the guest reported no exit status (QEMU: {status})", file=sys.stderr)
    return FAILED


def _write_control(control: Path, options: argparse.Namespace) -> None:
    """What the guest's init reads."""
    # The checkout and the virtual environment may lie where the guest has a file system of its own.
    shares = "".join(
        f"mkdir -p {shlex.quote(str(path))}\n"
        f"mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,ro,cache=loose {tag} {shlex.quote(str(path))}\n"
        for tag, path in _shares().items()
    )
    (control / "mounts").write_text(shares)
    (control / "net").write_text((build.HERE / "guest/net.sh").read_text())
    environment = {
        "HOME": "/root",
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
        "KVD_CWD": os.getcwd(),
        "KVD_VERBS_GUEST": "1",
        "PYTEST_ADDOPTS": "-p no:anyio -p no:cacheprovider",  # seconds of imports, and files that nobody reads
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.update(pair.split("=", 1) for pair in options.env)
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()]
    (control / "env").write_text("".join(lines))
    (control / "cmd").write_text("exec " + shlex.join(options.command) + "\n")


def _shares() -> dict[str, Path]:
    prefix = Path(sys.prefix)
    paths = [build.ROOT] if prefix.is_relative_to(build.ROOT) else [build.ROOT, prefix]
    return {
        f"share{number}": path
        for number, path in enumerate(paths)
        if path.is_relative_to("/tmp") or path.is_relative_to("/run")
    }


def _qemu(made: Path, control: str, options: argparse.Namespace) -> list[str]:
    command = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    command += ["-machine", "q35", "-cpu", "max", "-smp", options.smp, "-m", options.memory]
    if options.count:
        command += ["-accel", "tcg,thread=single,tb-size=512", "-icount", "shift=0,sleep=off"]
    else:
        command += ["-accel", "tcg,thread=multi,tb-size=512"]
    command += ["-kernel", str(made / "vmlinux"), "-initrd", str(made / "initrd.cpio"), "-append", APPEND]
    command += ["-chardev", "stdio,id=con,signal=off", "-device", "virtio-serial-pci"]
    command += ["-device", "virtconsole,chardev=con", "-device", "isa-debug-exit,iobase=0xf4,iosize=0x04"]
    command += ["-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng"]
    shares = {"root": (Path("/"), True), "ctl": (Path(control), False)}
    shares.update({tag: (path, True) for tag, path in _shares().items()})
    for tag, (path, readonly) in shares.items():
        mode = ",readonly=on" if readonly else ""
        command += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap{mode}"]
        command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    if options.log:
        command += ["-serial", f"file:{options.log}"]
    return command


if __name__ == "__main__":
    sys.exit(main())
