"""The demo with selective transfer: requests in one mode or in several, all for one prompt over one link.

The two inference processes and their models stay; daemons are started anew where runs differ in their configuration.
A request's time begins when this process, as the router, tells both sides of it.

The project's figures come from ``kvd demo --compare --mode full,speculative --speculative adaptive,windows --select
0.05,0.1,0.2 --tokens 80 --repeat 3``: T_p is measured, the link set to T_t = 6.5 T_p, each setting runs three times.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from statistics import median

from kvd.demo import picture, texts
from kvd.demo.display import Display
from kvd.demo.figures import Comparison, Run, Selection, Setting, median_run
from kvd.demo.inference import NODES
from kvd.demo.processes import Event, cpu_time, now
from kvd.demo.report import rate, seconds
from kvd.demo.stage import DAEMON, Stage, perform
from kvd.units import Rate
from kvd_client.protocol import MODES
from kvd_client.spec import AUTO

DEFAULT_TOKENS = 2000
"""Of the prompt."""
REGIME = 6.5
"""T_t over T_p of the link ``auto``: the paper's regime (75 % of each prompt in the source's prefix cache)."""

_WARM_UP = 2
"""New tokens of the request that warms daemons up."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user chose."""

    modes: tuple[str, ...] = MODES
    budgets: tuple[str, ...] = ("fixed", "deadline")
    speculative: tuple[str, ...] = ("adaptive",)
    masks: tuple[str, ...] = (AUTO,)
    """Of modes other than ``full``, which goes by token."""
    shares: tuple[float, ...] = (0.1,)
    """Of entries selected; each is a series of runs of its own."""
    selector: str = "quest"
    prefix_share: float = 0.95
    """Of the prompt, whose KV cache the source holds before the request; 0: none."""
    link: Rate | None = None
    """None: so that T_t = 6.5 T_p."""
    new_tokens: int
    prompt_file: Path | None = None
    prompt_tokens: int | None = None
    """None: all of the file, or the default for the built-in text."""
    model: Path | None = None
    plot: Path | None = None
    repeat: int = 1
    """Runs of each setting, of which the median by TTST counts."""
    selective: tuple[tuple[str, float], ...] = ()
    """Further keys of the daemons' section ``[selective]``."""

    def settings(self) -> list[Setting]:
        """Runs, those that daemons of one configuration can serve next to each other."""
        plain = [
            Setting(mode=mode, mask=mask)
            for mode in self.modes
            if mode in ("full", "partial")
            for mask in (self.masks if mode == "partial" else ("token",))
        ]
        found = [
            Setting(mode=mode, budget=budget, speculative=how, mask=mask)
            for budget in self.budgets
            for mode in self.modes
            if mode not in ("full", "partial")
            for how in (self.speculative if mode == "speculative" else ("",))
            for mask in self.masks
        ]
        return plain + found


def run(options: Options, display: Display) -> Comparison:
    """Run the demo; see :func:`kvd.demo.stage.perform`."""
    return perform(lambda: _Compare(options, display))


class _Compare(Stage[Comparison]):
    def __init__(self, options: Options, display: Display) -> None:
        super().__init__(display)
        self._options = options
        self._profiles = self.folder / "profiles"
        self._profiles.mkdir()
        self._running: tuple[str, str] | None = None
        """Budget and speculative policy of the daemons that run."""
        self._requests = 0

    async def steps(self) -> Comparison:
        options, children, say = self._options, self.children, self.display.say
        folder = await self.model(options.model)
        say("starting two inference processes")
        for name, module in (("prefill", "selective_source"), ("decode", "selective_sink")):
            argv = [sys.executable, "-m", f"kvd.demo.{module}", str(folder), options.selector]
            children.start(name, argv, talks=True)
        layers = (await self.each("loaded"))["prefill"]["layers"]
        self._ask("train")
        trained = await self._told("trained")
        children.send("decode", weights=trained["weights"])
        await self.each("warm", "decode")

        text, question, limit = self._prompt()
        self._ask("prepare", text=text, question=question, prompt_tokens=limit, prefix_share=options.prefix_share,
                  new_tokens=options.new_tokens)  # fmt: skip
        prepared = await self._told("prepared")
        profile: Event = {"profile": {}}
        if set(options.modes) - {"full", "partial"}:
            self._ask("record")
            profile = await self._told("recorded")
        say(f"a prompt of {prepared['tokens']} tokens, {prepared['prefix']} of them held by the source; measuring T_p")
        self._ask("measure")
        samples = (await self._told("measured"))["seconds"]
        prefill_s = median(samples)
        link = Rate(prepared["kv_bytes"] / (REGIME * prefill_s)) if options.link is None else options.link
        comparison = Comparison(
            model=folder.name,
            selector=options.selector,
            layers=layers,
            prompt_tokens=prepared["tokens"],
            prefix_tokens=prepared["prefix"],
            kv_bytes=prepared["kv_bytes"],
            metadata_bytes=prepared["metadata_bytes"],
            link=link,
            prefill_s=prefill_s,
            prefill_samples_s=samples,
            profile=profile["profile"],
        )
        self._ask("write_profile", folder=str(self._profiles), prefill_s=prefill_s, transfer_s=comparison.transfer_s,
                  link=link)  # fmt: skip
        await self._told("written")
        say(f"T_p = {seconds(prefill_s)}; link between the two nodes: {rate(link * 8 or None, 'unlimited')}")
        for share in options.shares:
            comparison.selections.append(await self._selection(share))
        for setting in options.settings():
            if await self._daemons(setting, link):
                # The first request of new daemons meets cold memory and no connection, and users hardly ever do.
                await self._request(comparison, comparison.selections[0], setting, new_tokens=_WARM_UP)
            for selection in comparison.selections:
                found = [await self._request(comparison, selection, setting) for _ in range(options.repeat)]
                made = median_run(found)
                selection.runs.append(made)
                same = "" if made.tokens == selection.local_tokens else "; other tokens than one process"
                say(f"{made.setting.name}, {100 * selection.share:g} % selected: TTST {seconds(made.ttst_s)}{same}")
        if options.plot is not None:
            picture.plot(comparison, options.plot)
        return comparison

    def _prompt(self) -> tuple[str, str, int | None]:
        """Text, question, and the most tokens of both (None: what the model's context holds)."""
        options = self._options
        if options.prompt_file is not None:
            return texts.read_text(options.prompt_file), "", options.prompt_tokens
        return texts.default_text(), texts.QUESTION, options.prompt_tokens or DEFAULT_TOKENS

    def _ask(self, what: str, **arguments: object) -> None:
        self.children.send("prefill", do=what, **arguments)

    async def _told(self, event: str) -> Event:
        return (await self.each(event, "prefill"))["prefill"]

    async def _selection(self, share: float) -> Selection:
        self.display.say(f"the same in one process, {100 * share:g} % selected")
        self._ask("local", share=share, new_tokens=self._options.new_tokens)
        local = await self._told("local")
        return Selection(
            share=share,
            entries=local["entries"],
            local_tokens=local["tokens"],
            local_text=local["text"],
            local_step_s=local["step_s"],
            local_select_s=local["select_s"],
            orders=local["orders"],
        )

    async def _daemons(self, setting: Setting, link: int) -> bool:
        """Daemons that are configured for a run; those that run already, if they are. Whether new ones were started."""
        wanted = (setting.budget or "deadline", setting.speculative or "adaptive")
        if setting.mode == "partial":
            wanted = ("fixed", wanted[1])
        if self._running == wanted or (self._running is not None and setting.mode == "full"):
            return False
        if self._running is not None:
            await self.children.end(*DAEMON.values())
        self._running = wanted
        self.start_daemons(
            link,
            selective={
                "budget": wanted[0],
                "speculative": wanted[1],
                "profiles": str(self._profiles),
                **dict(self._options.selective),
            },
        )
        await self.daemons_ready()
        return True

    async def _request(
        self, comparison: Comparison, selection: Selection, setting: Setting, new_tokens: int | None = None
    ) -> Run:
        """One request from its arrival to its end, this process being the router."""
        self._requests += 1
        request = f"kvd-demo-{self._requests}"
        children = self.children
        before = self._cpu()
        since = now()
        children.send(
            "decode",
            socket=str(self.socket("decode")),
            request=request,
            tokens=comparison.prompt_tokens,
            mode=setting.mode,
            mask=setting.mask,
            share=selection.share,
            new_tokens=new_tokens or self._options.new_tokens,
        )
        self._ask("request", socket=str(self.socket("prefill")), request=request, prefill_s=comparison.prefill_s,
                  mask=setting.mask)  # fmt: skip
        first = decoded = delivered = None
        while decoded is None:
            _, event = await children.next()
            match event["event"]:
                case "first":
                    first = event
                    children.send("decode", token=event["token"])
                case "delivered":
                    delivered = event["at"]
                case "decoded":
                    decoded = event
        assert first is not None
        cpu_s = {name: spent - before[name] for name, spent in self._cpu().items()}
        if decoded["complete"] and delivered is None:
            delivered = (await self._told("delivered"))["at"]
        # The source knows what it sent on which path, the sink what it served of fetches by itself.
        paths = await self._paths("prefill", request)
        if filled := (await self._paths("decode", request)).get("filled"):
            paths["filled"] = filled
        children.send("decode", do="release")
        await self.each("released", "decode")
        self._ask("release")
        await self.each("released", "prefill")
        return Run(
            setting=dataclasses.replace(setting, mask=decoded["mask"]),
            tokens=decoded["tokens"],
            times=[at - since for at in (first["at"], *decoded["at"])],
            selected=decoded["selected"],
            fetched=decoded["fetched"],
            waited_s=decoded["waited_s"],
            fetch_wait_s=decoded["fetch_wait_s"],
            fetch_s=decoded["fetch_s"],
            select_s=decoded["select_s"],
            paths=paths,
            cpu_s=cpu_s,
            local_s=delivered - since if decoded["complete"] and delivered is not None else None,
        )

    async def _paths(self, node: str, request: str) -> dict[str, int]:
        """Bytes and counts of a request's part in a node's daemon, which holds it until it is released."""
        parts = (await self.status(node)).transfers
        return next((part.paths for part in parts if part.request == request), {})

    def _cpu(self) -> dict[str, float]:
        return {name: cpu_time(self.children.pid(name)) for name in (*NODES, *DAEMON.values())}
