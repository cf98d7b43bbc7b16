"""One prompt with one selection: how far the next tokens' distribution moves, and which hidden facts are found.

Needs torch; nothing that a daemon imports imports this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from kvd.profiling.evaluate.plan import Hidden, Question, Settings
from kvd.profiling.evaluate.store import replacing
from kvd.profiling.recorded import Recorded, pack
from kvd_client.engines.forced import LayerState, PromptState, asked, forced, prompt_state, summaries
from kvd_client.engines.prompt import AHEAD
from kvd_client.selectors.base import Index, Selector


def kept_state(model: Any, prompt: Sequence[int], path: Path) -> PromptState:
    """The prefill of a prompt, from its file if that is of this prompt, computed and kept there otherwise.

    K, V and queries are kept in half precision, as a served cache would be; so all runs see the same numbers.
    """
    if path.is_file():
        found = _loaded(path)
        if found is not None and found.tokens == tuple(prompt):
            return found
    state = prompt_state(model, prompt).to(torch.half)
    tensors = {"tokens": torch.tensor(state.tokens, dtype=torch.int64)}
    for number, layer in enumerate(state.layers):
        for name in ("queries", "keys", "values"):
            tensors[f"{number}.{name}"] = getattr(layer, name).contiguous()
    with replacing(path) as partial:
        safetensors.torch.save_file(tensors, partial)
    return state


def _loaded(path: Path) -> PromptState | None:
    try:
        return _state(safetensors.torch.load_file(path))
    except (safetensors.SafetensorError, KeyError, OSError):
        return None  # it can be made again


def _state(tensors: dict[str, torch.Tensor]) -> PromptState:
    count = sum(name.endswith(".keys") for name in tensors)
    layers = tuple(
        LayerState(*(tensors[f"{number}.{name}"] for name in ("queries", "keys", "values"))) for number in range(count)
    )
    return PromptState(tuple(tensors["tokens"].tolist()), layers)


class TextRuns:
    """The tokens behind one prompt, run with any number of selections and compared with the full cache."""

    def __init__(self, model: Any, state: PromptState, behind: Sequence[int]) -> None:
        self._model, self._state = model, state
        self._given, self._targets = list(behind[:-1]), torch.tensor(behind[1:])
        self._full: torch.Tensor | None = None

    def run(
        self, selector: Selector | None, share: float, *, record: Settings | None = None, name: str = ""
    ) -> tuple[dict[str, Any], Recorded | None]:
        """What one selection makes of them, per step: ``nll`` (nats), ``kl`` (of the full cache's distribution to this
        one, nats) and ``same`` (whether the likeliest token is the full cache's); and ``selected``, the share of the
        prompt that was. With ``record``, also what the steps and the prompt's last queries selected.
        """
        if self._full is None:
            self._full = log_probabilities(forced(self._model, self._state, self._given, None).logits)
        if selector is None:
            return self._values(self._full, 1.0), None
        state, steps = self._state, len(self._given)
        metadata = summaries(self._model, state, selector)
        heads = state.layers[0].keys.shape[0]
        mask = np.zeros((len(state.layers), steps, heads, state.length), bool) if record is not None else None

        def on_select(layer: int, step: int, index: Index) -> None:
            if mask is not None:
                _mark(mask[layer, step - 1], index)

        made = forced(self._model, state, self._given, selector, share=share, metadata=metadata, on_select=on_select)
        values = self._values(log_probabilities(made.logits), made.share)
        if mask is None or record is None:
            return values, None
        recorded = Recorded(
            name=name,
            selector=selector.name,
            parameters=selector.parameters,
            model=str(self._model.config.model_type),
            share=share,
            query_share=record.query_share,
            length=state.length,
            steps=pack(mask),
            queries=pack(self._queries(selector, metadata)),
            asked_ahead=AHEAD,
        )
        return values, recorded

    def asked_anew(self, selector: Selector, recorded: Recorded) -> Recorded:
        """A recording of this prompt whose queries were asked in another way, with those that are asked now."""
        metadata = summaries(self._model, self._state, selector)
        return dataclasses.replace(recorded, queries=pack(self._queries(selector, metadata)), asked_ahead=AHEAD)

    def _values(self, found: torch.Tensor, share: float) -> dict[str, Any]:
        assert self._full is not None
        return {
            "nll": _numbers(-found.gather(1, self._targets[:, None])[:, 0]),
            "kl": _numbers(divergence(self._full, found)),
            "same": [bool(one) for one in found.argmax(1) == self._full.argmax(1)],
            "selected": round(share, 5),
        }

    def _queries(self, selector: Selector, metadata: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """What the prompt's last queries select as prefill asks them: bool (layers, queries, KV heads, tokens)."""
        state = self._state
        found = asked(self._model, state, selector, metadata=metadata)
        count = max(map(len, found.values()), default=0)
        mask = np.zeros((len(state.layers), count, state.layers[0].keys.shape[0], state.length), bool)
        for layer, indices in found.items():
            for number, index in enumerate(indices):
                _mark(mask[layer, number], index)
        return mask


class Finder:
    """Facts hidden in one document, looked for with any number of selections."""

    def __init__(self, model: Any, document: PromptState, hidden: Hidden) -> None:
        self._model, self._document, self._hidden = model, document, hidden
        self._asked: list[tuple[Question, PromptState]] = []

    def run(self, selector: Selector | None, share: float) -> dict[str, Any]:
        """Whether the numbers are found, by depth: ``one``, each asked for by itself, and ``all``, all of them in one
        answer; ``selected`` as in :meth:`TextRuns.run`.

        A number counts as found if each of its tokens is the likeliest one, given what stands before it.
        """
        found: list[list[bool]] = []
        shares = []
        for question, state in self._states():
            # The last token's logits are the step behind it, which nobody needs.
            made = forced(self._model, state, question.answer[:-1], selector, share=share)
            likeliest = made.logits.argmax(1).tolist()
            found.append(
                [likeliest[start - 1 : stop - 1] == question.answer[start:stop] for start, stop in question.numbers]
            )
            shares.append(made.share if selector is not None else 1.0)
        return {
            "one": [one for (one,) in found[:-1]],
            "all": found[-1],
            "selected": round(sum(shares) / len(shares), 5),
        }

    def _states(self) -> list[tuple[Question, PromptState]]:
        """The document with each question behind it, computed once: a question sees all of the prompt, as prefill
        does."""
        if not self._asked:
            self._asked = [
                (
                    one,
                    prompt_state(self._model, [*self._hidden.tokens, *one.tokens], known=self._document).to(torch.half),
                )
                for one in self._hidden.all()
            ]
        return self._asked


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """float64 (steps, vocabulary)."""
    return torch.log_softmax(logits.double(), -1)


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of each row of log probabilities, in nats: the sum of p (log p - log q)."""
    return (full.exp() * (full - other)).sum(1).clamp(min=0.0)


def _mark(mask: np.ndarray[Any, np.dtype[np.bool_]], index: Index) -> None:
    """Set what an index of one row, (KV heads, k), names in (KV heads, tokens)."""
    for head, tokens in enumerate(index):
        mask[head, tokens[tokens >= 0]] = True


def _numbers(values: torch.Tensor) -> list[float]:
    return [round(float(value), 6) for value in values]
