"""House rules that a reader should not have to check: small files, small functions, nothing left behind."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
LINE_LENGTH_MAX = 120

PACKAGE = "diloco_jax"
FOLDERS = (PACKAGE, "tests", "scripts", "configs", "docs", ".ci", ".github")
TEXT_SUFFIXES = {"", ".py", ".sh", ".md", ".toml", ".yaml", ".yml", ".txt", ".proto", ".cfg", ".j2"}
PYTHON_SHEBANG = re.compile(r"#!.*\bpython")

# Written in pieces so that this file passes its own test.
LEFTOVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
MACHINE_PATH = re.compile(r"(?<![\w.:/~}-])/(home|root|Users|wor" + r"k|private|tm" + r"p)/\w")
# Files and folders that print for people. All others emit records or raise.
PRINTING = {"cli", "report", "__main__"}
# A docstring may not begin with one of these words.
RIDDLES = {"What", "Whether", "Of", "Who", "Which", "How", "Where", "When"}
HEADING = re.compile(r"(?m)^ *# -{3,}")
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name


# Each file is searched once for each of these: a search line by line takes ten times as long.
IN_TEXTS = {
    re.compile(r"\t"): "tab; use spaces",
    re.compile(r"[^\S\n](?=\n|\Z)"): "space at the end of the line",
    LEFTOVER: "leftover {}; do it, or open an issue",
    MACHINE_PATH: "absolute path of one machine ({}...)",
}


def text_problems(text: str) -> Iterator[str]:
    """Problems that any text file may have. Each starts with its line number."""
    for pattern, problem in IN_TEXTS.items():
        for match in pattern.finditer(text):
            yield f"{text.count(chr(10), 0, match.start()) + 1}: {problem.format(match[0])}"
    if text and not text.endswith("\n"):
        yield f"{text.count(chr(10)) + 1}: no newline at the end of the file"


def statements_of(tree: ast.AST) -> Iterator[ast.AST]:
    """The tree and its statements; expressions hold no statements, and are not visited."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from statements_of(node)


def python_problems(text: str, tree: ast.Module) -> Iterator[str]:
    """Size rules for every Python file, tests and scripts included."""
    lines = text.splitlines()
    if len(lines) > FILE_LINES_MAX:
        yield f"1: {len(lines)} lines; split the file, {FILE_LINES_MAX} is the limit"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_LENGTH_MAX:
            yield f"{number}: {len(line)} characters; {LINE_LENGTH_MAX} is the limit"
    for node in statements_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} has {length} lines; {FUNCTION_LINES_MAX} is the limit"


def package_problems(text: str, tree: ast.Module, parts: tuple[str, ...]) -> Iterator[str]:
    """Rules for what is installed: says what it is for, keeps quiet, loads no code from data."""
    if match := HEADING.search(text):
        yield f"{text.count(chr(10), 0, match.start()) + 1}: section heading; let names and order say it"
    if tree.body and ast.get_docstring(tree) is None:
        yield "1: no module docstring; say in one line what the file is for"
    if PRINTING.isdisjoint(parts) and "print(" in text:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"{node.lineno}: print(); emit a telemetry record, or raise"
    for node in statements_of(tree):
        # Not the text below a field: it answers what its value is.
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = re.match(r"\w*", ast.get_docstring(node) or "")
            if first and first[0] in RIDDLES:
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield f"{line}: a docstring begins with {first[0]}; begin with a verb (functions) or a noun"
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
        tree = ast.parse(text)
        yield from python_problems(text, tree)
        if PACKAGE in path.relative_to(ROOT).parts:
            yield from package_problems(text, tree, path.relative_to(ROOT).with_suffix("").parts)


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


def test_scripts_name_tests_that_exist() -> None:
    """Pytest runs no test at all if one of its paths is missing, and some of these scripts run only at night."""
    named = re.compile(r"(?<![\w/.])tests/[\w/.{},]+")
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    texts = "\n".join(sorted({word for path in scripts for word in named.findall(path.read_text())}))
    # Only a shell knows what its braces mean.
    loop = f'for path in {texts.replace(chr(10), " ")}; do [ -e "${{path%.}}" ] || echo "$path"; done'
    missing = subprocess.run(["bash", "-c", loop], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not missing, f"paths of tests that do not exist:\n{missing}"
