"""The tokens of a conversation, and which of them are trained on.

Training is on what the assistant would write: everything after the text that asks it to write (the generation prompt),
up to the token that ends its turn. A template only gives the text of a whole conversation, and it may drop or change
parts of messages. To find the turns, the conversation is rendered a second time, with marks around the assistant's
texts. Without its marks the second text must equal the first one, so marks never change what is trained on.

    <user>Hello<end><assistant>[Good day]<end>
                               |__________|___| trained
                                  marks    the special token behind the marks
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from diloco_jax.training.chat.template import THOUGHTS, ChatTemplate, Message
from diloco_jax.training.data.config import LossOn
from diloco_jax.training.data.tokenizer import Tokenizer

ASSISTANT = "assistant"
# Characters for private use, which texts do not have. One from each range encloses the texts of one message.
OPEN, CLOSE, MESSAGES_MAX = 0xF0000, 0x100000, 0xFFFD
MARK = re.compile(f"[{chr(OPEN)}-{chr(OPEN + MESSAGES_MAX)}{chr(CLOSE)}-{chr(CLOSE + MESSAGES_MAX)}]")


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
    """A range of characters."""

    start: int
    stop: int
    # Whether the range has the token that ends a turn.
    ended: bool = True


def encode_conversation(
    row: Conversation, template: ChatTemplate, tokenizer: Tokenizer, loss_on: LossOn = "completion"
) -> Encoded:
    """Return the ids that `apply_chat_template` of transformers gives, and the weight of each in the loss.

    Args:
      loss_on: completion: the assistant's turns behind the prompt. last: only the last of them. all: every token.

    Raises:
      ValueError: the template refuses the conversation, or changes the assistant's texts so that the turns cannot be
        found.
    """
    text = template.render(row.messages, row.tools, options=row.options)
    ids, places = tokenizer.encode_places(text)
    turns = _token_turns(row, template, tokenizer, text, ids, places, loss_on)
    weights = np.full(len(ids), loss_on == "all", np.uint8)
    for turn in turns if loss_on == "completion" else turns[-1:]:
        weights[turn] = 1
    ends = np.zeros(len(ids), np.uint8)
    ends[[turn.stop - 1 for turn in turns if turn.stop > turn.start]] = 1
    return Encoded(ids, weights, ends, text)


def _token_turns(
    row: Conversation,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    text: str,
    ids: list[int],
    places: Int[np.ndarray, "n 2"],
    loss_on: LossOn,
) -> list[slice]:
    """Return the tokens of each turn of the assistant, with the one that ends the turn."""
    try:
        spans = (_enclosed if template.marks_turns(row.tools) else _turns)(row, template, text)
    except ValueError:
        # Without turns, all tokens can still be trained on, but a conversation that is too long cannot be cut.
        if loss_on != "all":
            raise
        return []
    found = [_tokens(places, span) for span in spans]
    turns, limits = [], [*(first for first, _ in found[1:]), len(ids)]
    for span, (first, stop), limit in zip(spans, found, limits, strict=False):
        ends = (at + 1 for at in range(stop, limit) if ids[at] in tokenizer.special)
        turns.append(slice(first, stop if span.ended else next(ends, stop)))
    return turns


def encode_completion(row: Completion, tokenizer: Tokenizer, loss_on: LossOn = "completion") -> Encoded:
    """Return the ids of a text and its continuation as one document, and the weight of each in the loss.

    A token with characters of both counts as one of the continuation.
    """
    text = row.prompt + row.completion
    ids, places = tokenizer.encode_places(text)
    before, after = tokenizer.around
    whole = [*before, *ids, *after]
    if tokenizer.end is not None and (not tokenizer.made or whole[-1:] != [tokenizer.end]):
        whole.append(tokenizer.end)
    weights, ends = np.ones(len(whole), np.uint8), np.zeros(len(whole), np.uint8)
    ends[-1:] = 1
    if loss_on != "all":
        weights[: len(before) + _tokens(places, Span(len(row.prompt), len(text)))[0]] = 0
    return Encoded(whole, weights, ends, text)


def _tokens(places: Int[np.ndarray, "n 2"], span: Span) -> tuple[int, int]:
    """Return the range of the tokens that have characters of a span."""
    # Pieces of one character share its place, and a token may have no character, so places ascend, but not strictly.
    first = int(np.searchsorted(places[:, 1], span.start, side="right"))
    return first, max(first, int(np.searchsorted(places[:, 0], span.stop, side="left")))


def _enclosed(row: Conversation, template: ChatTemplate, text: str) -> list[Span]:
    """Return the parts of a text that the template itself marks as the assistant's, behind the prompt."""
    marks = chr(OPEN), chr(CLOSE)
    marked = template.render(row.messages, row.tools, options=row.options, marks=marks)
    found = [place for _, place in _marks(marked, text)]
    spans = [Span(*pair) for pair in zip(found[::2], found[1::2], strict=True)]
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
    """Return the assistant's turns in a text, behind the prompt."""
    if len(row.messages) > MESSAGES_MAX:
        raise ValueError(f"a conversation has {len(row.messages):,} messages; the limit is {MESSAGES_MAX:,}")
    numbered = enumerate(row.messages)
    messages = [_marked(one, number) if one.get("role") == ASSISTANT else one for number, one in numbered]
    found = _marks(template.render(messages, row.tools, options=row.options), text)
    spans, last = list[Span](), 0
    for number in range(len(messages)):
        opened, closed = chr(OPEN + number), chr(CLOSE + number)
        places = [place for mark, place in found if mark in (opened, closed)]
        # A template may leave out a message.
        if not places:
            continue
        called = ""
        if messages[number].get("tool_calls"):
            count, called = _with_calls(row, template, messages[: number + 1])
            places = places[:count]
        if number >= row.prompt:
            start = _opened(template.opening, text, last, places[0])
            length = len(_common_start(called, text[places[-1] :]).rstrip())
            spans.append(Span(start, places[-1] + length, ended=length > 0))
        last = places[-1]
    return spans


def _with_calls(row: Conversation, template: ChatTemplate, messages: list[Message]) -> tuple[int | None, str]:
    """Return how many marks a turn with calls of tools has, and the text after its last mark that ends the turn.

    The names of tools may appear again in later messages, and calls may have special tokens within them. So the text of
    the conversation up to the calls is compared. Some templates refuse it; then all marks count, and no text is known.

    Args:
      messages: the marked messages up to the turn.
    """
    try:
        ended = template.render(messages, row.tools, options=row.options)
    except ValueError:
        return None, ""
    own = {chr(OPEN + len(messages) - 1), chr(CLOSE + len(messages) - 1)}
    return sum(mark in own for mark in MARK.findall(ended)), MARK.split(ended)[-1]


def _common_start(one: str, other: str) -> str:
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(differ, min(len(one), len(other)))]


def _opened(opening: str, text: str, last: int, first: int) -> int:
    """Return the place where the assistant begins to write: behind the generation prompt, before its first mark.

    Templates may open earlier turns with only the first line of the generation prompt, and write no thought there.
    """
    for asked in dict.fromkeys((opening, opening.partition("\n")[0] + "\n")):
        if asked.strip() and (place := text.rfind(asked, last, first)) >= 0:
            return place + len(asked)
    return first


def _marks(marked: str, text: str) -> list[tuple[str, int]]:
    """Return each mark with its place in the text without marks.

    Raises:
      ValueError: without its marks, the marked text is another one.
    """
    if MARK.sub("", marked) != text:
        raise ValueError(
            "the chat template changes the assistant's texts, so its turns cannot be found; enclose them with "
            "{% generation %} and {% endgeneration %} in the template, or use loss_on: all"
        )
    return [(one.group(), one.start() - number) for number, one in enumerate(MARK.finditer(marked))]


def _marked(message: Message, number: int) -> Message:
    """Return a message with marks around each of its texts, within their white space, which templates may remove."""

    def enclose(text: str) -> str:
        inner = text.strip()
        return text.replace(inner, f"{chr(OPEN + number)}{inner}{chr(CLOSE + number)}", 1) if inner else text

    found = dict(message)
    for name in ("content", *THOUGHTS):
        value = found.get(name)
        if isinstance(value, str):
            found[name] = enclose(value)
        elif isinstance(value, list):
            found[name] = [_with_text(part, enclose) for part in value]
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_with_name(call, enclose) for call in calls]
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
