"""What the evaluation runs: prompts cut from the texts, facts hidden in them, and the selections to compare."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvd.errors import InvalidArgument
from kvd.profiling.evaluate.texts import Domain

FULL = "full"
"""The label of no selection at all."""

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where in the text facts are hidden."""

FACTS = (
    ("The secret password of the archive is", "What is the secret password of the archive?"),
    ("The flight number of the courier is", "What is the flight number of the courier?"),
    ("The room key of the ambassador has the number", "Which number does the room key of the ambassador have?"),
    ("The telephone extension of the bakery is", "What is the telephone extension of the bakery?"),
    ("The licence plate of the green van is", "What is the licence plate of the green van?"),
    ("The price of the old violin in euros is", "What is the price of the old violin in euros?"),
    ("The serial number of the broken telescope is", "What is the serial number of the broken telescope?"),
    ("The membership number of the chess champion is", "What is the membership number of the chess champion?"),
    (
        "The locker of the lighthouse keeper has the number",
        "Which number does the locker of the lighthouse keeper have?",
    ),
    ("The postal code of the winter palace is", "What is the postal code of the winter palace?"),
)
"""How a sentence that hides a number begins, and the question about it."""
_ALL = "List every number that is hidden in the text above, with the sentence that it stands in."


UNTRAINED = "-untrained"
"""Behind a selector's name: without the weights that it could have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """A KV selection algorithm with its parameters, and the share of a prompt that it selects."""

    spec: str
    """As :func:`kvd_client.selectors.parse` reads it: ``hata``, ``quest:page=8``."""
    share: float = 1.0
    untrained: bool = False

    @property
    def selector(self) -> str:
        return self.spec.partition(":")[0]

    @property
    def name(self) -> str:
        """Without the share: ``hata-untrained``, ``quest:page=8``."""
        name, colon, rest = self.spec.partition(":")
        return f"{name}{UNTRAINED * self.untrained}{colon}{rest}"

    @property
    def label(self) -> str:
        """What names it in results and on the command line: ``hata@0.2``."""
        return FULL if self.spec == FULL else f"{self.name}@{self.share:g}"

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The variant of a label. Raises :class:`InvalidArgument` for a text that is none."""
        if text == FULL:
            return cls(FULL)
        head, _, share = text.rpartition("@")
        name, colon, rest = head.partition(":")
        try:
            number = float(share)
        except ValueError:
            number = 0.0
        if not name or not 0 < number <= 1:
            raise InvalidArgument(
                f"{text!r} is no selection; write a selector and a share, as in hata@0.2 or quest:page=8@0.1",
                selection=text,
            )
        base = name.removesuffix(UNTRAINED)
        return cls(f"{base}{colon}{rest}", number, untrained=base != name)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What of an evaluation must stay the same for its results to belong together."""

    steps: int = 64
    """Tokens behind each prompt that are run, the same number of decode steps."""
    query_share: float = 0.2
    """Of the prompt, what its last queries select, as prefill asks them."""
    calibration: str = "code"
    """The domain that weights and profiles are made from."""
    seed: int = 0

    def fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One text at one length."""

    number: int
    length: int
    domain: str

    @property
    def key(self) -> str:
        return f"{self.domain}-{self.length}-{self.number}"


def counts(most: int, lengths: Sequence[int]) -> dict[int, int]:
    """How many prompts of each length: ``most`` of the shortest, of longer ones as many tokens, at least one if any."""
    return {length: max(min(most, 1), most * min(lengths) // length) for length in lengths}


def places(domains: Sequence[str], numbers: dict[int, int]) -> list[Place]:
    """Every domain at every length."""
    return [
        Place(number, length, name) for length, count in numbers.items() for number in range(count) for name in domains
    ]


@dataclasses.dataclass(frozen=True)
class Work:
    """What to run."""

    domains: tuple[str, ...]
    variants: tuple[Variant, ...]
    """All of them, :data:`FULL` first."""
    recorded: tuple[Variant, ...]
    """Those of them whose selections are kept."""
    recalling: tuple[Variant, ...]
    """Those of them that look for hidden facts, :data:`FULL` first."""
    compared: Mapping[int, int]
    """Prompts of each length and domain that run with all variants; ``texts`` with the recorded ones too."""
    texts: Mapping[int, int]
    hidden: Mapping[int, int]
    """Prompts with hidden facts of each length and domain."""

    def cells(self, settings: Settings) -> list[tuple[Place, str, list[Variant]]]:
        """Every prompt with its kind and variants, in the order to run them. On the calibration domain nothing but
        selections is measured."""
        calibration = settings.calibration
        found: list[tuple[Place, str, list[Variant]]] = []
        for place in places(self.domains, dict(self.texts)):
            whole = place.number < self.compared[place.length] and place.domain != calibration
            found.append((place, "text", list(self.variants if whole else self.recorded)))
        tested = [name for name in self.domains if name != calibration]
        found += [(place, "hidden", list(self.recalling)) for place in places(tested, dict(self.hidden))]
        # Stable: as many tokens of each length, all domains, texts before hidden facts; so that a run that is stopped
        # has something of everything.
        return sorted(found, key=lambda one: ((one[0].number + 1) * one[0].length, one[0].length))


class Tokens:
    """The domains' documents as token ids."""

    def __init__(self, tokenizer: Any, domains: Sequence[Domain], settings: Settings) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        self._domains = {domain.name: domain for domain in domains}
        self._ids: dict[tuple[str, int], list[int]] = {}

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def document(self, domain: str, number: int) -> list[int]:
        """Raises :class:`InvalidArgument` where the domain has fewer documents."""
        documents = self._domains[domain].documents
        if number >= len(documents):
            raise InvalidArgument(
                f"domain {domain!r} has texts for {len(documents)} prompts of a length, not for {number + 1}; ask for "
                "fewer, or give a longer text",
                domain=domain,
            )
        if (domain, number) not in self._ids:
            self._ids[domain, number] = self.encode(documents[number])
        return self._ids[domain, number]

    def text(self, place: Place) -> tuple[list[int], list[int]]:
        """A prompt that begins a document, and the tokens behind it: one more than there are steps."""
        head = [token for token in self.tokenizer.encode("") if token == self.tokenizer.bos_token_id]
        ids = [*head, *self.document(place.domain, place.number)]
        stop = place.length + self.settings.steps + 1
        return self._enough(place, ids, stop)[: place.length], ids[place.length : stop]

    def hidden(self, place: Place) -> Hidden:
        """A prompt with facts hidden in it, of ``place.length`` tokens up to the question. Texts are the domain's last
        documents, where there are enough, so that they are not those of :meth:`text`."""
        last = len(self._domains[place.domain].documents) - 1
        body = self.document(place.domain, last - place.number if last >= place.number else place.number)
        seed = hashlib.sha256(f"{self.settings.seed} {place.key}".encode()).digest()
        dice = random.Random(seed)
        facts = dice.sample(FACTS, len(DEPTHS))
        numbers = [str(dice.randrange(10_000, 100_000)) for _ in facts]
        sentences = [self.encode(f"\n{start} {number}.\n") for (start, _), number in zip(facts, numbers, strict=True)]
        before = self._turn()[0]
        room = place.length - len(before) - sum(map(len, sentences))
        if room < len(DEPTHS):
            raise InvalidArgument(f"a prompt of {place.length} tokens has no room for facts; give a longer one")
        text, done, ids = self._enough(place, body, room)[:room], 0, list(before)
        for depth, sentence in zip(DEPTHS, sentences, strict=True):
            at = self._line_end(text, int(depth * room))
            ids += [*text[done:at], *sentence]
            done = at
        ids += text[done:]
        questions = [
            self._question(question, [(f"{start} ", number)])
            for (start, question), number in zip(facts, numbers, strict=True)
        ]
        # Each as a sentence of its own, so that what was answered before says nothing about the next.
        everything = self._question(
            _ALL, [(f"{start} ", number) for (start, _), number in zip(facts, numbers, strict=True)]
        )
        return Hidden(ids, questions, everything)

    def _question(self, question: str, answers: Sequence[tuple[str, str]]) -> Question:
        """``answers``: the words before a number, which are given, and the number, which must be found."""
        given: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, number in answers:
            # A number's space belongs to it: so the text was made, and so the tokenizer would.
            given += self.encode(f"{'. ' if given else ''}{start.rstrip()}")
            found = self.encode(f" {number}")
            spans.append((len(given), len(given) + len(found)))
            given += found
        return Question(self.encode(f"\n\n{question}") + self._turn()[1], given, spans)

    def _turn(self) -> tuple[list[int], list[int]]:
        """The tokens before and behind what a user says, in the tokenizer's chat form if it has one."""
        if not getattr(self.tokenizer, "chat_template", None):
            return [], self.encode("\n")
        mark = "\x00text\x00"
        turn = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        before, _, behind = turn.partition(mark)
        return self.encode(before), self.encode(behind)

    def _line_end(self, ids: Sequence[int], at: int) -> int:
        """The first place from ``at`` on that follows a line's end, or ``at`` where none comes soon."""
        for place in range(at, min(at + 64, len(ids))):
            if place and "\n" in self.tokenizer.decode([ids[place - 1]]):
                return place
        return at

    def _enough(self, place: Place, ids: list[int], need: int) -> list[int]:
        if len(ids) < need:
            raise InvalidArgument(
                f"a text of domain {place.domain!r} has {len(ids)} tokens, and prompts of {place.length} need {need}; "
                "give shorter lengths or longer texts",
                domain=place.domain,
            )
        return ids


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What is asked behind a prompt, and the answer."""

    tokens: list[int]
    answer: list[int]
    """Words that lead to each number, and the numbers."""
    numbers: list[tuple[int, int]]
    """Where in ``answer`` each number stands: the tokens that must be found."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hidden:
    """A prompt with a fact at each of :data:`DEPTHS`."""

    tokens: list[int]
    questions: list[Question]
    """One about each fact, by depth."""
    everything: Question
    """About all of them at once."""

    def all(self) -> Iterator[Question]:
        yield from self.questions
        yield self.everything
