"""The demo's prompt: a long text that every Python has, and a question about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvd import reading
from kvd.demo.errors import DemoFailed
from kvd.errors import InvalidArgument

QUESTION = "In two or three sentences: what is the text above about?"
DEFAULT_TOKENS = 1000
MIN_TOKENS = 64
"""The chat frame and the question take about forty."""

_TOPICS = ("execmodel", "objects", "compound", "assignment")
_MARK = "\x00text\x00"


def default_text() -> str:
    """Chapters of the language reference that ship with Python for its ``help()``; about 20,000 tokens.

    Raises :class:`DemoFailed` where a distribution leaves them out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DemoFailed(
            "this Python lacks the texts of its help() (pydoc_data), from which the demo makes its prompt; give a "
            "text by --prompt-file FILE"
        ) from None
    return "\n\n".join(topics[topic].strip() for topic in _TOPICS)


def read_text(path: Path) -> str:
    """A prompt file's text; raises :class:`InvalidArgument` if it can't be read, or is empty."""
    try:
        text = reading.read_text(path).strip()
    except OSError as error:
        raise InvalidArgument(f"{path}: can't be read: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: byte {error.start} is not UTF-8; save the prompt as UTF-8") from None
    if not text:
        raise InvalidArgument(f"{path}: is empty; write the prompt into it")
    return text


def prompt_ids(tokenizer: Any, text: str, question: str, limit: int) -> list[int]:
    """The token ids of a user's turn that says ``text`` and then ``question``, in the tokenizer's chat form
    if it has one; the text's end is cut off so that there are at most ``limit`` tokens.

    Raises :class:`DemoFailed` if ``limit`` leaves no room for the text.
    """
    body = f"{_MARK}\n\n{question}" if question else _MARK
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": body}]
        body = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    before, _, behind = body.partition(_MARK)

    def encode(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False)) if part else []

    head, tail = encode(before), encode(behind)
    if not getattr(tokenizer, "chat_template", None) and tokenizer.bos_token_id is not None:
        head.insert(0, tokenizer.bos_token_id)
    room = limit - len(head) - len(tail)
    if room < 1:
        raise DemoFailed(f"a prompt of {limit} tokens has no room for a text; the question alone takes {limit - room}")
    return head + encode(text)[:room] + tail


class TextStream:
    """Text of tokens that come one at a time; what is no whole character yet is held back."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._told = 0

    def push(self, token: int) -> str:
        """What the token adds."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece = text[self._told :]
        self._told = len(text)
        return str(piece)
