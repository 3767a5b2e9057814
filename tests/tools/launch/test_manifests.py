"""Kubernetes takes the manifests: core types against its schemas, JobSet against the fields of its API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

from diloco_jax.settings.slices import Topology
from diloco_jax.settings.text import parse
from diloco_jax.tools.launch import common
from tests.tools.launch.helpers import plan

KUBERNETES = "1.32"
VARIANTS = (
    (),
    ("--cloud.spot", "True", "--cloud.external", "True", "--cloud.source_ranges", "34.1.2.0/24"),
    ("--syncer.shards", "3"),
)
# Fields of jobset.x-k8s.io/v1alpha2 and their types: kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go.
ANY, JOB = object(), object()
JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": ANY,
    "spec": {
        "replicatedJobs": [{"name": str, "groupName": str, "replicas": int, "template": JOB, "dependsOn": ANY}],
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": {"Recreate", "BlockingRecreate"},
            "rules": [
                {
                    "name": str,
                    "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
                    "onJobFailureReasons": [str],
                    "onJobFailureMessagePatterns": [str],
                    "targetReplicatedJobs": [str],
                }
            ],
        },
        "suspend": bool,
        "coordinator": {"replicatedJob": str, "jobIndex": int, "podIndex": int},
        "managedBy": str,
        "ttlSecondsAfterFinished": int,
    },
}


def problems(value: Any, shape: Any, where: str) -> Iterator[str]:
    """What of a JobSet is not in the table."""
    if shape is JOB:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x", **value.get("metadata", {})}}
        try:
            kubernetes_validate.validate({**job, "spec": value["spec"]}, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{where}: {error}"
    elif isinstance(shape, dict):
        for key in value:
            if key not in shape:
                yield f"{where}: no field {key}"
            else:
                yield from problems(value[key], shape[key], f"{where}.{key}")
    elif isinstance(shape, list):
        for index, each in enumerate(value):
            yield from problems(each, shape[0], f"{where}[{index}]")
    elif isinstance(shape, set):
        if value not in shape:
            yield f"{where}: {value!r} is none of {sorted(shape)}"
    elif shape is not ANY and type(value) is not shape:
        yield f"{where}: {value!r} is no {shape}"


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
    assert [text for each in found for text in problems(each, JOBSET, each["metadata"]["name"])] == []


def test_wrong_jobsets_are_caught() -> None:
    def spoiled(change: Any) -> int:
        (each, *_) = of_kind("JobSet")
        change(each["spec"])
        return len(list(problems(each, JOBSET, "x")))

    job = lambda spec: spec["replicatedJobs"][0]["template"]["spec"]  # noqa: E731
    assert spoiled(lambda spec: spec.update(failPolicy={})) == 1
    assert spoiled(lambda spec: spec["failurePolicy"].update(maxRestarts="3")) == 1
    assert spoiled(lambda spec: spec["failurePolicy"]["rules"][0].update(action="RestartJob")) == 1
    assert spoiled(lambda spec: job(spec).update(parallelsm=2)) == 1


def test_an_island_is_one_slice_and_restarts_as_a_whole() -> None:
    for each in of_kind("JobSet", "--cloud.spot", "True"):
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
