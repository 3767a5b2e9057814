"""An island of two processes gives, in parts, what one of a single process gives, without a collective."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diloco_jax.core.parts import join_parts
from tests.sockets import free_port
from tests.training.one_host import CASES, Alone, exercise

PATIENCE_S = 600


@pytest.fixture(scope="module")
def of_hosts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """Return what each of two processes found."""
    folder, port = tmp_path_factory.mktemp("hosts"), free_port()
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.training.one_host", str(folder)]
    logs = [folder / f"{host}.log" for host in range(2)]
    processes = []
    for host, path in enumerate(logs):
        with path.open("wb") as log:
            words = [*command, str(host), str(port)]
            processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        for process, path in zip(processes, logs, strict=True):
            assert process.wait(PATIENCE_S) == 0, path.read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = []
    for host in range(2):
        with np.load(folder / f"{host}.npz") as arrays:
            found.append({name.replace("|", "/"): arrays[name] for name in arrays.files})
    return found


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_two_processes_give_the_parts_of_what_one_gives(of_hosts: list[dict[str, np.ndarray]], case: int) -> None:
    alone = exercise(case, Alone())
    payloads = [name for name in alone if name.startswith(f"{case}-") and name.count("-") == 2]
    assert len(payloads) == 6
    for name in payloads:
        parts = [bytes(found[name]) for found in of_hosts]
        assert bytes(join_parts(parts, 1 << 30)) == bytes(alone[name]), name
    sent = [sum(found[name].size for name in payloads) for found in of_hosts]
    assert min(sent) > sum(sent) / 4, f"the hosts share the work: {sent} bytes"
    states = [name for name in alone if "/" in name]
    assert states
    for found in of_hosts:
        assert not found[f"{case}-collectives"].any() and found[f"{case}-collectives"].size
        for name in states:  # elementwise up to here, so bit for bit
            np.testing.assert_array_equal(found[name], alone[name], err_msg=name)
        # Sums over devices of several processes are made in another order.
        np.testing.assert_allclose(found[f"{case}-losses"], alone[f"{case}-losses"], rtol=1e-5)
    read = [found[f"{case}-read"].tolist() for found in of_hosts]
    assert [len(rows) for rows in read] == [12, 12] and sorted(read[0] + read[1]) == sorted([*range(12)] * 2), (
        "two epochs of 12 samples, of which each host read the rows of its devices"
    )
    assert alone[f"{case}-losses"][2] < alone[f"{case}-losses"][0]
