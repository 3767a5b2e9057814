"""The JobSet for Pathways: what Kubernetes takes, what pathwaysutils' builder writes, and what is refused."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from diloco_jax.cli.commands import make_parser
from diloco_jax.settings.slices import GENERATIONS, Topology
from diloco_jax.settings.text import load
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.pathways import head_machine, instance_type
from tests.tools.launch.helpers import PATHWAYS, TESTDATA, plan
from tests.tools.launch.test_manifests import KUBERNETES, problems

SPOT = ("--cloud.capacity", "spot", "--cloud.queue", "mine", "--cloud.priority_class", "high")


def manifests(*overrides: str) -> list[dict[str, Any]]:
    files = plan("pathways", *overrides).files
    texts = [text for name, text in files.items() if name.startswith("clusters/") and name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def jobset(*overrides: str) -> dict[str, Any]:
    (found,) = [each for each in manifests(*overrides) if each["kind"] == "JobSet"]
    return found


def pods(*overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pods of the head and of a worker."""
    head, worker = jobset(*overrides)["spec"]["replicatedJobs"]
    return head["template"]["spec"]["template"]["spec"], worker["template"]["spec"]["template"]["spec"]


@pytest.mark.extra("dev")
@pytest.mark.parametrize("overrides", [(), SPOT, ("--syncer.metrics", "0.0.0.0:9464")])
def test_kubernetes_takes_everything(overrides: tuple[str, ...]) -> None:
    import kubernetes_validate

    assert problems(jobset(*overrides)) == []
    core = [each for each in manifests(*overrides) if each["kind"] not in ("JobSet", "PodMonitoring")]
    assert {each["kind"] for each in core} == {"Namespace", "ServiceAccount", "ConfigMap", "StatefulSet", "Service"}
    for each in core:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_one_process_drives_all_islands_and_a_slice_is_a_job() -> None:
    head, worker = pods(*SPOT)
    (islands,) = head["containers"]
    arguments = make_parser().parse_args(islands["args"])
    assert (arguments.name, arguments.config, arguments.syncer) == ("islands", common.CONFIG_PATH, "$(DILOCO_SYNCER)")
    environment = {each["name"]: each.get("value") for each in islands["env"]}
    proxy = next(each for each in head["initContainers"] if each["name"] == "pathways-proxy")
    assert environment["JAX_PLATFORMS"] == "proxy"
    assert environment["JAX_BACKEND_TARGET"] == f"grpc://localhost:{proxy['ports'][0]['containerPort']}"
    assert "JAX_COMPILATION_CACHE_DIR" not in environment, "pathwaysutils switches JAX's cache off"
    job = jobset()["spec"]["replicatedJobs"][1]
    slice_ = Topology.parse("v5p:2x2x2")
    assert job["replicas"] == 2 and job["template"]["spec"]["completions"] == slice_.hosts
    assert worker["nodeSelector"]["cloud.google.com/gke-spot"] == "true" and worker["priorityClassName"] == "high"
    assert jobset(*SPOT)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "mine"


def test_nothing_keeps_the_head_from_being_ready() -> None:
    """JobSet starts the workers after the head is ready, and the islands find their devices after that."""
    assert jobset()["spec"]["startupPolicy"] == {"startupPolicyOrder": "InOrder"}
    (islands,) = pods()[0]["containers"]
    assert not {"readinessProbe", "startupProbe"} & set(islands)
    assert islands["livenessProbe"]["initialDelaySeconds"] > 3600


def test_what_is_mounted_is_there() -> None:
    files = plan("pathways").files
    script = " ".join(files["clusters/us-east5/cluster.sh"].replace("\\\n", " ").split())
    volumes = {each["name"]: each for each in pods()[0]["volumes"]}
    assert volumes["certificates"]["secret"]["secretName"] == "small-islands"
    (secret,) = [part for part in script.split("create secret generic ") if part.startswith('"$RUN-islands"')]
    for name in ("island-0", "island-1"):
        for file in common.certificate_files(name):
            assert f"--from-file=certs/{file} " in secret
    assert "syncer.key" not in secret.partition("apply -f -")[0]
    config = next(each for each in manifests() if each["kind"] == "ConfigMap")
    assert volumes["config"]["configMap"]["name"] == config["metadata"]["name"]
    settings = yaml.safe_load(config["data"]["config.yaml"])
    assert settings["islands"]["pathways"] is True and settings["islands"]["controller"] == "single"
    assert settings["checkpoints"]["states"].startswith("gs://my-bucket/")
    assert "node-pools create small-head " in script and "--machine-type n2-highmem-64" in script


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("--islands.least", "1", "--cloud.extra.capacity", "spot"),
            "cloud.extra is set, but launch pathways starts all islands as one JobSet",
        ),
        (
            ("--islands.pathways", "False", "--islands.controller", "processes"),
            "set islands.controller to single and islands.pathways to true",
        ),
        (("--islands.each", "{island-1: {zone: us-east5-b}}"), "slices of one kind in one zone"),
        (("--islands.each", '{island-1: {topology: "v5p:2x2x4"}}'), "slices of one kind in one zone"),
        (("--cloud.syncer_zone", "us-east1-b"), "launch pathways has one cluster; remove cloud.syncer_zone"),
        (("--islands.topology", "v6e:1x1"), "one host with 1 chips"),
        (("--name", "a-name-of-thirty-characters-xx"), "shorten it by 1"),
        (("--cloud.head_machine_type", "auto"), "name a machine type with 32 processors or more"),
        (("--cloud.pathways_version", "a b"), "cloud.pathways_version is 'a b'"),
    ],
)
def test_wrong_settings_are_one_message(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan("pathways", *overrides)


def test_the_head_has_room_for_all_islands() -> None:
    config = load(TESTDATA / "small.yaml", (*PATHWAYS, "--cloud.head_machine_type", "auto"))
    slices = common.slices_of(config, "pathways", ())
    # On each of two hosts of each of two islands.
    needs = {"islands": [{"islands": ["island-0", "island-1"], "host": {"weights": 0.0, "emulated_devices": 0.0}}]}
    assert head_machine(config, slices, needs) == "n2-highmem-32"
    needs["islands"][0]["host"]["weights"] = 60e9  # type: ignore[index]
    # 132 GB of Pathways, and 1.1 times 240 GB.
    assert head_machine(config, slices, needs) == "n2-highmem-64"
    needs["islands"][0]["host"]["weights"] = 2e12  # type: ignore[index]
    with pytest.raises(ValueError, match="more than m3-ultramem-128 has"):
        head_machine(config, slices, needs)


def test_every_generation_has_the_name_that_pathways_gives_it() -> None:
    assert {name: each.pathways for name, each in GENERATIONS.items()} == {
        "v4": "tpuv4", "v5e": "tpuv5e", "v5p": "tpuv5", "v6e": "tpuv6e", "tpu7x": "tpu7x"
    }  # fmt: skip
    assert instance_type(Topology.parse("v6e:2x4")) == "tpuv6e1t:2x4"
    assert instance_type(Topology.parse("v6e:4x4")) == "tpuv6e:4x4"


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a manifest by path; entries of a list that have a name have it in the path."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from flat(each, f"{path}/{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            key = each.get("name", each.get("mountPath", index)) if isinstance(each, dict) else index
            yield from flat(each, f"{path}/{key}")
    else:
        yield path, value


# Where we differ from the builder, and why.
OURS = {
    "/spec/failurePolicy/rules": "wrong input is final, and machines that are taken away do not count",
    "/podFailurePolicy": "likewise",
    "/nodeSelector": "the pools of this launch have other names, and the islands' zone is given",
    "/serviceAccountName": "pods reach the bucket as the run's account",
    "/metadata/labels": "all objects of a run carry its labels",
    "/initContainers/before": "as for an island on GKE",
    "/securityContext": "as for an island on GKE",
    "/terminationGracePeriodSeconds": "an island says goodbye",
    "/containers/islands": "the builder knows nothing of it but the proxy's variables, which are compared",
    "/volumes": "config, certificates and the run's folder",
}
JAX_VARIABLES = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS")


@pytest.mark.extra("pathways")
def test_pathwaysutils_builder_writes_the_same() -> None:
    try:
        builder = importlib.import_module("pathwaysutils.experimental.gke.jobset")
    except ImportError:
        pytest.skip("pathwaysutils[gke] is not installed; -m trainers installs it")
    ours = jobset()
    theirs = (
        builder.PathwaysJobSet(
            name="small-islands",
            namespace="diloco",
            pathways_dir="gs://my-bucket/small/pathways",
            tpu_type="ct5p-hightpu-4t",
            topology="2x2x2",
            num_slices=2,
            elastic_slices=2,
            max_restarts=100,
        )
        .add_user_workload(pods()[0]["containers"][0]["image"], ["diloco"], name="islands")
        .to_dict()
    )
    own, built = dict(flat(ours)), dict(flat(theirs))
    different = {path for path in own.keys() | built.keys() if own.get(path) != built.get(path)}
    assert {path for path in different if not any(part in path for part in OURS)} == set()
    for name in JAX_VARIABLES:
        (path,) = [each for each in built if f"/env/{name}/value" in each and "/containers/islands/" in each]
        assert own[path] == built[path]
    assert all(any(part in path for path in different) for part in OURS), "this difference is no more"
