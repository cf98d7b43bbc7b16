"""What the evaluation runs, and the folder that keeps what is finished."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvd.errors import FingerprintMismatch, InvalidArgument
from kvd.profiling.evaluate import texts
from kvd.profiling.evaluate.plan import DEPTHS, FULL, Place, Settings, Tokens, Variant, Work, counts, places
from kvd.profiling.evaluate.store import Store, flat, replacing
from kvd.profiling.evaluate.texts import Domain

LETTERS = Domain("letters", "made up", tuple(("abc def\n" * 400 + f"{n}")[:2400] for n in range(3)))


class Characters:
    """A token for each character."""

    bos_token_id = 1
    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Chat(Characters):
    chat_template = "yes"

    def apply_chat_template(self, turns: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"<user>{turns[0]['content']}</user><model>"


def tokens(tokenizer: Characters | None = None, **settings: int) -> Tokens:
    return Tokens(tokenizer or Characters(), [LETTERS], Settings(**settings))


@pytest.mark.parametrize("label", ["hata@0.2", "hata-untrained@0.05", "quest:page=8,reduce=max@0.1", "full", "a-b@1"])
def test_a_label_is_its_variants(label: str) -> None:
    assert Variant.parse(label).label == label


def test_a_labels_parts_are_the_selectors() -> None:
    found = Variant.parse("hata-untrained:bits=128@0.05")
    assert (found.spec, found.selector, found.share, found.untrained) == ("hata:bits=128", "hata", 0.05, True)


@pytest.mark.parametrize("text", ["hata", "hata@", "@0.1", "hata@0", "hata@1.5", "hata@x", "hata@nan", ""])
def test_what_is_no_label_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="no selection"):
        Variant.parse(text)


def test_longer_prompts_are_fewer_and_lengths_take_turns() -> None:
    numbers = counts(6, [1024, 2048, 4096])
    assert numbers == {1024: 6, 2048: 3, 4096: 1}
    assert len(places(["a", "b"], numbers)) == 20
    some, all_of_them = (Variant.parse("exact@0.2"),), tuple(map(Variant.parse, ("full", "exact@0.2", "quest@0.1")))
    work = Work(
        domains=("a", "b"),
        variants=all_of_them,
        recorded=some,
        recalling=all_of_them[:2],
        compared=counts(1, [1024, 2048]),
        texts=counts(2, [1024, 2048]),
        hidden=counts(1, [1024, 2048]),
    )
    found = [(place.key, kind, len(variants)) for place, kind, variants in work.cells(Settings(calibration="a"))]
    assert found == [
        ("a-1024-0", "text", 1),
        ("b-1024-0", "text", 3),
        ("b-1024-0", "hidden", 2),
        ("a-1024-1", "text", 1),
        ("b-1024-1", "text", 1),
        ("a-2048-0", "text", 1),
        ("b-2048-0", "text", 3),
        ("b-2048-0", "hidden", 2),
    ]


def test_a_text_is_a_prompt_and_what_is_behind_it() -> None:
    prompt, behind = tokens(steps=5).text(Place(1, 100, "letters"))
    whole = Characters().encode(LETTERS.documents[1])
    assert prompt == whole[:100]
    assert behind == whole[100:106]
    with pytest.raises(InvalidArgument, match="2401 tokens, and prompts of 2400 need 2406"):
        tokens(steps=5).text(Place(1, 2400, "letters"))
    with pytest.raises(InvalidArgument, match="3 prompts of a length, not for 4"):
        tokens().text(Place(3, 100, "letters"))


@pytest.mark.parametrize("tokenizer", [Characters(), Chat()])
def test_facts_are_hidden_at_their_depths_and_asked_for(tokenizer: Characters) -> None:
    place = Place(0, 1000, "letters")
    hidden = tokens(tokenizer).hidden(place)
    text = tokenizer.decode(hidden.tokens)
    assert len(hidden.tokens) == 1000
    assert text.startswith("<user>") == (tokenizer.chat_template is not None)
    for depth, question in zip(DEPTHS, hidden.questions, strict=True):
        asked, answer = tokenizer.decode(question.tokens), tokenizer.decode(question.answer)
        assert "?" in asked
        assert asked.endswith("</user><model>" if tokenizer.chat_template else "\n")
        ((start, stop),) = question.numbers
        assert start > 0
        assert answer[start:stop].strip().isdecimal()
        assert len(answer[start:stop].strip()) == 5
        sentence = f"\n{answer}.\n"
        assert text.count(sentence) == 1
        assert text.index(sentence) / 1000 == pytest.approx(depth, abs=0.15)
        assert text[text.index(sentence) - 1] == "\n"  # whole lines stay whole
    everything = tokenizer.decode(hidden.everything.answer)
    assert [everything[start:stop] for start, stop in hidden.everything.numbers] == [
        tokenizer.decode(q.answer[slice(*q.numbers[0])]) for q in hidden.questions
    ]
    assert tokens(tokenizer).hidden(place) == hidden
    assert tokens(tokenizer, seed=1).hidden(place).tokens != hidden.tokens
    with pytest.raises(InvalidArgument, match="no room"):
        tokens(tokenizer).hidden(Place(0, 64, "letters"))


def test_own_texts_are_cut_at_lines_and_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("".join(f"line {n}\n" for n in range(9000)))
    found = texts.own("mine", path)
    assert len(found.documents) == 3
    assert all(document.startswith("line ") and len(document) == texts.DOCUMENT for document in found.documents)
    numbers = [set(document.splitlines()[:-1]) for document in found.documents]
    assert not numbers[0] & numbers[1] | numbers[1] & numbers[2]
    assert found.digest != texts.own("mine", Path(__file__)).digest
    for wrong, sentence in ((tmp_path / "none", "can't be read"), (tmp_path / "empty", "is empty")):
        (tmp_path / "empty").touch()
        with pytest.raises(InvalidArgument, match=sentence):
            texts.own("mine", wrong)


IDENTITY = {"model": {"name": "m", "digest": "d"}, "settings": {"steps": 64}, "texts": {"a": "1"}}
PLACE = Place(0, 1024, "a")


def test_cells_stay_and_other_parameters_are_other_cells(tmp_path: Path) -> None:
    store = Store(tmp_path / "work", IDENTITY)
    assert store.cell(PLACE, "text", "hata@0.2", {}) is None
    store.finish(PLACE, "text", "hata@0.2", {"bits": 256, "pair": (1, 2)}, {"kl": [0.5]})
    with pytest.raises(InvalidArgument, match="another evaluation is running there"):
        Store(tmp_path / "work", IDENTITY)
    store.close()
    again = Store(tmp_path / "work", IDENTITY)
    assert again.cell(PLACE, "text", "hata@0.2", {"bits": 256, "pair": (1, 2)}) == {"kl": [0.5]}
    assert again.cell(PLACE, "text", "hata@0.2", {"bits": 128}) is None
    assert again.cell(PLACE, "hidden", "hata@0.2", {"bits": 256}) is None
    assert again.recorded(PLACE, "hata@0.2").name == "hata@0.2.kvdrecorded"
    assert list(tmp_path.rglob("*.tmp")) == []


def test_results_of_another_evaluation_are_refused_with_what_differs(tmp_path: Path) -> None:
    Store(tmp_path / "work", IDENTITY).close()
    other = {"model": {"name": "m", "digest": "e"}, "settings": {"steps": 32}, "texts": {"a": "1", "b": "2"}}
    with pytest.raises(FingerprintMismatch, match=r"settings\.steps 64 instead of 32") as caught:
        Store(tmp_path / "work", other)
    assert caught.value.fields == {"model.digest": ["d", "e"], "settings.steps": [64, 32], "texts.b": [None, "2"]}


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(InvalidArgument, match="something else"):
        Store(tmp_path, IDENTITY)
    with pytest.raises(InvalidArgument, match="can't be used"):
        Store(tmp_path / "mine.txt" / "work", IDENTITY)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "work", IDENTITY)
    store.finish(PLACE, "text", FULL, {}, {})
    (path,) = (tmp_path / "work" / "cells").rglob("*.json")
    path.write_text("{")
    with pytest.raises(InvalidArgument, match=r"full\.json: can't be read"):
        store.cell(PLACE, "text", FULL, {})


def test_a_file_that_fails_to_be_written_is_not_there(tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "state") as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert list(tmp_path.iterdir()) == []


def test_flat_trees_have_what_json_has() -> None:
    assert flat({"a": {"b": (1, 2), "c": {}}, "d": None}) == {"a.b": [1, 2], "d": None}
    assert json.loads(json.dumps(flat({"a": {"b": 1.5}}))) == {"a.b": 1.5}
