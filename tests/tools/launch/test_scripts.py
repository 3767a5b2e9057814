"""The scripts do what they say, in the right order, with stand-ins for gcloud, kubectl and diloco."""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.limits import HANGS_S
from tests.tools.launch.gcloud_flags import EVERYWHERE, FLAGS, command_of, flags_of
from tests.tools.launch.helpers import GPU, Stage, plan
from tests.tools.launch.test_manifests import EXTRA, FLEX

WAYS = ("gke", "pathways", "gce", "tpu-vm")
SHELLCHECK = Path(sys.executable).parent / "shellcheck"


@pytest.fixture(params=WAYS)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    return Stage(tmp_path, plan(request.param))


class Run(NamedTuple):
    """One run of a script, and the calls that it made."""

    output: str
    calls: list[list[str]]

    def gcloud(self, verb: str) -> list[list[str]]:
        """List the calls of gcloud with this verb."""
        return gcloud(self.calls, verb)


Recorded = Callable[..., Run]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return a function that runs a script of a plan, which succeeds; asked again it returns the same run."""

    @functools.cache
    def stage_of(way: str, overrides: tuple[str, ...]) -> Stage:
        return Stage(tmp_path_factory.mktemp(way), plan(way, *overrides))

    @functools.cache
    def run(way: str, script: str, there: str, overrides: tuple[str, ...]) -> Run:
        stage = stage_of(way, overrides)
        result = stage.run(script, there=there)
        assert result.returncode == 0, result.stderr
        return Run(result.stdout, stage.calls)

    return lambda way, script, there, overrides=(): run(way, script, there, overrides)


def test_scripts_can_be_executed_and_stop_at_failures(stage: Stage) -> None:
    scripts = [path for path in stage.out.rglob("*.sh") if path.name != "variables.sh"]
    assert len(scripts) >= 4
    for path in scripts:
        assert path.stat().st_mode & 0o100, f"{path} cannot be executed"
        assert "set -euo pipefail" in path.read_text(encoding="utf-8")


def gcloud(calls: list[list[str]], verb: str) -> list[list[str]]:
    """List the calls of gcloud with this verb."""
    return [words for words in calls if words[0] == "gcloud" and verb in words]


@pytest.mark.parametrize("way", WAYS)
def test_a_second_time_makes_nothing(recorded: Recorded, way: str) -> None:
    assert recorded(way, "./create.sh", "nothing").gcloud("create")
    assert not recorded(way, "./create.sh", "all").gcloud("create")


@pytest.mark.parametrize("way", WAYS)
def test_delete_takes_away_what_create_made_but_the_disk(recorded: Recorded, way: str) -> None:
    def things(run: Run, verb: str) -> set[tuple[str, ...]]:
        found = set()
        for words in run.gcloud(verb):
            where = words.index(verb)
            name = next(w for w in words[where + 1 :] if not w.startswith("-") and w != "workload-policy")
            found.add((*words[1:where], name))
        return {each for each in found if not {"clusters", "disks", "routers"} & set(each)}

    made, deleted = recorded(way, "./create.sh", "nothing"), recorded(way, "./delete.sh", "all")
    assert things(made, "create") and things(deleted, "delete") == things(made, "create")
    assert not any("disks" in words for words in deleted.calls)


def test_delete_continues_after_a_failure(stage: Stage) -> None:
    result = stage.run("./delete.sh", there="all", FAIL="delete small-island-0")
    assert result.returncode == 1
    assert any("small-syncer" in words or "syncer" in " ".join(words) for words in stage.calls)
    assert any("small-island-1" in words for words in stage.calls if "delete" in words)


def test_an_unanswered_question_is_not_a_no(stage: Stage) -> None:
    """After a login has expired, create.sh creates nothing, and delete.sh does not report success."""
    for name in ("./create.sh", "./delete.sh"):
        result = stage.run(name, there="unknown")
        assert result.returncode == 1 and "your login has expired" in result.stderr
        assert not gcloud(stage.calls, "create") and not gcloud(stage.calls, "delete")


def test_create_stops_at_the_first_failure(stage: Stage) -> None:
    result = stage.run("./create.sh", FAIL="create small-island-0")
    assert result.returncode == 3 and "no capacity" in result.stderr
    assert "create small-island-0" in " ".join(stage.calls[-1])


@pytest.mark.parametrize("way", ["gke", "gce", "tpu-vm"])
def test_islands_get_the_address_and_only_their_own_certificates(recorded: Recorded, way: str) -> None:
    run = recorded(way, "./create.sh", "nothing")
    everything = "\n".join(" ".join(words) for words in run.calls)
    assert "10.1.2.3:50051" in everything
    for_island_1 = [words for words in run.calls if any("island-1" in word for word in words)]
    own = " ".join(word for words in for_island_1 if words[0] != "diloco" for word in words)
    assert own and not any(key in own for key in ("island-0.key", "syncer.key", "ca.key"))
    # The output lists the files in the archives for Secret Manager.
    assert "ca.key" not in run.output
    assert "ca.key" not in everything


def test_gce_archives_hold_what_a_machine_needs(tmp_path: Path) -> None:
    stage = Stage(tmp_path, plan("gce"))
    assert stage.run("./syncer.sh", "create").returncode != 0, "there are no certificates yet"
    stage.run("diloco", "certs", "certs", "--learners", "island-0,island-1")
    result = stage.run("./syncer.sh", "create")
    assert result.stdout.split() == ["ca.pem", "token", "syncer.pem", "syncer.key"]
    result = stage.run("islands/island-1.sh", "create")
    assert result.stdout.split() == ["ca.pem", "token", "island-1.pem", "island-1.key"]


def test_tpu_vm_says_how_to_replace_what_was_preempted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, plan("tpu-vm"))
    result = stage.run("islands/island-0.sh", "start", STATE="SUSPENDED")
    assert result.returncode == 1 and "island-0 is SUSPENDED" in result.stderr and "delete && " in result.stderr


def test_an_extra_island_waits_and_is_created_once(tmp_path: Path) -> None:
    stage, script = Stage(tmp_path, plan("gke", *FLEX)), "clusters/europe-west4/cluster.sh"
    stage.run("diloco", "certs", "certs", "--learners", "island-0,island-1")
    assert stage.run(script, "create").returncode == 0
    (pool,) = gcloud(stage.calls, "small-island-1")[1:]
    assert {"--flex-start", "--enable-queued-provisioning", "--min-nodes=0"} <= {*pool}
    assert pool[pool.index("--num-nodes") + 1] == "0"
    assert stage.run(script, "configure").returncode == 0
    assert "clusters/europe-west4/admission.yaml" in [words[-1] for words in stage.calls if "apply" in words]
    started = {}
    for there in ("nothing", "all"):
        assert stage.run(script, "start", there=there).returncode == 0
        started[there] = [words[3] for words in stage.calls if words[-1].endswith("island-1.yaml")]
    assert started == {"nothing": ["get", "create"], "all": ["get"]}
    assert "small-island-0" not in " ".join(map(" ".join, stage.calls)), "it is in another cluster"


def test_the_pool_of_an_extra_spot_island_is_empty_until_there_is_capacity() -> None:
    files = plan("gke", *EXTRA, "--cloud.extra.capacity", "spot").files
    first, second = (files[f"clusters/{region}/cluster.sh"] for region in ("us-east5", "europe-west4"))
    grows = "--num-nodes 0 --spot --enable-autoscaling --min-nodes=0 --location-policy=ANY --max-nodes 1"
    assert grows in second and "--enable-autoscaling" not in first and "--reservation mine" in first


def test_wrong_verb_says_which_there_are(stage: Stage) -> None:
    result = stage.run("./syncer.sh", "creat")
    assert result.returncode == 2 and "create" in result.stderr


VARIANTS = (
    (),
    ("--cloud.capacity", "spot", "--cloud.external", "True", "--cloud.source_ranges", "34.1.2.0/24"),
    ("--cloud.capacity", "reservation", "--cloud.reservation", "mine", "--cloud.private", "True", "--cloud.nat", "out"),
    ("--cloud.capacity", "flex-start"),
    ("--islands.each", "{}", "--islands.topology", "tpu7x:2x2x2", "--islands.zone", "us-central1-c"),
    FLEX,
)
SLICED = ("--islands.slices", "2")
SLICES = ("--islands.each", "{}", "--islands.topology", "v5p:2x2x1", "--islands.zone", "us-east5-a", *SLICED)
# So many of the variants above are tried for each way.
TRIED = {"gke": 6, "pathways": 2, "gce": 3, "tpu-vm": 4}


def calls_of_gcloud(recorded: Recorded) -> list[list[str]]:
    """Return one call for each command and set of flags."""
    found: dict[tuple[str, ...], list[str]] = {}
    for way, count in TRIED.items():
        for number, overrides in enumerate(VARIANTS[:count]):
            for name, there in (("./create.sh", "nothing"), ("./delete.sh", "all"))[: 1 if number else 2]:
                for words in recorded(way, name, there, overrides).calls:
                    if words[0] == "gcloud":
                        found[command_of(words), *sorted(flags_of(words))] = words
    return list(found.values())


@pytest.mark.extra("dev")
@pytest.mark.parametrize(
    ("way", "overrides"),
    [*((way, ()) for way in WAYS), ("slurm", GPU), ("sky", GPU), ("tpu-vm", SLICES), ("slurm", (*GPU, *SLICED))],
)
def test_shellcheck_finds_nothing(way: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    stage = Stage(tmp_path, plan(way, *overrides))
    shells = [str(path) for path in sorted(stage.out.rglob("*")) if path.suffix in (".sh", ".sbatch")]
    checked = subprocess.run([str(SHELLCHECK), "-x", "-P", str(stage.out), *shells], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_flags_are_known(recorded: Recorded) -> None:
    used: dict[str, set[str]] = {name: set() for name in FLAGS}
    for words in calls_of_gcloud(recorded):
        command = command_of(words)
        assert command, f"{words} is none of the commands in gcloud_flags.py"
        used[command] |= flags_of(words)
        assert "--node-count" not in words, "several nodes of one resource are a multislice job"
    unknown = {name: flags - FLAGS[name] - EVERYWHERE for name, flags in used.items()}
    assert not {name: flags for name, flags in unknown.items() if flags}
    unused = {name: FLAGS[name] - flags for name, flags in used.items()}
    assert not {name: flags for name, flags in unused.items() if flags}, "nothing uses them any more"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_parses_every_call(tmp_path: Path, recorded: Recorded) -> None:
    """Without an account it reads all flags, and then says that there is no account."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("CLOUDSDK_", "GOOGLE_"))},
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        # on a machine in Google Cloud it must not find that machine's account, nor reach anything
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_PROXY_TYPE": "http",
        "CLOUDSDK_PROXY_ADDRESS": "127.0.0.1",
        "CLOUDSDK_PROXY_PORT": "9",
    }
    calls = calls_of_gcloud(recorded)
    # The command reads the files that it names.
    files = Stage(tmp_path, plan("gce")).out
    wrong = []
    for words in calls:
        result = subprocess.run(
            words, cwd=files, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANGS_S
        )
        if "do not currently have an active account" not in result.stderr:
            wrong.append(f"{words}: {result.stderr}")
    assert len(calls) > 30 and not wrong, "\n".join(wrong)
