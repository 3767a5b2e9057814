"""Kubernetes takes the manifests: core types against its schemas, JobSets against the schema of theirs."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_jax.cli.commands import make_parser
from diloco_jax.settings.slices import Topology
from diloco_jax.settings.text import load, parse
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.sites import WAYS
from diloco_jax.transport.trust.certificates import make as make_certificates
from diloco_jax.transport.trust.security import credentials
from tests.tools.launch.helpers import CONFIGS, TESTDATA, plan

KUBERNETES = "1.32"
VARIANTS = (
    (),
    ("--cloud.capacity", "spot", "--cloud.external", "True", "--cloud.source_ranges", "34.1.2.0/24"),
    ("--syncer.metrics", "0.0.0.0:9464"),
)


# The first island has a reservation; the second one comes when there is capacity.
EXTRA = ("--islands.least", "1", "--cloud.capacity", "reservation", "--cloud.reservation", "mine")
EXTRA += ("--cloud.queue", "team", "--cloud.priority_class", "high")
FLEX = (*EXTRA, "--cloud.extra", '{"capacity": "flex-start", "queue": "spare", "priority_class": "low"}')


def problems(jobset: dict[str, Any]) -> list[str]:
    """Hold a JobSet against its own schema, and its template against that of Jobs."""
    import jsonschema
    import kubernetes_validate

    schema = json.loads((TESTDATA / "jobset_crd.json").read_text(encoding="utf-8"))
    found = [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(jobset)]
    for each in jobset["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **each["template"]}
        try:
            kubernetes_validate.validate(job, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(str(error))
    return found


def manifests(*overrides: str) -> list[dict[str, Any]]:
    files = plan("gke", *overrides).files
    texts = [text for name, text in files.items() if name.startswith("clusters/") and name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def of_kind(kind: str, *overrides: str) -> list[dict[str, Any]]:
    return [each for each in manifests(*overrides) if each["kind"] == kind]


@pytest.mark.extra("dev")
@pytest.mark.parametrize("overrides", VARIANTS)
def test_kubernetes_takes_core_types_and_jobsets(overrides: tuple[str, ...]) -> None:
    import kubernetes_validate

    core = [each for each in manifests(*overrides) if each["kind"] not in ("JobSet", "PodMonitoring")]
    assert {each["kind"] for each in core} == {"Namespace", "ServiceAccount", "ConfigMap", "StatefulSet", "Service"}
    for each in core:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    found = of_kind("JobSet", *overrides)
    assert [each["metadata"]["name"] for each in found] == ["small-island-1", "small-island-0"]
    assert [problems(each) for each in found] == [[], []]


@pytest.mark.extra("dev")
@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(failPolicy={}),
        lambda spec: spec["failurePolicy"].update(maxRestarts="3"),
        lambda spec: spec["failurePolicy"]["rules"][0].update(action="Restart"),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(parallelsm=2),
    ],
)
def test_wrong_jobsets_are_caught(change: Callable[[dict[str, Any]], None]) -> None:
    (each, *_) = of_kind("JobSet")
    change(each["spec"])
    assert len(problems(each)) == 1


def test_an_island_is_one_slice_and_restarts_as_a_whole() -> None:
    for each in of_kind("JobSet", "--cloud.capacity", "spot"):
        spec = each["spec"]
        (replicated,) = spec["replicatedJobs"]
        job = replicated["template"]["spec"]
        pod = job["template"]["spec"]
        selector = pod["nodeSelector"]
        slice_ = Topology.parse({"small-island-0": "v5p:2x2x2", "small-island-1": "v6e:2x4"}[each["metadata"]["name"]])
        assert replicated["replicas"] == 1 and job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
        assert job["parallelism"] == job["completions"] == slice_.hosts
        assert selector["cloud.google.com/gke-tpu-accelerator"] == slice_.generation.gke_accelerator
        assert selector["cloud.google.com/gke-tpu-topology"] == slice_.dims
        assert selector["cloud.google.com/gke-spot"] == "true"
        container = pod["containers"][0]
        assert container["resources"]["limits"] == {"google.com/tpu": slice_.chips_per_host}
        assert each["metadata"]["annotations"] == {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
        assert "MEGASCALE" not in yaml.safe_dump(each)


@pytest.mark.extra("dev")
def test_extra_islands_wait_in_their_queue_until_kueue_has_machines_for_them() -> None:
    import jsonschema

    kinds = json.loads((TESTDATA / "kueue_crds.json").read_text(encoding="utf-8"))
    found = manifests(*FLEX)
    config, check = (each for kind in kinds for each in found if each["kind"] == kind)
    for each in (config, check):
        assert not [*jsonschema.Draft202012Validator(kinds[each["kind"]]).iter_errors(each)]
    assert check["spec"]["parameters"]["name"] == config["metadata"]["name"] == check["metadata"]["name"]
    jobsets = {each["metadata"]["name"]: each for each in found if each["kind"] == "JobSet"}
    assert [problems(each) for each in jobsets.values()] == [[], []]
    for name, queue, priority, label in (
        ("small-island-0", "team", "high", ("cloud.google.com/reservation-name", "mine")),
        ("small-island-1", "spare", "low", ("cloud.google.com/gke-flex-start", "true")),
    ):
        pod = jobsets[name]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        assert jobsets[name]["spec"]["suspend"] is True and pod["priorityClassName"] == priority
        assert jobsets[name]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue
        assert label in pod["nodeSelector"].items()


def test_only_queued_islands_are_suspended_and_only_flex_start_is_requested() -> None:
    assert "suspend:" not in "".join(text for name, text in plan("gke").files.items() if name.endswith(".yaml"))
    # Without Kueue, GKE's autoscaler requests the machines.
    for overrides in (EXTRA, ("--cloud.capacity", "flex-start")):
        assert not [name for name in plan("gke", *overrides).files if name.endswith("admission.yaml")]


@pytest.mark.parametrize(
    "code, taken, action",
    [
        (1, False, "RestartJobSet"),
        (137, False, "RestartJobSet"),
        (2, False, "FailJobSet"),
        (2, True, "FailJobSet"),
        (130, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (143, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (1, True, "RestartJobSetAndIgnoreMaxRestarts"),
    ],
)
def test_what_follows_the_end_of_a_host(code: int, taken: bool, action: str) -> None:
    """With the rules as Kubernetes and JobSet say that they apply them: the first that does."""
    (each, *_) = of_kind("JobSet")
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for rule in each["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]:
        if code in rule.get("onExitCodes", {}).get("values", []):
            reason, message = "PodFailurePolicy", f"Container learner for pod a/b failed with exit code {code} matching"
            break
        if "onPodConditions" in rule and taken:
            reason, message = "PodFailurePolicy", "Pod a/b has condition DisruptionTarget matching FailJob rule"
    for rule in each["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            assert rule["action"] == action
            return
    assert action == "RestartJobSet", "what JobSet does without a rule, counted"


TPU = sorted((CONFIGS / "tpu").glob("*.yaml"))
PLACES = ("--cloud.project", "p", "--cloud.image", "i", "--cloud.service_account", "a", "--cloud.bucket", "my-bucket")
PLACES += ("--cloud.syncer_machine_type", "n2-highmem-64", "--cloud.tpu_image_family", "f")


@pytest.mark.parametrize("path", TPU, ids=lambda path: path.stem)
def test_every_config_finds_what_it_needs_in_its_pods(path: Path, tmp_path: Path) -> None:
    """Each pod's own command reads its mounted config and certificates, and keeps what a resume needs."""
    zone = () if load(path).islands.each else ("--islands.zone", "us-east5-b")
    sliced = load(path).islands.slices > 1
    for way in ("tpu-vm",) if sliced else ("gce", "tpu-vm"):
        assert WAYS[way].plan(load(path, (*PLACES, *zone))).files
    files = WAYS["gke"].plan(load(path, (*PLACES, *zone))).files
    (text, *_) = (text for name, text in files.items() if name.endswith("common.yaml"))
    (settings, *_) = (each["data"] for each in yaml.safe_load_all(text) if each["kind"] == "ConfigMap")
    make_certificates(made := tmp_path / "made", load(path).islands.names)
    for name in [name for name in files if re.search(r"(island-\d+|syncer)\.yaml$", name)]:
        manifest = next(yaml.safe_load_all(files[name]))
        who, spec = manifest["metadata"]["labels"]["app.kubernetes.io/component"], manifest["spec"]
        jobs = spec.get("replicatedJobs")
        pod = (jobs[0]["template"]["spec"] if jobs else spec)["template"]["spec"]
        (container,) = pod["containers"]
        root = tmp_path / who
        for mount in container["volumeMounts"]:
            (root / mount["mountPath"][1:]).mkdir(parents=True)
        (root / "etc/diloco/config/config.yaml").write_text(
            settings["config.yaml"].replace("/etc/diloco", f"{root}/etc/diloco"), encoding="utf-8"
        )
        for file in common.certificate_files(who):
            shutil.copy(made / file, root / "etc/diloco/certs" / file)
        words = [word.replace("/etc", f"{root}/etc").replace("/var", f"{root}/var") for word in container["args"]]
        arguments = make_parser().parse_args(words)
        config = load(arguments.config)
        # This call reads and checks all files of the credentials.
        credentials(config.transport, who)
        assert Path(arguments.run_dir).parent.is_dir(), "no volume holds the run's folder"
        given = {each["name"]: each.get("value", "") for each in container["env"]}
        assert given["DILOCO_CACHE"].startswith("/var/diloco/")
        assert config.checkpoints.states.startswith("gs://my-bucket/")
        assert config.data.path == "stdlib" or config.data.path.startswith("gs://my-bucket/")


def test_what_is_mounted_is_there() -> None:
    """Every volume, ConfigMap and Secret that a pod names is made by a manifest or by a script."""
    files = plan("gke").files
    scripts = "\n".join(text for name, text in files.items() if name.endswith(".sh")).replace("$RUN", "small")
    configs = {each["metadata"]["name"] for each in of_kind("ConfigMap")}
    pods = [each["spec"]["template"]["spec"] for each in of_kind("StatefulSet")]
    pods += [each["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"] for each in of_kind("JobSet")]
    assert len(pods) == 3
    claims = {each["metadata"]["name"] for s in of_kind("StatefulSet") for each in s["spec"]["volumeClaimTemplates"]}
    for pod in pods:
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} <= {*volumes, *claims}
        assert volumes["config"]["configMap"]["name"] in configs
        assert f'"{volumes["certificates"]["secret"]["secretName"]}"' in scripts
        assert not any("emptyDir" in volume for volume in pod["volumes"]), "it would be gone with the pod"
        for variable in pod["containers"][0]["env"]:
            if "value" in variable:
                continue
            source = variable["valueFrom"]["configMapKeyRef"]
            assert f'configmap "{source["name"]}"' in " ".join(scripts.replace("\\\n", " ").split())
            assert f"--from-literal={source['key']}=" in scripts


def test_containers_read_a_config_that_protects_every_connection() -> None:
    texts = {each["data"]["config.yaml"] for each in of_kind("ConfigMap")}
    assert len(texts) == 1
    config = parse(yaml.safe_load(texts.pop()), "config.yaml")
    assert config.transport.encrypted and not config.transport.allow_plaintext
    assert config.transport.address == "0.0.0.0:50051"
    (service,) = of_kind("Service")
    assert [each["port"] for each in service["spec"]["ports"]] == [50051]
    named = [getattr(config.transport, name) for name in ("tls_ca", "token_file", "tls_certificate", "tls_key")]
    assert named == [f"{common.CERTIFICATES_PATH}/{name}" for name in common.certificate_files("{name}")]


def test_prometheus_asks_the_syncer_where_it_tells() -> None:
    """Names and labels of one manifest are those of another, which no schema would notice."""
    assert not of_kind("PodMonitoring")
    asked = ("--syncer.metrics", "0.0.0.0:9464")
    (monitoring,), (syncer,) = of_kind("PodMonitoring", *asked), of_kind("StatefulSet", *asked)
    assert monitoring["apiVersion"] == "monitoring.googleapis.com/v1"
    assert monitoring["metadata"]["namespace"] == syncer["metadata"]["namespace"]
    pod = syncer["spec"]["template"]
    assert monitoring["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    (endpoint,) = monitoring["spec"]["endpoints"]
    ports = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
    assert endpoint == {"port": "metrics", "interval": "30s"} and ports == {"port-50051": 50051, "metrics": 9464}
    (service,) = of_kind("Service", *asked)
    assert [each["port"] for each in service["spec"]["ports"]] == [50051], "nobody outside of the cluster asks"


@pytest.mark.parametrize("address", ["127.0.0.1:9464", "0.0.0.0:50051", "0.0.0.0:0"])
def test_metrics_that_no_collector_reaches_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"syncer\.metrics is .* write 0\.0\.0\.0:PORT"):
        plan("gke", "--syncer.metrics", address)


def test_only_an_external_syncer_is_on_the_internet() -> None:
    inside, outside = of_kind("Service"), of_kind("Service", *VARIANTS[1])
    key = "networking.gke.io/load-balancer-type"
    assert inside[0]["metadata"]["annotations"][key] == "Internal"
    assert "annotations" not in outside[0]["metadata"]
    assert outside[0]["spec"]["loadBalancerSourceRanges"] == ["34.1.2.0/24"]
