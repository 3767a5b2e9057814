"""All checks that need an accelerator, in one command of at most ten minutes: ./scripts/device [--json] [--cpu].

The checks are: device and host produce equal codes, bit for bit; four islands share the accelerator; the time of a step
with a syncer over that of a plain loop, in turn; the tests marked `device`. --cpu tries the command at small sizes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[2]
# Together these limits are below ten minutes.
LIMITS_S = {"codes": 90.0, "islands": 150.0, "overhead": 240.0, "tests": 90.0}
LOOK = "import jax; d = jax.devices(); print(d[0].platform, len(d), jax.__version__, d[0].device_kind)"
LARGE = {"dim": 1024, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 128, "mlp_dim": 4096}
SMALL = {"dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "mlp_dim": 256}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="try the command at small sizes on the CPU")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    # Internal: run only the check of codes, in this process.
    parser.add_argument("--codes", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Other processes may use the cores, too.
    LIMITS_S.update(dict.fromkeys(LIMITS_S, 600.0) if options.cpu else {})
    os.environ |= {"PYTHONPATH": str(ROOT)} | ({"JAX_PLATFORMS": "cpu"} if options.cpu else {})
    if options.codes:
        sys.stdout.write(json.dumps(codes(SMALL if options.cpu else LARGE)) + "\n")
        return 0
    platform, count, version, kind = run([sys.executable, "-c", LOOK], 120.0).split(maxsplit=3)
    if platform == "cpu" and not options.cpu:
        sys.stderr.write("JAX finds no accelerator, only CPUs; use --cpu to try the command without one\n")
        return 2
    os.environ["JAX_PLATFORMS"] = ",".join(dict.fromkeys(({"gpu": "cuda"}.get(platform, platform), "cpu")))
    rows = {}
    for check in (codes_apart, islands, overhead, tests):
        began_s = time.monotonic()
        try:
            row = check(options.cpu)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            row = {"ok": False, "told": f"{type(error).__name__}: {error}"[:300]}
        rows[check.__name__] = {**row, "seconds": round(time.monotonic() - began_s, 1)}
    told = {"device": f"{count} x {kind} ({platform}), JAX {version}", "checks": rows}
    lines = [f"{name:<11} {'ok' if row['ok'] else 'FAILED':<7} {row['seconds']:6.1f} s  {row['told']}"
             for name, row in rows.items()]  # fmt: skip
    sys.stdout.write((json.dumps(told) if options.json else "\n".join([told["device"], *lines])) + "\n")
    return 0 if all(row["ok"] for row in rows.values()) else 1


def run(command: Sequence[str], limit_s: float) -> str:
    """Run a command in the root, and return the last line that it printed; ValueError if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise ValueError(f"status {done.returncode}: {(done.stderr or done.stdout).strip()[-250:]}")
    return lines[-1]


def codes(args: dict[str, Any]) -> dict[str, Any]:
    """Compare encoded updates of very different sizes that an island stages with those that the host encodes."""
    import jax
    import numpy as np

    from diloco_jax.core import codec
    from diloco_jax.core.fragments import plan_fragments
    from diloco_jax.training.island import Island
    from diloco_jax.training.models.config import ModelConfig
    from diloco_jax.training.optimizers import OptimizerConfig
    from diloco_jax.training.sharding import MeshConfig

    rng, differ, model = np.random.default_rng(0), dict[str, int](), ModelConfig(args=args)
    for format in get_args(codec.Format):
        island = Island(model, OptimizerConfig(), MeshConfig(), seed=0, devices=jax.devices()[:1], wire=format)
        (fragment,) = plan_fragments(island.shapes, 1).fragments
        anchor, local = {}, {}
        for key, shape in fragment.keys_shapes:
            sizes = np.exp2(rng.integers(-30, 10, shape)).astype(np.float32)
            anchor[key] = rng.standard_normal(shape).astype(np.float32)
            local[key] = anchor[key] + sizes * rng.standard_normal(shape).astype(np.float32)
        island.adopt(fragment, anchor)
        island.overwrite(fragment, local)
        staged = island.exchange.stage(island.state.params, fragment).encode()
        got = np.frombuffer(b"".join(staged) if isinstance(staged, list) else staged, np.uint8)
        want = np.frombuffer(codec.encode({key: anchor[key] - local[key] for key in anchor}, format), np.uint8)
        differ[format] = int((got != want).sum()) if got.size == want.size else want.size
    told = f"bytes that differ, of {fragment.num_elements / 1e6:.1f}M values: {differ}"
    return {"ok": not any(differ.values()), "told": told, "differ": differ}


def codes_apart(small: bool) -> dict[str, Any]:
    return json.loads(run([sys.executable, __file__, "--codes", *(["--cpu"] * small)], LIMITS_S["codes"]))


def islands(small: bool) -> dict[str, Any]:
    """Train four islands; all of them must be merged."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "quickstart", "--islands.count", "4", "--train.steps", "48" if small else "240"]
        words += ["--run-dir", f"{folder}/run", "--json", *(["--islands.devices", "1"] * small)]
        summary = json.loads(run([sys.executable, "-m", "diloco_jax", *words], LIMITS_S["islands"]))
    shares = [row["participation"] for row in summary["learners"].values()]
    told = f"participation {min(shares):.2f} to {max(shares):.2f}, loss {summary['eval_loss']:.3f}"
    return {"ok": summary["complete"] and len(shares) == 4 and min(shares) > 0.5, "told": told, **summary}


def overhead(small: bool) -> dict[str, Any]:
    """Measure the bench `overhead` with a batch for steps of about 0.2 s."""
    until_s, batch = time.monotonic() + LIMITS_S["overhead"], 8
    command = [sys.executable, "scripts/bench/overhead.py", "--json", "--nice", "0", "--devices", "1"]
    command += ["--dim", "64", "--layers", "2", "--seq-len", "64"] if small else ["--dim", "1024", "--layers", "8"]
    if not small:
        command += ["--seq-len", "1024", "--accelerator"]
        tried = run([*command, "--batch-size", str(batch), "--pairs", "1", "--steps", "8"], LIMITS_S["overhead"])
        batch = max(1, round(batch * 0.2 / json.loads(tried)["step_s"]))
    pairs = ["--batch-size", str(batch), "--pairs", "3" if small else "5"]
    found = json.loads(run([*command, *pairs], max(1.0, until_s - time.monotonic())))
    told = f"x {found['value']:.4f} ({found['low']:.4f} to {found['high']:.4f}) of {1000 * found['step_s']:.0f} ms, "
    return {"ok": True, "told": f"{told}{found['parameters'] / 1e6:.1f}M parameters, batch {batch}", **found}


def tests(_: bool) -> dict[str, Any]:
    marked = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.device" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "device", *marked]
    return {"ok": True, "told": run(command, LIMITS_S["tests"]) if marked else "no test is marked so"}


if __name__ == "__main__":
    sys.exit(main())
