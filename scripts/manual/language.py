"""The check of this project's language: phrases that have to be read twice, and comments behind code.

`python scripts/manual/language.py [PATH ...]` reads Python files (comments, docstrings, messages), pages of the manual
and templates. It prints one line for each finding, and ends with status 1 if there is one. `./scripts/lint` runs it
over everything that git tracks. Records (the log, the decisions, the changes of past releases) keep the words of their
day.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDS = ("docs/log.md", "docs/decisions/", "CHANGELOG.md")
SUFFIXES = {".py", ".md", ".j2"}

# A comment behind code has room for a unit, a shape, or one or two words beside it.
TRAILING_WORDS_MAX = 3
DIRECTIVE = re.compile(r"# ?(noqa|type:|pragma|pyright|mypy|ruff|fmt:|language:)")

# This file and its test hold the phrases themselves.
EXEMPT = ("scripts/manual/language.py", "scripts/manual/test_language.py")

_PREPOSITIONS = "of|by|to|in|from|for|with|on|at|after|before|under|over|through|without|against"

# A phrase, and what to write instead.
PHRASES: tuple[tuple[str, str], ...] = (
    (r"(?:go|goes|going|went|gone) on(?! (?:the|a|an|its|their|top|disk)\b)", "continue, resume"),
    (r"anew", "again"),
    (r"begins? again", "restart, is reshuffled"),
    (r"(?:whoever|whomever|whosoever)", "a noun, or anyone who"),
    (r"those who", "a noun, or anyone who"),
    (rf"(?:{_PREPOSITIONS}) (?:which|whom)", "two sentences"),
    (r"(?<!there\s)is no (?!longer|more|less|such)\w+", "is not a"),
    (r"in the mean(?!time)", "on average"),
    (r"at last", "finally"),
    (r"for ever", "forever"),
    (r"at the begin", "at the start"),
    (r"of (?:its|their|one's|your|our|his) own", "separate, or your own X"),
    (r"all else", "everything else, by its name"),
    (r"the latter", "the noun again"),
    (r"com(?:e|es|ing) along", "is included"),
    (r"tak(?:e|es|ing|en) up(?! to)", "recover, restore, load"),
    (r"obituary", "description of its exit"),
    (r"will do", "is enough, works"),
    (r"see (?:above|below|the head of this file)", "the fact itself, or the name of its place"),
    # One word for one thing (docs/glossary.md).
    (r"(?:life|lives)", "incarnation (a learner's), epoch (the syncer's), runs"),
    (r"host(?: |-)memory", "CPU memory"),
)
# These contain such a phrase, and mean something else; the last one is a record in metrics.jsonl.
IDIOMS = re.compile(
    r"\bsigns?[\s-]+of[\s-]+life\b|\blife\s+of\s+an?\s+(?:fragment|round)\b|\blife\s+t\s+global_step\b", re.I
)
FINDERS = tuple(
    (re.compile(r"\b(?:" + phrase.replace(" ", r"\s+") + r")(?!\w)", re.I), instead) for phrase, instead in PHRASES
)


def phrase_problems(text: str) -> Iterator[tuple[int, str]]:
    """Find phrases that this project does not use; line numbers start at 1 with the text."""
    text = IDIOMS.sub(lambda idiom: "\n" * idiom[0].count("\n"), text)
    for finder, instead in FINDERS:
        for match in finder.finditer(text):
            words = " ".join(match[0].split())
            yield text.count("\n", 0, match.start()) + 1, f'"{words}"; write {instead}'


def comment_problems(text: str) -> Iterator[tuple[int, str]]:
    """Find comments behind code that should be sentences above it, and phrases in all comments."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        line, column = token.start
        words = len(token.string.lstrip("#").split())
        if token.line[:column].strip() and words > TRAILING_WORDS_MAX:
            yield line, f"a comment of {words} words behind code; write a sentence above it"
        for _, problem in phrase_problems(token.string):
            yield line, problem


def string_problems(text: str) -> Iterator[tuple[int, str]]:
    """Find phrases in docstrings and messages; a literal with no space is a name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for line, problem in phrase_problems(node.value):
                yield node.lineno + line - 1, problem


def prose_of(page: str) -> str:
    """Blank the code of a Markdown page, and keep its lines."""
    hollow = re.sub(r"(?ms)^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), page)
    return re.sub(r"`[^`\n]*`", "`code`", hollow)


def problems(path: Path) -> list[tuple[int, str]]:
    """List the findings of one file by line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return sorted({*comment_problems(text), *string_problems(text)})
    return sorted(phrase_problems(prose_of(text) if path.suffix == ".md" else text))


def tracked(paths: list[str]) -> list[Path]:
    """List the files below `paths` (default: all) that git tracks and this check reads."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], cwd=ROOT, check=True, capture_output=True, text=True
    )
    names = [name for name in listed.stdout.split("\0") if name]
    kept = [n for n in names if not n.startswith((*RECORDS, *EXEMPT)) and "_pb2" not in n and "testdata" not in n]
    return [ROOT / name for name in kept if Path(name).suffix in SUFFIXES and (ROOT / name).is_file()]


def main(paths: list[str]) -> int:
    """Print all findings below `paths`, by default everywhere; 1 if there is one."""
    count = 0
    for path in tracked(paths):
        name = str(path.relative_to(ROOT))
        for line, problem in problems(path):
            print(f"{name}:{line}: {problem}")
            count += 1
    print(f"language: {count} findings" if count else "language: clean")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
