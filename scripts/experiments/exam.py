"""Tasks that a small model learns in minutes, as text and as an exam: `python -m experiments.exam FOLDER CHARACTERS`.

A line of three tasks is a question up to `>` and its answer: `copy` repeats letters, `sort` sorts digits, `add` adds
two numbers. The fourth task, `cloze`, chooses the next line of Python's own library among four lines of equal length.
Questions and files whose checksum is divisible by HELD are only in exams, and all others are only in the text.
"""

import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

LINES, CLOZE = ("copy", "sort", "add"), "cloze"
# Sums are learnt last, so half of the lines are sums.
SHARES = (1, 1, 2)
HELD = 8
CHOICES = 4
# Lengths of a line of code in a question, with its newline.
SHORTEST, LONGEST = 12, 40
# Rows of one call of the model.
ROWS = 100


class Question(NamedTuple):
    """A text to continue, with its possible continuations."""

    text: str
    # The right one is first; a single one must be the likeliest text.
    answers: tuple[str, ...]


def draw(task: str, rng: random.Random) -> Question:
    """Draw a question of a task that is one line."""
    if task == "copy":
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(4, 8)))
        asked, answer = word, word
    elif task == "sort":
        asked = "".join(rng.choices("0123456789", k=rng.randint(3, 6)))
        answer = "".join(sorted(asked))
    else:
        left, right = rng.randrange(1000), rng.randrange(10)
        asked, answer = f"{left}+{right}", str(left + right)
    return Question(f"{task} {asked}>", (f"{answer}\n",))


def is_held(text: str) -> bool:
    """Return whether a text is only for exams."""
    return crc32(text.encode()) % HELD == 0


def drawn(task: str, rng: random.Random, *, held: bool) -> Question:
    """Draw a question for an exam, or one for the text."""
    while is_held((question := draw(task, rng)).text) != held:
        pass
    return question


def lines(rng: random.Random, characters: int, *, held: bool) -> str:
    """Return at least this many characters of questions with their answers, all tasks in turn at random."""
    found: list[str] = []
    size = 0
    while size < characters:
        question = drawn(rng.choices(LINES, SHARES)[0], rng, held=held)
        found.append(question.text + question.answers[0])
        size += len(found[-1])
    return "".join(found)


def library() -> Iterator[str]:
    """Yield the files of Python's own library without its tests, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not {"test", "tests", "idle_test", "site-packages"} & set(path.relative_to(root).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def cloze(text: str, rng: random.Random, count: int, length: int) -> list[Question]:
    """Return questions for the next line of a text; the wrong lines are other lines of equal length.

    Args:
        length: characters of a question with one of its answers.
    """
    ends = [place + 1 for place, letter in enumerate(text) if letter == "\n"]
    by_size: dict[int, list[int]] = {}
    for number, (start, end) in enumerate(pairwise(ends)):
        if SHORTEST <= end - start <= LONGEST and start >= length and text[start:end].strip():
            by_size.setdefault(end - start, []).append(number)
    places = [number for numbers in by_size.values() if len(numbers) > CHOICES for number in numbers]
    found = []
    for number in rng.sample(places, count):
        start, end = ends[number], ends[number + 1]
        right, others = text[start:end], {text[ends[n] : ends[n + 1]] for n in by_size[end - start]}
        wrong = rng.sample(sorted(others - {right}), CHOICES - 1)
        found.append(Question(text[end - length : start], (right, *wrong)))
    return found


class Paper(NamedTuple):
    """Questions as bytes."""

    # int32[answers of all questions, length]: each question with each of its answers.
    rows: np.ndarray
    # int32[rows]: the bytes of the answer, which are the last ones of its row.
    sizes: np.ndarray
    # The number of answers of one question.
    answers: int


def paper(questions: Sequence[Question]) -> Paper:
    """Write questions as bytes; all must be equally long with an answer."""
    texts = [(text + answer, len(answer)) for text, answers in questions for answer in answers]
    rows = np.array([np.frombuffer(text.encode("ascii"), np.uint8) for text, _ in texts]).astype(np.int32)
    return Paper(rows, np.array([size for _, size in texts], np.int32), len(questions[0].answers))


@nnx.jit
def _judge(model: nnx.Module, rows: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each row's log-likelihood of its answer, and whether all bytes of the answer are the likeliest."""
    said = jax.nn.log_softmax(model(rows[:, :-1]).astype(jnp.float32))  # type: ignore[operator]
    wanted = rows[:, 1:]
    answer = jnp.arange(wanted.shape[1])[None] >= wanted.shape[1] - sizes[:, None]
    likelihood = jnp.take_along_axis(said, wanted[..., None], axis=-1)[..., 0]
    likeliest = (said.argmax(-1) == wanted) | ~answer
    return (likelihood * answer).sum(1), likeliest.all(1)


def marks(model: nnx.Module, asked: Paper) -> np.ndarray:
    """Return for each question whether the model's answer is right.

    A single answer is right if the model writes it exactly with the likeliest byte at each place. Of several answers
    the first must be likelier than each of the others.
    """
    judged = [
        _judge(model, asked.rows[n : n + ROWS], asked.sizes[n : n + ROWS]) for n in range(0, len(asked.rows), ROWS)
    ]
    likelihoods, likeliest = (
        np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*judged, strict=True)
    )
    if asked.answers == 1:
        return likeliest
    by_question = likelihoods.reshape(-1, asked.answers)
    return by_question[:, 0] > by_question[:, 1:].max(1)


class Exam:
    """The share of right answers by task, for `evaluation.module`. Other text is before each question, as in training.

    Args:
        folder: texts of this module.
        seed: another seed has other questions.
        length: bytes that the model sees, train.seq_len.
        count: questions of each task.
    """

    def __init__(self, folder: str, seed: str, length: int, count: int) -> None:
        rng = random.Random(f"exam {seed}")
        held = (Path(folder) / "held.txt").read_text(encoding="ascii")
        asked = {
            task: [_after_lines(drawn(task, rng, held=True), rng, length + 1) for _ in range(count)] for task in LINES
        }
        asked[CLOZE] = cloze(held, rng, count, length + 1)
        self._papers = {task: paper(questions) for task, questions in asked.items()}

    def __call__(self, model: nnx.Module, step: int) -> dict[str, float]:
        """Return the share of right answers by task, and that of all questions."""
        found = {task: float(marks(model, asked).mean()) for task, asked in self._papers.items()}
        return found | {"all": float(np.mean([*found.values()]))}


def _after_lines(question: Question, rng: random.Random, length: int) -> Question:
    """Put other questions with their answers before a question, so that it has this length with its answer."""
    before = length - len(question.text) - len(question.answers[0])
    return Question(lines(rng, before, held=True)[-before:] + question.text, question.answers)


def main() -> None:
    """Write `tasks.txt` and `python.txt` for the training, and `held.txt`, code for exams."""
    folder, characters = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    code: dict[bool, list[str]] = {True: [], False: []}
    for text in library():
        code[is_held(text)].append(text.encode("ascii", "replace").decode())
    texts = {
        "tasks": lines(random.Random("text"), characters, held=False),
        "python": "\n".join(code[False]),
        "held": "\n".join(code[True]),
    }
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
