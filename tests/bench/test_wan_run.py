"""A whole bench over emulated links, small: what its figures mean on one example."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from lab.network import ROOT

from tests.bench.test_wan_lab import NEEDS_ROOT


@NEEDS_ROOT
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_bytes_of_a_run_are_its_payload_and_little_else() -> None:
    words = ["bytes", "--islands", "2", "--model", "1m", "--steps", "48", "--rate-mbit", "200", "--json"]
    words += ["--up", "bfloat16"]
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench" / "wan.py"), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"},
    )
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout)
    rows = {row["what"]: row for row in outcome["rows"]}
    payload, planned = rows["of that payload"], rows["planned"]
    assert payload["down"] == pytest.approx(planned["down"], rel=0.1)
    assert 0.4 * planned["up"] < payload["up"] < 1.05 * planned["up"], "one of two learners at least, in each round"
    assert 1.02 < outcome["value"] / payload["both"] < 1.3, "headers, and reports of a small model"
    assert outcome["global_steps"] >= 48 and 1 <= outcome["contributors"] <= 2
