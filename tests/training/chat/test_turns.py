"""Conversations as tokens: the ids are those of transformers, and what is trained on is what the assistant writes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_jax.training.chat import template as chat_template
from diloco_jax.training.chat.rows import read_row
from diloco_jax.training.chat.template import DAY, ChatTemplate, open_template
from diloco_jax.training.chat.turns import (
    OPEN,
    Completion,
    Conversation,
    Encoded,
    encode_completion,
    encode_conversation,
)
from diloco_jax.training.data.config import LossOn
from diloco_jax.training.data.tokenizer import Tokenizer, open_tokenizer
from tests.training.chat.templates import CONVERSATIONS, LINES, MARKED, TEMPLATES, TOOLS, said, write_tokenizer


def shown(tokenizer: Tokenizer, made: Encoded) -> str:
    """Return the text with [ and ] around what is trained on."""
    edges = np.flatnonzero(np.diff(made.weights, prepend=0, append=0)).tolist()
    text, at = "", 0
    for number, edge in enumerate(edges):
        text += tokenizer.decode(made.ids[at:edge]) + "[]"[number % 2]
        at = edge
    return text + tokenizer.decode(made.ids[at:])


def encoded(folder: Path, name: str, which: str, loss_on: LossOn = "completion", prompt: int = 0) -> str:
    folder = write_tokenizer(folder / name, TEMPLATES[name])
    messages, tools = CONVERSATIONS[which]
    tokenizer = open_tokenizer(folder)
    row = Conversation(messages, prompt, tools)
    return shown(tokenizer, encode_conversation(row, open_template(folder), tokenizer, loss_on))


HI = "<|begin|>user\nHello there<|stop|>\n"
# What each template writes, and in brackets what is trained on.
WANTED = [
    ("lines", "one", f"{HI}<|begin|>assistant\n[Good day.<|stop|>]\n"),
    (
        "lines",
        "two",
        "<|begin|>user\n Hi\n<|stop|>\n<|begin|>assistant\n[ Yes, é ü 世界.\n<|stop|>]\n"
        "<|begin|>user\nMore?<|stop|>\n<|begin|>assistant\n[No.<|stop|>]\n",
    ),
    (
        "trimmed",
        "two",
        "<s><|begin|>user\nHi<|stop|>\n<|begin|>model\n[Yes, é ü 世界.<|stop|>]\n"
        "<|begin|>user\nMore?<|stop|>\n<|begin|>model\n[No.<|stop|>]\n",
    ),
    ("bare", "one", "<s><|begin|> Hello there <|call|> [Good day.<|stop|>]"),
    # The earlier thought is not in the text. The last one is written by the assistant; the prompt opens it.
    (
        "thinking",
        "thought",
        "<|begin|>user\n1+1<|stop|>\n<|begin|>assistant\n[2<|stop|>]\n"
        "<|begin|>user\n2+2<|stop|>\n<|begin|>assistant\n<think>\n[twice two\n</think>\n\n4<|stop|>]\n",
    ),
    (
        "thinking",
        "tool",
        '<|begin|>system\n[{"type": "function", "function": {"name": "clock", "description": "Tells the time", '
        '"parameters": {}}}]<|stop|>\n<|begin|>user\nTime?<|stop|>\n<|begin|>assistant\n<think>\n[\n</think>\n\n'
        '<tool>{"name": "clock"}</tool><|stop|>]\n<|begin|>tool\nnoon<|stop|>\n'
        "<|begin|>assistant\n<think>\n[\n</think>\n\nIt is noon.<|stop|>]\n",
    ),
    (
        "channels",
        "thought",
        "Today is 2026-01-01.<|begin|>user<|channel|>1+1<|stop|><|begin|>assistant[<|channel|>2<|stop|>]"
        "<|begin|>user<|channel|>2+2<|stop|><|begin|>assistant[<|channel|>thought twice two<|stop|>"
        "<|begin|>assistant<|channel|>4<|last|>]",
    ),
    (
        "channels",
        "tool",
        "Today is 2026-01-01.<|begin|>user<|channel|>Time?<|stop|><|begin|>assistant[ to=clock<|channel|>{}<|call|>]"
        "<|begin|>clock<|channel|>noon<|stop|><|begin|>assistant[<|channel|>It is noon.<|last|>]",
    ),
    ("marked", "one", f"{HI}<|begin|>assistant\n[Good day.<|stop|>]\n"),
]


@pytest.mark.parametrize(("name", "which", "wanted"), WANTED, ids=[f"{name}-{which}" for name, which, _ in WANTED])
def test_the_turns_of_the_assistant_are_trained_on(tmp_path: Path, name: str, which: str, wanted: str) -> None:
    assert encoded(tmp_path, name, which) == wanted


# A text beside a call of a tool, and thoughts that a template cuts out of the content, as in public templates.
ODD = {
    "a call before its text": (
        "{% for m in messages %}{% if m.role == 'tool' %}<|call|>{{ m.name }}:{{ m.content }}<|stop|>"
        "{% elif m.role == 'assistant' and m.tool_calls %}<|begin|>model {{ m.tool_calls[0].name }}<|channel|>"
        "{{ messages[2].name }}:{{ messages[2].content }}<|call|>{{ m.content }}<|stop|>"
        "{% elif m.role == 'assistant' %}<|begin|>model {{ m.content }}<|stop|>"
        "{% else %}<|begin|>{{ m.role }} {{ m.content }}<|stop|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|begin|>model {% endif %}",
        [
            said("user", "Time?"),
            said("assistant", "let me", tool_calls=[{"name": "clock", "arguments": {}}]),
            said("tool", "noon", name="clock"),
        ],
        "<|begin|>user Time?<|stop|><|begin|>model [clock<|channel|>]clock:noon<|call|>[let me<|stop|>]"
        "<|call|>clock:noon<|stop|>",
    ),
    "a thought is cut out": (
        "{% for m in messages %}<|begin|>{{ m.role }}:"
        "{{ m.content.split('</think>')[-1] }}<|stop|>{% endfor %}"
        "{% if add_generation_prompt %}<|begin|>assistant:<think>\n{% endif %}",
        [said("user", "q"), said("assistant", "<think>\nhm\n</think>\n\na")],
        "<|begin|>user:q<|stop|><|begin|>assistant:[\n\na<|stop|>]",
    ),
    "no token ends a turn": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<|stop|>"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        [said("user", "q"), said("assistant", "a"), said("user", "more <|call|>")],
        "user: q\nassistant: [a]\nuser: more <|call|>\n<|stop|>",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_only_what_the_assistant_writes_is_trained_on(tmp_path: Path, name: str) -> None:
    template, messages, wanted = ODD[name]
    folder = write_tokenizer(tmp_path, template)
    tokenizer = open_tokenizer(folder)
    assert shown(tokenizer, encode_conversation(Conversation(messages), open_template(folder), tokenizer)) == wanted


@pytest.mark.parametrize("name", ["lines", "marked"])
def test_the_last_turn_the_turns_behind_a_prompt_or_all(tmp_path: Path, name: str) -> None:
    text = encoded(tmp_path, name, "two").replace("[", "").replace("]", "")
    both = encoded(tmp_path, name, "two")
    last = text.replace("No.<|stop|>", "[No.<|stop|>]")
    assert encoded(tmp_path, name, "two", "last") == last == encoded(tmp_path, name, "two", prompt=2)
    assert encoded(tmp_path, name, "two", "all") == f"[{text}]" and encoded(tmp_path, name, "two", prompt=1) == both


@pytest.mark.extra("parity")
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_marked_tokens_are_those_of_transformers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer
    from transformers.utils import chat_template_utils

    class Day:
        now = staticmethod(lambda: DAY)

    # Templates read the present in transformers.
    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    folder = write_tokenizer(tmp_path / name, TEMPLATES[name])
    theirs, ours = AutoTokenizer.from_pretrained(folder), open_tokenizer(folder)
    count = 0
    for which, (messages, tools) in CONVERSATIONS.items():
        if name == "trimmed" and which == "system":
            continue
        how: dict[str, Any] = {"tokenize": True, "return_dict": True, "tools": tools}
        wanted = theirs.apply_chat_template(messages, return_assistant_tokens_mask=name == "marked", **how)
        made = encode_conversation(Conversation(messages, 0, tools), open_template(folder), ours)
        assert made.ids == wanted["input_ids"]
        if name == "marked":
            assert made.weights.tolist() == wanted["assistant_masks"]
        count += 1
    assert count >= 4


def test_a_template_that_rewrites_an_answer_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, LINES.replace("{{ m.content }}", "{{ m.content[:4] }}"))
    row, tokenizer, opened = Conversation(CONVERSATIONS["one"][0]), open_tokenizer(folder), open_template(folder)
    with pytest.raises(ValueError, match=r"changes the assistant's texts.*generation"):
        encode_conversation(row, opened, tokenizer)
    assert encode_conversation(row, opened, tokenizer, "all").weights.all()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"content": "a"}]}, "message 1 of 'messages' is .*give an object with a role"),
        ({"messages": "hello"}, "'messages' is text that is not JSON"),
        ({"messages": {"role": "user"}}, "'messages' is dict; give list"),
        ({"messages": [said("user", "a"), {"role": "assistant", "content": [{"type": "image"}]}]}, "only text is read"),
        ({"prompt": "a"}, "it has prompt; give 'messages'.*'prompt' and 'completion'"),
        ({"text": "a"}, "it has text; give 'messages'"),
        ({"messages": [], "tools": 3}, "'tools' is int; give list"),
    ],
)
def test_wrong_rows_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_row(row, "messages")


def test_rows_have_messages_or_a_prompt_and_a_completion() -> None:
    asked, answered = said("user", "a"), said("assistant", "b")
    assert read_row({"messages": [asked, answered]}, "messages") == Conversation([asked, answered])
    assert read_row({"prompt": [asked], "completion": [answered]}, "messages") == Conversation([asked, answered], 1)
    assert read_row({"prompt": "a", "completion": "b\ud800"}, "messages") == Completion("a", "b\ufffd")
    row = {"chat": '[{"role": "assistant", "content": "b"}]', "tools": "[{}]", "chat_template_kwargs": {"x": 1}}
    assert read_row(row, "chat") == Conversation([answered], 0, [{}], {"x": 1})
    # Rows without an answer are left out.
    for empty in ({"messages": [asked]}, {"messages": None}, {"prompt": "a", "completion": ""}):
        assert read_row(empty, "messages") is None


@pytest.mark.parametrize("end", ["<|stop|>", "</s>"])
def test_a_completion_ends_as_a_document(tmp_path: Path, end: str) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, None, end))
    made = encode_completion(Completion("a t", "he end"), tokenizer)
    # The token "the" has characters of both.
    assert shown(tokenizer, made) == f"a [the end{end}]" and made.ends.tolist() == [0] * (len(made.ids) - 1) + [1]
    assert encode_completion(Completion("a", "b"), tokenizer, "all").weights.all()
    letters = open_tokenizer("bytes")
    assert encode_completion(Completion("é", "b"), letters).weights.tolist() == [0, 0, 1, 1]


def test_templates_come_from_a_file_or_from_the_settings(tmp_path: Path) -> None:
    folder, messages = write_tokenizer(tmp_path / "a", None), CONVERSATIONS["one"][0]
    with pytest.raises(ValueError, match=r"has no chat template.*chat_template.jinja"):
        open_template(folder)
    settings = folder / "tokenizer_config.json"
    named = '[{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools[0].type }}"}]'
    settings.write_text(f'{{"chat_template": {named}, "pad_token": {{"content": "<p>"}}, "eos_token": null}}')
    assert open_template(folder).render(messages) == "plain"
    assert open_template(folder).render(messages, TOOLS) == "with function"
    (folder / "chat_template.jinja").write_text("{{ pad_token }}{{ eos_token }}{{ messages | length }}{{ more }}")
    assert open_template(folder).render(messages, options={"more": "!"}) == "<p>2!"
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"is damaged: line 1: .*copy it again"):
        open_template(folder)
    (folder / "chat_template.jinja").write_text("")
    settings.write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is damaged"):
        open_template(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('turns must alternate') }}", "refuses the conversation: turns must alternate"),
        ("{{ messages.append(1) }}", "refuses the conversation"),
        ("{{ ''.__class__.__mro__ }}", "refuses the conversation"),
        ("{{ 1 / 0 }}", "refuses the conversation: division by zero"),
        ("{{ 'a' * 2000 }}", "more than 1,000 characters of text; make it shorter"),
    ],
)
def test_what_a_template_may_not_do(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TEXT_MAX", 1000)
    with pytest.raises(ValueError, match=message):
        ChatTemplate({"default": text}, {}, "folder").render([said("user", "a")])


def test_texts_with_the_characters_of_marks_are_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, LINES)
    row = Conversation([said("user", chr(OPEN)), said("assistant", "b")])
    with pytest.raises(ValueError, match=r"a text has the character U\+100000, which marks the assistant's turns"):
        encode_conversation(row, open_template(folder), open_tokenizer(folder))


def test_a_prompt_needs_a_mark_for_each_turn(tmp_path: Path) -> None:
    folder = write_tokenizer(
        tmp_path,
        MARKED.replace("<|stop|>{% endgeneration %}", "{% endgeneration %}{% generation %}<|stop|>{% endgeneration %}"),
    )
    row = Conversation(CONVERSATIONS["two"][0], 2)
    with pytest.raises(ValueError, match="marks 4 parts in a conversation of 2 assistant's turns"):
        encode_conversation(row, open_template(folder), open_tokenizer(folder))
