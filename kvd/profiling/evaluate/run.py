"""Running an evaluation: every missing cell, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvd.errors import InvalidArgument
from kvd.profiling import recorded as recordings
from kvd.profiling.evaluate import measure
from kvd.profiling.evaluate.plan import FULL, Place, Tokens, Variant, Work
from kvd.profiling.evaluate.store import Store
from kvd.profiling.files import replace_file
from kvd_client import selectors
from kvd_client.engines.prompt import AHEAD
from kvd_client.selectors import Selector
from kvd_client.selectors import weights as weight_files

CALIBRATION_TOKENS, CALIBRATION_PROMPTS = 1024, 8
"""What weights are trained on: prompts of the calibration domain's documents that are not measured, where there are
enough."""

Told = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and how much there is."""


class Runner:
    """Runs what is missing in a results folder. Needs torch and a model of the reference engine's."""

    def __init__(
        self,
        model: Any,
        tokens: Tokens,
        store: Store,
        work: Work,
        *,
        told: Told,
        stop_at: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._tokens, self._store, self._work = model, tokens, store, work
        self._told, self._stop_at, self._clock = told, stop_at, clock
        self._selectors: dict[str, Selector] = {}

    def run(self) -> bool:
        """Run every missing cell; False where ``stop_at`` came first."""
        plan = self._work.cells(self._tokens.settings)
        for place, kind, _ in plan:  # before hours are spent, as all that can be wrong with the texts
            self._tokens.text(place) if kind == "text" else self._tokens.hidden(place)
        total = sum(len(variants) for _, _, variants in plan)
        done = 0
        for place, kind, variants in plan:
            missing = [one for one in variants if not self._finished(place, kind, one)]
            done += len(variants) - len(missing)
            self._told(f"{place.key}, {kind}", done, total)
            if not missing:
                continue
            if self._over():
                return False
            cells = self._texts(place, missing) if kind == "text" else self._hidden(place, missing)
            for _ in cells:
                done += 1
                self._told(f"{place.key}, {kind}", done, total)
                if self._over():
                    return False
        return True

    def selector(self, variant: Variant) -> Selector | None:
        """The variant's algorithm, with its weights, which are trained if need be; None for no selection."""
        if variant.label == FULL:
            return None
        if variant.name not in self._selectors:
            trained = selectors.kind_of(variant.selector).trained and not variant.untrained
            made = self._weights(variant.selector) if trained else None
            self._selectors[variant.name] = selectors.parse(variant.spec, weights=made)
        return self._selectors[variant.name]

    def _over(self) -> bool:
        return self._stop_at is not None and self._clock() >= self._stop_at

    def parameters(self, variant: Variant) -> dict[str, Any]:
        selector = self.selector(variant)
        return dict(selector.parameters) if selector is not None else {}

    def _finished(self, place: Place, kind: str, variant: Variant) -> bool:
        if self._cell(place, kind, variant) is None:
            return False
        return kind != "text" or variant not in self._work.recorded or self._recorded(place, variant)

    def _cell(self, place: Place, kind: str, variant: Variant) -> dict[str, Any] | None:
        return self._store.cell(place, kind, variant.label, self.parameters(variant))

    def _recorded(self, place: Place, variant: Variant) -> bool:
        """Whether its selections are kept, those of queries as prefill asks them today."""
        path = self._store.recorded(place, variant.label)
        return path.is_file() and recordings.read(path).asked_ahead == AHEAD

    def _texts(self, place: Place, missing: Sequence[Variant]) -> Any:
        prompt, behind = self._tokens.text(place)
        state = measure.kept_state(self._model, prompt, self._store.state(place, "text"))
        runs = measure.TextRuns(self._model, state, behind)
        for variant in missing:
            selector, path = self.selector(variant), self._store.recorded(place, variant.label)
            if selector is not None and path.is_file() and self._cell(place, "text", variant) is not None:
                recordings.write(runs.asked_anew(selector, recordings.read(path)), path)
                yield
                continue
            record = self._tokens.settings if variant in self._work.recorded else None
            values, made = runs.run(selector, variant.share, record=record, name=place.domain)
            if made is not None:
                recordings.write(made, path)
            self._store.finish(place, "text", variant.label, self.parameters(variant), values)
            yield

    def _hidden(self, place: Place, missing: Sequence[Variant]) -> Any:
        hidden = self._tokens.hidden(place)
        document = measure.kept_state(self._model, hidden.tokens, self._store.state(place, "hidden"))
        finder = measure.Finder(self._model, document, hidden)
        for variant in missing:
            values = finder.run(self.selector(variant), variant.share)
            self._store.finish(place, "hidden", variant.label, self.parameters(variant), values)
            yield

    def _weights(self, name: str) -> weight_files.Weights:
        path = self._store.weights(name)
        if path.is_file():
            return weight_files.read(path)
        from kvd.profiling.calibration import train

        domain = self._tokens.settings.calibration
        self._told(f"training {name} on {domain}", 0, 0)
        most = max(self._work.texts.values())
        prompts = []
        for number in range(most, most + CALIBRATION_PROMPTS):
            try:
                ids = self._tokens.document(domain, number)
            except InvalidArgument:
                break
            prompts.append(list(ids[:CALIBRATION_TOKENS]))
        prompts = prompts or [list(self._tokens.document(domain, 0)[:CALIBRATION_TOKENS])]
        made = train(name, self._model, prompts, told=self._told)
        replace_file(path, weight_files.encode(made))
        return made
