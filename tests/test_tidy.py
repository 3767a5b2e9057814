"""House rules that a reader should not have to check: small files, small functions, nothing left behind."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
LINE_LENGTH_MAX = 120

PACKAGE = "diloco_jax"
FOLDERS = (PACKAGE, "tests", "scripts", "configs", "docs", ".ci")
TEXT_SUFFIXES = {"", ".py", ".sh", ".md", ".toml", ".yaml", ".yml", ".txt", ".proto", ".cfg", ".j2"}
PYTHON_SHEBANG = re.compile(r"#!.*\bpython")

# Written in pieces so that this file passes its own test.
LEFTOVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
MACHINE_PATH = re.compile(r"(?<![\w.:/~}-])/(home|root|Users|wor" + r"k|private|tm" + r"p)/\w")
PRINTING = {"cli", "report", "__main__"}  # files and folders that talk to people; all others emit records or raise
RIDDLES = {"What", "Whether", "Of", "Who", "Which", "How", "Where", "When"}  # no sentence of a docstring begins so
HEADING = re.compile(r"(?m)^ *# -{3,}")
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name


def text_problems(text: str) -> Iterator[str]:
    """Problems that any text file may have. Each starts with its line number."""
    for number, line in enumerate(text.splitlines(), 1):
        if "\t" in line:
            yield f"{number}: tab; use spaces"
        if line != line.rstrip():
            yield f"{number}: space at the end of the line"
        if match := LEFTOVER.search(line):
            yield f"{number}: leftover {match[0]}; do it, or open an issue"
        if match := MACHINE_PATH.search(line):
            yield f"{number}: absolute path of one machine ({match[0]}...)"
    if text and not text.endswith("\n"):
        yield f"{text.count(chr(10)) + 1}: no newline at the end of the file"


def python_problems(text: str) -> Iterator[str]:
    """Size rules for every Python file, tests and scripts included."""
    lines = text.splitlines()
    if len(lines) > FILE_LINES_MAX:
        yield f"1: {len(lines)} lines; split the file, {FILE_LINES_MAX} is the limit"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_LENGTH_MAX:
            yield f"{number}: {len(line)} characters; {LINE_LENGTH_MAX} is the limit"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} has {length} lines; {FUNCTION_LINES_MAX} is the limit"


def package_problems(text: str, parts: tuple[str, ...]) -> Iterator[str]:
    """Rules for what is installed: says what it is for, keeps quiet, loads no code from data."""
    if match := HEADING.search(text):
        yield f"{text.count(chr(10), 0, match.start()) + 1}: section heading; let names and order say it"
    tree = ast.parse(text)
    if tree.body and ast.get_docstring(tree) is None:
        yield "1: no module docstring; say in one line what the file is for"
    may_print = not PRINTING.isdisjoint(parts)
    for node in ast.walk(tree):
        # Not the text below a field: it answers what its value is.
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = re.match(r"\w*", ast.get_docstring(node) or "")
            if first and first[0] in RIDDLES:
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield f"{line}: a docstring begins with {first[0]}; begin with a verb (functions) or a noun"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print" and not may_print:
            yield f"{node.lineno}: print(); emit a telemetry record, or raise"
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.split(".")[0] in UNSAFE_MODULES:
                yield f"{node.lineno}: imports {name}; bytes from a peer or a file must not become code"


def problems_of(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    yield from text_problems(text)
    if path.suffix == ".py" or PYTHON_SHEBANG.match(text):
        yield from python_problems(text)
        if PACKAGE in path.relative_to(ROOT).parts:
            yield from package_problems(text, path.relative_to(ROOT).with_suffix("").parts)


def house_files() -> list[Path]:
    """Every hand-written text file of the repository, committed or not."""
    files = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in {".md", ".toml", ".txt"}]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in TEXT_SUFFIXES]
    skipped = {"__pycache__", "_build"}
    return sorted(path for path in files if not is_generated(path) and not skipped & set(path.parts))


def test_tidy() -> None:
    files = house_files()
    assert ROOT / PACKAGE / "protocol" / "messages.py" in files, "the package was not found"
    found = [f"{path.relative_to(ROOT)}:{problem}" for path in files for problem in problems_of(path)]
    assert not found, "\n".join(found)


def test_bad_text_is_caught() -> None:
    bad = ["a\tb\n", "a \n", "# TO" + "DO: later\n", "# see /ho" + "me/somebody/data\n", "no newline"]
    assert [len(list(text_problems(text))) for text in bad] == [1] * len(bad)
    good = "gs://bucket/tmp/x, https://host/work/x, ${HOME}/root/x, ~/work/x, the /dev/null device, XXXL\n"
    assert not list(text_problems(good))


def test_bad_python_is_caught() -> None:
    long_function = "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX
    bad = [
        "x = 1\n" * (FILE_LINES_MAX + 1),
        long_function,
        "async " + long_function,
        f"x = '{'a' * LINE_LENGTH_MAX}'\n",
    ]
    assert [len(list(python_problems(text))) for text in bad] == [1] * len(bad)
    assert not list(python_problems("x = 1\n" * FILE_LINES_MAX))
    assert not list(python_problems(long_function.replace("    pass\n", "", 1)))


def test_bad_package_files_are_caught() -> None:
    doc = '"""Something for somebody. What it is not for."""\n'
    bad = ["import json\n", doc + "print('hello')\n", doc + "import pickle\n", doc + "from cloudpickle import loads\n"]
    bad += [
        doc + "# ---- helpers ----\n",
        '"""Of a run."""\n',
        doc + 'class A:\n    def f(self):\n        """Whether: or not."""\n',
    ]
    assert [len(list(package_problems(text, ("training", "island")))) for text in bad] == [1] * len(bad)
    assert not list(package_problems(doc + "print('hello')\n", ("cli", "main")))
    assert not list(package_problems("", ("__init__",))), "an empty file has no job to explain"


def test_generated_files_are_exempt() -> None:
    assert is_generated(Path("transport/proto/diloco_pb2.py")) and is_generated(Path("diloco_pb2_grpc.py"))
    assert not is_generated(Path("transport/wire.py"))
