"""Feed changed and random bytes to everything that parses bytes from the network, at full speed; one JSON line out.

Run it as `python -m tests.fuzz [--inputs N] [--seed S] [--guided]`. The targets are those of targets.py. An input is a
finding when its target fails, takes longer than ten seconds, or when a target's memory grows by more than 256 MiB.
Findings are printed in hexadecimal, with the name of their target, so that each can become a test. `value` is the
number of inputs; the status is 1 with findings.
"""

import argparse
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INPUT_TIMEOUT_S = 10
MEMORY_GROWTH_MAX_MIB = 256
# A target with more findings than this has one cause, which the first ones show.
FINDINGS_MAX = 10


class TooSlow(Exception):
    """An input took longer than any may."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs in all, shared equally by the targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", help="default: all")
    parser.add_argument("--guided", action="store_true", help="look for inputs that reach new code, with atheris")
    parser.add_argument("--guided-child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.guided_child:
        return guide(arguments.guided_child, arguments.inputs, arguments.seed)
    from tests.fuzz.targets import TARGETS

    names = arguments.targets or list(TARGETS)
    unknown = sorted(set(names) - set(TARGETS))
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    began_s, rows, findings = time.monotonic(), {}, []
    for name in names:
        try_one = guided if arguments.guided else mutated
        rows[name], found = try_one(name, max(1, arguments.inputs // len(names)), arguments.seed)
        findings += found
        sys.stderr.write(f"{name}: {rows[name]['inputs']} inputs, {len(found)} findings\n")
    result = {
        "name": "fuzz",
        "value": sum(row["inputs"] for row in rows.values()),
        "unit": "inputs",
        "findings": findings,
        "seed": arguments.seed,
        "guided": arguments.guided,
        "wall_s": round(time.monotonic() - began_s, 1),
        "targets": rows,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if findings else 0


def mutated(name: str, inputs: int, seed: int) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Try seeds and changed seeds in this process."""
    from tests.fuzz.inputs import mutate
    from tests.fuzz.targets import TARGETS

    target, number, findings = TARGETS[name], random.Random(f"{name} {seed}"), []
    signal.signal(signal.SIGALRM, _give_up)
    before_mib, began_s = _memory_mib(), time.monotonic()
    for index in range(inputs):
        data = target.seeds[index] if index < len(target.seeds) else mutate(number, target.seeds)
        signal.alarm(INPUT_TIMEOUT_S)
        try:
            target.run(data)
        except Exception as error:
            if len(findings) < FINDINGS_MAX:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
                findings.append({"target": name, "error": text, "input": data.hex()})
    signal.alarm(0)
    wall_s, growth_mib = time.monotonic() - began_s, _memory_mib() - before_mib
    if growth_mib > MEMORY_GROWTH_MAX_MIB:
        findings.append({"target": name, "error": f"memory grew by {growth_mib:.0f} MiB", "input": ""})
    row = {"inputs": inputs, "inputs_per_s": round(inputs / wall_s), "memory_growth_mib": round(growth_mib, 1)}
    return row, findings


def _give_up(number: int, frame: object) -> None:
    raise TooSlow(f"more than {INPUT_TIMEOUT_S} s")


def _memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def guided(name: str, inputs: int, seed: int) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Run one target under atheris in a child."""
    command = [sys.executable, "-m", "tests.fuzz", "--guided-child", name, "--inputs", str(inputs), "--seed", str(seed)]
    began_s = time.monotonic()
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    row = {"inputs": inputs, "inputs_per_s": round(inputs / (time.monotonic() - began_s))}
    if result.returncode == 0:
        return row, []
    return row, [{"target": name, "error": result.stderr[-4000:], "input": "see the error"}]


def guide(name: str, inputs: int, seed: int) -> int:
    """In the child: hand the process over to libFuzzer."""
    try:
        import atheris
    except ImportError:
        sys.stderr.write("atheris is missing: .venv/bin/pip install -c constraints-py311.txt atheris\n")
        return 2
    with atheris.instrument_imports(include=["diloco_jax.transport", "diloco_jax.protocol", "diloco_jax.training"]):
        from tests.fuzz.targets import TARGETS
    with tempfile.TemporaryDirectory(prefix="diloco-fuzz-") as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for index, data in enumerate(TARGETS[name].seeds):
            (corpus / str(index)).write_bytes(data)
        options = [f"-runs={inputs}", f"-seed={seed + 1}", "-max_len=4096", f"-timeout={INPUT_TIMEOUT_S}"]
        options += [f"-rss_limit_mb={round(_memory_mib()) + MEMORY_GROWTH_MAX_MIB}", f"-artifact_prefix={folder}/"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], TARGETS[name].run)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
