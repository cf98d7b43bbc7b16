from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
import structlog

from kvd import log
from kvd.errors import PeerLost


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_json_object_a_line_when_no_terminal_reads() -> None:
    stream = io.StringIO()
    log.configure(stream=stream)
    structlog.get_logger("kvd.peers").info("peer_up", peer="b", attempts=3)
    (line,) = lines(stream)
    time = datetime.fromisoformat(str(line.pop("timestamp")))
    assert time.utcoffset() == timedelta(0)
    assert line == {"level": "info", "logger": "kvd.peers", "event": "peer_up", "peer": "b", "attempts": 3}


def test_a_terminal_gets_text() -> None:
    stream = Terminal()
    log.configure(stream=stream)
    structlog.get_logger("kvd").info("peer_up", peer="b")
    assert "peer_up" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


@pytest.mark.parametrize(("format", "is_json"), [("json", True), ("console", False)])
def test_a_configured_format_wins(format, is_json: bool) -> None:
    for stream in (io.StringIO(), Terminal()):
        log.configure(format, stream=stream)
        structlog.get_logger("kvd").info("up")
        assert stream.getvalue().startswith("{") == is_json


def test_the_level_holds_for_kvd_and_for_libraries() -> None:
    stream = io.StringIO()
    log.configure("json", "warning", stream)
    structlog.get_logger("kvd").info("quiet")
    logging.getLogger("asyncio").info("quiet too")
    structlog.get_logger("kvd").warning("loud")
    logging.getLogger("asyncio").error("loud %s", "too", extra={"fd": 3})
    first, second = lines(stream)
    assert first["event"] == "loud"
    assert (second["event"], second["logger"], second["level"], second["fd"]) == ("loud too", "asyncio", "error", 3)


def test_an_error_of_kvd_is_its_code_sentence_and_fields() -> None:
    error = PeerLost("peer b is gone; it is dialled again", peer="b")
    stream = io.StringIO()
    log.configure("json", stream=stream)
    structlog.get_logger("kvd").warning("transfer_failed", error=error)
    assert lines(stream)[0]["error"] == {
        "code": "PEER_LOST",
        "message": "peer b is gone; it is dialled again",
        "peer": "b",
    }
    stream = io.StringIO()
    log.configure("console", stream=stream)
    structlog.get_logger("kvd").warning("transfer_failed", error=error)
    assert "PEER_LOST: peer b is gone" in stream.getvalue()


@pytest.mark.parametrize("format", ["json", "console"])
def test_tracebacks_show_no_local_variables(format) -> None:
    stream = io.StringIO()
    log.configure(format, stream=stream)

    def prove(secret: str) -> None:
        raise RuntimeError("no proof")

    try:
        prove("".join(["hun", "ter", "2"]))
    except RuntimeError:
        structlog.get_logger("kvd").exception("failed")
        logging.getLogger("asyncio").exception("failed")
    assert "hunter2" not in stream.getvalue()
    assert stream.getvalue().count('raise RuntimeError("no proof")' if format == "console" else "no proof") == 2
    assert "in prove" in stream.getvalue() or '"name":"prove"' in stream.getvalue()


def test_a_line_is_written_whatever_is_in_it() -> None:
    stream = io.StringIO()
    log.configure("json", stream=stream)
    endless: list[object] = []
    endless.append(endless)
    structlog.get_logger("kvd").info("odd\nline", name="\ud800", loop=endless, kind=object, error=OSError("x"), n=1)
    (line,) = lines(stream)
    assert line["event"] == "odd\nline"
    assert line["n"] == 1
    assert line["name"] == repr("\ud800")
    assert line["error"] == "x"


def test_lines_for_the_journal_start_with_their_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = socket.socketpair()
    found = os.fstat(writer.fileno())
    monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
    with reader, contextlib.closing(writer), writer.makefile("w", buffering=1) as stream:
        log.configure(stream=stream)
        structlog.get_logger("kvd").warning("late")
        structlog.get_logger("kvd").info("up")
        received = reader.recv(65536).decode().splitlines()
    assert received[0].startswith('<4>{"timestamp"')
    assert received[1].startswith('<6>{"timestamp"')


@pytest.mark.parametrize("variable", ["", "1:2", "x:y", "7"])
def test_other_streams_have_no_priority(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", variable)
    stream = io.StringIO()
    log.configure(stream=stream)
    structlog.get_logger("kvd").info("up")
    assert stream.getvalue().startswith("{")


@contextlib.contextmanager
def logged_to_a_pipe() -> Iterator[int]:
    """The end to read from."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        log.configure("json", stream=stream)
        yield reader
        logging.getLogger().handlers.clear()
    os.close(reader)


def test_a_reader_that_stands_still_holds_up_nobody() -> None:
    with logged_to_a_pipe() as reader:
        logger = structlog.get_logger("kvd")
        text, count = "x" * 5000, 0  # more than a pipe takes at once
        while "dropped" not in log.trouble() or ", 0 were dropped" in log.trouble():
            logger.info("line", number=count, text=text)
            count += 1
            assert count < 1000
        assert log.trouble().startswith("log: nobody reads it; ")
        data = b""
        while log.trouble():
            data += os.read(reader, 1 << 16)
            logger.info("more")
        data += os.read(reader, 1 << 16)
    found = [json.loads(line) for line in data.splitlines()]
    numbers = [line["number"] for line in found if line["event"] == "line"]
    assert numbers == list(range(len(numbers)))
    (told,) = (line for line in found if "dropped" in line["event"])
    assert len(found) - 1 + told["lines"] >= count


@pytest.mark.parametrize(("path", "trouble"), [("/dev/full", "no space left on device"), ("/dev/null", "")])
def test_a_log_without_room_loses_lines_and_says_so(path: str, trouble: str) -> None:
    with open(path, "w") as stream:
        log.configure("json", stream=stream)
        for _ in range(3):
            structlog.get_logger("kvd").info("line")
        assert log.trouble() == (trouble and f"log: lines are lost, since they can't be written: {trouble}")
        logging.getLogger().handlers.clear()


def test_a_log_whose_reader_has_left_goes_nowhere() -> None:
    with logged_to_a_pipe() as reader:
        os.dup2(os.open("/dev/null", os.O_RDONLY), reader)
        structlog.get_logger("kvd").info("line")
        assert "broken pipe" in log.trouble()
