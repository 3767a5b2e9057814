"""Every bench runs to its end with its smallest settings, so that all of them keep working.

The figures are not tested, because they mean nothing with so small settings.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_wan_lab import NEEDS_ROOT

from tests.limits import SLOW_HANGS_S
from tests.runtime.helpers import environment, write_config

ROOT = Path(__file__).parents[2]
BENCHES = Path(__file__).parent
SMALL_MODEL = {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_dim": 64}
SMALL_JOB = tuple(word for name, value in SMALL_MODEL.items() for word in (f"--model.args.{name}", str(value)))
SMALL_JOB += ("--train.seq_len", "32", "--train.final_eval_batches", "1", "--optimizer.warmup_steps", "2")
TWO_ISLANDS = ("--islands.count", "2", "--islands.devices", "1", "--train.batch_size", "4")


class Bench(NamedTuple):
    """A bench and its smallest settings."""

    program: str
    # The arguments; SMALL becomes the path of a small job's config.
    words: str
    # Settings of the runs that the bench makes.
    job: tuple[str, ...] = ()
    # The least number of JSON lines.
    results: int = 1


ISLAND = "--dim 32 --layers 1 --batch-size 2 --seq-len 16 --pairs 1 --steps 2"
SMALLEST = [
    Bench("arrival", "--mbytes 1 --runs 1 --json", results=6),
    Bench("cuts", "--payload-mb 2 --mbit 100 --every 1 --seconds 3 --json"),
    Bench("data", "--pairs 1 --steps 3 --batch-size 2 --seq-len 16 --json"),
    Bench("decoders", f"{ISLAND} --json"),
    Bench("donor", f"{ISLAND} --json"),
    Bench("hosts", "--payload-mb 1 --payloads 2 --json"),
    Bench("join", f"{ISLAND} --devices 1 --nice 0 --json"),
    Bench("long_run", "--days 0.001 --runs 1 --json"),
    Bench("memory", "--parameters 1e6 --fragments 4 --learners 2 --step-s 0.05 --json"),
    Bench("methods", "M=1 H=4,tau=2,adopt=rebase --steps 8 --dim 32 --layers 1 --held-out 64 --json", results=2),
    Bench("merge", "--mbytes 16 --threads 2 --runs 1 --no-mend --json"),
    Bench("outage", "--begins 48 --outages 240 --after 24 --seeds 1", results=4),
    Bench("overhead", f"{ISLAND} --devices 1 --nice 0 --json"),
    Bench("pytorch", f"{ISLAND} --nice 0 --json"),
    Bench("sampling", "--dim 64 --layers 1 --vocabulary 64 --prompt 4 --tokens 6 --pairs 1 --json", results=4),
    Bench("saving", f"{ISLAND} --json"),
    Bench("lock", "--bytes 8388608 --runs 1 --json", results=4),
    Bench("scaling", "--learners 2 4 --elements 65536 --rounds 1 --runs 1 --json", results=8),
    Bench("scaling", "--control 2 --seconds 1 --step-s 0.2 --runs 1 --json", results=5),
    Bench("sites", "--learners 2 --rounds 2 --step-s 0.2 --runs 1 --json", results=9),
    Bench(
        "slices", "--slices 2 --devices 1 --batch-size 4 --seq-len 16 --dim 32 --layers 1 --steps 60 --pairs 1 --json"
    ),
    Bench("slices", "--lose kill --hosts 1 --step-s 0.2 --json"),
    Bench("tape", "--seconds 60 --json", results=13),
    Bench("transport", "--stripes 1 2 --payload-mb 1 --payloads 2 --runs 1 --json", results=2),
    Bench("cold", "--runs 1 --steps 24 --at 12 --json", (*SMALL_JOB, *TWO_ISLANDS)),
    Bench("start", "--cold --runs 1 --json", (*SMALL_JOB, *TWO_ISLANDS)),
    Bench("mixed", "--seeds 0 --steps 12 --json", (*SMALL_JOB, "--islands.batch_size", "4")),
]
# The steps of `slow` include 100 steps of warm-up.
LINKS = {
    "transport": "--profiles 100mbit --programs transport --connections 1 --seconds 1 --repeats 1",
    "slow": "--islands 2 --model 1m --rate-mbit 100 --steps 150",
    "utilisation": "--islands 2 --multiples 20 --step-s 0.1 --steps 24",
    "downlink": "--islands 2 --shares 0.5 --step-s 0.1 --steps 24",
    "planned": "--multiples 20 --join-multiple 50 --step-s 0.2 --steps 12",
    "vs_data_parallel": "--islands 2 --rate-mbit 100 --steps 200 --batch-size 1 --seq-len 16 --timed-steps 1",
}


def marks_of(bench: Bench) -> list[pytest.MarkDecorator]:
    # CI runs the bench that decides which methods get into the package.
    nightly = [pytest.mark.nightly] * (bench.program != "methods")
    return nightly + [pytest.mark.extra("parity")] * (bench.program == "pytorch")


def results_of(program: str, words: list[str]) -> list[dict[str, Any]]:
    """Run a bench, and return its JSON lines."""
    command = [sys.executable, str(BENCHES / f"{program}.py"), *words]
    around = environment() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=around, timeout=SLOW_HANGS_S)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.net
@pytest.mark.parametrize("bench", [pytest.param(each, id=each.program, marks=marks_of(each)) for each in SMALLEST])
def test_it_runs(bench: Bench, tmp_path: Path) -> None:
    words = [str(write_config(tmp_path)) if word == "SMALL" else word for word in bench.words.split()]
    results = results_of(bench.program, [*words, *bench.job])
    assert len(results) >= bench.results
    for result in results:
        assert result["name"] and result["unit"] and isinstance(result["value"], int | float), result
        assert math.isfinite(result["value"]), result


def test_a_week_of_four_islands_takes_less_than_200_megabytes() -> None:
    found = {result["name"]: result["value"] for result in results_of("tape", ["--seconds", "120", "--json"])}
    assert found["syncer's tape, a week"] < 150
    assert found["syncer's tape, a week"] + found["tapes of all learners, a week"] < 225


@NEEDS_ROOT
@pytest.mark.slow
@pytest.mark.parametrize("name", LINKS)
def test_one_over_links_runs(name: str) -> None:
    [result] = results_of("wan", [name, *LINKS[name].split(), "--json"])
    assert "value" in result


@NEEDS_ROOT
@pytest.mark.slow
def test_bytes_of_a_run_are_its_payload_and_little_else() -> None:
    words = "bytes --islands 2 --model 1m --steps 48 --rate-mbit 200 --json --up bfloat16"
    [result] = results_of("wan", words.split())
    rows = {row["what"]: row for row in result["rows"]}
    payload, planned = rows["of that payload"], rows["planned"]
    assert payload["down"] == pytest.approx(planned["down"], rel=0.1)
    assert 0.4 * planned["up"] < payload["up"] < 1.05 * planned["up"], "one of two learners at least, in each round"
    assert 1.02 < result["value"] / payload["both"] < 1.3, "headers, and reports of a small model"
    assert result["global_steps"] >= 48 and 1 <= result["contributors"] <= 2


@pytest.mark.slow
def test_the_kill_of_one_of_three_beside_torchft_runs() -> None:
    if not (ROOT / ".bench" / "torchft" / ".stamp").exists():
        pytest.skip("PyTorch and torchft are not here; ./scripts/bench/vs_torchft installs them once")
    assert len(results_of("vs_torchft", ["--repeats", "1"])) > 4


def test_no_bench_is_excluded() -> None:
    programs = {path.name for path in BENCHES.iterdir() if path.is_file() and not path.suffix}
    assert programs == {bench.program for bench in SMALLEST} | {"wan", "vs_torchft"}
