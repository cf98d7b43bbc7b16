"""Every parser against its corpus and what hypothesis makes of it: a KvdError or a result, and nothing else.

The corpus (``corpus/``, a folder for each form of input) holds one valid input of each kind, and every input that ever
broke something; hypothesis changes, cuts, doubles and splices them.
"""

import contextlib
import functools
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd import config
from kvd.addresses import split_address
from kvd.errors import KvdError
from kvd.fabric import frames
from kvd.fabric.base import EndpointCounters
from kvd.fabric.records import RecordReader
from kvd.fabric.seals import Checksum, Gmac, NoSeal
from kvd.fabric.tcp import TcpFabric
from kvd.fabric.tcp_receive import LaneIn
from kvd.fabric.verbs import wire as verbs
from kvd.layout.notation import from_toml, to_toml
from kvd.profiling import files as profiles
from kvd.transfer.engine import _NOTIFICATION
from kvd.transfer.handle import parse_handle
from kvd.types import Lane
from kvd.units import parse_rate, parse_size
from kvd.wire import framing, hello
from kvd.wire.guard import GuardParser
from kvd.wire.handshake import Acceptor, Dialler
from kvd.wire.hello import Identity
from kvd.wire.machine import Failed
from kvd_client import framing as api_framing
from tests.fuzz.generate import CORPUS, corpus

IDENTITY = Identity("prefill", "b1", "127.0.0.1:1", {"wire": 2}, ("tcp",), (b"k" * 32,))


def text(parse):
    """A parser of text, on bytes."""
    return lambda data: parse(data.decode(errors="replace"))


def frames_of(parser, data):
    parser.feed(data)
    while parser.next() is not None:
        pass


def acceptor(data):
    machine = Acceptor(
        IDENTITY, nonce=b"a" * 32, session=b"s" * 16, token=b"t" * 32, find_lane=lambda session, lane: b"k" * 32
    )
    for event in machine.receive_data(data):
        assert isinstance(event, Failed), "nobody without the key gets in"


def dialler(data):
    machine = Dialler(IDENTITY, expect="a", nonce=b"d" * 32)
    for event in machine.receive_data(data):
        assert isinstance(event, Failed)


def lane(data):
    header = frames.unpack_header(data.ljust(frames.HEADER_BYTES, b"\0"))
    rest = bytearray(data[frames.HEADER_BYTES :].ljust(header.runs * frames.RUN_BYTES, b"\0"))
    runs = frames.unpack_runs(rest, 0, header)
    frames.inside(runs, header.low, header.high)


def layout(data):
    made = from_toml(data.decode(errors="replace"))
    assert from_toml(to_toml(made)) == made


def notification(data):
    try:
        _NOTIFICATION.decode(data)
    except Exception as error:
        # What the engine catches, and no more than that.
        if type(error).__name__ not in ("DecodeError", "ValidationError"):
            raise


PARSERS = {
    "api request": ("api", lambda data: api_framing.decode_request(data[4:])),
    "api request, whole": ("api", api_framing.decode_request),
    "api reply": ("api", api_framing.decode_reply),
    "api limits": ("api", api_framing.unpack),
    "control message": ("control", framing.decode),
    "control frames": ("api", lambda data: frames_of(framing.FrameParser(), data)),
    "control frames, encrypted": ("control", lambda data: frames_of(GuardParser(b"k" * 16), data)),
    "handshake message": ("handshake", hello.decode),
    "handshake, accepting": ("handshake", acceptor),
    "handshake, dialling": ("handshake", dialler),
    "lane frame": ("lane", lane),
    "lane hello": ("lane", functools.partial(frames.check_hello)),
    "notification": ("notification", notification),
    "verbs hello": ("lane", verbs.unpack_hello),
    "verbs frame": ("lane", lambda data: verbs.unpack_frame(memoryview(data))),
    "verbs token": ("lane", lambda data: verbs.unpack_token(data, b"k" * 16)),
    "profile": ("profile", profiles.decode),
    "layout": ("layout", layout),
    "configuration": ("config", text(config.parse)),
    "address": ("address", text(split_address)),
    "size": ("address", text(parse_size)),
    "rate": ("address", text(parse_rate)),
    "handle": ("address", text(parse_handle)),
}


@st.composite
def changed(draw, seeds):
    """A seed with some of it changed, cut out, doubled, or replaced by a piece of another."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at, size = draw(st.integers(0, len(data))), draw(st.integers(0, 40))
        match draw(st.integers(0, 4)):
            case 0:
                del data[at : at + size]
            case 1:
                data[at:at] = draw(st.binary(max_size=40))
            case 2:
                other = draw(st.sampled_from(seeds))
                begin = draw(st.integers(0, len(other)))
                data[at : at + size] = other[begin : begin + size]
            case 3 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case _:
                data[at : at + 4] = draw(st.sampled_from([b"\xff" * 4, bytes(4), b"\x80\0\0\0", b"\xdd\xff\xff\xff"]))
    return bytes(data)


def attempt(parse, data):
    # split_address and the units say ValueError, with a sentence.
    with contextlib.suppress(KvdError, ValueError):
        parse(data)


@pytest.mark.parametrize("name", PARSERS)
def test_parser(name):
    folder, parse = PARSERS[name]
    seeds = corpus(folder)
    assert seeds
    for seed in seeds:
        attempt(parse, seed)

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(changed(seeds))
    def run(data):
        attempt(parse, data)

    run()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(corpus("lane")), max_size=4), st.data())
@pytest.mark.parametrize("seal", [NoSeal(), Checksum(), Gmac(b"k" * 16)], ids=["none", "checksum", "gmac"])
def test_a_lane_that_receives_anything(seal, pieces, data):
    """The receiving half itself, over a socket: it raises a KvdError, or waits for more."""

    class Out:
        answers, reads, refusals = [], [], 0

        def __getattr__(self, name):
            return lambda *arguments: None

    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        fabric = TcpFabric()
        receiver = LaneIn(Lane.BULK, near, fabric.table, EndpointCounters(), Out(), lambda lane, m: None, seal=seal)
        stream = data.draw(changed([b"".join(pieces) or b"\0"]))
        far.sendall(stream)
        with contextlib.suppress(KvdError):
            for _ in range(10):
                receiver.receive()
        receiver.end()


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=600))
def test_encrypted_records_that_nobody_sent(data):
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.sendall(data + b"\0")
        reader = RecordReader(b"k" * 16)
        reader.receive(near.fileno())
        if len(data) + 1 < 20:
            assert reader.open() == 0  # not even a head yet
        else:
            with pytest.raises(KvdError, match="changed on the way"):
                reader.open()


def test_every_folder_of_the_corpus_is_used():
    assert {folder.name for folder in CORPUS.iterdir()} == {folder for folder, _ in PARSERS.values()}
