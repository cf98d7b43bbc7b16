"""The local API: messages between an inference process and its node's daemon, and their framing.

This, :mod:`kvd_client.statuses` and the shared :mod:`kvd_client.ring` are the only definition of the API; the daemon
imports it from here. A frame is a 4-byte little-endian length and that many bytes of msgpack, holding a map with a
``type`` key; :mod:`kvd_client.framing` makes and reads them.

The client speaks first (:class:`Hello`); the daemon answers each request with one reply that carries the request's
``id``. Replies with ``id`` 0 are unasked: :class:`Ended`. File descriptors travel by SCM_RIGHTS with the frame's
first byte; the messages say how many belong to them.

Version history: 1, first version. 2, tensors in a device's memory: ``placement`` and ``cache`` of an open, caches, and
the channel buffers of :class:`Opened`.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from kvd_client.layouts import Placement, TensorMap
from kvd_client.spec import KVSpec, MetadataSpec, TokenRange
from kvd_client.statuses import (
    DeviceStatus,
    LearntStatus,
    MemoryStatus,
    PeerStatus,
    ProfileStatus,
    RecordingStatus,
    TransferStatus,
)

PROTOCOL_VERSION = 2
COUNT_CELLS = 40
"""In so many parts of the prompt selections are counted by KV head."""
MAX_FRAME = 1 << 20
MAX_DEPTH = 16
MODES = ("full", "partial", "profile", "parallel", "speculative")
"""Each adds one technique to the one before, from partial on (SmartGen, figure 13): ``full`` pushes everything layer
by layer; ``partial`` the first blocks in address order, the rest only on demand; ``profile`` the most important ones;
``parallel`` fetches while local entries are loaded; ``speculative`` sends the rest in idle windows."""
LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all messages. ``id`` pairs a reply with its request; 0 where there is nothing to pair."""

    id: int = 0


# --- requests -----------------------------------------------------------------------------------------------------


class Hello(Message, tag="hello"):
    """First message of a connection."""

    version: int
    name: str = ""
    """What the process calls itself, for status and logs."""


class OpenSource(Message, tag="open_source"):
    """Open one rank of a transfer as its source. Answered by :class:`Opened` as soon as memory is reserved."""

    request: str
    spec: KVSpec
    lengths: list[int]
    """Prompt tokens of each row."""
    capacity: int
    """Tokens for which each row has room; at least ``max(lengths)``."""
    rank: int = 0
    ranks: int = 1
    head_start: int = 0
    head_count: int = 0
    """0 means all heads of the spec."""
    metadata: tuple[MetadataSpec, ...] = ()
    """Selection metadata; the same on both sides."""
    mode: str = ""
    """One of :data:`MODES`; empty: the sink's, or else the daemon's default. Decides what is pushed when."""
    selector: str = ""
    """The KV selection algorithm, as profiles name it."""
    prefill_s: float = 0.0
    """How long prefill will take (T_p), if the process knows; 0: what the profile says."""
    sink: str = ""
    """Node id to announce the transfer to; empty: the sink finds this node by itself."""
    deadline_s: float = 0.0
    """Seconds until the transfer must be delivered; 0: the daemon's default."""
    placement: Placement | None = None
    """The tensors lie in a device's memory; None: in the lease, token-major."""
    cache: int = 0
    """They lie in this cache (:class:`OpenCache`), in the blocks of ``table``; 0: in memory of the transfer's own."""
    table: bytes = b""
    """int32: the cache's block of each (row, logical block), row after row."""
    cache_head: int = -1
    """The part has only some of the cache's heads: which of them is its first. -1: it has all of them."""
    mask: str = "token"
    """One of :data:`kvd_client.spec.MASKS`, the same on both sides."""


class OpenSink(Message, tag="open_sink"):
    """Open one rank of a transfer as its sink; fields as in :class:`OpenSource`."""

    request: str
    spec: KVSpec
    lengths: list[int]
    capacity: int
    rank: int = 0
    ranks: int = 1
    head_start: int = 0
    head_count: int = 0
    source: str = ""
    """Node id of the source; empty: wait until a source announces the request to this node."""
    handle: str = ""
    """The source's handle, when its request id is another one; carries the source's node id."""
    metadata: tuple[MetadataSpec, ...] = ()
    mode: str = ""
    """Decides before the source's."""
    selector: str = ""
    landing_entries: int = 0
    """Most entries of a (row, head) that one :class:`Fetch` asks for; 0: no fetches."""
    landing_slots: int = 0
    held: list[TokenRange] = []
    """Tokens that this process has already, in every layer; they are never sent."""
    deadline_s: float = 0.0
    placement: Placement | None = None
    cache: int = 0
    table: bytes = b""
    cache_head: int = -1
    unit: str = ""
    """One of :data:`kvd_client.layouts.UNITS`; empty: ``layer`` in mode ``full``, else ``chunk``."""
    pull: bool = False
    """Read from the source's staging memory instead of having it write."""
    mask: str = "token"


class OpenCache(Message, tag="open_cache"):
    """Memory of a device for the KV cache of an engine, which outlives transfers: ``spec.layers`` layers of tensors of
    ``blocks`` blocks each. Answered by :class:`CacheOpened`."""

    spec: KVSpec
    placement: Placement
    blocks: int
    head_count: int = 0
    """Of the tensors; 0: all heads of the spec."""


class CloseCache(Message, tag="close_cache"):
    """Give a cache's memory back; transfers into it must have been released. Does nothing the second time."""

    cache: int


class Finish(Message, tag="finish"):
    """Source: every layer of every row has been rung; answered by :class:`Ok`. Anything missing is an error."""

    transfer: int


class Release(Message, tag="release"):
    """Give the memory back, ending the transfer if it still runs. Does nothing the second time."""

    transfer: int


class Abort(Message, tag="abort"):
    """End the transfer on both sides with ``ABORTED``; the memory stays mapped until :class:`Release`."""

    transfer: int
    reason: str = ""


class Fetch(Message, tag="fetch"):
    """Sink: bring entries of one layer into a landing slot; answered by :class:`Ok` once they are in place.

    Row ``i`` of the slot belongs to (row, head) ``i // heads, i % heads``; its first ``counts[i]`` entries will be
    those of the tokens that ``index`` lists, row after row."""

    transfer: int
    layer: int
    slot: int
    counts: bytes
    """int32, rows * heads of them."""
    index: bytes
    """int32, sum(counts) token positions."""


RANK_WEIGHT = 0.85
"""Of what queries select, against the profile, where nobody says otherwise (:mod:`kvd.importance.prompt`)."""


class RankBlocks(Message, tag="rank_blocks"):
    """Source: what the prompt's last queries would select of a layer; sorts what is unsent of it. Answered by
    :class:`Ranked`."""

    transfer: int
    layer: int
    blocks: int
    shares: bytes
    """float32, rows * blocks: 0 to 1, the share of what could have been selected in the block. With a mask by head each
    (row, head) is a row."""
    weight: float
    """0 to 1, against the profile."""


class InstallProfile(Message, tag="install_profile"):
    """A piece of a profile file; with ``last``, the file is checked and takes effect for new transfers."""

    offset: int
    data: bytes
    last: bool = False


class ReportSelections(Message, tag="report_selections"):
    """Sink: how often the entries of each KV block were selected, for profiles of what this node really decodes."""

    transfer: int
    blocks: int
    steps: int
    """Decode steps counted."""
    counts: bytes
    """float32, layers * blocks: entries selected, summed over rows, heads and steps."""
    by_head: bytes = b""
    """float32, layers * KV heads * :data:`COUNT_CELLS`: the same by KV head of the part, in as many equal parts of the
    prompt, summed over rows and steps; empty where that would not fit into the message."""
    asked: bool = True
    """The process wants a profile recorded; else the daemon wanted to learn (:attr:`Opened.count_blocks`)."""


class ExportProfile(Message, tag="export_profile"):
    """Ask for the profile that was recorded for a model and selector, answered by :class:`ProfileData`."""

    model: str
    selector: str = ""
    offset: int = 0
    learnt: bool = False
    """What the daemon uses for new transfers, instead of what processes asked it to record."""


class Reject(Message, tag="reject"):
    """Tell a source that nobody will fetch its transfer, which this node has not opened (and will not)."""

    handle: str = ""
    request: str = ""
    source: str = ""
    reason: str = ""


class GetStatus(Message, tag="get_status"):
    """Ask for the daemon's status, answered by :class:`Status`."""


# --- replies ------------------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome"):
    """Answer to :class:`Hello`, with three descriptors: the ring's memfd, the eventfd that wakes the daemon,
    and the eventfd by which the daemon wakes the process."""

    version: int
    node: str
    boot: str
    descriptors: int = 3


class Opened(Message, tag="opened"):
    """The transfer exists; with one descriptor, the memfd that holds the lease."""

    transfer: int
    handle: str
    slot: int
    """Index of the transfer's :data:`~kvd_client.ring.SLOT` in the ring's memory."""
    offset: int
    """Where the lease begins in the memfd: a multiple of the page size."""
    nbytes: int
    generation: int
    count_blocks: int = 0
    """Sink: count selections in so many KV blocks, and report them at the release: the daemon learns from them. 0: it
    does not."""
    tensors: TensorMap | None = None
    """Where they lie on a device; behind the lease's descriptor comes one for each channel that a process can map."""
    descriptors: int = 1


class CacheOpened(Message, tag="cache_opened"):
    """The cache exists; with a descriptor for each channel."""

    cache: int
    tensors: TensorMap
    descriptors: int


class Ok(Message, tag="ok"):
    """Done."""


class Ranked(Message, tag="ranked"):
    """Answer to :class:`RankBlocks`."""

    wanted: bool
    """False where the transfer's mode has no order that a ranking changes: further ones need not be made."""


class ProfileData(Message, tag="profile_data"):
    """A piece of a profile file."""

    data: bytes
    total: int


class Failure(Message, tag="failure"):
    """The request failed; ``code`` is one of :mod:`kvd_client.errors`."""

    code: str
    message: str
    fields: dict[str, Any] = {}


class Ended(Message, tag="ended"):
    """A transfer has ended: ``code`` is ``OK`` when delivered, an error's code otherwise. Sent once for each."""

    transfer: int
    code: str
    message: str = ""
    fields: dict[str, Any] = {}


class Status(Message, tag="status"):
    """The daemon at one moment."""

    node: str
    boot: str
    version: str
    pid: int
    uptime_s: float
    health: str
    """``ok`` or ``degraded``; :attr:`reasons` says why."""
    reasons: list[str]
    fabric: str
    """Names of what is offered to peers, by preference, with commas; :attr:`PeerStatus.fabric` has what is used."""
    kernels: str
    listen: str
    socket: str
    clients: int
    draining: bool
    memory: MemoryStatus
    peers: list[PeerStatus]
    transfers: list[TransferStatus]
    counters: dict[str, int]
    profiles: list[ProfileStatus] = []
    recordings: list[RecordingStatus] = []
    learnt: list[LearntStatus] = []
    devices: list[DeviceStatus] = []
    device: str = ""
    """What the fabrics run on: device, port, address, MTU. Empty where that is the system's network."""
    security: str = ""
    """What protects bytes on their way: ``unchecked``, ``checksums``, ``authentic``, ``secret``; empty: the fabric's
    own means."""


Request = (
    Hello
    | OpenSource
    | OpenSink
    | OpenCache
    | CloseCache
    | Finish
    | Release
    | Abort
    | Fetch
    | Reject
    | RankBlocks
    | InstallProfile
    | ReportSelections
    | ExportProfile
    | GetStatus
)
Reply = Welcome | Opened | CacheOpened | Ok | Failure | Ended | Ranked | ProfileData | Status
