"""The tokens of a conversation, and which of them are trained on.

Training is on what the assistant would write: everything after the text that asks it to write (the generation prompt),
up to the token that ends its turn. A template only gives the text of a whole conversation, and it may drop, move or
change parts of messages. To find the turns, the conversation is rendered a second time, with marks around texts.
Without its marks the second text must equal the first one, so marks never change what is trained on.

    <user>Hello<end><assistant>[Good day]<end>
                               |__________|___| trained
                                  marks    the special token after the marks
"""

import re
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from diloco_jax.training.chat.template import THOUGHTS, ChatTemplate, Message
from diloco_jax.training.data.config import LossOn
from diloco_jax.training.data.tokenizer import Tokenizer

ASSISTANT = "assistant"
# Characters for private use, which no known font has. One from each half encloses one text.
OPEN, CLOSE, TEXTS_MAX = 0x100000, 0x108000, 0x7FFD
MARK = re.compile(f"[{chr(OPEN)}-{chr(CLOSE + TEXTS_MAX)}]")


class Conversation(NamedTuple):
    """A row of chat data."""

    messages: list[Message]
    # Messages before this one are the prompt, whose turns are not trained on.
    prompt: int = 0
    tools: list[dict[str, Any]] | None = None
    # Further variables of the template.
    options: dict[str, Any] | None = None


class Completion(NamedTuple):
    """A row of chat data without turns: a text and what follows it."""

    prompt: str
    completion: str


class Encoded(NamedTuple):
    """The tokens of a row."""

    ids: list[int]
    # The weight of each token in the loss, 0 or 1.
    weights: UInt8[np.ndarray, " n"]
    # 1 for the last token of each of the assistant's turns, where a conversation that is too long may be cut.
    ends: UInt8[np.ndarray, " n"]
    text: str


class Span(NamedTuple):
    """A range of characters that the assistant wrote."""

    start: int
    stop: int
    # The number of its message.
    message: int
    # Whether the range includes the token that ends the turn.
    ended: bool


def encode_conversation(
    row: Conversation, template: ChatTemplate, tokenizer: Tokenizer, loss_on: LossOn = "completion"
) -> Encoded:
    """Return the ids that `apply_chat_template` of transformers gives, and the weight of each in the loss.

    Args:
      loss_on: completion: the assistant's turns after the prompt. last: only the last of them. all: every token.

    Raises:
      ValueError: the template refuses the conversation, or changes the assistant's texts so that the turns cannot be
        found.
    """
    text = template.render(row.messages, row.tools, options=row.options)
    if mark := MARK.search(text):
        raise ValueError(f"a text has the character U+{ord(mark.group()):X}, which marks the assistant's turns")
    ids, places = tokenizer.encode_places(text)
    found = _token_turns(row, template, tokenizer, text, ids, places, loss_on)
    weights, ends = np.full(len(ids), loss_on == "all", np.uint8), np.zeros(len(ids), np.uint8)
    last = max((number for number, one in enumerate(row.messages) if one.get("role") == ASSISTANT), default=-1)
    for message, turn in found:
        # The marks of a template do not say which message they belong to.
        if loss_on == "completion" or (loss_on == "last" and message in (last, -1)):
            weights[turn] = 1
        ends[turn.stop - 1] = 1
    return Encoded(ids, weights, ends, text)


def _token_turns(
    row: Conversation,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    text: str,
    ids: list[int],
    places: Int[np.ndarray, "n 2"],
    loss_on: LossOn,
) -> list[tuple[int, slice]]:
    """Return the number of each turn's message, and the turn's tokens with the one that ends it."""
    try:
        if template.marks_turns(row.tools):
            spans = _enclosed(row, template, text)
            spans = spans[-1:] if loss_on == "last" else spans
        else:
            spans = _turns(row, template, text)
    except ValueError:
        # Without turns, all tokens can still be trained on, but a conversation that is too long cannot be cut.
        if loss_on != "all":
            raise
        return []
    turns = list[tuple[int, slice]]()
    for span in spans:
        first, stop = _tokens(places, span.start, span.stop)
        if not span.ended:
            # Only white space may be between a text and the token that ends its turn.
            at = stop
            while at < len(ids) and ids[at] not in tokenizer.special and text[slice(*places[at])].isspace():
                at += 1
            stop = at + 1 if at < len(ids) and ids[at] in tokenizer.special else stop
        elif not template.marks_turns(row.tools):
            # A token that reaches beyond the text of a call does not belong to it.
            stop = max(first, int(np.searchsorted(places[:, 1], span.stop, side="right")))
        if stop > first:
            turns.append((span.message, slice(first, stop)))
    return turns


def turn_end_of(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the token that ends the assistant's turns in a template; None if no special token does."""
    row = Conversation([{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}])
    try:
        encoded = encode_conversation(row, template, tokenizer)
    except ValueError:
        # Some templates refuse a conversation without a system message.
        return None
    last = encoded.ids[int(encoded.ends.argmax())] if encoded.ends.any() else None
    return last if last in tokenizer.special else None


def encode_completion(row: Completion, tokenizer: Tokenizer, loss_on: LossOn = "completion") -> Encoded:
    """Return the ids of a text and its continuation as one document, and the weight of each in the loss.

    A token with characters of both counts as one of the continuation.
    """
    text = row.prompt + row.completion
    ids, places = tokenizer.encode_places(text)
    before, after = tokenizer.around
    whole = tokenizer.closed([*before, *ids, *after])
    weights, ends = np.ones(len(whole), np.uint8), np.zeros(len(whole), np.uint8)
    ends[-1:] = 1
    if loss_on != "all":
        weights[: len(before) + _tokens(places, len(row.prompt), len(text))[0]] = 0
    return Encoded(whole, weights, ends, text)


def _tokens(places: Int[np.ndarray, "n 2"], start: int, stop: int) -> tuple[int, int]:
    """Return the range of the tokens that have characters of a range of a text."""
    # Pieces of one character share its place, and a token may have no character, so places ascend, but not strictly.
    first = int(np.searchsorted(places[:, 1], start, side="right"))
    return first, max(first, int(np.searchsorted(places[:, 0], stop, side="left")))


def _enclosed(row: Conversation, template: ChatTemplate, text: str) -> list[Span]:
    """Return the parts of a text that the template itself marks as the assistant's, after the prompt."""
    marks = chr(OPEN), chr(CLOSE)
    found = _marks(template.render(row.messages, row.tools, options=row.options, marks=marks), text)
    if found is None:
        raise ValueError("the chat template changes what {% generation %} encloses; correct it, or use loss_on: all")
    places = [place for _, place in found]
    spans = [Span(*pair, message=-1, ended=True) for pair in zip(places[::2], places[1::2], strict=True)]
    if not row.prompt:
        return spans
    roles = [message.get("role") for message in row.messages]
    if len(spans) != roles.count(ASSISTANT):
        raise ValueError(
            f"the chat template marks {len(spans)} parts in a conversation of {roles.count(ASSISTANT)} assistant's "
            "turns, so the prompt cannot be told from the completion; give the row as messages"
        )
    return spans[roles[: row.prompt].count(ASSISTANT) :]


def _turns(row: Conversation, template: ChatTemplate, text: str) -> list[Span]:
    """Return the assistant's turns in a text, after the prompt.

    A turn has several spans if the template writes the answer of a tool within it. A span begins after the generation
    prompt. It ends with the last mark of its texts, or with the call after the name of a tool.
    """
    # Some templates look into texts. Then fewer marks are enough: a text between others needs none.
    for chosen in (_all_texts, _of_assistants, _of_calls):
        marked = _Marked(row.messages, chosen)
        try:
            found = _marks(template.render(marked.messages, row.tools, options=row.options), text)
        except ValueError:
            # The conversation is valid, so the template refuses the marks.
            continue
        if found is not None:
            break
    else:
        raise ValueError(
            "the chat template changes the assistant's texts, so its turns cannot be found; enclose them with "
            "{% generation %} and {% endgeneration %} in the template, or use loss_on: all"
        )
    # The name of a tool may appear again in the answer of the tool.
    first = dict[str, int]()
    for mark, place in found:
        first.setdefault(mark, place)
    spans, last = list[Span](), 0
    for number, run in groupby(first.items(), key=lambda one: marked.message_of(one[0])):
        places = [(place, mark) for mark, place in run]
        message = row.messages[number]
        if number >= row.prompt and message.get("role") == ASSISTANT:
            start = _opened(template.opening, text, last, places[0][0])
            stop, mark = places[-1]
            called = 0
            if marked.is_name(mark):
                called = _call_length(row, template, marked.messages[: number + 1], mark, text[stop:])
            spans.append(Span(start, stop + called, number, ended=called > 0))
        last = places[-1][0]
    return spans


def _call_length(row: Conversation, template: ChatTemplate, messages: list[Message], mark: str, rest: str) -> int:
    """Return the characters after the name of a turn's last tool that write its call and end the turn; 0 if unknown.

    Calls may have special tokens within them. So they end where the text of the conversation up to them differs from
    the text of the whole one.

    Args:
      messages: the marked messages up to the turn.
      mark: the mark after the name.
      rest: the text of the whole conversation after that mark.
    """
    try:
        ended = template.render(messages, row.tools, options=row.options)
    except ValueError:
        # Some templates refuse a conversation that ends with a call.
        return 0
    tail = MARK.sub("", ended.partition(mark)[2])
    differ = (at for at, (a, b) in enumerate(zip(tail, rest, strict=False)) if a != b)
    return len(tail[: next(differ, min(len(tail), len(rest)))].rstrip())


def _opened(opening: str, text: str, last: int, first: int) -> int:
    """Return the place where the assistant begins to write: after the generation prompt, before its first mark.

    A generation prompt may also begin a thought, which templates leave out of earlier turns. So the longest beginning
    of the prompt counts that the text has, at least its first line up to a thought.
    """
    header = opening.partition("\n")[0].partition("<think>")[0]
    for length in range(len(opening), max(len(header), 1) - 1, -1):
        if (place := text.rfind(opening[:length], last, first)) >= 0:
            return place + length
    return first


def _marks(marked: str, text: str) -> list[tuple[str, int]] | None:
    """Return each mark with its place in the text without marks; None if that is another text."""
    if MARK.sub("", marked) != text:
        return None
    return [(one.group(), one.start() - number) for number, one in enumerate(MARK.finditer(marked))]


# Chooses the texts that get marks: of a message's content and thoughts, and of its calls.
Choice = Callable[[Message], tuple[bool, bool]]


def _all_texts(message: Message) -> tuple[bool, bool]:
    # The answers of tools show where the assistant's texts around them end.
    return message.get("role") in (ASSISTANT, "tool"), True


def _of_assistants(message: Message) -> tuple[bool, bool]:
    return message.get("role") == ASSISTANT, True


def _of_calls(message: Message) -> tuple[bool, bool]:
    return message.get("role") == ASSISTANT and not message.get("tool_calls"), True


def _number_of(mark: str) -> int:
    """Return the number of the text that a mark encloses."""
    return ord(mark) - (CLOSE if ord(mark) >= CLOSE else OPEN)


class _Marked:
    """Messages with a pair of marks around each chosen text, within its white space, which templates may remove."""

    def __init__(self, messages: list[Message], choice: Choice) -> None:
        # For each text the number of its message, and whether it is the name of a tool.
        self._texts = list[tuple[int, bool]]()
        self.messages = [self._with_marks(one, number, choice) for number, one in enumerate(messages)]

    def message_of(self, mark: str) -> int:
        """Return the number of the message whose text has a mark."""
        return self._texts[_number_of(mark)][0]

    def is_name(self, mark: str) -> bool:
        """Return whether a mark encloses the name of a tool."""
        return self._texts[_number_of(mark)][1]

    def _with_marks(self, message: Message, number: int, choice: Choice) -> Message:
        def enclose(text: str, *, is_name: bool = False) -> str:
            if not (inner := text.strip()):
                return text
            if (at := len(self._texts)) > TEXTS_MAX:
                raise ValueError(f"a conversation has more than {TEXTS_MAX:,} texts of the assistant; make it shorter")
            self._texts.append((number, is_name))
            return text.replace(inner, f"{chr(OPEN + at)}{inner}{chr(CLOSE + at)}", 1)

        found, (texts, calls) = dict(message), choice(message)
        for name in ("content", *THOUGHTS) if texts else ():
            value = found.get(name)
            if isinstance(value, str):
                found[name] = enclose(value)
            elif isinstance(value, list):
                found[name] = [_with_text(part, enclose) for part in value]
        if calls and isinstance(value := found.get("tool_calls"), list):
            found["tool_calls"] = [_with_name(call, partial(enclose, is_name=True)) for call in value]
        return found


def _with_text(part: Any, enclose: Callable[[str], str]) -> Any:
    has_text = isinstance(part, dict) and isinstance(part.get("text"), str)
    return {**part, "text": enclose(part["text"])} if has_text else part


def _with_name(call: Any, enclose: Callable[[str], str]) -> Any:
    """Return the call of a tool with marks around the name of its function, which has one of two places."""
    if not isinstance(call, dict):
        return call
    found = dict(call)
    if "function" in call:
        found["function"] = _with_name(call["function"], enclose)
    if isinstance(name := call.get("name"), str):
        found["name"] = enclose(name)
    return found
