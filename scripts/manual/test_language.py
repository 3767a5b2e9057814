"""The check of the language finds what it should, and leaves plain sentences alone."""

from pathlib import Path

import pytest
from manual.language import comment_problems, main, phrase_problems, prose_of, string_problems


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("the run goes on", "goes on", id="verb"),
        pytest.param("the file\nof which nobody knows", "of which", id="relative-clause"),
        pytest.param("that is no leader", "is no leader", id="negation"),
        pytest.param("Whoever asks", "Whoever", id="capital"),
        pytest.param("a loop of\nyour own", "of your own", id="broken-line"),
        pytest.param("it was started in an earlier life", "life", id="one-start"),
        pytest.param("the lives of an island", "lives", id="several-starts"),
        pytest.param("copies in host\nmemory", "host memory", id="memory"),
    ],
)
def test_phrases_are_found(text: str, found: str) -> None:
    assert [problem.split('"')[1] for _, problem in phrase_problems(text)] == [found]


@pytest.mark.parametrize(
    "text",
    [
        "every round goes on the tape",
        "there is no leader",
        "the run is no longer needed",
        "it takes up to 3 s",
        "the lattermost is anewlook",
        "its signs of\n  life, and a sign of life",
        "the life of a round is its lifetime",
        "a disk that outlives its machine",
        "the memory of each host",
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert list(phrase_problems(text)) == []


def test_comments_behind_code_are_short() -> None:
    code = "a = 1  # bytes per second\nb = 2  # of the one that came first\n# Above.\nc = 3  # noqa: E501 a b c\n"
    assert [line for line, _ in comment_problems(code)] == [2]


def test_docstrings_and_messages_are_read_and_names_are_not() -> None:
    code = 'def f():\n    """Return.\n\n    It begins anew.\n    """\n    raise OSError(f"{f} goes on")\n\nx = "anew"\n'
    assert [line for line, _ in string_problems(code)] == [4, 6]


def test_code_on_pages_is_not_prose() -> None:
    page = "# Title\n\n```\nanew\n```\n\nThe field `anew` is a name.\nIt begins anew.\n"
    assert list(phrase_problems(prose_of(page))) == [(8, '"anew"; write again')]


def test_the_tree_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out


def test_a_record_is_not_read() -> None:
    assert main([str(Path("docs") / "log.md")]) == 0
