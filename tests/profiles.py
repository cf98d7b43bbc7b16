"""Profiles for tests."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvd.importance.matrix import ImportanceMatrix
from kvd.profiling.profile import Profile, ProfileGroup
from kvd.profiling.timing import Times
from kvd_client.spec import KVSpec

SPEC = KVSpec(layers=4, kv_heads=3, entry_bytes=256, dtype="float16", model="org/model", revision="abc")
CREATED = datetime.datetime(2025, 3, 4, 5, 6, 7, tzinfo=datetime.UTC)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
parameters = st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.floats(-1e15, 1e15) | texts


def matrix(seed: int = 0, *, layers: int = 4, blocks: int = 10) -> ImportanceMatrix:
    return ImportanceMatrix(np.random.default_rng(seed).random((layers, blocks)))


def profile(**fields: Any) -> Profile:
    """A profile of ``SPEC`` with two groups, some fields as given."""
    return Profile(
        **{
            "model": SPEC.model,
            "revision": SPEC.revision,
            "layers": SPEC.layers,
            "kv_heads": SPEC.kv_heads,
            "entry_bytes": SPEC.entry_bytes,
            "selector": "quest",
            "parameters": {"share": 0.1, "page": 16},
            "groups": (
                ProfileGroup(512, 1024, matrix(1), 12, 300),
                ProfileGroup(1024, 2048, matrix(2), 4, 99),
            ),
            "prefill": Times((512, 1024, 2048), (0.1, 0.2, 0.5)),
            "transfer": Times((512, 1024, 2048), (0.7, 1.4, 2.8)),
            "link_rate": 25_000_000,
            "created": CREATED,
            "notes": "texts of five domains",
        }
        | fields
    )


@st.composite
def times(draw: st.DrawFn) -> Times:
    points = draw(st.lists(st.tuples(st.integers(1, 1 << 24), st.floats(0, 1e6)), max_size=5))
    return Times(tuple(tokens for tokens, _ in points), tuple(seconds for _, seconds in points))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    layers, blocks = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    edges = sorted(draw(st.sets(st.integers(1, 1 << 20), min_size=2, max_size=4)))
    cells = arrays.arrays(np.float32, (layers, blocks), elements=st.floats(0, 1, width=32))
    counts = st.integers(0, 1 << 53)
    return Profile(
        model=draw(texts.filter(bool)),
        revision=draw(texts),
        layers=layers,
        kv_heads=draw(st.integers(1, 8)),
        entry_bytes=draw(st.integers(1, 1 << 20)),
        selector=draw(texts.filter(bool)),
        parameters=draw(st.dictionaries(texts.filter(bool), parameters, max_size=3)),
        groups=tuple(
            ProfileGroup(low, high, ImportanceMatrix(draw(cells)), draw(counts), draw(counts))
            for low, high in itertools.pairwise(edges)
        ),
        prefill=draw(times()),
        transfer=draw(times()),
        link_rate=draw(st.integers(0, 1 << 50)),
        created=draw(st.datetimes(timezones=st.just(datetime.UTC))),
        notes=draw(texts),
    )


def plain(of: Profile) -> dict[str, Any]:
    """Every field as a value that == compares."""
    names = [name for name in Profile.__dataclass_fields__ if name not in ("groups", "parameters")]
    return {name: getattr(of, name) for name in names} | {
        "parameters": [(name, type(value), value) for name, value in sorted(of.parameters.items())],
        "groups": [
            (group.low, group.high, group.samples, group.steps, group.matrix.values.tolist()) for group in of.groups
        ],
    }
