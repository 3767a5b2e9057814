"""README.md beside the scripts: what to do in which order, and how to look at the run."""

from __future__ import annotations

from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.common import IslandMachines

_ORDER = """\
# {name}: {title}

{islands}

Written by `diloco launch {way}`. Change the run's config and write these files again, rather than edit them. Nothing in
them is secret but `certs/`, which the first command makes: keep that folder, and give it to nobody.

## Before the first time

```bash
gcloud services enable {apis} --project {project}
docker build -t {image} FOLDER_WITH_THE_DOCKERFILE
docker push {image}
```

{before}

## Start

```bash
./create.sh
```

or its commands one by one, which is what `diloco launch {way} CONFIG --run` does:

```bash
{create}
```

All of them may be called again; what is there stays.

## Look

```bash
syncer="$(./syncer.sh address):{port}"
diloco status "$syncer" --config local.yaml            # from a machine that reaches it
diloco doctor local.yaml --island {first} --syncer "$syncer"
```

`doctor` checks firewall, certificates and throughput from where it is called. From an island's own host:

```bash
{doctor}
```

If it cannot connect: TCP {ports} must be open from the islands' addresses ({ranges}: `cloud.source_ranges`) to the
syncer, and islands of other networks need `cloud.external`.

```bash
{look}
```

## When something goes away

{losses}

## End

One island after its current step, the others go on: `diloco drain {first} "$syncer" --config local.yaml`. Everything:

```bash
./delete.sh
```

It leaves the disk with the run's folder, from which `./create.sh` goes on{leaves}. Delete the disk when the run's
result has been copied:

```bash
{disk}
```
"""

_GKE_BEFORE = """\
You need quota for the slices above, `gcloud` with its `gke-gcloud-auth-plugin`, and `kubectl`. A cluster that is there
under the name `cloud.cluster` is used as it is."""
_GKE_LOSSES = """\
Nothing is to be done. A pod that is preempted gets SIGTERM, on which its island leaves politely; the JobSet starts the
island again as a whole when GKE has capacity for its node pool. The syncer comes back with its disk, and islands train
on meanwhile. An island whose status is `Completed` was drained, or the run is over; the syncer's pod then starts again
and again, until it is deleted."""

_GCE_BEFORE = """\
You need quota for the slices above, and `gcloud`. Hosts need a way to the image and to Google's APIs: their external
address, or Cloud NAT and Private Google Access. The account that they run as must be allowed to read the image
(`roles/artifactregistry.reader`); the scripts let it read the certificates."""
_GCE_LOSSES = """\
A host whose container fails starts it again, and with it the island as a whole. A slice of spot capacity that was taken
away has to be made anew: `islands/{first}.sh delete && islands/{first}.sh create`. The syncer's machine starts again by
itself, with its disk; islands train on meanwhile."""

_TPU_VM_BEFORE = """\
You need quota for the slices above, and `gcloud` with an ssh key (`gcloud compute config-ssh`). The account that the
machines run as must be allowed to read the image (`roles/artifactregistry.reader`)."""
_TPU_VM_LOSSES = """\
A host whose container fails starts it again, and with it the island as a whole. A resource that is SUSPENDED was
preempted, and has to be made anew: `islands/{first}.sh delete && islands/{first}.sh create && islands/{first}.sh
start`. The syncer's machine starts again by itself, with its disk; islands train on meanwhile."""

_DOCKER_DOCTOR = "sudo docker exec diloco diloco doctor {config} --island {first} --syncer ADDRESS:{port}"


def _fill(config: RunConfig, slices: list[IslandMachines], create: tuple[str, ...], **words: str) -> str:
    cloud, first = config.cloud, slices[0].name
    words["losses"] = words["losses"].format(first=first)
    return _ORDER.format(
        name=config.name,
        project=cloud.project,
        image=cloud.image,
        islands="\n".join(f"* {each}" for each in slices) + f"\n* syncer in {common.syncer_zone(config)}",
        create="\n".join(create),
        port=cloud.port,
        ports=common.port_range(config),
        ranges=", ".join(cloud.source_ranges),
        first=first,
        **words,
    )


def gke(config: RunConfig, slices: list[IslandMachines], regions: list[str], create: tuple[str, ...]) -> str:
    """Write README.md for Kubernetes."""
    cloud, first = config.cloud, slices[0]

    def kubectl(region: str) -> str:
        return f"kubectl --context gke_{cloud.project}_{region}_{cloud.cluster} --namespace {cloud.namespace}"

    there = kubectl(first.region)
    looks = [f"{kubectl(region)} get jobsets,pods" for region in regions]
    logs = f"{kubectl(common.syncer_region(config))} logs statefulset/{common.syncer_name(config)} --tail 20"
    return _fill(
        config,
        slices,
        create,
        way="gke",
        title="one JobSet per island on Google Kubernetes Engine",
        apis="container.googleapis.com compute.googleapis.com",
        before=_GKE_BEFORE,
        doctor=f"pod=$({there} get pod -o name -l app.kubernetes.io/component={first.name} | head -n 1)\n"
        f'{there} exec "$pod" -- \\\n'
        f'  diloco doctor {common.CONFIG_PATH} --island {first.name} --syncer "$syncer"',
        look="\n".join([*looks, logs]),
        losses=_GKE_LOSSES,
        leaves=", and clusters",
        disk=f"{kubectl(common.syncer_region(config))} delete pvc run-{common.syncer_name(config)}-0",
    )


def gce(config: RunConfig, slices: list[IslandMachines], create: tuple[str, ...]) -> str:
    """Write README.md for Compute Engine."""
    first, project = slices[0], config.cloud.project
    group = f"gcloud compute instance-groups managed list-instances {first.resource}"
    host = f"gcloud compute ssh HOST --zone {first.zone} --project {project} --command"
    return _fill(
        config,
        slices,
        create,
        way="gce",
        title="one managed instance group per island on Compute Engine",
        apis="compute.googleapis.com secretmanager.googleapis.com",
        before=_GCE_BEFORE,
        doctor=f"{group} --zone {first.zone} --project {project}    # names of its hosts\n"
        f"{host} '{_docker_doctor(config, first)}'",
        look=f"{host} 'sudo docker logs --tail 20 diloco'\n"
        f"{host} 'sudo journalctl --unit google-startup-scripts --lines 30'    # if there is no container",
        losses=_GCE_LOSSES,
        leaves="",
        disk=_disk(config),
    )


def tpu_vm(config: RunConfig, slices: list[IslandMachines], create: tuple[str, ...]) -> str:
    """Write README.md for the Cloud TPU API."""
    first = slices[0]
    where = f"--zone {first.zone} --project {config.cloud.project}"
    return _fill(
        config,
        slices,
        create,
        way="tpu-vm",
        title="one queued resource per island with the Cloud TPU API",
        apis="tpu.googleapis.com compute.googleapis.com secretmanager.googleapis.com",
        before=_TPU_VM_BEFORE,
        doctor=f"gcloud compute tpus tpu-vm ssh {first.resource} {where} --worker=0 --command \\\n"
        f"  '{_docker_doctor(config, first)}'",
        look=f"islands/{first.name}.sh logs    # the last lines of every host",
        losses=_TPU_VM_LOSSES,
        leaves="",
        disk=_disk(config),
    )


def _docker_doctor(config: RunConfig, first: IslandMachines) -> str:
    return _DOCKER_DOCTOR.format(config=common.CONFIG_PATH, first=first.name, port=config.cloud.port)


def _disk(config: RunConfig) -> str:
    zone = common.syncer_zone(config)
    return f"gcloud compute disks delete {common.syncer_name(config)} --zone {zone} --project {config.cloud.project}"
