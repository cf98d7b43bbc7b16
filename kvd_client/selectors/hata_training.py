"""Training of HATA's hash weights from the queries and keys of calibration texts; needs torch, minutes on one core.

For each layer and KV head, W (head dim x bits) begins as random hyperplanes and learns to rank. The student's scores,
t * |k| * (agreement of the codes), go through a softmax over the keys that a query may see, and cross-entropy pulls
that towards the teacher: half the true attention, half the uniform distribution over the query's best tenth of keys.
Attention alone would not care for the order of what lies behind the first few. Codes are signs in the forward pass;
backward the sign counts as a tanh whose typical argument is of order one. The scale t of each head is learned too, and
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvd_client.errors import InvalidArgument
from kvd_client.selectors.base import Training
from kvd_client.selectors.hata import HASH, WORD_BITS, projection

MIN_TOKENS = 32
"""Shorter texts teach nothing about choosing."""
_BEST = 0.1


class HashTraining(Training):
    """``bits`` a code; ``steps`` of gradient descent, each on ``queries`` queries and up to ``keys`` keys of one text;
    ``rate`` of Adam; ``seed`` of every choice."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        bits: int = 256,
        steps: int = 200,
        queries: int = 24,
        keys: int = 192,
        rate: float = 0.02,
        seed: int = 0,
    ) -> None:
        if bits < WORD_BITS or bits % WORD_BITS:
            raise InvalidArgument(f"codes of {bits} bits; give a multiple of {WORD_BITS}", bits=bits)
        if min(steps, queries, keys) < 1 or not rate > 0:
            raise InvalidArgument("steps, queries, keys and rate of the training must be above 0")
        self._form = layers, kv_heads, head_dim
        self._bits, self._steps, self._queries, self._keys = bits, steps, queries, keys
        self._rate, self._seed = rate, seed
        self._samples: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = [[] for _ in range(layers)]

    def add(self, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Keep some of a text: all layers the same tokens, so that they can learn at once."""
        tokens = queries.shape[1]
        if tokens < MIN_TOKENS:
            return
        generator = torch.Generator().manual_seed(self._seed + len(self._samples[layer]))
        # Queries of the later part, which have something to choose from; the newest key is always selected anyway.
        at = tokens // 4 + torch.randperm(tokens - tokens // 4, generator=generator)[: 4 * self._queries]
        heads = self._form[1]
        q = queries[:, at].detach().to("cpu", torch.float16).unflatten(0, (heads, -1))
        self._samples[layer].append((q, keys.detach().to("cpu", torch.float16), at))

    def finish(self, told: Callable[[int, int], None] | None = None) -> dict[str, npt.NDArray[np.float32]]:
        layers, heads, dim = self._form
        texts = min((len(each) for each in self._samples), default=0)
        if not texts:
            raise InvalidArgument(f"no calibration text has {MIN_TOKENS} tokens; give longer ones")
        start = torch.from_numpy(projection(dim, self._bits, self._seed))
        w = start.expand(layers, heads, -1, -1).clone().requires_grad_()
        scale = torch.zeros(layers, heads, 1, 1, 1, requires_grad=True)
        optimizer = torch.optim.Adam([{"params": [w], "lr": self._rate}, {"params": [scale], "lr": 0.05}])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self._steps)
        generator = torch.Generator().manual_seed(self._seed)
        for step in range(self._steps):
            if told is not None:
                told(step, self._steps)
            q, k, seen = self._batch(step % texts, generator)
            optimizer.zero_grad(set_to_none=True)
            loss = _loss(q, k, seen, w, scale)
            loss.backward()
            optimizer.step()
            schedule.step()
        return {HASH: w.detach().numpy()}

    def _batch(self, text: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (layers, KV heads, G, queries, d), keys (layers, KV heads, keys, d), and which a query sees."""
        samples = [each[text] for each in self._samples]
        at, tokens = samples[0][2], samples[0][1].shape[1]
        some = torch.randperm(len(at), generator=generator)[: self._queries]
        which = torch.randperm(tokens, generator=generator)[: self._keys]
        which[0] = 0  # which every query sees
        q = torch.stack([q[:, :, some] for q, _, _ in samples]).float()
        k = torch.stack([k[:, which] for _, k, _ in samples]).float()
        return q, k, which <= at[some, None]


class _Sign(torch.autograd.Function):  # type: ignore[misc]
    """The sign forward; backward as if it were tanh."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (1 - torch.tanh(x) ** 2)


def _codes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    product = x @ w
    with torch.no_grad():
        typical = product.abs().mean((-2, -1), keepdim=True).clamp(min=1e-6)
    signs: torch.Tensor = _Sign.apply(product / typical)
    return signs


def _loss(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    layers, heads, group, _, dim = q.shape
    flat = q.flatten(2, 3)
    hidden = ~seen.repeat(group, 1)  # (G * queries, keys)
    with torch.no_grad():
        logits = (flat @ k.transpose(-1, -2) / dim**0.5).masked_fill(hidden, -torch.inf)
        attention = logits.softmax(-1)
        best = (seen.sum(1) * _BEST).ceil().long().clamp(min=1).repeat(group)
        ranked = logits.sort(-1, descending=True).values
        least = ranked.gather(-1, (best - 1).expand(layers, heads, -1)[..., None])
        chosen = (logits >= least).float()
        teacher = (attention + chosen / chosen.sum(-1, keepdim=True)) / 2
        length = k.norm(dim=-1)[:, :, None]
        # What a score of 1 is worth at the start: the length of typical queries.
        worth = flat.norm(dim=-1).mean(-1)[..., None, None] / dim**0.5
    agreement = _codes(flat, w) @ _codes(k, w).transpose(-1, -2) / w.shape[-1]
    student = (scale.squeeze(-1).exp() * worth * length * agreement).masked_fill(hidden, -torch.inf)
    return -(teacher * student.log_softmax(-1).masked_fill(hidden, 0)).sum(-1).mean() * layers * heads
