"""Scripts that virtual machines run when they start: they fetch what the container needs, and start it.

A machine is told what to do by its metadata: diloco-image, -arguments, -secret, -config and -ports (of the syncer).
Nothing secret is among them; certificates come from Secret Manager, to which the machine's account has access.
"""

from __future__ import annotations

import shlex

from diloco_jax.tools.launch.files import HEADER

USER = 10001  # of the image
DISK = "diloco-run"  # device name of the disk with the run's folder
STOP_S = 60  # for a container to end in good order

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
"""

_CONTAINER = """\
registry="${{image%%/*}}"
case "$registry" in
  *.pkg.dev | gcr.io | *.gcr.io) docker login -u oauth2accesstoken --password-stdin "https://$registry" <<<"$token" ;;
esac
docker pull "$image"
docker rm --force diloco >/dev/null 2>&1 || true
docker run --detach --name diloco --restart on-failure --net host --stop-timeout {stop} {flags} \\
  -v "$HOME/config:/etc/diloco/config:ro" -v "$HOME/certs:/etc/diloco/certs:ro" -v "$HOME/var:/var/diloco" \\
  "$image" "${{arguments[@]}}"
"""
_TPU_FLAGS = "--user root --privileged"  # TPU devices belong to root, and locked memory must not be limited
_HOME_AT_BOOT = "export HOME=/var/lib/diloco\n"


def _script(about: str, *parts: str, flags: str) -> str:
    lines = (*parts, _CONTAINER.format(flags=flags, stop=STOP_S))
    return HEADER + f"# {about}\nset -euo pipefail\n" + "\n".join(lines)


# of every host of a TPU slice in a managed instance group
LEARNER_AT_BOOT = _script(
    "Starts an island's container on a TPU host, at every start of the host.",
    *(_HOME_AT_BOOT, _METADATA, _SECRET, _DOCKER),
    flags=_TPU_FLAGS,
)
SYNCER_AT_BOOT = _script(
    "Starts the syncer's container, at every start of its machine. The run's folder is on a disk of its own.",
    *(_HOME_AT_BOOT, _METADATA, _SECRET, _DISK),
    flags=f"--user {USER}",
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
