"""``kvd doctor``: what keeps RDMA, cards and peers from working with this host, all at once, with fixes."""

from __future__ import annotations

from pathlib import Path

import typer

from kvd.cli import config as configuration
from kvd.cli.output import printable


def doctor(path: Path | None) -> int:
    """Write one line a finding, and the fix below each problem; 1 if there is a problem, else 0."""
    from kvd.cli.doctor_peers import examine_peers
    from kvd.daemon import fingerprint
    from kvd.fabric.verbs import doctor as verbs
    from kvd.memory import tenstorrent

    config, _ = configuration.read(path)
    wanted = config.fabric
    wants = any(npu.backing == "tenstorrent" for npu in config.npu.values())
    findings = list(
        verbs.examine(
            pool=config.memory.pool,
            device=wanted.device,
            port=wanted.port,
            gid_index=wanted.gid_index,
            cards=wants and wanted.name != "tcp",
        )
    )
    what, fix = tenstorrent.describe()
    # A card that nobody asked for is not missed.
    findings.append(verbs.Finding(what, fix if wants else ""))
    findings += examine_peers(config, fingerprint(config))
    for finding in findings:
        typer.echo(f"{'ok  ' if finding.ok else 'FIX '} {printable(finding.what)}")
        if finding.fix:
            typer.echo(f"     -> {printable(finding.fix)}")
    return 0 if all(finding.ok for finding in findings) else 1
