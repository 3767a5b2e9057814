"""Chat templates in the manner of public families, written for these tests, and a tokenizer with their tokens."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

# Every turn is alike, and ends with a line.
LINES = """
{%- for m in messages -%}
<|begin|>{{ m.role }}
{{ m.content }}<|stop|>
{% endfor %}
{%- if add_generation_prompt %}<|begin|>assistant
{% endif %}"""
# The texts of turns are trimmed, assistants have another name, and there is no system turn.
TRIMMED = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}
{%- for m in messages -%}
<|begin|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}
{{ m['content'] | trim }}<|stop|>
{% endfor %}
{%- if add_generation_prompt %}<|begin|>model
{% endif %}"""
# There is no text that opens a turn of the assistant.
BARE = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}<|begin|> {{ m.content }} <|call|>
{%- elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}
{%- endfor %}"""
# Thoughts of earlier turns are dropped, the last turn always has one, and calls of tools are JSON.
THINKING = """
{%- if tools %}<|begin|>system
{{ tools | tojson }}<|stop|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' -%}
<|begin|>assistant
{% if loop.index0 > ns.last %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool>{{ call.function | tojson }}</tool>
{%- endfor %}<|stop|>
{% else -%}
<|begin|>{{ m.role }}
{{ m.content }}<|stop|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|begin|>assistant
<think>
{% endif %}"""
# The last turn ends with another token than earlier ones, and a call writes special tokens and its tool's name twice.
CHANNELS = """Today is {{ strftime_now('%Y-%m-%d') }}.
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls -%}
<|begin|>assistant to={{ m.tool_calls[0].name }}<|channel|>{{ m.tool_calls[0].arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' -%}
{% if m.thinking and loop.last %}<|begin|>assistant<|channel|>thought {{ m.thinking }}<|stop|>{% endif -%}
<|begin|>assistant<|channel|>{{ m.content }}{{ '<|last|>' if loop.last else '<|stop|>' }}
{%- elif m.role == 'tool' -%}
<|begin|>{{ m.name }}<|channel|>{{ m.content }}<|stop|>
{%- else -%}
<|begin|>{{ m.role }}<|channel|>{{ m.content }}<|stop|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|begin|>assistant{% endif %}"""
# The template itself marks what the assistant writes.
MARKED = """
{%- for m in messages -%}
<|begin|>{{ m.role }}
{% if m.role != 'assistant' %}{{ m.content }}<|stop|>{% else %}
{% generation %}{{ m.content }}<|stop|>{% endgeneration %}
{% endif %}

{% endfor %}
{%- if add_generation_prompt %}<|begin|>assistant
{% endif %}"""
TEMPLATES = {
    "lines": LINES,
    "trimmed": TRIMMED,
    "bare": BARE,
    "thinking": THINKING,
    "channels": CHANNELS,
    "marked": MARKED,
}
SPECIAL = ("<s>", "</s>", "<|begin|>", "<|stop|>", "<|call|>", "<|channel|>", "<|last|>")
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "Tells the time", "parameters": {}}}]


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one": ([said("user", "Hello there"), said("assistant", "Good day.")], None),
    "two": (
        [
            said("user", " Hi\n"),
            said("assistant", " Yes, é ü 世界.\n"),
            said("user", "More?"),
            said("assistant", "No."),
        ],
        None,
    ),
    "system": ([said("system", "Be brief."), said("user", "Hi"), said("assistant", "Yes")], None),
    "thought": (
        [
            said("user", "1+1"),
            said("assistant", "2", reasoning_content="small"),
            said("user", "2+2"),
            said("assistant", "4", reasoning="twice two"),
        ],
        None,
    ),
    "tool": (
        [
            said("user", "Time?"),
            said("assistant", "", tool_calls=[{"name": "clock", "arguments": {}, "function": {"name": "clock"}}]),
            said("tool", "noon", name="clock"),
            said("assistant", "It is noon."),
        ],
        TOOLS,
    ),
}


def write_tokenizer(folder: Path, template: str | None, end: str = "<|stop|>") -> Path:
    """Write a tokenizer of bytes with special tokens, as Hugging Face's folders have it."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: number for number, token in enumerate([*SPECIAL, *alphabet, "th", "the", "is"])}
    made = tokenizers.Tokenizer(models.BPE(words, [("t", "h"), ("th", "e"), ("i", "s")]))
    made.add_special_tokens(list(SPECIAL))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
