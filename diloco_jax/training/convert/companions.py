"""Files beside the weights of a public model: the meaning of its special tokens, and its licence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_jax.training.chat.template import open_template
from diloco_jax.training.chat.turns import turn_end_of
from diloco_jax.training.convert.weights import CONFIG_FILE, read_json
from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.data.tokenizer import Tokenizer, has_tokenizer, open_tokenizer
from diloco_jax.training.models.config import ModelConfig

GENERATION_FILE = "generation_config.json"
END = "eos_token_id"
TOKEN_IDS = ("bos_token_id", END, "pad_token_id")
# How the names of files start, in capitals, whose text a copy of the model must include.
LICENCES = ("LICENSE", "LICENCE", "NOTICE")


def folders_of(model: ModelConfig, data: DataConfig, tokenizer: Tokenizer | None) -> list[Path]:
    """List the folders with files for a run's model, the preferred one first, except those with another tokenizer."""
    names = (tokenizer.folder if tokenizer else None, data.tokenizer, model.weights)
    found: list[Path] = []
    for folder in (Path(name) for name in names if name):
        if not folder.is_dir() or folder in found:
            continue
        if has_tokenizer(folder) and tokenizer and open_tokenizer(folder).digest != tokenizer.digest:
            continue
        found.append(folder)
    return found


def token_ids(model: ModelConfig, folders: Sequence[Path], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the special tokens of the public model that the run started from, and the end token of its documents.

    Args:
        model: the run's model.
        folders: those of `folders_of`.
        tokenizer: the tokenizer of the run.
    """
    found = _said_ids(model, folders)
    if tokenizer and tokenizer.end is not None and tokenizer.end not in _ids(found.get(END)):
        found[END] = tokenizer.end
    return found


def turn_end(data: DataConfig, tokenizer: Tokenizer | None) -> set[int]:
    """Return the token that ends the assistant's turns in a run's conversations; empty if there are none.

    The tokenizer of a base model names another end, although its template has turns.
    """
    if not (data.with_chat and tokenizer and tokenizer.folder):
        return set()
    try:
        found = turn_end_of(open_template(tokenizer.folder), tokenizer)
    except ValueError:
        # Rows with a prompt and a completion need no template.
        return set()
    return set() if found is None else {found}


def with_ends(said: dict[str, Any], ends: set[int]) -> dict[str, Any]:
    """Return settings whose end tokens include `ends`."""
    ids = _ids(said.get(END))
    missing = sorted(ends - {*ids})
    return {**said, END: [*ids, *missing] if ids else missing} if missing else said


def stop_ids(model: ModelConfig, data: DataConfig, tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that end a text which the run's model writes.

    They are the end tokens of its documents and of its conversations' turns, and those of generation_config.json of the
    public model that it started from; without this file those of config.json, as in transformers.
    """
    folders = folders_of(model, data, tokenizer)
    path = next((one / GENERATION_FILE for one in folders if (one / GENERATION_FILE).exists()), None)
    said = read_json(path) if path else _said_ids(model, folders)
    return {id for one in (said.get(END), tokenizer.end) for id in _ids(one)} | turn_end(data, tokenizer)


def licences_of(model: ModelConfig) -> list[Path]:
    """List the licence files of the public model that a run started from."""
    paths = Path(model.weights).glob("*") if model.weights else ()
    return sorted(path for path in paths if path.name.upper().startswith(LICENCES) and path.is_file())


def _said_ids(model: ModelConfig, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the special tokens in config.json of the public model, if its folder is one of `folders`."""
    weights = Path(model.weights)
    if not (model.weights and weights in folders and (weights / CONFIG_FILE).exists()):
        return {}
    said = read_json(weights / CONFIG_FILE)
    text = said.get("text_config")
    said = {**(text if isinstance(text, dict) else {}), **said}
    return {name: said[name] for name in TOKEN_IDS if _ids(said.get(name))}


def _ids(value: Any) -> list[int]:
    """Return the ids of a key, which has one or a list of them; empty if it has anything else."""
    ids = value if isinstance(value, list) else [value]
    valid = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids)
    return ids if valid else []
