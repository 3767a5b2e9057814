"""Tests import at their top only what `./scripts/test` installs; what needs more has a mark with the extra's name."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.extras import OWN, PYPROJECT, absent, declared, missing

ROOT = Path(__file__).resolve().parent.parent
# Modules that tests may import at their top, with the distribution of each.
INSTALLED = {
    "cryptography": "cryptography",
    "flax": "flax",
    "fsspec": "fsspec",
    "google": "protobuf",
    "grpc": "grpcio",
    "hypothesis": "hypothesis",
    "jax": "jax",
    "jaxtyping": "jaxtyping",
    "ml_dtypes": "ml_dtypes",
    "numba": "numba",
    "numpy": "numpy",
    "obstore": "obstore",
    "optax": "optax",
    "prometheus_client": "prometheus-client",
    "pydantic": "pydantic",
    "pytest": "pytest",
    "rich": "rich",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "xxhash": "xxhash",
    "yaml": "pyyaml",
}
# Programs that tests start in separate processes, some with other environments; pytest does not import them.
PROGRAMS = {
    "tests/adapters/pytorch/returning_loop.py",
    "tests/runtime/own_loop/held_loop.py",
    "tests/runtime/own_loop/reading_loop.py",
    "tests/adapters/tunix/inside.py",
}
# Folders of the package that import a package of an extra.
OPTIONAL = {"diloco_jax.torch": "torch", "diloco_jax.adapters.torch": "torch"}


def sources() -> list[Path]:
    """List all tests and what they share; a program in scripts/ may need any extra."""
    found = [*(ROOT / "tests").rglob("*.py"), ROOT / "scripts" / "conftest.py", *(ROOT / "scripts").rglob("test_*.py")]
    return sorted(path for path in found if str(path.relative_to(ROOT)) not in PROGRAMS)


def own_names() -> set[str]:
    """Name the package, tests, examples, and the programs that import each other by name."""
    scripts = [path for folder in ("scripts", "scripts/bench") for path in (ROOT / folder).iterdir()]
    return {"diloco_jax", "tests", "docs"} | {path.stem for path in scripts}


class Import(NamedTuple):
    line: int
    module: str

    @property
    def top(self) -> str:
        """Return the module that must be installed."""
        for folder, module in OPTIONAL.items():
            if self.module == folder or self.module.startswith(f"{folder}."):
                return module
        return self.module.partition(".")[0]


def imports_at_top(tree: ast.AST) -> Iterator[Import]:
    """Yield what importing a module imports: classes and conditions count, functions and type checks do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from diloco_jax import torch` imports a folder as well.
            names = [f"{node.module}.{each.name}" for each in node.names]
            yield from (Import(node.lineno, name if name in OPTIONAL else str(node.module)) for name in names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_at_top(node)


def skips(tree: ast.Module) -> dict[str, tuple[int, str]]:
    """Return the modules that a test module cannot do without: the line of its skip, and the extra."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
            text = ast.unparse(node.value)
            if match := re.fullmatch(r"pytest\.importorskip\('(\w+)[\w.]*', reason=absent\('(\w+)'\)\)", text):
                found[match[1]] = (node.lineno, match[2])
    return found


def marks_of(tree: ast.Module) -> str:
    """Return the text of a module's own marks."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return "".join(ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "pytestmark")


def problems(name: str, text: str) -> list[str]:
    """Return what breaks the rule in a source."""
    tree = ast.parse(text)
    skipped, allowed = skips(tree), {*sys.stdlib_module_names, *INSTALLED, *own_names()}
    found = []
    for line, module in {
        (each.line, each.module): each.top for each in imports_at_top(tree) if each.top not in allowed
    }:
        top = Import(line, module).top
        if top not in skipped or line < skipped[top][0]:
            found.append(f"{name}:{line} imports {module}; import it in the test, and mark the test if an extra has it")
    for module, (line, extra) in skipped.items():
        # The marks select what needs more than the extra `test`.
        if f"diloco-jax[{extra}]" not in own_extras("test") and f"extra('{extra}')" not in marks_of(tree):
            found.append(f"{name}:{line} is skipped without {module}; give the module the mark extra({extra!r})")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
            reasons = [ast.unparse(each.value) for each in node.keywords if each.arg == "reason"]
            if not reasons or not re.fullmatch(r"absent\('\w+'\)", reasons[0]):
                found.append(f"{name}:{node.lineno} is skipped without the name of an extra; add reason=absent(EXTRA)")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.extra":
            (extra_node,) = node.args
            if isinstance(extra_node, ast.Constant) and extra_node.value not in declared():
                found.append(f"{name}:{node.lineno} names the extra {extra_node.value}, which is not in pyproject.toml")
    return found


def own_extras(extra: str) -> set[str]:
    """Return the extras of the package that an extra includes, as requirements."""
    lines = (re.fullmatch(r"diloco-jax\[([\w,]+)\]", line) for line in declared()[extra])
    return {f"diloco-jax[{name}]" for match in lines if match for name in match[1].split(",")}


def required(extra: str) -> set[str]:
    """Name the distributions that the package and an extra require, in lower case with dashes."""
    from packaging.requirements import Requirement

    found = set()
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    for needed in map(Requirement, [*project["dependencies"], *declared()[extra]]):
        found |= {name for each in needed.extras for name in required(each)} if needed.name == OWN else {needed.name}
    return {name.lower().replace("_", "-") for name in found}


def test_tests_import_at_their_top_what_the_extra_test_installs() -> None:
    found = [each for path in sources() for each in problems(str(path.relative_to(ROOT)), path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_the_list_has_what_is_installed_and_used() -> None:
    assert {name.lower().replace("_", "-") for name in INSTALLED.values()} <= required("test")
    used = {each.top for path in sources() for each in imports_at_top(ast.parse(path.read_text("utf-8")))}
    assert set(INSTALLED) - used == set(), "no test imports them any more"


PARITY = 'pytest.importorskip("torch", reason=absent("parity"))\n'
MARK = 'pytestmark = [pytest.mark.extra("parity")]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch.nn\n", "x.py:1 imports torch.nn"),
        ("from orbax import checkpoint\n", "x.py:1 imports orbax"),
        ("try:\n    import ray\nexcept ImportError:\n    ray = None\n", "x.py:2 imports ray"),
        ("class A:\n    from ray import data\n", "x.py:2 imports ray"),
        ("from diloco_jax.torch import attach\n", "x.py:1 imports diloco_jax.torch"),
        ("from diloco_jax.adapters.torch.holder import T\n", "x.py:1 imports diloco_jax.adapters.torch.holder"),
        (f"import torch\n{PARITY}{MARK}", "x.py:1 imports torch"),
        (f"{PARITY}import torch\nimport transformers\n{MARK}", "x.py:3 imports transformers"),
        (f"{PARITY}import torch\n", "give the module the mark extra('parity')"),
        (f'{PARITY}pytestmark = pytest.mark.extra("ray")\n', "give the module the mark extra('parity')"),
        ('pytest.importorskip("torch")\n', "x.py:1 is skipped without the name"),
        ('def f():\n    pytest.importorskip("torch", reason="no torch")\n', "x.py:2 is skipped without the name"),
        ('@pytest.mark.extra("torch")\ndef test(): ...\n', "x.py:1 names the extra torch"),
    ],
)
def test_what_breaks_the_rule(text: str, said: str) -> None:
    (found,) = problems("x.py", text)
    assert said in found


def test_what_keeps_the_rule() -> None:
    inside = "def test():\n    import torch\n"
    typed = "if TYPE_CHECKING:\n    import torch\n"
    skipped = f"{PARITY}import torch\nimport diloco_jax.torch\n{MARK}"
    for text in (inside, typed, skipped, "import jax.numpy\nimport os\n"):
        assert problems("x.py", text) == []


def test_an_extra_without_a_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = {"whole": ["pytest>=1"], "elsewhere": ["pytest", "nowhere; sys_platform == 'none'"]}
    extras |= {"part": ["pytest", "Not_There>=1"], "nested": ["diloco-jax[whole,part]"]}
    monkeypatch.setattr("tests.extras.declared", lambda: extras)
    found = {extra: missing.__wrapped__(extra) for extra in extras}
    assert found["whole"] == found["elsewhere"] == ()
    assert absent("part") == "the extra part is not installed"
    with pytest.raises(KeyError):
        absent("parts")
    assert found["part"] == ("Not_There",)
