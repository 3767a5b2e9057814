"""Kubernetes takes the manifests: core types against its schemas, JobSet against the fields of its API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import kubernetes_validate
import pytest
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from diloco_jax.settings.slices import Topology
from diloco_jax.settings.text import parse
from diloco_jax.tools.launch import common
from tests.tools.launch.helpers import plan

KUBERNETES = "1.32"
VARIANTS = (
    (),
    ("--cloud.capacity", "spot", "--cloud.external", "True", "--cloud.source_ranges", "34.1.2.0/24"),
    ("--syncer.shards", "3"),
)


# Fields of jobset.x-k8s.io/v1alpha2 and their types: kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go.
class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def valid_job(template: dict[str, Any]) -> dict[str, Any]:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x", **template.get("metadata", {})}}
    try:
        kubernetes_validate.validate({**job, "spec": template["spec"]}, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise ValueError(error) from error
    return template


class ReplicatedJob(Strict):
    name: str
    groupName: str = ""
    replicas: int
    template: Annotated[dict[str, Any], AfterValidator(valid_job)]
    dependsOn: Any = None


class Rule(Strict):
    name: str
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    onJobFailureReasons: list[str] = []
    onJobFailureMessagePatterns: list[str] = []
    targetReplicatedJobs: list[str] = []


class FailurePolicy(Strict):
    maxRestarts: int
    restartStrategy: Literal["Recreate", "BlockingRecreate"]
    rules: list[Rule]


class Spec(Strict):
    replicatedJobs: list[ReplicatedJob]
    failurePolicy: FailurePolicy


class JobSet(Strict):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Any
    spec: Spec


def manifests(*overrides: str) -> list[dict[str, Any]]:
    files = plan("gke", *overrides).files
    texts = [text for name, text in files.items() if name.startswith("clusters/") and name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def of_kind(kind: str, *overrides: str) -> list[dict[str, Any]]:
    return [each for each in manifests(*overrides) if each["kind"] == kind]


@pytest.mark.parametrize("overrides", VARIANTS)
def test_kubernetes_takes_core_types(overrides: tuple[str, ...]) -> None:
    core = [each for each in manifests(*overrides) if each["kind"] != "JobSet"]
    assert {each["kind"] for each in core} == {"Namespace", "ConfigMap", "StatefulSet", "Service"}
    for each in core:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


@pytest.mark.parametrize("overrides", VARIANTS)
def test_jobset_has_these_fields(overrides: tuple[str, ...]) -> None:
    found = of_kind("JobSet", *overrides)
    assert [each["metadata"]["name"] for each in found] == ["small-island-1", "small-island-0"]
    for each in found:
        JobSet.model_validate(each)


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(failPolicy={}),
        lambda spec: spec["failurePolicy"].update(maxRestarts="3"),
        lambda spec: spec["failurePolicy"]["rules"][0].update(action="RestartJob"),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(parallelsm=2),
    ],
)
def test_wrong_jobsets_are_caught(change: Callable[[dict[str, Any]], None]) -> None:
    (each, *_) = of_kind("JobSet")
    change(each["spec"])
    with pytest.raises(ValidationError) as caught:
        JobSet.model_validate(each)
    assert caught.value.error_count() == 1


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
        for variable in pod["containers"][0].get("env", []):
            source = variable["valueFrom"]["configMapKeyRef"]
            assert f'configmap "{source["name"]}"' in " ".join(scripts.replace("\\\n", " ").split())
            assert f"--from-literal={source['key']}=" in scripts


def test_containers_read_a_config_that_protects_every_connection() -> None:
    texts = {each["data"]["config.yaml"] for each in of_kind("ConfigMap")}
    assert len(texts) == 1
    config = parse(yaml.safe_load(texts.pop()), "config.yaml")
    assert config.transport.encrypted and not config.transport.allow_plaintext
    assert config.transport.address == "0.0.0.0:50051"
    (service,) = of_kind("Service", "--syncer.shards", "3")
    assert [each["port"] for each in service["spec"]["ports"]] == [50051, 50052, 50053, 50054]
    for name in common.certificate_files("{name}"):
        assert f"{common.CERTIFICATES_PATH}/{name}" in vars_of(config.transport)


def vars_of(transport: Any) -> list[str]:
    return [getattr(transport, name) for name in ("tls_ca", "tls_certificate", "tls_key", "token_file")]


def test_only_an_external_syncer_is_on_the_internet() -> None:
    inside, outside = of_kind("Service"), of_kind("Service", *VARIANTS[1])
    key = "networking.gke.io/load-balancer-type"
    assert inside[0]["metadata"]["annotations"][key] == "Internal"
    assert "annotations" not in outside[0]["metadata"]
    assert outside[0]["spec"]["loadBalancerSourceRanges"] == ["34.1.2.0/24"]
