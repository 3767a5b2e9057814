"""Rows of chat data: JSON objects with messages, or with a prompt and its completion."""

import json
from collections.abc import Mapping
from typing import Any

from diloco_jax.training.chat.template import Message
from diloco_jax.training.chat.turns import ASSISTANT, Completion, Conversation
from diloco_jax.training.data.documents import COMPLETION, HALVES, OPTIONS, PROMPT, REPLACEMENT, TOOLS


def read_row(row: Mapping[str, Any], field: str) -> Conversation | Completion | None:
    """Return the conversation of a row; None if there is nothing that could be trained on.

    Args:
      row: `field` has messages, or `prompt` and `completion` have texts or messages; `tools` and
        `chat_template_kwargs` may be JSON text.
      field: the name of the messages.

    Raises:
      ValueError: the row has another form.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"it is {type(row).__name__}; give an object with '{field}' (--field, data.field)")
    row = whole_characters(row)
    tools, options = _parsed(row.get(TOOLS), TOOLS, list), _parsed(row.get(OPTIONS), OPTIONS, dict)
    if row.get(field) is not None:
        return _conversation(_messages(row[field], field), 0, tools, options)
    prompt, completion = row.get(PROMPT), row.get(COMPLETION)
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion) if completion else None
    if prompt is None and completion is None and {field, PROMPT} & {*row}:
        return None
    if prompt is None or completion is None:
        raise ValueError(
            f"it has {', '.join(row) or 'no keys'}; give '{field}' (--field, data.field), or '{PROMPT}' and "
            f"'{COMPLETION}'"
        )
    if isinstance(prompt, str) != isinstance(completion, str):
        raise ValueError(f"'{PROMPT}' and '{COMPLETION}' differ in form; give both as texts, or both as messages")
    before = _messages(prompt, PROMPT)
    return _conversation([*before, *_messages(completion, COMPLETION)], len(before), tools, options)


def _conversation(
    messages: list[Message], prompt: int, tools: list[Any] | None, options: dict[str, Any] | None
) -> Conversation | None:
    has_answer = any(message["role"] == ASSISTANT for message in messages[prompt:])
    return Conversation(messages, prompt, tools, options) if has_answer else None


def _messages(value: Any, name: str) -> list[Message]:
    value = _parsed(value, name, list)
    for number, one in enumerate(value):
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise ValueError(f"message {number + 1} of '{name}' is {str(one)[:80]!r}; give an object with a role")
        content = one.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or any(_is_other(part) for part in parts):
            raise ValueError(
                f"message {number + 1} of '{name}' has {str(content)[:80]!r} as content; only text is read"
            )
    return list(value)


def _is_other(part: Any) -> bool:
    return not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str)


def _parsed(value: Any, name: str, kind: type) -> Any:
    """Return a value that may be JSON text; None stays None."""
    if isinstance(value, str) and not value.strip():
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"'{name}' is text that is not JSON ({error}); correct it") from error
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"'{name}' is {type(value).__name__}; give {kind.__name__}")
    return value


def without_nulls(value: Any) -> Any:
    """Return plain JSON without keys whose value is null: tables have all keys in all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def whole_characters(value: Any) -> Any:
    """Return plain JSON where halves of characters, which JSON may contain, are U+FFFD."""
    if isinstance(value, str):
        return HALVES.sub(REPLACEMENT, value)
    if isinstance(value, Mapping):
        return {whole_characters(key): whole_characters(each) for key, each in value.items()}
    return [whole_characters(each) for each in value] if isinstance(value, list) else value
