"""What doctor, preflight, plan and launch say of the same config: the same numbers."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_jax.cli.main import main
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from diloco_jax.sim.goodput.settings import Assumptions
from diloco_jax.tools.budget.figures import size
from diloco_jax.tools.budget.memory import chip_memory
from diloco_jax.tools.budget.needs import IslandKind
from diloco_jax.tools.doctor import examine as examining
from diloco_jax.tools.doctor.link import _throughput
from diloco_jax.tools.doctor.machine import Check, ProcessPart
from diloco_jax.tools.doctor.probing import Greeting, Rate
from diloco_jax.tools.launch.needs import describe_needs, needs_of
from diloco_jax.tools.launch.sites import WAYS
from diloco_jax.tools.plan.case import case_of
from diloco_jax.tools.plan.forecast import forecast
from diloco_jax.tools.preflight import judge
from diloco_jax.tools.preflight.compile import Built, Compiled, Memory
from diloco_jax.training.blueprint import Blueprint

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
FAR = Greeting("run", {}, {}, 0, 0.05, 0.0)
EMPTY = Memory(0, 0, 0, 0, 0)


def doctor(config: RunConfig, island: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Findings by name; the link carries a gigabyte per second."""

    def link(config: RunConfig, side: Any, part: ProcessPart, seconds: float) -> list[Check]:
        return [_throughput(config, FAR, part.links, Rate(1, 1e9), Rate(1, 1e9))]

    monkeypatch.setattr(examining, "check_link", link)
    found = examining.examine(config, folder, island=island, address="127.0.0.1:1", seconds=1.0)
    return {check.name: check.found for check in found}


def preflight(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The result for programs that take nothing beside what an island holds."""

    def compiled(config: RunConfig, island: Any, say: Any) -> Compiled:
        chips = IslandKind(island, ()).chips
        blueprint = Blueprint(config.model, config.optimizer, island.mesh, chips, seed=config.seed)
        run = resolve(config, blueprint.shapes, blueprint.kinds)
        programs = tuple(Built(kind, (), 0.0, 0.0, EMPTY, None, 0.0) for kind in ("create", "step"))
        return Compiled(blueprint, run, chip_memory(run, blueprint), programs)

    monkeypatch.setattr(judge, "compile_island", compiled)
    return judge.preflight(config, [], print)


@pytest.mark.usefixtures("few_failures")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_all_tools_say_the_same(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(load(path), algorithm="decoupled")
    launch, name = needs_of(config), config.islands.names[0]
    plan = forecast(case_of(config, Assumptions(step_s=1.0)), [])
    assert [each["islands"] for each in launch["islands"]] == [each["islands"] for each in plan["memory"]["islands"]]
    for each, planned in zip(launch["islands"], plan["memory"]["islands"], strict=True):
        assert {**planned, "disk_bytes": each["disk_bytes"]} == each
        said = doctor(config, each["islands"][0], tmp_path, monkeypatch)
        assert f"about {size(sum(planned['host'].values()))} needed" in said["memory"]
        if config.protocol.snapshot_every:
            assert f"up to {size(each['disk_bytes'])}" in said["disk"]
    assert launch["syncer"]["memory"] == plan["memory"]["syncer"]
    said = doctor(config, "", tmp_path, monkeypatch)
    assert f"about {size(sum(plan['memory']['syncer'].values()))} needed" in said["memory"]

    up, down = (plan["bytes"][way] for way in (config.wire.up, config.wire.down))
    link = {"up_bytes_per_step": up["per_step"], "down_bytes_per_step": down["per_step"]}
    assert launch["link"] == {**link, "fragment_bytes_max": up["round_max"]}
    assert f"moves {size(up['per_step'])} up and {size(down['per_step'])} down per global step" in said["throughput"]
    assert plan["link"]["planned_gbit_per_s_per_learner"] == pytest.approx(8e-9 * max(link.values()))
    if config.island(name).topology:
        text = "\n".join(describe_needs(config, launch))
        assert "warning" not in text
        judged = preflight(config, monkeypatch)["islands"]
        compiled = [each for each in launch["islands"] if config.island(each["islands"][0]).topology]
        for each, found in zip(compiled, judged, strict=True):
            assert {**found["hbm"], "temporaries": each["hbm"]["temporaries"]} == each["hbm"]
            assert found["hbm_limit_bytes"] == each["hbm_limit_bytes"]
            assert (found["host_bytes"], found["host_limit_bytes"]) == (
                sum(each["host"].values()),
                each["host_limit_bytes"],
            )
            rates = found["wire"].pop("gbit_per_s")
            assert found["wire"] == launch["link"]
            assert rates == pytest.approx([8e-9 * max(link.values()) / seconds for seconds in found["step_s"]])
            assert f"{size(found['host_bytes'])} of {size(found['host_limit_bytes'])} on each host" in text
            chip = f"{size(each['hbm_held_bytes'])} of {size(each['hbm_limit_bytes'])} on each chip"
            assert f"{chip}, without activations" in text
        # Islands of several providers are launched apart (test_sites.py).
        if not any(each.provider for each in config.islands.each.values()):
            _launched(config, launch)


def _launched(config: RunConfig, needs: dict[str, Any]) -> None:
    """Compare what the manifests ask for with what all tools say."""
    files = WAYS["gke"].plan(_placed(config), needs).files
    manifests = [yaml.safe_load(files[name]) for name in files if re.search(r"island-\d+(-slice-\d+)?\.yaml$", name)]
    for manifest in manifests:
        name = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        kind = next(each for each in needs["islands"] if name in each["islands"])
        job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert job["parallelism"] == config.island(name).hosts
        asked = job["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"]
        assert asked == f"{math.ceil(sum(kind['host'].values()) / 2**30)}Gi"
    assert len(manifests) == config.islands.count * config.islands.slices
    text = next(text for name, text in files.items() if name.endswith("syncer.yaml"))
    resources = next(yaml.safe_load_all(text))["spec"]["template"]["spec"]["containers"][0]["resources"]
    asked, most = (int(resources[each]["memory"].removesuffix("Gi")) for each in ("requests", "limits"))
    assert asked == math.ceil(1.1 * sum(needs["syncer"]["memory"].values()) / 2**30) <= most


def _placed(config: RunConfig) -> RunConfig:
    """Add what people say on the command line: project, image, bucket, account and zone."""
    words = {"project": "p", "image": "i", "bucket": "b", "service_account": "a"}
    zone = config.islands.zone or "us-east5-b"
    cloud = replace(config.cloud, **words, syncer_machine_type="auto")
    return replace(config, cloud=cloud, islands=replace(config.islands, zone=zone))


def test_launch_tells_what_machines_need(capsys: pytest.CaptureFixture[str]) -> None:
    small = str(ROOT / "tests/tools/launch/testdata/small.yaml")
    tight = ["--cloud.syncer_disk_gb", "50", "--checkpoints.keep", "100000", "--protocol.snapshot_every", "10"]
    assert main(["launch", "gke", small, *tight]) == 0
    assert "but cloud.syncer_disk_gb is 50; raise it" in capsys.readouterr().out
    assert main(["launch", "gke", small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["needs"]["syncer"]["memory"]["values"] > 0
    assert main(["launch", "gke", small, "--model.module", "only.in.the.image:Net"]) == 0
    assert "unknown here" in capsys.readouterr().out
    assert main(["launch", "gke", small, "--model.module", "only.in.the.image:Net", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["needs"] is None
