"""KV selection algorithms against their formulas, written out in NumPy with 64-bit floats."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvd_client import selectors  # noqa: E402
from kvd_client.errors import InvalidArgument  # noqa: E402
from kvd_client.selectors import GROUP, Chunk, Selector, Shape, create, names, parse, top_k  # noqa: E402
from kvd_client.selectors.hata import Hata, projection  # noqa: E402

LENGTHS = (41, 16, 3)
LAYER = 2
GROUPS = {"mha": (3, 1), "gqa": (2, 3)}
SCORING: list[tuple[str, dict[str, Any]]] = [
    ("quest", {}),
    ("quest", {"reduce": "max"}),
    ("quest", {"page": 5}),
    ("hata", {"bits": 128}),
    ("hata", {"bits": 256, "seed": 3}),
    ("hata", {"reduce": "sum"}),
    ("exact", {}),
    ("exact", {"reduce": "max"}),
    ("exact", {"reduce": "softmax"}),
]


class Scene:
    """Random keys and a query, and a selector's arrays over them."""

    def __init__(
        self, selector: Selector, form: str, *, dtype: Any = torch.float32, chunk: int = 41, dim: int = 16
    ) -> None:
        heads, g = GROUPS[form]
        generator = torch.Generator().manual_seed(5)
        self.selector = selector
        self.shape = Shape(LENGTHS, heads, dim, str(dtype).removeprefix("torch."))
        self.keys = torch.randn((len(LENGTHS), heads, max(LENGTHS), dim), generator=generator).to(dtype)
        for row, length in enumerate(LENGTHS):
            self.keys[row, :, length:] = float("nan")  # padding
        self.query = torch.randn((len(LENGTHS), heads * g, 1, dim), generator=generator).to(dtype)
        self.arrays = {
            array.name: np.full(array.layer_bytes, 0xFF, np.uint8) for array in selector.metadata(self.shape)
        }
        self.queries = torch.randn((len(LENGTHS), heads * g, max(LENGTHS), dim), generator=generator).to(dtype)
        self.scratch: dict[str, Any] = {}
        for start in range(0, max(LENGTHS), chunk):
            stop = min(start + chunk, max(LENGTHS))
            part = Chunk(LAYER, start, self.keys[:, :, :stop], self.queries[:, :, start:stop], self.scratch)
            selector.summarize(self.shape, part, self.arrays)

    def select(self, k: list[int], layer: int = LAYER, step: int = 1) -> Any:
        return self.selector.select(self.shape, self.query, self.arrays, k, layer=layer, step=step)

    def formula(self) -> Any:
        """Scores float64 (rows, heads, tokens); NaN beyond a row's length."""
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        keys = self.keys.double().numpy()
        query = self.query.double().numpy().reshape(len(LENGTHS), heads, -1, dim)
        scores = np.full(keys.shape[:3], np.nan)
        for row, length in enumerate(LENGTHS):
            for head in range(heads):
                for token in range(length):
                    scores[row, head, token] = self._one(keys[row, head, :length], query[row, head], token)
        return scores

    def _one(self, keys: Any, queries: Any, token: int) -> float:
        s: Any = self.selector
        if s.name == "exact":
            each = queries @ keys[token] / np.sqrt(keys.shape[1])
            if s.reduce == "softmax":
                every = np.exp(queries @ keys.T / np.sqrt(keys.shape[1]))
                return float((np.exp(each) / every.sum(1)).sum())
            return float(each.sum() if s.reduce == "sum" else each.max())
        if s.name == "quest":
            page = keys[token // s.page * s.page :][: s.page].astype(np.float16).astype(np.float64)
            each = np.maximum(queries * page.min(0), queries * page.max(0)).sum(1)
            return float(each.sum() if s.reduce == "sum" else each.max())
        w = np.random.RandomState(s.seed).standard_normal((keys.shape[1], s.bits)).astype(np.float32).astype(np.float64)
        agree = 1 - 2 * ((queries @ w > 0)[:, None] != (keys @ w > 0)).sum(2) / s.bits
        each = agree * np.linalg.norm(keys.astype(np.float64), axis=1)
        if s.reduce == "sum":
            return float(each[:, token].sum())
        every = np.exp(each * np.linalg.norm(queries, axis=1)[:, None] / np.sqrt(keys.shape[1]))
        return float((every[:, token] / every.sum(1)).sum())


@pytest.mark.parametrize("form", GROUPS)
@pytest.mark.parametrize(("name", "parameters"), SCORING)
def test_scores_are_the_formulas(name: str, parameters: dict[str, Any], form: str) -> None:
    selector: Any = create(name, **parameters)
    scene = Scene(selector, form)
    scores = selector.scores(scene.shape, scene.query, scene.arrays, layer=LAYER)[:, :, 0]
    expected = scene.formula()
    there = ~np.isnan(expected)
    assert scores.dtype == np.float32
    assert scores.shape == expected.shape
    np.testing.assert_allclose(scores[there], expected[there], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("form", GROUPS)
@pytest.mark.parametrize(("name", "parameters"), SCORING)
def test_the_best_tokens_are_selected(name: str, parameters: dict[str, Any], form: str) -> None:
    scene = Scene(create(name, **parameters), form)
    expected, k = scene.formula(), [9, 16, 2]
    index = scene.select(k).reshape(len(LENGTHS), -1, 16)
    for row, length in enumerate(LENGTHS):
        for head in range(scene.shape.kv_heads):
            mine = index[row, head, : k[row]]
            assert (index[row, head, k[row] :] == -1).all()
            assert (np.diff(mine) > 0).all()
            assert mine[-1] == length - 1, "the newest token"
            scores = expected[row, head, :length]
            best = np.sort(scores[:-1])[::-1][: k[row] - 1]
            np.testing.assert_allclose(np.sort(scores[mine[:-1]])[::-1], best, rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize("name", ["quest", "hata", "exact", "infinigen"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 32])
def test_chunks_make_the_same_metadata_and_padding_none(name: str, chunk: int) -> None:
    whole, parts = Scene(create(name), "gqa"), Scene(create(name), "gqa", chunk=chunk)
    assert np.array_equal(whole.select([20, 8, 3]), parts.select([20, 8, 3]))
    for array in whole.arrays:
        for row, length in enumerate(LENGTHS):
            mine, its = (scene.arrays[array].reshape(len(LENGTHS), 2, -1)[row] for scene in (whole, parts))
            used = -(-length // 16) * 2 * 16 * 2 if name == "quest" else mine.shape[1] * length // max(LENGTHS)
            if array in ("infinigen.columns", "infinigen.steps"):
                used = mine.shape[1]
            np.testing.assert_array_equal(mine[:, :used], its[:, :used])
            assert (mine[:, used:] == 0xFF).all(), "nothing is written for padding"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["quest", "hata", "exact"])
def test_keys_of_half_precision(name: str, dtype: Any) -> None:
    selector: Any = create(name)
    scene = Scene(selector, "gqa", dtype=dtype)
    scores, expected = selector.scores(scene.shape, scene.query, scene.arrays, layer=LAYER)[:, :, 0], scene.formula()
    there = ~np.isnan(expected)
    np.testing.assert_allclose(scores[there], expected[there], rtol=2e-3, atol=2e-3)


def test_keys_beyond_the_range_of_half_precision_give_finite_scores() -> None:
    for name in ("quest", "hata"):
        selector: Any = create(name)
        shape = Shape((4,), 1, 64, "bfloat16")
        keys = torch.full((1, 1, 4, 64), 1e30, dtype=torch.bfloat16)
        arrays = {array.name: np.zeros(array.layer_bytes, np.uint8) for array in selector.metadata(shape)}
        selector.summarize(shape, Chunk(LAYER, 0, keys, None, {}), arrays)
        assert np.isfinite(selector.scores(shape, torch.ones((1, 1, 1, 64)), arrays, layer=LAYER)).all()


@pytest.mark.parametrize(("name", "share"), [("quest", 1 / 16), ("hata", 0.1328125), ("infinigen", 0.1484375)])
def test_metadata_takes_the_share_of_an_fp16_cache_that_the_table_says(name: str, share: float) -> None:
    shape = Shape((1024,), 3, 64, "float16")
    arrays = create(name).metadata(shape)
    by_token = sum(array.layer_bytes for array in arrays if array.layer_bytes > 1024)
    assert by_token / (1024 * 3 * 64 * 2 * 2) == share


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_top_k_against_sorting(data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    k = [data.draw(st.integers(1, length)) for length in lengths]
    heads = data.draw(st.integers(1, 2))
    values = st.sampled_from([0.0, 1.0, -1.0, 2.5, np.nan, np.inf, -np.inf])
    flat = data.draw(st.lists(values, min_size=len(lengths) * heads * 20, max_size=len(lengths) * heads * 20))
    scores = np.array(flat, np.float32).reshape(len(lengths), heads, 20)
    index = top_k(scores, lengths, k)
    assert index.dtype == np.int32
    assert index.shape == (len(lengths) * heads, max(k))
    for i, mine in enumerate(index):
        row, head = divmod(i, heads)
        value = [-np.inf if np.isnan(v) else v for v in scores[row, head, : lengths[row]]]
        order = sorted(range(lengths[row] - 1), key=lambda t: (-value[t], t))
        expected = sorted([*order[: k[row] - 1], lengths[row] - 1])
        assert mine.tolist() == expected + [-1] * (max(k) - k[row])


MANY = [*SCORING, ("infinigen", {}), ("infinigen", {"alpha": 1.0}), ("random", {}), ("streaming", {})]


@pytest.mark.parametrize("form", GROUPS)
@pytest.mark.parametrize(("name", "parameters"), MANY)
def test_many_queries_at_once_are_many_selections(name: str, parameters: dict[str, Any], form: str) -> None:
    scene = Scene(create(name, **parameters), form)
    k, steps = [9, 16, 2], [3, 1, 7, 1]
    queries = scene.queries[:, :, [5, 0, 2, 1]].nan_to_num()
    together = scene.selector.select_many(scene.shape, queries, scene.arrays, k, layer=LAYER, steps=steps)
    assert len(together) == 4
    for i, (step, found) in enumerate(zip(steps, together, strict=True)):
        one = scene.selector.select(scene.shape, queries[:, :, i : i + 1], scene.arrays, k, layer=LAYER, step=step)
        assert found.dtype == np.int32
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, one)  # no two of these scores are as near as rounding
    for wrong in ([42, 1, 1], [0, 1, 1], [1, 1]):
        with pytest.raises(InvalidArgument):
            scene.selector.select_many(scene.shape, queries, scene.arrays, wrong, layer=LAYER, steps=steps)


@pytest.mark.parametrize("name", ["exact", "hata", "quest", "random", "streaming"])
def test_everything_can_be_selected_and_more_can_not(name: str) -> None:
    scene = Scene(create(name), "gqa")
    index = scene.select(list(LENGTHS)).reshape(3, 2, 41)
    for row, length in enumerate(LENGTHS):
        assert (index[row, :, :length] == np.arange(length)).all()
        assert (index[row, :, length:] == -1).all()
    one = scene.select([1, 1, 1])
    assert one[:, 0].tolist() == [40, 40, 15, 15, 2, 2]
    for k in ([42, 1, 1], [0, 1, 1], [1, 1]):
        with pytest.raises(InvalidArgument):
            scene.select(k)


def test_streaming_takes_the_first_and_the_newest() -> None:
    scene = Scene(create("streaming"), "mha")
    index = scene.select([8, 6, 2]).reshape(3, 3, 8)
    assert (index[0] == [0, 1, 2, 3, 37, 38, 39, 40]).all()
    assert (index[1] == [0, 1, 2, 3, 14, 15, -1, -1]).all()
    assert (index[2] == [0, 2, -1, -1, -1, -1, -1, -1]).all()
    assert scene.arrays == {}


def test_random_differs_by_layer_step_and_seed_and_is_the_same_otherwise() -> None:
    scene = Scene(create("random", seed=1), "gqa")
    k = [10, 5, 2]
    once = scene.select(k, layer=3, step=4)
    assert np.array_equal(once, scene.select(k, layer=3, step=4))
    others = [scene.select(k, layer=2, step=4), scene.select(k, layer=3, step=5)]
    others.append(Scene(create("random", seed=2), "gqa").select(k, layer=3, step=4))
    assert not any(np.array_equal(once, other) for other in others)
    rest = np.concatenate([scene.select([10, 1, 1], step=step)[:2, :9].ravel() for step in range(200)])
    counts = np.bincount(rest, minlength=40)
    assert counts.min() > 50, "each token but the newest has its turn: 90 on average"
    assert counts.max() < 140


def test_hashes_are_the_same_in_every_process() -> None:
    w = projection(2, 64, 0)
    assert w.dtype == np.float32
    np.testing.assert_allclose(w[0, :3], [1.764052345967664, 0.4001572083672233, 0.9787379841057392], rtol=1e-6)


def test_the_registry_knows_its_own_and_what_packages_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    own = names()
    assert own == ["exact", "hata", "infinigen", "quest", "random", "streaming"]
    assert create("hata", bits=128).parameters == {"bits": 128, "seed": 0, "reduce": "softmax"}
    assert create("quest").parameters == {"page": 16, "reduce": "sum"}
    assert [name for name in names() if not create(name).deployable] == ["exact"]
    with pytest.raises(InvalidArgument, match="no selector 'ours'"):
        create("ours")
    entries = [
        EntryPoint("ours", "kvd_client.selectors.hata:Hata", GROUP),
        EntryPoint("bad", "kvd_client.selectors.hata:projection", GROUP),
        EntryPoint("gone", "kvd_client.selectors.nowhere:Selector", GROUP),
        EntryPoint("torn", "kvd_client.selectors.hata:Torn", GROUP),
        EntryPoint("part", "kvd_client.selectors.base:ScoringSelector", GROUP),
    ]

    def found(*, group: str, name: str | None = None) -> list[EntryPoint]:
        return [entry for entry in entries if entry.group == group and name in (None, entry.name)]

    monkeypatch.setattr(selectors, "entry_points", found)
    assert set(names()) == {entry.name for entry in entries} | set(own)
    assert create("ours", bits=64) == Hata(bits=64)
    for name, said in (
        ("bad", "is no Selector class; update"),
        ("gone", "ModuleNotFoundError: No module named 'kvd_client.selectors.nowhere'; update"),
        ("torn", "AttributeError: .*'Torn'; update"),
        ("part", "lacks scores; update"),
    ):
        with pytest.raises(InvalidArgument, match=rf"selector '{name}'.* {said}") as raised:
            create(name)
        assert "\n" not in raised.value.message


def test_selectors_are_written_with_parameters() -> None:
    assert parse("hata:bits=128,ahead=true") == create("hata", bits=128, ahead=True)
    assert parse("quest") == create("quest")
    assert parse("infinigen:columns=0.25,ahead=no") == create("infinigen", columns=0.25, ahead=False)
    assert parse("quest:reduce=max").parameters == {"page": 16, "reduce": "max"}
    ahead = parse("quest:ahead=1").parameters
    assert (ahead["ahead"], ahead["query"]) == (True, "residual")
    assert parse("infinigen:query=input").parameters["query"] == "input"
    assert not {"ahead", "query"} & set(parse("infinigen:ahead=no").parameters)
    for text, said in (
        ("ours", "no selector 'ours'"),
        ("hata:size=1", "no parameter of selector 'hata'; it has bits, seed"),
        ("hata:bits", "no parameter"),
        ("hata:bits=many", "bits=many of selector 'hata' is no int; the default is 0"),
        ("hata:ahead=perhaps", "is no bool"),
        ("hata:weights=x", "no parameter"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            parse(text)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("quest", {"page": 0}),
        ("quest", {"reduce": "mean"}),
        ("exact", {"reduce": ""}),
        ("quest", {"reduce": "softmax"}),
        ("hata", {"reduce": "max"}),
        ("hata", {"bits": 100}),
        ("hata", {"bits": -64}),
        ("infinigen", {"columns": 0.0}),
        ("infinigen", {"columns": 1.1}),
        ("infinigen", {"alpha": -1.0}),
        ("infinigen", {"alpha": float("nan")}),
        ("infinigen", {"query": "output"}),
        ("infinigen", {"sinks": -1}),
        ("streaming", {"sinks": -1}),
        ("quest", {"pages": 16}),
    ],
)
def test_parameters_that_make_no_sense(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        create(name, **parameters)


def test_torch_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys; from kvd_client.selectors import create, Shape;"
        "create('hata').metadata(Shape((5,), 2, 64, 'float16')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
