"""The tasks of an exam, its marks, and the intervals of its scores: exact small cases."""

import math
import random
from pathlib import Path

import jax
import pytest
from flax import nnx

from experiments.exam import LINES, Exam, Question, cloze, drawn, is_held, lines, marks, paper
from experiments.intervals import over_seeds, wilson

# Ten lines of 12 letters, which are long enough for questions, and many shorter ones.
CODE = "".join(f"value_{letter} = {letter}\n" for letter in "abcdefghij") + "x = 1\n" * 30


class Reader(nnx.Module):
    """A model that knows all next bytes but the last one, which is a line's end, and is wrong about sevens."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        following = jax.numpy.concatenate([tokens[:, 1:], jax.numpy.full_like(tokens[:, :1], ord("\n"))], 1)
        return jax.nn.one_hot(jax.numpy.where(following == ord("7"), ord("8"), following), 256)


def solve(asked: str) -> str:
    task, _, what = asked.removesuffix(">").partition(" ")
    if task == "add":
        left, right = what.split("+")
        return str(int(left) + int(right))
    return "".join(sorted(what)) if task == "sort" else what


def test_lines_have_right_answers_and_no_question_of_an_exam() -> None:
    text = lines(random.Random(1), 20_000, held=False)
    assert text == lines(random.Random(1), 20_000, held=False)
    pairs = [line.partition(">") for line in text.splitlines()]
    assert len(pairs) > 1000 and {asked.split(" ")[0] for asked, _, _ in pairs} == set(LINES)
    for asked, _, answer in pairs:
        assert answer == solve(asked) and not is_held(f"{asked}>")
    assert all(is_held(drawn(task, random.Random(seed), held=True).text) for task in LINES for seed in range(20))


def test_a_line_of_code_is_chosen_among_others_of_its_length() -> None:
    text = "\n".join([CODE, CODE])
    for asked, answers in cloze(text, random.Random(0), 9, 40):
        assert len(set(answers)) == 4 and {len(answer) for answer in answers} == {12}
        assert len(asked) == 28 and asked + answers[0] in text
        assert all(answer in CODE for answer in answers)


def test_an_answer_is_right_if_every_byte_of_it_is_the_likeliest() -> None:
    asked = [("add 1+1>", "2\n"), ("copy 17>", "7\n"), ("add 7+8>", "5\n")]
    found = marks(Reader(), paper([Question(text, (answer,)) for text, answer in asked]))
    assert found.tolist() == [True, False, True], "a seven in the question does not count"


def test_the_first_answer_must_be_likelier_than_all_others() -> None:
    choices = [("5\n", "7\n"), ("7\n", "5\n"), ("5\n", "6\n")]
    found = marks(Reader(), paper([Question("ask ", answers) for answers in choices]))
    assert found.tolist() == [True, False, False], "equal likelihoods are no choice"


def test_an_exam_has_a_score_for_each_task_and_for_all(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("\n".join([CODE, CODE]), encoding="ascii")
    scores = Exam(str(tmp_path), "0", 32, 8)(Reader(), 1)
    assert set(scores) == {*LINES, "cloze", "all"}
    assert scores["copy"] == 1.0, "letters have no sevens"
    assert scores["cloze"] == 0.0, "this model finds all lines equally likely"
    assert scores["all"] == pytest.approx((1.0 + scores["sort"] + scores["add"]) / 4)
    assert Exam(str(tmp_path), "0", 32, 8)(Reader(), 1) == scores


@pytest.mark.parametrize(("right", "count"), [(50, 100), (1, 500), (499, 500), (0, 10), (10, 10)])
def test_wilsons_ends_are_the_shares_that_are_just_compatible(right: int, count: int) -> None:
    """At an end p, the share is 1.96 standard deviations of a share with the chance p away from it."""
    share, low, high = wilson(right, count)
    assert share == right / count
    for end in (low, high):
        spread = 1.959964 * math.sqrt(end * (1 - end) / count)
        assert abs(share - end) == pytest.approx(spread, abs=1e-6)


def test_an_interval_over_seeds_is_students() -> None:
    mean, low, high = over_seeds([1.0, 2.0, 3.0]) or pytest.fail()
    assert (mean, high - mean, mean - low) == pytest.approx((2.0, 4.302653 / math.sqrt(3), 4.302653 / math.sqrt(3)))
    two = over_seeds([0.0, 2.0])
    assert two == pytest.approx((1.0, 1 - 12.706205, 1 + 12.706205)) and two is not None and two.has_zero
    assert over_seeds([1.0]) is None and over_seeds([]) is None
    assert over_seeds([1.0, 1.1]) is not None
