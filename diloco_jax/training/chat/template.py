"""Chat templates: Jinja2 programs in a tokenizer's folder that turn a conversation into text.

The text is the one of `apply_chat_template` of transformers: the same settings of Jinja2, the same extra functions, and
the special tokens by name. Templates come from strangers, so they run in Jinja2's sandbox and see plain JSON only.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diloco_jax.training.data.tokenizer import CHAT_FILE, SETTINGS_FILE, SPECIAL_FILE, TOOL_FILE
from diloco_jax.training.regular import check_regular

Message = dict[str, Any]
# The names of templates if there are several: one for conversations with tools, and one for all others.
DEFAULT, WITH_TOOLS = "default", "tool_use"
# The settings with special tokens that a template may write.
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# The names of a thought; a template reads one of them.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# A template may mark what the assistant writes; this variable has the texts that stand for such a mark.
MARKS = "diloco_marks"
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The day that templates write into data: with the real one, a store would depend on the day when it was made.
DAY = datetime(2026, 1, 1)
# The most characters of a text: its tokens take about a hundred times as much memory.
TEXT_MAX = 1 << 26


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
      texts: the template by name; a tokenizer with a single template has it as DEFAULT.
      special: special tokens by their name in a template, such as bos_token.
      where: the folder, for messages.
      day: what a template reads as the present; None: the real present.

    Raises:
      ValueError: a template is not valid Jinja2.
    """

    def __init__(
        self, texts: Mapping[str, str], special: Mapping[str, str], where: str, day: datetime | None = DAY
    ) -> None:
        self._special, self._where = dict(special), where
        environment = _environment(day)
        try:
            self._made = {name: environment.from_string(text) for name, text in texts.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template of {where} is damaged: line {error.lineno}: {error.message}; copy it again from "
                "its origin"
            ) from error
        self._marked = {name for name, text in texts.items() if MARKED.search(text)}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt: bool = False,
        options: Mapping[str, Any] | None = None,
        marks: tuple[str, str] | None = None,
    ) -> str:
        """Return the text of a conversation.

        Args:
          messages: dicts with role and content, and what else the template reads; plain JSON.
          tools: descriptions of functions as JSON schemas; None: there are none.
          prompt: whether the text ends with the beginning of an assistant's turn (`add_generation_prompt`).
          options: further variables of the template.
          marks: texts before and after each part that the template itself marks as the assistant's.

        Raises:
          ValueError: the template refuses the conversation, or fails.
        """
        name = self._name(tools)
        variables = {"documents": None, **self._special, **(options or {})}
        variables |= {"messages": _with_thoughts(messages), "tools": tools, "add_generation_prompt": prompt}
        variables[MARKS] = marks
        pieces, length = list[str](), 0
        try:
            for piece in self._made[name].generate(variables):
                pieces.append(piece)
                if (length := length + len(piece)) > TEXT_MAX:
                    break
        # A template is a program, so it may raise any error.
        except Exception as error:
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"the chat template of {self._where} refuses the conversation: {why}") from error
        if length > TEXT_MAX:
            raise ValueError(f"a conversation has more than {TEXT_MAX:,} characters of text; make it shorter")
        return "".join(pieces)

    def marks_turns(self, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Return whether the template marks the assistant's parts with {% generation %}."""
        return self._name(tools) in self._marked

    @cached_property
    def opening(self) -> str:
        """Return the text that opens an assistant's turn (the generation prompt); "" if a turn needs none."""
        question = {"role": "user", "content": "a"}
        # Some templates refuse a conversation without a system message, others one with it.
        for messages in ([question], [{"role": "system", "content": "b"}, question]):
            try:
                before, after = self.render(messages), self.render(messages, prompt=True)
            except ValueError:
                continue
            return after[len(before) :] if after.startswith(before) else ""
        return ""

    def _name(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        return WITH_TOOLS if tools is not None and WITH_TOOLS in self._made else DEFAULT


def open_template(folder: Path | None, day: datetime | None = DAY) -> ChatTemplate:
    """Open the chat template in the folder of a tokenizer.

    The file chat_template.jinja comes before `chat_template` in tokenizer_config.json, as in transformers. A template
    for conversations with tools may be beside it.

    Args:
      folder: None for the tokenizer of bytes, which has none.
      day: as in `ChatTemplate`.

    Raises:
      ValueError: the folder has no template, or it is damaged.
    """
    if folder is None:
        raise ValueError("the tokenizer bytes has no chat template; name a folder with tokenizer.json and a template")
    settings = _json(folder / SETTINGS_FILE)
    path = folder / CHAT_FILE
    if path.exists():
        check_regular(path)
        found: Any = path.read_text(encoding="utf-8")
    else:
        found = settings.get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    texts = {DEFAULT: found} if isinstance(found, str) else found
    if isinstance(texts, dict) and (more := folder / TOOL_FILE).exists():
        check_regular(more)
        texts = {**texts, WITH_TOOLS: more.read_text(encoding="utf-8")}
    if not isinstance(texts, dict) or not isinstance(texts.get(DEFAULT), str):
        raise ValueError(
            f"{folder} has no chat template, which messages need: put {CHAT_FILE} there, or give rows with a prompt "
            "and a completion"
        )
    return ChatTemplate(texts, _special(folder, settings), str(folder), day)


def _special(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by their name in a template."""
    said = {**_json(folder / SPECIAL_FILE), **{key: value for key, value in settings.items() if value is not None}}
    more = said.get("extra_special_tokens")
    found = dict(more) if isinstance(more, dict) else {}
    found |= {f"{name}_token": said.get(f"{name}_token") for name in SPECIAL}
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; an empty one if the file does not exist."""
    try:
        if not path.exists():
            return {}
        check_regular(path)
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again from its origin") from error
    return found


def _with_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Return messages where a thought has all names that templates read."""
    named = []
    for message in messages:
        thought = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
        named.append(message if thought is None else {"thinking": thought, **message, "reasoning_content": thought})
    return named


class _Generation(Extension):
    """The tag {% generation %}, which encloses what the assistant writes."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = nodes.Name(MARKS, "load")
        return nodes.CallBlock(self.call_method("_enclose", [marks]), [], [], body).set_lineno(line)

    def _enclose(self, marks: Any, caller: Any) -> str:
        text = str(caller())
        return text if not marks else f"{marks[0]}{text}{marks[1]}"


class _Dict:
    """The function `dict` of templates, without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _environment(day: datetime | None) -> ImmutableSandboxedEnvironment:
    def now(form: str) -> str:
        return (day or datetime.now()).strftime(form)

    extensions: list[type[Extension]] = [_Generation, loopcontrols]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _refuse, "strftime_now": now, "dict": _Dict()}
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # The filter of Jinja2 would escape characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
