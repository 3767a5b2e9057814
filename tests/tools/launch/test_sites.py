"""Runs at several providers: a folder for each, and one README, order and address for all."""

import os
import subprocess
from pathlib import Path

import pytest

from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load, parse
from diloco_jax.tools.launch.sites import check_sites, divide, plan_sites
from diloco_jax.tools.launch.write import check_tools
from tests.tools.launch.helpers import CONFIGS, Stage, stand_ins
from tests.tools.launch.test_scripts import SHELLCHECK

CLOUD = ("--cloud.project", "p", "--cloud.image", "us/i:1", "--cloud.bucket", "b", "--cloud.service_account", "a@p")
OUTSIDE = ("--cloud.external", "true", "--cloud.source_ranges", "34.1.2.0/24")
THREE = CONFIGS / "three_sites.yaml"


def three(*overrides: str) -> RunConfig:
    return load(THREE, (*CLOUD, *overrides))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Write the example; `sky` and `sbatch` are stand-ins, too."""
    folder = tmp_path_factory.mktemp("sites")
    made = Stage(folder, plan_sites(three(*OUTSIDE), "gke"))
    for name in ("sky", "sbatch"):
        (folder / "bin" / name).symlink_to("diloco")
    return made


def test_islands_are_divided_and_the_syncer_is_at_the_target() -> None:
    config = three(*OUTSIDE)
    assert divide(config, "gke") == {
        "gke": (("island-0",), True),
        "sky": (("island-1",), False),
        "slurm": (("island-2",), False),
    }
    small = load(THREE, ("--islands.count", "1", "--islands.each", "{}"))
    assert divide(small, "slurm") == {"slurm": (("island-0",), True)}


def test_create_gives_every_folder_its_certificates_and_the_address(stage: Stage) -> None:
    result = stage.run("./create.sh")
    assert result.returncode == 0, result.stderr
    files = {folder: sorted(os.listdir(stage.out / folder / "certs")) for folder in ("gke", "sky", "slurm")}
    every = ["ca.pem", "token"]
    assert files == {
        "gke": sorted([*every, "island-0.key", "island-0.pem", "syncer.key", "syncer.pem"]),
        "sky": sorted([*every, "island-1.key", "island-1.pem"]),
        "slurm": sorted([*every, "island-2.key", "island-2.pem"]),
    }
    for folder in ("sky", "slurm"):
        assert (stage.out / folder / "address").read_text(encoding="utf-8") == "10.1.2.3:50051\n"
    called = [words for words in stage.calls if words[0] in ("sky", "sbatch")]
    assert called == [
        ["sky", "jobs", "launch", "--yes", "--detach-run", "--env", "SYNCER=10.1.2.3:50051", "island-1.sky.yaml"],
        ["sbatch", "island-2.sbatch"],
    ]


def test_files_of_each_place(stage: Stage) -> None:
    files = stage.plan.files
    assert [name for name in files if "README" in name] == ["README.md"]
    assert not [name for name in files if name.startswith(("sky/syncer", "slurm/syncer"))]
    task = files["sky/island-1.sky.yaml"]
    assert "infra: lambda/us-east-1" in task and "accelerators: H100:8" in task and "docker:ghcr.io/you" in task
    assert 'image: "us/i:1"' in files["gke/clusters/us-east5/island-0.yaml"]
    assert 'gke-spot: "true"' in files["gke/clusters/us-east5/island-0.yaml"]
    # Only machines of Google Cloud can be expected to reach its bucket.
    found = {folder: load(stage.out / folder / "config.yaml") for folder in ("sky", "slurm")}
    assert {each.checkpoints.states for each in found.values()} == {""}
    readme = files["README.md"]
    assert "From sky (island-1): outgoing TCP to the syncer's port 50051" in readme and "34.1.2.0/24" in readme
    order = [readme.index(line) for line in stage.plan.create]
    assert order == sorted(order)


def test_google_without_the_syncer(tmp_path: Path) -> None:
    fixed = Stage(tmp_path, plan_sites(three("--transport.address", "s.example.org:50051"), "slurm"))
    files = fixed.plan.files
    assert "slurm/syncer.sbatch" in files and not [name for name in files if name.endswith("syncer.yaml")]
    assert "syncer" not in " ".join(
        files["gke/clusters/us-east5/cluster.sh"].partition("configure()")[0].split("pools")
    )
    assert fixed.run("diloco", "certs", "certs", "--learners", "island-0,island-1,island-2").returncode == 0
    assert fixed.run("./share.sh", "address").stdout == "the syncer is at s.example.org:50051\n"
    assert fixed.run("gke/syncer.sh", "address").stdout == "s.example.org\n"
    assert (fixed.out / "sky" / "address").exists() and not (fixed.out / "slurm" / "address").exists()
    asked = plan_sites(three(), "sky").files["share.sh"]
    assert 'address="$(sky status --ip three-sites-syncer):50051"' in asked


@pytest.mark.parametrize(
    ("way", "overrides", "said"),
    [
        (
            "gke",
            (),
            "island-1 is at sky and the syncer at gke, whose address is internal (cloud.external is false); set",
        ),
        (
            "slurm",
            (),
            "transport.address is 127.0.0.1:0, where only the syncer's own machine reaches it; set transport",
        ),
        (
            "gke",
            ("--transport.address", "s.org:1"),
            "transport.address is s.org:1, but the syncer listens at port 50051",
        ),
        ("pathways", (), "islands.each.island-0.provider is gke, but launch pathways has one process for all islands"),
        ("slurm", ("--islands.count", "4"), "island-3 has no number of GPUs; set islands.devices"),
        ("gce", ("--islands.each.island-0.provider", "sky"), "islands.each.island-0.topology is 'v6e:4x4', which sky"),
    ],
)
def test_mistakes_are_one_message(way: str, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=r"remove|set|write|launch") as refused:
        config = three(*overrides)
        check_sites(config, way)
        plan_sites(config, way)
    assert said in str(refused.value)


def test_no_islands_at_the_target_leave_the_zone_open() -> None:
    each = {"island-0": {"provider": "sky", "devices": 1, "accelerator": "H100"}}
    with pytest.raises(ValueError, match="the syncer is at gke, where no island is, so its zone is unknown; set cloud"):
        check_sites(parse({"islands": {"count": 1, "each": each}, "cloud": {}}, "test"), "gke")


def test_the_command_needs_no_slurm_here(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(stand_ins(tmp_path / "bin")))
    with pytest.raises(ValueError, match=r"--run calls sky, not found in PATH; pip install skypilot"):
        check_tools(stage.plan)


@pytest.mark.extra("dev")
def test_shellcheck_finds_nothing(stage: Stage) -> None:
    shells = [str(stage.out / name) for name in ("create.sh", "share.sh", "delete.sh")]
    checked = subprocess.run([str(SHELLCHECK), "-x", "-P", str(stage.out), *shells], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
