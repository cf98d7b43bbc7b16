"""One run of the plain demo, from the request to the report: two daemons, two inference processes, and a
router's part."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from kvd.demo import texts
from kvd.demo.display import Display
from kvd.demo.inference import NODES
from kvd.demo.processes import Event, now, peak_memory
from kvd.demo.report import Report, busy_rate, rate
from kvd.demo.stage import DAEMON, Interrupted, Stage, perform
from kvd.units import Rate

__all__ = ["Interrupted", "Options", "run"]

CHANNELS = 8
"""Of the decode node's device, where it has one: those of a Blackhole p150."""
_MODULES = {"prefill": "kvd.demo.prefill_process", "decode": "kvd.demo.decode_process"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user chose."""

    link: Rate
    """Limit of the link between the nodes; 0: none."""
    new_tokens: int
    prompt_file: Path | None
    prompt_tokens: int | None
    """None: all of the file, or the default for the built-in text."""
    model: Path | None
    """None: the demo's own."""
    layout: str = ""
    """Of the cache at the decode node, which then has a device; empty: as prefill has it."""


def run(options: Options, display: Display) -> Report:
    """Run the demo; see :func:`kvd.demo.stage.perform`."""
    return perform(lambda: _Run(options, display))


class _Run(Stage[Report]):
    def __init__(self, options: Options, display: Display) -> None:
        super().__init__(display)
        self._options = options

    async def steps(self) -> Report:
        children, display = self.children, self.display
        text, question, limit = self._prompt()
        folder = await self.model(self._options.model)
        display.say("starting two daemons and two inference processes")
        self.start_daemons(self._options.link, channels=CHANNELS if self._options.layout else 0)
        for name in NODES:
            argv = [sys.executable, "-m", _MODULES[name], str(self.socket(name)), str(folder)]
            children.start(name, argv, talks=True)
        await self.daemons_ready()
        layers = (await self.each("loaded"))["prefill"]["layers"]

        prompt = {"text": text, "question": question, "prompt_tokens": limit}
        children.send("prefill", new_tokens=self._options.new_tokens, **prompt)
        tokens = (await self.each("prepared", "prefill"))["prefill"]["tokens"]
        link = rate(self._options.link * 8 or None, "unlimited")
        display.say(f"a prompt of {tokens} tokens; link between the two nodes: {link}")

        seen = await self._request(tokens, layers)
        moved, counters = await self._sent()
        reference = await self._reference(seen)
        for name in DAEMON.values():
            seen.peak[name] = peak_memory(children.pid(name))
        seen.peak["demo"] = peak_memory(os.getpid())
        later = seen.times[1:]
        return Report(
            model=folder.name,
            prompt_tokens=tokens,
            tokens=seen.tokens,
            reference_tokens=reference,
            text="".join(seen.pieces),
            kv_bytes=seen.kv_bytes,
            bytes_moved=moved,
            link_configured=self._options.link * 8 or None,
            link_achieved=busy_rate(moved, seen.ready, seen.arrived),
            ttft_s=seen.times[0] - seen.since,
            ttst_s=later[0] - seen.since if later else None,
            waited_s=seen.waited_s,
            tbt_s=(later[-1] - later[0]) / (len(later) - 1) if len(later) > 1 else None,
            layers_before_first=sum(at <= seen.times[0] for at in seen.arrived),
            layers=layers,
            peak_memory=seen.peak,
            layout=self._options.layout,
            channels=CHANNELS if self._options.layout else 0,
            requests=counters.get("tensor_requests", 0),
            regroup_s=counters.get("regroup_us", 0) / 1e6,
        )

    def _prompt(self) -> tuple[str, str, int | None]:
        """Text, question, and the most tokens of both (None: what the model's context holds)."""
        options = self._options
        if options.prompt_file is not None:
            return texts.read_text(options.prompt_file), "", options.prompt_tokens
        return texts.default_text(), texts.QUESTION, options.prompt_tokens or texts.DEFAULT_TOKENS

    async def _request(self, tokens: int, layers: int) -> _Seen:
        """Send the request to both processes, hand prefill's token to decode, and follow until the
        text's end."""
        children = self.children
        seen = _Seen(since=now())
        children.send(
            "decode",
            request=_REQUEST,
            tokens=tokens,
            new_tokens=self._options.new_tokens,
            layout=self._options.layout,
        )
        children.send("prefill", request=_REQUEST)
        running = {"delivered", "done"}
        while running:
            name, event = await children.next()
            match event["event"]:
                case "layer":
                    seen.ready.append(event["at"])
                    self.display.progress("prefill, layers", len(seen.ready), layers)
                case "arrived":
                    seen.arrived.append(event["at"])
                case "first" | "token" as which:
                    seen.add(event)
                    self.display.text(event["text"])
                    if which == "first":
                        children.send("decode", token=event["token"])
                case "delivered":
                    seen.kv_bytes = event["kv_bytes"]
                    running.remove("delivered")
                case "done":
                    seen.peak[name] = event["peak_memory"]
                    running.remove("done")
        return seen

    async def _sent(self) -> tuple[int, dict[str, int]]:
        """Payload that the prefill node's daemon has sent to the other, entries and masks, and its counters."""
        status = await self.status("prefill")
        return sum(peer.bytes_sent for peer in status.peers if peer.node == NODES["decode"]), status.counters

    async def _reference(self, seen: _Seen) -> list[int]:
        """What a single process makes of the prompt: only now, so as not to disturb what is measured."""
        children, what = self.children, "the same by one process alone, tokens"
        self.display.progress(what, 0, len(seen.tokens))
        children.send("prefill", new_tokens=self._options.new_tokens)
        made = 0
        while True:
            name, event = await children.next()
            if event["event"] == "reference_token":
                made += 1
                self.display.progress(what, made, max(made, len(seen.tokens)))
            elif event["event"] == "reference":
                seen.peak[name] = event["peak_memory"]
                return list(event["tokens"])


@dataclasses.dataclass(slots=True)
class _Seen:
    """What is seen of one request, on the clock that all processes share."""

    since: float
    ready: list[float] = dataclasses.field(default_factory=list)
    arrived: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)
    pieces: list[str] = dataclasses.field(default_factory=list)
    waited_s: float = 0.0
    kv_bytes: int = 0
    peak: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, event: Event) -> None:
        self.tokens.append(event["token"])
        self.times.append(event["at"])
        self.pieces.append(event["text"])
        if len(self.tokens) == 2:
            self.waited_s = event["waited_s"]


_REQUEST = "kvd-demo"
