"""Scripts that virtual machines run when they start: they fetch what the container needs, and start it.

A machine is told what to do by its metadata: diloco-image, -arguments, -secret, -config, -ports (of the syncer), -hosts
and -environment (of an island). Nothing secret is among them; certificates come from Secret Manager, to which the
machine's account has access.
"""

from __future__ import annotations

import shlex

from diloco_jax.runtime.records.signals import INTERRUPTED, WRONG_INPUT
from diloco_jax.tools.launch.common import VOLUME
from diloco_jax.tools.launch.files import HEADER

USER = 10001  # of the image
DISK = "diloco-run"  # device name of the disk with the run's folder
STOP_S = 60  # for a container to end in good order
COORDINATOR_PORT = 8482  # of JAX, as it would choose by itself on a TPU

_METADATA = """\
base=http://metadata.google.internal/computeMetadata/v1
metadata() {
  curl --silent --show-error --fail --retry 10 --retry-connrefused -H 'Metadata-Flavor: Google' "$base/$1"
}
attribute() {
  metadata "instance/attributes/$1"
}
token="$(metadata instance/service-accounts/default/token | sed -n 's/.*"access_token":"\\([^"]*\\)".*/\\1/p')"
"""

_SECRET = """\
mkdir -p "$HOME/config" "$HOME/certs" "$HOME/var"
chmod 700 "$HOME/certs"
secret="projects/$(metadata project/project-id)/secrets/$(attribute diloco-secret)"
curl --silent --show-error --fail --retry 10 -H "Authorization: Bearer $token" \\
  "https://secretmanager.googleapis.com/v1/$secret/versions/latest:access" |
  sed -n 's/.*"data": *"\\([^"]*\\)".*/\\1/p' | base64 -d | tar -xz -C "$HOME/certs"
attribute diloco-config >"$HOME/config/config.yaml"
image="$(attribute diloco-image)"
read -r -a arguments <<<"$(attribute diloco-arguments)"
"""

_DISK = f"""\
disk=/dev/disk/by-id/google-{DISK}
blkid "$disk" >/dev/null || mkfs.ext4 -q -m 0 "$disk"
mountpoint -q "$HOME/var" || mount -o discard "$disk" "$HOME/var"
chown -R {USER}:{USER} "$HOME/var" "$HOME/certs"
# Container-Optimized OS lets nothing in but ssh
rule=(INPUT -p tcp --dport "$(attribute diloco-ports)" -j ACCEPT)
iptables -w -C "${{rule[@]}}" 2>/dev/null || iptables -w -A "${{rule[@]}}"
"""

_DOCKER = """\
command -v docker >/dev/null || { apt-get -q update && apt-get -q -y install docker.io; }
echo always >/sys/kernel/mm/transparent_hugepage/enabled || true  # the TPU runtime asks for it
"""

# Hosts of a slice are counted by their names: nothing is left to what a platform may tell.
_HOSTS = f"""\
attribute diloco-environment >"$HOME/config/environment"
hosts="$(attribute diloco-hosts)"
if [ "$hosts" -gt 1 ]; then
  members="https://compute.googleapis.com/compute/v1/$(attribute created-by)/listManagedInstances"
  until names="$(curl --silent --show-error --fail --retry 10 --data '' -H "Authorization: Bearer $token" "$members" |
    sed -n 's|.*"instance": *".*/\\([^"/]*\\)".*|\\1|p' | sort)" && [ "$(wc -l <<<"$names")" -eq "$hosts" ]; do
    sleep 5
  done
  own="$(metadata instance/name)"
  number="$(($(grep -n -x "$own" <<<"$names" | cut -d : -f 1) - 1))"
  zone="$(metadata instance/zone)"
  coordinator="$(head -n 1 <<<"$names").${{zone##*/}}.c.$(metadata project/project-id).internal:{COORDINATOR_PORT}"
  arguments+=(--host "$number" --coordinator "$coordinator")
  printf 'TPU_WORKER_ID=%s\\nTPU_WORKER_HOSTNAMES=%s\\n' "$number" "${{names//$'\\n'/,}}" >>"$HOME/config/environment"
fi
"""

_CONTAINER = """\
registry="${{image%%/*}}"
case "$registry" in
  *.pkg.dev | gcr.io | *.gcr.io) docker login -u oauth2accesstoken --password-stdin "https://$registry" <<<"$token" ;;
esac
docker pull "$image"
cat >"$HOME/keep.sh" <<'KEEP'
# Starts a container again, later after each failure in a row; not after {done}.
delay_s=2
while true; do
  docker rm --force diloco >/dev/null 2>&1 || true
  began_s="$SECONDS"
  docker run --name diloco "$@" && exit 0
  case "$?" in {final}) exit 0 ;; esac
  ((SECONDS - began_s < 600)) || delay_s=2
  sleep "$delay_s"
  delay_s=$((delay_s < 64 ? delay_s * 2 : 64))
done
KEEP
systemctl stop diloco 2>/dev/null || true
systemd-run --unit diloco --collect --property TimeoutStopSec={stop} bash "$HOME/keep.sh" \\
  --net host --stop-timeout {stop} {flags} \\
  -v "$HOME/config:/etc/diloco/config:ro" -v "$HOME/certs:/etc/diloco/certs:ro" -v "$HOME/var:{volume}" \\
  "$image" "${{arguments[@]}}"
"""
_FINAL = {"wrong input": WRONG_INPUT, "SIGTERM": INTERRUPTED, "SIGTERM before it could listen": 143}
# TPU devices belong to root, and locked memory must not be limited
_TPU_FLAGS = '--user root --privileged --env-file "$HOME/config/environment"'
_SYNCER_FLAGS = f"--user {USER} --env DILOCO_LOG=json --env DILOCO_CACHE={VOLUME}/cache"
_HOME_AT_BOOT = "export HOME=/var/lib/diloco\n"


def _script(about: str, *parts: str, flags: str) -> str:
    done, final = ", ".join(_FINAL), " | ".join(map(str, _FINAL.values()))
    lines = (*parts, _CONTAINER.format(flags=flags, stop=STOP_S, volume=VOLUME, done=done, final=final))
    return HEADER + f"# {about}\nset -euo pipefail\n" + "\n".join(lines)


# of every host of a TPU slice in a managed instance group
LEARNER_AT_BOOT = _script(
    "Starts an island's container on a TPU host, at every start of the host.",
    *(_HOME_AT_BOOT, _METADATA, _SECRET, _HOSTS, _DOCKER),
    flags=_TPU_FLAGS,
)
SYNCER_AT_BOOT = _script(
    "Starts the syncer's container, at every start of its machine. The run's folder is on a disk of its own.",
    *(_HOME_AT_BOOT, _METADATA, _SECRET, _DISK),
    flags=_SYNCER_FLAGS,
)
# of a TPU VM, to which the files were copied
LEARNER_BY_HAND = _script(
    "Starts an island's container on a TPU VM: learner.sh IMAGE ARGUMENT... Run as root.",
    'HOME="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nexport HOME\n',
    _METADATA,
    'image="$1"\narguments=("${@:2}")\nmkdir -p "$HOME/var"\n',
    _DOCKER,
    flags=_TPU_FLAGS,
)


def secret_command(files: list[str]) -> str:
    """Pack certificates as the scripts unpack them, for the standard input of `gcloud secrets`."""
    return f"tar -cz -C certs {' '.join(map(shlex.quote, files))}"
