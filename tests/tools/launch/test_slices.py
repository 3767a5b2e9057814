"""Islands of several slices: each slice starts, finds the others and restarts by itself."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from diloco_jax.tools.launch.sites import WAYS
from tests.limits import HANGS_S
from tests.tools.launch.helpers import GPU, Stage, plan

ALIKE = ("--islands.each", "{}", "--islands.topology", "v5p:2x2x1", "--islands.zone", "us-east5-a")
SLICES = (*ALIKE, "--islands.slices", "2")
NAMES = [f"small-island-{island}-slice-{number}" for island in (0, 1) for number in (0, 1)]


def test_gke_makes_a_jobset_and_a_pool_for_each_slice() -> None:
    files = plan("gke", *SLICES).files
    folder = "clusters/us-east5"
    manifests = [yaml.safe_load(files[f"{folder}/{name.removeprefix('small-')}.yaml"]) for name in NAMES]
    assert [each["metadata"]["name"] for each in manifests] == NAMES
    for number, each in enumerate(manifests[2:]):
        pod = each["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        words = pod["containers"][0]["args"]
        assert words[words.index("--island") + 1] == "island-1"
        assert words[words.index("--slice") + 1] == str(number)
        # JobSet names a pod after its JobSet, its Job, and its number, below the JobSet's own service.
        host = "host-0-$(JOB_COMPLETION_INDEX)"
        addresses = ",".join(f"{name}-{host}.{name}:7100" for name in NAMES[2:])
        assert words[words.index("--slices") + 1] == addresses
        # Slices of an island have one certificate, and each its own folder.
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["certificates"]["secret"]["secretName"] == "small-island-1"
        assert volumes["run"]["hostPath"]["path"].endswith(NAMES[2 + number])
    script = files[f"{folder}/cluster.sh"]
    assert re.findall(r"node-pools create (small-island\S+)", script) == NAMES
    assert script.count('create secret generic "$RUN-island-0"') == 1
    assert "restart one by one" in files["README.md"] and "one JobSet per slice" in files["README.md"]


def test_tpu_vms_of_a_slice_learn_new_addresses_of_the_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path, plan("tpu-vm", *SLICES))
    stage.run("diloco", "certs", "certs", "--learners", "island-0,island-1")
    result = stage.run("islands/island-0-slice-1.sh", "start", there="all")
    assert result.returncode == 0, result.stderr
    lines = (stage.out / "islands" / "island-0.hosts").read_text(encoding="utf-8").splitlines()
    ours = [f"10.0.0.{1 + host} {name}-host-{host}" for name in NAMES[:2] for host in (0, 1)]
    assert lines == ["127.0.0.1 localhost", "::1 localhost", *ours]
    told = [words[6] for words in stage.calls if "islands/island-0.hosts" in words]
    assert told == [f"{name}:diloco/config/hosts" for name in NAMES[:2]]
    (command,) = [words[-1] for words in stage.calls if "learner.sh" in words[-1]]
    addresses = ",".join(f"{name}-host-{{host}}:7100" for name in NAMES[:2])
    assert f"--slice 1 --slices {addresses}" in command
    assert "agent-worker-number" in plan("tpu-vm", *SLICES).files["learner.sh"]


def test_slurm_has_a_node_for_each_host_and_a_step_for_each_slice() -> None:
    script = plan("slurm", *GPU, "--islands.slices", "1").files["island-0.sbatch"]
    assert "#SBATCH --ntasks=2" in script
    planned = plan("slurm", "--islands.each", "{}", "--islands.devices", "4", "--islands.slices", "4")
    script = planned.files["island-0.sbatch"]
    assert "#SBATCH --nodes=4" in script and "#SBATCH --no-kill" in script
    assert '--slice "$SLICE"' in script and "4 slices" in planned.files["README.md"]


@pytest.mark.parametrize("slices", ["1", "2"])
def test_jobs_of_slurm_that_share_a_node_have_different_ports(slices: str) -> None:
    """Compare two ports of each of three consecutive jobs."""
    script = plan("slurm", *GPU, "--islands.slices", slices).files["island-0.sbatch"]
    (line,) = re.findall(r"^PORT=.*$", script, re.MULTILINE)
    printed = f'for SLURM_JOB_ID in 5999 6000 6001; do {line}; echo "$PORT" "$((PORT + 1))"; done'
    found = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=True, timeout=HANGS_S)
    ports = found.stdout.split()
    assert len({*ports}) == 6 and all(20000 <= int(port) < 32768 for port in ports)


def test_slurm_users_read_that_an_island_needs_its_first_node() -> None:
    files = plan("slurm", *GPU, "--islands.slices", "2").files
    assert "if that one fails, the whole island starts again" in files["island-0.sbatch"]
    assert "if that one is lost, the whole island starts again" in files["README.md"]


@pytest.mark.parametrize("way", sorted({*WAYS} - {"gke", "tpu-vm", "slurm", "pathways"}))
def test_other_ways_refuse_slices(way: str) -> None:
    with pytest.raises(
        ValueError, match=rf"islands.slices is 2, but with launch {way} .* use launch gke, tpu-vm, slurm"
    ):
        plan(way, *SLICES)
