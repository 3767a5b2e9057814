"""GPU machines: what is written for Slurm runs, on emulated devices, with stand-ins for its commands."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from diloco_jax.cli.main import main
from tests.limits import SLOW_HANGS_S
from tests.sockets import free_port
from tests.tools.launch.helpers import GPU, TESTDATA, plan

# A job runs at once, its tasks side by side; the node is this machine.
STAND_INS = {
    "sbatch": 'n="$(sed -n "s/^#SBATCH --ntasks=//p" "$1")"\n'
    'SLURM_JOB_ID=$$ SLURM_JOB_NODELIST=here STAND_IN_TASKS="$n" bash "$1" &\n',
    "srun": 'while [[ "$1" == --* ]]; do shift; done\npids=()\nstatus=0\n'
    'for ((i = 0; i < STAND_IN_TASKS; i++)); do SLURM_PROCID=$i "$@" & pids+=($!); done\n'
    'for pid in "${pids[@]}"; do wait "$pid" || status=$?; done\nexit "$status"\n',
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >>requeued; fi\n',
    "hostname": "echo 127.0.0.1\n",
    "diloco": f'exec {sys.executable} -m diloco_jax "$@"\n',
}
TINY = {
    "--train.steps": "4",
    # The shared folder is enough.
    "--cloud.bucket": "",
    "--optimizer.warmup_steps": "1",
    "--train.batch_size": "8",
    "--train.seq_len": "32",
    "--train.final_eval_batches": "1",
    "--islands.devices": "2",
    "--protocol.quorum": "2",
    "--protocol.sync_every": "2",
    "--protocol.num_fragments": "2",
    "--model.args": json.dumps({"dim": 32, "num_layers": 1, "num_heads": 2, "mlp_dim": 32}),
}


# A node for each host of two slices: the loopback has many addresses.
SLICES = ("--islands.each", "{}", "--gpu.accelerator", "H100", "--islands.slices", "2")
NODES = {
    "sbatch": 'SLURM_JOB_ID=$$ SLURM_JOB_NODELIST=here STAND_IN_TASKS=1 bash "$1" &\n',
    "scontrol": 'if [ "$1" = show ]; then printf "127.0.0.1\\n127.0.0.2\\n"; else echo "$@" >>requeued; fi\n',
}


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.parametrize(("given", "nodes"), [(GPU, {}), (SLICES, NODES)], ids=["hosts", "slices"])
def test_slurm_trains_to_the_end_on_emulated_hosts(
    tmp_path: Path, given: tuple[str, ...], nodes: dict[str, str]
) -> None:
    out, stand_ins = tmp_path / "out", tmp_path / "bin"
    stand_ins.mkdir()
    for name, text in (STAND_INS | nodes).items():
        (stand_ins / name).write_text("#!/usr/bin/env bash\n" + text, encoding="utf-8")
        (stand_ins / name).chmod(0o755)
    words = [word for pair in TINY.items() for word in pair]
    asked = [*given, *words, "--cloud.port", str(free_port()), "--out", str(out)]
    assert main(["launch", "slurm", str(TESTDATA / "small.yaml"), *asked]) == 0
    path = f"{stand_ins}{os.pathsep}{os.environ['PATH']}"
    # without what conftest.py sets for tests in this process
    own = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment = {**own, "PATH": path, "JAX_PLATFORMS": "cpu"}
    # its output ends when all jobs have closed theirs
    with subprocess.Popen(
        ["./create.sh"], cwd=out, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        try:
            told, _ = started.communicate(timeout=SLOW_HANGS_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    assert not started.returncode and not (out / "requeued").exists(), told
    assert json.loads((out / "run" / "summary.json").read_text(encoding="utf-8"))["complete"], told


def test_only_extra_islands_of_sky_are_spot_and_no_request_waits_for_another() -> None:
    planned = plan("sky", *GPU, "--islands.least", "1", "--cloud.extra.capacity", "spot")
    tasks = [yaml.safe_load(planned.files[f"island-{n}.sky.yaml"]) for n in (0, 1)]
    assert [task["resources"]["use_spot"] for task in tasks] == [False, True]
    assert [line.split()[:5] for line in planned.create if " jobs launch " in line] == [
        ["sky", "jobs", "launch", "--yes", "--async"]
    ] * 2
