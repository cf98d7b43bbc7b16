"""Selectors that are trained: their formulas in 64-bit floats, their training, and the files of their weights."""

from __future__ import annotations

import dataclasses
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

torch = pytest.importorskip("torch")

from kvd_client.errors import FingerprintMismatch, InvalidArgument, InvalidProfile  # noqa: E402
from kvd_client.selectors import Chunk, Shape, create, kind_of  # noqa: E402
from kvd_client.selectors.weights import Weights, decode, encode, read  # noqa: E402
from kvd_client.spec import KVSpec  # noqa: E402

LENGTHS, DIM, LAYERS, LAYER = (61, 40, 3), 16, 4, 2
FORMS = {"mha": (3, 1), "gqa": (2, 3)}
"""KV heads, and query heads of each."""


def weights_of(selector: str, heads: int, arrays: dict[str, Any] | None = None, **changes: Any) -> Weights:
    rng = np.random.default_rng(heads)
    if arrays is None and selector == "infinigen":
        arrays = {"skew": np.linalg.qr(rng.standard_normal((LAYERS, heads, DIM, DIM)))[0].astype(np.float32)}
    if arrays is None:
        arrays = {"hash": rng.standard_normal((LAYERS, heads, DIM, 128)).astype(np.float32)}
    made: dict[str, Any] = {
        "selector": selector,
        "model": "m",
        "layers": LAYERS,
        "kv_heads": heads,
        "head_dim": DIM,
        "arrays": arrays,
        "created": datetime(2026, 1, 2, tzinfo=UTC),
    }
    return Weights(**made | changes)


class Scene:
    """Random queries and keys of one layer, some dimensions much larger than others, summarized in chunks."""

    def __init__(self, selector: Any, form: str, *, chunk: int = 17) -> None:
        heads, g = FORMS[form]
        generator = torch.Generator().manual_seed(heads)
        self.selector, self.shape = selector, Shape(LENGTHS, heads, DIM, "float32")
        stretch = 3 * torch.rand(DIM, generator=generator) ** 4
        self.keys = torch.randn((3, heads, 61, DIM), generator=generator)
        self.prompt = torch.randn((3, heads * g, 61, DIM), generator=generator) * stretch
        self.query = 2 * torch.randn((3, heads * g, 1, DIM), generator=generator) * stretch
        for row, length in enumerate(LENGTHS):
            self.keys[row, :, length:] = self.prompt[row, :, length:] = float("nan")
        specs = selector.metadata(self.shape)
        self.arrays = {array.name: np.full(array.layer_bytes, 0xFF, np.uint8) for array in specs}
        scratch: dict[str, Any] = {}
        for start in range(0, 61, chunk):
            stop = min(start + chunk, 61)
            part = Chunk(LAYER, start, self.keys[:, :, :stop], self.prompt[:, :, start:stop], scratch)
            selector.summarize(self.shape, part, self.arrays)

    def numbers(self, row: int, head: int) -> tuple[Any, Any, Any]:
        """Query (G, d), the prompt's queries (G, tokens, d) and keys (tokens, d) of a row and KV head, in float64."""
        g, length = self.query.shape[1] // self.shape.kv_heads, LENGTHS[row]
        mine = slice(head * g, (head + 1) * g)
        return (
            self.query[row, mine, 0].double().numpy(),
            self.prompt[row, mine, :length].double().numpy(),
            self.keys[row, head, :length].double().numpy(),
        )


def infinigen_by_formula(scene: Scene, row: int) -> tuple[list[Any], float]:
    """Scores of each head, and the mean number of entries within alpha of the best behind the sinks."""
    s, found, counts = scene.selector, [], []
    for head in range(scene.shape.kv_heads):
        query, prompt, keys = scene.numbers(row, head)
        a = np.eye(DIM) if s.weights is None else s.weights.arrays["skew"][LAYER, head].astype(np.float64)
        importance = np.abs(prompt @ a).sum((0, 1))
        columns = np.argsort(-importance)[: int(s.columns * DIM)]
        partial = (keys @ a)[:, columns]
        step = np.ptp(partial, axis=0) / 255
        partial = np.round((partial - partial.min(0)) / np.where(step > 0, step, 1)) * step  # the least adds nothing
        each = (query @ a)[:, columns] @ partial.T / np.sqrt(DIM)
        behind = each[:, s.sinks :] if s.sinks < each.shape[1] else each
        alpha = s.alpha or np.log(LENGTHS[row])
        counts += [int((one > best.max() - alpha).sum()) for one, best in zip(each, behind, strict=True)]
        power = np.exp(each - each.max(1, keepdims=True))
        found.append((power / power.sum(1, keepdims=True)).sum(0))
    return found, float(np.mean(counts))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    "parameters", [{}, {"sinks": 0}, {"alpha": 0.7, "columns": 0.5}, {"alpha": 0.7, "sinks": 0}, {"alpha": 100.0}]
)
def test_infinigen_is_its_formula(form: str, trained: bool, parameters: dict[str, Any]) -> None:
    selector = create("infinigen", weights=weights_of("infinigen", FORMS[form][0]) if trained else None, **parameters)
    scene = Scene(selector, form)
    most = [30, 20, 2]
    index = selector.select(scene.shape, scene.query, scene.arrays, most, layer=LAYER, step=1)
    index = index.reshape(3, scene.shape.kv_heads, -1)
    for row, length in enumerate(LENGTHS):
        scores, count = infinigen_by_formula(scene, row)
        k = max(1, min(int(count), most[row]))
        for head in range(scene.shape.kv_heads):
            mine = index[row, head]
            assert (mine[k:] == -1).all()
            assert (np.diff(mine[:k]) > 0).all()
            assert mine[k - 1] == length - 1, "the newest token"
            best = np.sort(scores[head][:-1])[::-1][: k - 1]
            np.testing.assert_allclose(np.sort(scores[head][mine[: k - 1]])[::-1], best, rtol=1e-3, atol=1e-6)
    if parameters.get("alpha") == 100.0:
        assert index.shape[2] == 30, "the cap"
    elif "columns" in parameters:
        assert index.shape[2] < 30, "fewer than the cap where few scores are near the best"


def test_an_attention_sink_does_not_hide_the_rest() -> None:
    shape, counts = Shape((50,), 1, DIM, "float32"), {}
    keys = 0.1 * torch.randn((1, 1, 50, DIM), generator=torch.Generator().manual_seed(2))
    keys[0, 0, 0] = 10.0  # far above all others for this query
    query = torch.ones(1, 1, 1, DIM)
    for sinks in (0, 1, 4):
        selector = create("infinigen", columns=1.0, sinks=sinks)
        arrays = {a.name: np.zeros(a.layer_bytes, np.uint8) for a in selector.metadata(shape)}
        selector.summarize(shape, Chunk(LAYER, 0, keys, None, {}), arrays)
        index = selector.select(shape, query, arrays, [20], layer=LAYER, step=1)
        counts[sinks] = index.shape[1]
        assert 0 in index or index.shape[1] == 1
    assert counts == {0: 1, 1: 20, 4: 20}


def test_infinigen_selects_the_same_of_a_row_whatever_the_others_are() -> None:
    selector = create("infinigen", alpha=1.0)
    scene = Scene(selector, "gqa")
    together = selector.select(scene.shape, scene.query, scene.arrays, [30, 20, 3], layer=LAYER, step=1).reshape(
        3, 2, -1
    )
    for row, length in enumerate(LENGTHS):
        shape = Shape((length,), 2, DIM, "float32")
        arrays = {a.name: np.zeros(a.layer_bytes, np.uint8) for a in selector.metadata(shape)}
        keys, prompt = scene.keys[row : row + 1, :, :length], scene.prompt[row : row + 1, :, :length]
        selector.summarize(shape, Chunk(LAYER, 0, keys, prompt, {}), arrays)
        alone = selector.select(shape, scene.query[row : row + 1], arrays, [(30, 20, 3)[row]], layer=LAYER, step=1)
        width = alone.shape[1]
        assert (together[row, :, :width] == alone).all()
        assert (together[row, :, width:] == -1).all()


def test_infinigen_chooses_columns_by_the_queries_that_it_was_given() -> None:
    """A cached prefix has keys, and no queries that anybody computed for this request."""
    selector = create("infinigen", columns=0.2)
    shape = Shape((30,), 1, DIM, "float32")
    keys, queries = torch.randn(1, 1, 30, DIM), torch.zeros(1, 2, 5, DIM)
    queries[..., [3, 7, 12]] = torch.tensor([1.0, -2.0, 0.5])
    arrays = {a.name: np.zeros(a.layer_bytes, np.uint8) for a in selector.metadata(shape)}
    scratch: dict[str, Any] = {}
    selector.summarize(shape, Chunk(LAYER, 0, keys[:, :, :25], None, scratch), arrays)
    assert not any(array.any() for array in arrays.values()), "not before the queries are there"
    selector.summarize(shape, Chunk(LAYER, 25, keys, queries, scratch), arrays)
    assert arrays["infinigen.columns"].view(np.uint16).tolist() == [3, 7, 12]
    expected = keys[0, 0][:, [3, 7, 12]].numpy()
    steps, codes = arrays["infinigen.steps"].view(np.float32), arrays["infinigen.keys"].reshape(30, 3)
    np.testing.assert_allclose(steps, np.ptp(expected, axis=0) / 255, rtol=1e-6)
    assert (codes.min(0) == 0).all()
    assert (codes.max(0) == 255).all()
    np.testing.assert_allclose(codes * steps + expected.min(0), expected, atol=steps.max() * 0.51)


def test_columns_without_any_difference_add_nothing() -> None:
    selector, shape = create("infinigen", columns=1.0), Shape((20,), 1, DIM, "bfloat16")
    keys = torch.full((1, 1, 20, DIM), 8e37, dtype=torch.bfloat16)
    keys[..., 1] = torch.linspace(-8e37, 8e37, 20)
    arrays = {a.name: np.full(a.layer_bytes, 0xFF, np.uint8) for a in selector.metadata(shape)}
    selector.summarize(shape, Chunk(LAYER, 0, keys, torch.ones(1, 1, 20, DIM), {}), arrays)
    codes = arrays["infinigen.keys"].reshape(20, DIM)
    assert not np.delete(codes, 1, 1).any()
    assert (np.diff(codes[:, 1].astype(int)) > 0).all()
    index = selector.select(shape, torch.full((1, 1, 1, DIM), 1e-38), arrays, [5], layer=LAYER, step=1)
    assert index.tolist() == [[15, 16, 17, 18, 19]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduce", ["sum", "softmax"])
def test_trained_hata_is_its_formula(form: str, reduce: str) -> None:
    heads = FORMS[form][0]
    selector: Any = create("hata", weights=weights_of("hata", heads), reduce=reduce)
    scene = Scene(selector, form)
    scores = selector.scores(scene.shape, scene.query, scene.arrays, layer=LAYER)[:, :, 0]
    for row, length in enumerate(LENGTHS):
        for head in range(heads):
            query, _, keys = scene.numbers(row, head)
            w = selector.weights.arrays["hash"][LAYER, head].astype(np.float64)
            differ = ((query @ w > 0)[:, None] != (keys @ w > 0)).sum(2)
            each = (1 - 2 * differ / 128) * np.linalg.norm(keys, axis=1)
            logits = each * np.linalg.norm(query, axis=1)[:, None] / np.sqrt(DIM)
            attention = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            expected = (each if reduce == "sum" else attention).sum(0)
            np.testing.assert_allclose(
                scores[row, head, :length], expected, rtol=2e-3, atol=0.1 if reduce == "sum" else 0
            )
    other = selector.scores(scene.shape, scene.query, scene.arrays, layer=LAYER + 1)[:, :, 0]
    length = LENGTHS[0]
    changed = np.abs(other[0, :, :length] - scores[0, :, :length])
    assert changed.max() > 0.1 * np.abs(scores[0, :, :length]).max(), "each layer has its own"


def test_skewing_gathers_the_queries_length_in_few_columns() -> None:
    rng = np.random.default_rng(1)
    training = kind_of("infinigen").training(LAYERS, 2, DIM)
    mix = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0] * np.geomspace(10, 0.01, DIM)[:, None]
    texts = [rng.standard_normal((6, 50, DIM)) @ mix.T for _ in range(2)]
    for text in texts:
        for layer in range(LAYERS):
            training.add(layer, torch.from_numpy((layer + 1) * text).float(), torch.zeros(2, 50, DIM))
    skew = training.finish()["skew"]
    assert skew.shape == (LAYERS, 2, DIM, DIM)
    for head in range(2):
        a = skew[1, head].astype(np.float64)
        np.testing.assert_allclose(a.T @ a, np.eye(DIM), atol=1e-5)
        queries = np.concatenate([2 * text[3 * head : 3 * head + 3].reshape(-1, DIM) for text in texts])
        _, _, right = np.linalg.svd(queries, full_matrices=False)
        lengths = np.linalg.norm(queries @ a, axis=0)
        np.testing.assert_allclose(lengths, np.linalg.norm(queries @ right.T, axis=0), rtol=1e-3)
        assert (np.diff(lengths) <= 1e-3 * lengths[0]).all(), "by descending singular value"


def test_trained_hashes_find_more_of_the_best_keys_than_random_ones() -> None:
    """Keys with a large common offset, as real ones have: random hyperplanes spend most bits on it."""
    generator = torch.Generator().manual_seed(3)
    offset = 6 * torch.randn(1, 1, DIM, generator=generator)

    def text(tokens: int) -> tuple[Any, Any]:
        keys = torch.randn((1, tokens, DIM), generator=generator) + offset
        return torch.randn((2, tokens, DIM), generator=generator) * 2, keys

    training = kind_of("hata").training(1, 1, DIM, bits=64, steps=60, queries=16, keys=128)
    for _ in range(3):
        training.add(0, *text(200))
    arrays = training.finish()
    trained = create("hata", weights=weights_of("hata", 1, arrays, layers=1))
    queries, keys = text(300)
    shape, recalls = Shape((300,), 1, DIM, "float32"), {}
    for name, selector in {"trained": trained, "random": create("hata", bits=64), "exact": create("exact")}.items():
        metadata = {a.name: np.zeros(a.layer_bytes, np.uint8) for a in selector.metadata(shape)}
        selector.summarize(shape, Chunk(0, 0, keys[None], None, {}), metadata)
        chosen = [
            set(selector.select(shape, queries[None, :, at : at + 1], metadata, [30], layer=0, step=1)[0])
            for at in range(0, 300, 10)
        ]
        recalls[name] = chosen
    hits = {name: sum(len(a & b) for a, b in zip(recalls[name], recalls["exact"], strict=True)) for name in recalls}
    assert hits["trained"] > 1.15 * hits["random"], hits


def test_what_training_refuses() -> None:
    for call, said in (
        (lambda: kind_of("quest").training(1, 1, 8), "not trained"),
        (lambda: kind_of("infinigen").training(1, 1, 8, bits=64), "has no bits"),
        (lambda: kind_of("infinigen").training(1, 1, 8).finish(), "no calibration text"),
        (lambda: kind_of("hata").training(1, 1, 8, colour=1), "does not take"),
        (lambda: kind_of("hata").training(1, 1, 8, bits=100), "100 bits"),
        (lambda: kind_of("hata").training(1, 1, 8, steps=0), "above 0"),
        (lambda: kind_of("hata").training(1, 1, 8).finish(), "no calibration text has 32 tokens"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            call()


# ---------------------------------------------------------------- files


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    weights = weights_of("hata", 2, revision="r", parameters={"steps": 3, "rate": 0.5}, notes="two\nlines")
    path = tmp_path / "w"
    path.write_bytes(encode(weights))
    again = read(path)
    assert again.fingerprint == weights.fingerprint
    assert (again.arrays["hash"] == weights.arrays["hash"]).all()
    assert dict(again.parameters) == {"rate": 0.5, "steps": 3}
    assert (again.revision, again.notes, again.created) == ("r", "two\nlines", weights.created)
    assert not again.arrays["hash"].flags.writeable
    assert create("hata", weights=path).parameters == {
        "bits": 128,
        "seed": 0,
        "reduce": "softmax",
        "weights": weights.fingerprint,
    }


def test_damage_anywhere_is_found() -> None:
    data = encode(weights_of("infinigen", 1))
    for at in range(0, len(data), max(len(data) // 300, 1)):
        broken = bytearray(data)
        broken[at] ^= 0x10
        with pytest.raises(InvalidProfile):
            decode(bytes(broken))
    for stop in (0, 7, 8, 100, len(data) - 1):
        with pytest.raises(InvalidProfile, match="cut off"):
            decode(data[:stop])


def test_what_is_no_weights_file_is_refused(tmp_path: Path) -> None:
    weights = weights_of("infinigen", 1)
    with pytest.raises(InvalidProfile, match="something else") as raised:
        decode(safetensors.numpy.save({"a": np.zeros(3, np.float32)}), "x")
    assert raised.value.fields == {"file": "x", "field": "format"}
    newer = encode(weights).replace(b'"version":"1"', b'"version":"2"')
    with pytest.raises(InvalidProfile, match="version '2', and this kvd reads version 1"):
        decode(newer)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "none", tmp_path, "nul\0"):
        with pytest.raises(InvalidArgument):
            read(path)


def test_weights_that_make_no_sense() -> None:
    good = weights_of("infinigen", 2)
    for changes, field in (
        ({"layers": 0}, "layers"),
        ({"kv_heads": 3}, "skew"),
        ({"created": datetime(2026, 1, 1)}, "created"),
        ({"arrays": {}}, "arrays"),
        ({"arrays": {"skew": good.arrays["skew"].astype(np.float64)}}, "skew"),
        ({"arrays": {"skew": np.full_like(good.arrays["skew"], np.nan)}}, "skew"),
    ):
        with pytest.raises(InvalidArgument) as raised:
            dataclasses.replace(good, **changes)
        assert raised.value.fields["field"] == field


def test_weights_of_something_else_are_refused() -> None:
    skew, hashes = weights_of("infinigen", 2), weights_of("hata", 2)
    with pytest.raises(FingerprintMismatch, match="for selector 'infinigen', not for 'hata'"):
        create("hata", weights=skew)
    with pytest.raises(FingerprintMismatch, match="codes of 128 bits, not of 256"):
        create("hata", weights=hashes, bits=256)
    with pytest.raises(InvalidArgument, match="takes no weights"):
        create("quest", weights=skew)
    with pytest.raises(InvalidArgument, match="lack a tensor 'skew'"):
        create("infinigen", weights=weights_of("infinigen", 2, dict(hashes.arrays)))
    spec = KVSpec(layers=LAYERS, kv_heads=2, entry_bytes=64, dtype="float16", model="m")
    assert skew.for_model(spec) is skew
    with pytest.raises(FingerprintMismatch, match="model 'm' instead of 'other', layers 4 instead of 9") as raised:
        skew.for_model(KVSpec(layers=9, kv_heads=2, entry_bytes=64, dtype="float16", model="other"))
    assert raised.value.fields == {"model": ["m", "other"], "layers": [4, 9]}
    create("infinigen", weights=skew).check(Shape((5,), 2, DIM, "float16"), LAYERS)
    with pytest.raises(FingerprintMismatch, match="head dimension 16, the model has 4, 2 and 8"):
        create("infinigen", weights=skew).check(Shape((5,), 2, 8, "float16"), LAYERS)


def test_ends_with_other_weights_have_other_metadata() -> None:
    shape = Shape((5,), 2, DIM, "float16")
    for name in ("infinigen", "hata"):
        some, others = weights_of(name, 2), weights_of(name, 2, notes="another day")
        named = [[array.name for array in create(name, weights=each).metadata(shape)] for each in (some, others, None)]
        assert len({tuple(each) for each in named}) == 3
