"""Merges, cuts and codes that replace those of the package, each in a separate process."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from experiments.instead import coded, payload_bytes, put_in_place
from experiments.plan import COMMON, TINY
from experiments.spec import ROOT, merged
from tests.limits import HANGS_S

PATHS = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])


def around() -> dict[str, str]:
    """Return the environment of a process that imports the experiments."""
    return os.environ | {"PYTHONPATH": PATHS}


def train(folder: Path, instead: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the result of a short training in a separate process."""
    base = merged(merged(COMMON, TINY), {"train": {"tokens": 8000}, "wire": {"up": "float32", "down": "float32"}})
    config = merged(base, {"model": {"args": {"seq_len_max": 32}}} | settings)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "schedule.json").write_text(json.dumps({"instead": instead} if instead else {}))
    words = [sys.executable, "-m", "experiments.taped", *map(str, (folder / "config.yaml", folder / "schedule.json"))]
    done = subprocess.run([*words, str(folder)], env=around(), capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_codes_of_two_bits_are_the_best_four_levels() -> None:
    values = np.random.default_rng(0).standard_normal(256 * 40).astype(np.float32)
    error = {bits: float(((coded(values, bits) - values) ** 2).mean()) for bits in (4, 2, 1)}
    # The error of the best four levels is from Max (1960), table I.
    assert error[2] == pytest.approx(0.1175, rel=0.05)
    assert error[1] == pytest.approx(1 - 2 / math.pi, rel=0.05)
    assert error[4] < 0.02
    assert len(np.unique(np.abs(coded(values[:256], 2)))) == 2
    assert coded(np.zeros(5, np.float32), 2).tolist() == [0.0] * 5
    assert payload_bytes(257, 2) == 2 * (4 + 64)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="instead has 'units'; use unit, cut"):
        put_in_place({"units": "row"})


def test_each_replacement_has_its_effect_and_little_else(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", {})
    row = train(tmp_path / "row", {"unit": "row"})
    codes = train(tmp_path / "codes", {"bits": 2})
    lost = train(tmp_path / "lost", {"bits": 2, "feedback": False})
    layers = train(tmp_path / "layers", {"cut": "layer"}, protocol={"num_fragments": 2})
    losses = [each["loss"] for each in (plain, row, codes, lost, layers)]
    assert len(set(losses)) == 5 and max(losses) < 1.05 * min(losses)
    assert codes["up_bytes"] == lost["up_bytes"] < plain["up_bytes"] / 10
    assert plain["up_bytes"] == row["up_bytes"] and layers["peak_to_mean"] > plain["peak_to_mean"]
