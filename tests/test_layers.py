"""The rules of the house, read from the sources: which room may import which, nothing in a circle, no room too full.

    cli -> tools -> runtime | sim -> settings -> transport | training -> protocol | core
    maxtext | nnx | torch | tunix -> adapters -> runtime

`protocol` decides and `core` computes; both are pure and they never meet but in a driver. Nothing but `cli` imports
`tools`, so a tool can be deleted without a trace. Nothing but the short paths of users imports `adapters`, and nothing
imports the short paths.
"""

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from tests.limits import HANGS_S

PACKAGE = "diloco_jax"
ROOT = Path(__file__).resolve().parent.parent

BOTTOM = {"protocol", "core"}
MIDDLE = {"transport", "training"} | BOTTOM
RUNS = {"runtime", "sim", "settings"} | MIDDLE
LAYERS: dict[str, set[str]] = {
    "protocol": set(),
    "core": set(),
    "transport": {"protocol", "core"},
    "training": {"protocol", "core"},
    "settings": {"transport", "training", "protocol", "core"},
    "sim": {"protocol"},
    "runtime": {"settings"} | MIDDLE,
    "tools": RUNS,
    "adapters": RUNS - {"sim"},
    # the paths that users import
    "runs": RUNS,
    "maxtext": {"adapters"},
    "nnx": {"adapters"},
    "torch": {"adapters"},
    "tunix": {"adapters"},
    "cli": {"tools"} | RUNS,
    "__main__": {"cli"},
    "__init__": RUNS,
}
# Inside these layers every room lists the rooms that it may import; "" is the layer's own floor.
ROOMS: dict[str, dict[str, set[str]]] = {
    "protocol": {"": set(), "learner": {""}, "syncer": {""}, "watch": {"", "syncer"}},
    "transport": {
        "proto": set(),
        "": {"proto"},
        "trust": {""},
        "store": {"", "proto", "trust"},
        "session": {"", "proto", "trust", "store"},
        "bucket": {"", "proto", "store", "session"},
        "group": {"", "proto", "trust", "session"},
        "slices": {"", "trust", "session"},
        "endpoints": {"", "proto", "trust", "store", "session", "bucket"},
    },
    "runtime": {
        "figures": set(),
        "trackers": {"figures"},
        "records": {"trackers", "figures"},
        "model": {"records"},
        "island": {"model", "records"},
        "learner": {"island", "records", "trackers"},
        "syncer": {"model", "records", "trackers", "figures"},
        "subscriber": {"model", "records"},
        "own_loop": {"learner", "island", "model", "records", "trackers"},
        "slices": {"learner", "island", "records"},
        "local": {"own_loop", "learner", "syncer", "island", "model", "records", "trackers", "figures"},
    },
    "sim": {"": set(), "goodput": {""}, "invariants": {""}},
    "adapters": {"nnx": set(), "torch": set(), "tunix": {"nnx"}, "maxtext": {"nnx"}},
    "tools": {
        "budget": set(),
        "replay": set(),
        "preflight": {"budget"},
        "plan": {"budget", "preflight"},
        "stage": {"plan", "budget", "replay"},
        "launch": {"budget"},
        "doctor": {"budget"},
        "export": set(),
        "inference": set(),
        "terminal": set(),
        "page": {"terminal", "budget"},
        "chaos": {"replay", "page"},
        "ray": set(),
    },
}
# This is the number of folders below the package.
DEPTH_MAX = 2
# The limit is for one folder, without its __init__.py.
FILES_MAX = 16
FACES = ("__init__.py", "__main__.py")  # of a package

# Standard library without clock, randomness, files, sockets, threads or processes. A module that is missing here and
# has none of these may be added.
# fmt: off
PURE_STDLIB = {
    "__future__", "abc", "base64", "binascii", "bisect", "collections", "contextlib", "copy", "dataclasses", "decimal",
    "enum", "fnmatch", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "numbers", "operator",
    "re", "statistics", "string", "struct", "textwrap", "types", "typing", "zlib",
}
# fmt: on
# Array libraries of the layers that have a closed list. `jaxtyping` only annotates.
THIRD_PARTY = {
    "protocol": set[str](),
    "core": {"jax", "jaxlib", "numpy", "optax", "ml_dtypes", "jaxtyping", "llvmlite", "numba", "xxhash"},
    "sim": set[str](),
}
PURE_LAYERS = {"protocol", "core"}
IO_BUILTINS = {"open", "input", "print"}
# `diloco simulate` must start without JAX, and the commands of MaxText's islands answer --help without MaxText.
LATE_IMPORTS_ALLOWED = {"cli", "adapters.maxtext"}
# Modules elsewhere with what they import where they use it: it takes long, or needs an extra, and many processes never
# need it.
_WEIGHTS = "diloco_jax.training.convert.weights"
_CERTIFICATES = "diloco_jax.transport.trust.certificates"
HEAVY = {
    "diloco_jax.training.models.attention": "jax.experimental.pallas.ops.tpu.splash_attention",
    "diloco_jax.training.data.mixture": "grain",
    "diloco_jax.training.data.corpus": "diloco_jax.training.data.next_fit",
    "diloco_jax.training.data.tokenizing": "diloco_jax.training.chat.encoder",
    "diloco_jax.training.base": _WEIGHTS,
    "diloco_jax.runtime.model.evaluation": _WEIGHTS,
    "diloco_jax.runtime.syncer.machine_alarms": _CERTIFICATES,
    "diloco_jax.tools.chaos.actions": _CERTIFICATES,
    "diloco_jax.tools.ray.cluster": _CERTIFICATES,
    "diloco_jax.transport.trust.security": _CERTIFICATES,
    "diloco_jax.transport.store.seal": "cryptography",
    "diloco_jax.transport.store.store": "obstore",
}
parsed = cache(ast.parse)


class Import(NamedTuple):
    """One imported module, `package.module` or `package.module.name`, and where it stands."""

    target: str
    line: int
    late: bool  # inside a function


def statements_of(tree: ast.AST, late: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every statement, and whether it is inside a function; expressions hold no statements, and are not visited."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node, late
            yield from statements_of(node, late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def imports_of(source: str, module: str, is_package: bool = False) -> list[Import]:
    """Every import of a file, those of TYPE_CHECKING blocks too: a type is a dependency like any other."""
    found, parts = [], module.split(".")
    for node, late in statements_of(parsed(source)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - 1 if is_package else node.level
                base = ".".join(parts[: len(parts) - up] + ([node.module] if node.module else []))
            found += [Import(f"{base}.{alias.name}", node.lineno, late) for alias in node.names]
    return found


def layer_of(module: str) -> str:
    """`diloco_jax.core.merge` -> `core`; the package itself -> `__init__`."""
    return [*module.split("."), "__init__"][1]


def room_of(module: str) -> str:
    """`diloco_jax.runtime.island.host` -> `island`; what lies on the layer's own floor -> ""."""
    layer, _, rest = module.partition(".")[2].partition(".")
    room = rest.split(".")[0]
    return room if room in ROOMS.get(layer, ()) else ""


def room_problem(module: str, target: str) -> str:
    """Return why a file may not import another one of the same layer; "" if it may."""
    rooms = ROOMS.get(layer_of(module), {})
    mine, other = room_of(module), room_of(target)
    if other == mine or other in rooms.get(mine, {other}):
        return ""
    return f"imports {target}; the room {mine!r} may import {', '.join(sorted(rooms[mine])) or 'no other'}"


def violations_of(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return the violations of one file against the rules of layers, as messages."""
    layer = layer_of(module)
    if layer not in LAYERS:
        return [f"{module}: `{layer}` is not a layer of this package; add it to LAYERS with what it may import"]
    found = []
    for target, line, late in imports_of(source, module, is_package):
        where, top = f"{module}:{line}", target.split(".")[0]
        if late and not LATE_IMPORTS_ALLOWED & {layer, f"{layer}.{room_of(module)}"} and not _is_heavy(module, target):
            found.append(f"{where}: imports {target} inside a function; only commands may")
        if top == PACKAGE:
            other = layer_of(target)
            if other != layer and other not in LAYERS[layer]:
                allowed = ", ".join(sorted(LAYERS[layer])) or "nothing of the package"
                found.append(f"{where}: {layer} imports {target}; it may import {allowed}")
            elif other == layer and (problem := room_problem(module, target)):
                found.append(f"{where}: {problem}")
        elif top in sys.stdlib_module_names:
            if layer in PURE_LAYERS and top not in PURE_STDLIB:
                found.append(
                    f"{where}: {layer} imports {top}, which is not pure; drivers own clocks, files and threads"
                )
        elif layer in THIRD_PARTY and top not in THIRD_PARTY[layer]:
            allowed = ", ".join(sorted(THIRD_PARTY[layer])) or "only the standard library"
            found.append(f"{where}: {layer} imports {top}; it may use {allowed}")
    if layer in PURE_LAYERS:
        found += [f"{module}:{line}: {layer} calls {name}(); it has no I/O" for name, line in io_calls(source)]
    return found


def _is_heavy(module: str, target: str) -> bool:
    """Return whether a module may import a target late."""
    heavy = HEAVY.get(module)
    return heavy is not None and (target == heavy or target.startswith(f"{heavy}."))


def io_calls(source: str) -> Iterator[tuple[str, int]]:
    """Calls of builtins that need no import and do I/O."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IO_BUILTINS:
            yield node.func.id, node.lineno


def cycles_of(sources: dict[str, str], packages: set[str]) -> list[str]:
    """Return the first circle among modules by imports at module level, if there is one."""
    edges: dict[str, set[str]] = {}
    for module, source in sources.items():
        edges[module] = set()
        for target, _, late in imports_of(source, module, module in packages):
            # `from package import name` reaches the module package.name if there is one, else the package
            reached = target if target in sources else target.rpartition(".")[0]
            counts = not late or _is_heavy(module, target)
            if counts and reached in sources and reached != module:
                edges[module].add(reached)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def package_files() -> list[Path]:
    return [path for path in sorted((ROOT / PACKAGE).rglob("*.py")) if "_pb2" not in path.name]


def package_sources() -> tuple[dict[str, str], set[str]]:
    """Module name -> source for the whole package, and the names that are packages. Generated stubs are left out."""
    sources, packages = {}, set()
    for path in package_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[module] = path.read_text(encoding="utf-8")
        if parts[-1] == "__init__":
            packages.add(module)
    return sources, packages


def test_layers() -> None:
    sources, packages = package_sources()
    assert len(sources) > 5, "the package was not found"
    found = [text for name, source in sources.items() for text in violations_of(source, name, name in packages)]
    found += cycles_of(sources, packages)
    assert not found, "\n".join(found)


def test_rooms_are_of_a_size() -> None:
    found = []
    inner = [path.relative_to(ROOT / PACKAGE) for path in package_files()]
    for inside in inner:
        if len(inside.parts) - 1 > DEPTH_MAX:
            found.append(f"{inside}: {len(inside.parts) - 1} folders deep; {DEPTH_MAX} is the limit")
        if len(inside.parts) > 2 and inside.parts[1] not in ROOMS.get(inside.parts[0], {inside.parts[1]: ()}):
            found.append(f"{inside}: no room of {inside.parts[0]}; add it to ROOMS with the rooms it may import")
    folders = Counter(inside.parent for inside in inner if inside.name not in FACES)
    found += [
        f"{where}: {count} files; {FILES_MAX} is the limit" for where, count in folders.items() if count > FILES_MAX
    ]
    assert not found, "\n".join(found)


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, source in package_sources()[0].items():
        for node, _ in statements_of(parsed(source)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    found = [
        f"{name} is in {' and '.join(where)}; one word for one thing" for name, where in homes.items() if where[1:]
    ]
    assert not found, "\n".join(found)


def test_a_learner_starts_without_what_it_may_not_need() -> None:
    heavy = ("grain", "orbax.checkpoint", "numba", *HEAVY.values())
    code = f"""
import sys, diloco_jax.runtime.learner.run, diloco_jax.training.models.decoder
sys.exit(", ".join(name for name in {heavy} if name in sys.modules) or 0)
"""
    command, around = [sys.executable, "-c", code], os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=HANGS_S)
    assert result.returncode == 0, result.stderr


BAD = {
    "protocol reads the clock": ("protocol.syncer", "import time"),
    "protocol draws randomness": ("protocol.syncer", "from random import Random"),
    "protocol opens a file": ("protocol.tape", "with open('tape') as file: pass"),
    "protocol uses a library": ("protocol.tape", "import numpy as np"),
    "protocol uses core": ("protocol.syncer", "from diloco_jax.core import merge"),
    "core uses protocol": ("core.merge", "from diloco_jax.protocol.messages import Contribution"),
    "core uses protocol, relatively": ("core.merge", "from ..protocol import messages"),
    "core does I/O": ("core.codec", "import socket"),
    "core uses another library": ("core.codec", "import flax"),
    "sim uses core": ("sim.cluster", "import diloco_jax.core.merge"),
    "sim uses numpy": ("sim.engine", "import numpy"),
    "the contract of connections uses their sessions": (
        "transport.link",
        "from diloco_jax.transport.session import calls",
    ),
    "sessions use the endpoints": ("transport.session.stream", "from diloco_jax.transport.endpoints import probe"),
    "transport uses training": ("transport.grpc", "from diloco_jax.training import island"),
    "runtime uses sim": ("runtime.local", "from diloco_jax import sim"),
    "runtime uses the root": ("runtime.local", "from diloco_jax import RunConfig"),
    "upwards, for types only": ("training.island", "if TYPE_CHECKING:\n    from diloco_jax.runtime import local"),
    "config uses cli": ("config", "from diloco_jax import cli"),
    "late import": ("runtime.local", "def f():\n    import json"),
    "late import in an adapter": ("adapters.nnx.attach", "def f():\n    import json"),
    "runtime uses an adapter": ("runtime.own_loop.attached", "from diloco_jax.adapters.nnx import holder"),
    "tools use an adapter": ("tools.export.files", "from diloco_jax.adapters.maxtext import snapshot"),
    "tools use a short path": ("tools.export.files", "from diloco_jax.nnx import attach"),
    "an adapter uses tools": ("adapters.nnx.attach", "from diloco_jax.tools.budget import memory"),
    "an adapter uses another one": ("adapters.nnx.attach", "from diloco_jax.adapters.torch import names"),
    "an adapter uses a short path": ("adapters.tunix.island", "from diloco_jax.nnx import attach"),
    "a short path has code": ("nnx", "from diloco_jax.runtime.own_loop.enter import enter"),
    "unknown layer": ("helpers.misc", ""),
}
GOOD = {
    "protocol": ("protocol.tape", "import json\nfrom collections.abc import Iterator\nfrom .messages import Merge"),
    "core": ("core.merge", "import jax.numpy as jnp\nfrom diloco_jax.core.fragments import Slice"),
    "sim": ("sim.engine", "import heapq\nimport random\nfrom diloco_jax.protocol import syncer"),
    "runtime": ("runtime.local", "import time\nfrom diloco_jax.training.island import Island"),
    "late import": ("cli", "def simulate():\n    from diloco_jax.sim import cluster"),
    "late import in an adapter": (
        "adapters.maxtext.main",
        "def f():\n    from diloco_jax.adapters.maxtext import loop",
    ),
    "an adapter": ("adapters.tunix.island", "from diloco_jax.adapters.nnx.holder import VariableHolder"),
    "short path": ("maxtext.launch", "from diloco_jax.adapters.maxtext.launch import run"),
}


def test_bad_examples_are_caught() -> None:
    missed = [name for name, (module, source) in BAD.items() if len(violations_of(source, f"{PACKAGE}.{module}")) != 1]
    assert not missed
    wrong = {name: violations_of(source, f"{PACKAGE}.{module}") for name, (module, source) in GOOD.items()}
    assert not any(wrong.values()), wrong


def test_a_circle_is_caught() -> None:
    sources = {"p": "", "p.a": "from p import b", "p.b": "from . import c", "p.c": "import p.a"}
    (circle,) = cycles_of(sources, {"p"})
    assert circle in 2 * "p.a <- p.c <- p.b <- "
    assert cycles_of(sources | {"p.c": "def f():\n    import p.a"}, {"p"}) == []
