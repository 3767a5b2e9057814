"""A small corpus for MaxText without a network: source text of Python's standard library, and a tokenizer for it.

    python docs/examples/maxtext_corpus.py FOLDER

FOLDER gets `train.array_record` and `eval.array_record` for MaxText's grain pipeline, and `tokenizer` in the format of
Hugging Face for `tokenizer_type=huggingface`. Run it in the environment of MaxText.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordWriter
from maxtext.input_pipeline.protos.example_pb2 import Example
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 512
# One file of so many is held out for evaluations.
HELD_OUT = 16
LETTERS = 400  # of one record
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3"}


def texts() -> list[str]:
    """Return the source files of the standard library, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts)]
    return [path.read_text(encoding="utf-8", errors="replace") for path in files]


def records(text: str) -> Iterator[str]:
    """Cut a file into records of whole lines."""
    part = ""
    for line in text.splitlines(keepends=True):
        if part and len(part) + len(line) > LETTERS:
            yield part
            part = ""
        part += line
    if part.strip():
        yield part


def write(file: Path, every: Iterable[str]) -> int:
    """Write the records of files; return their number."""
    writer, count = ArrayRecordWriter(str(file), "group_size:1"), 0
    for text in every:
        for record in records(text):
            example = Example()
            example.features.feature["text"].bytes_list.value.append(record.encode())
            writer.write(example.SerializeToString())
            count += 1
    writer.close()
    return count


def train_tokenizer(folder: Path, every: Iterable[str]) -> None:
    """Train a tokenizer of byte pairs, and write it in the format of Hugging Face."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = list(SPECIAL.values())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(every, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main(folder: Path) -> None:
    """Write corpus and tokenizer below `folder`."""
    every = texts()
    # A part of the text is enough for byte pairs.
    train_tokenizer(folder / "tokenizer", every[::4])
    held_out = every[::HELD_OUT]
    trained = [text for index, text in enumerate(every) if index % HELD_OUT]
    counts = {
        part: write(folder / f"{part}.array_record", some) for part, some in (("train", trained), ("eval", held_out))
    }
    print(f"{folder}: {counts['train']} records to train, {counts['eval']} held out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
