"""Scripts that virtual machines run when they start: they fetch what the container needs, and start it.

A machine is told what to do by its metadata: diloco-image, -arguments, -secret, -config, -ports (of the syncer), -hosts
and -environment (of an island). Nothing secret is among them; certificates come from Secret Manager, to which the
machine's account has access.
"""

import shlex

from diloco_jax.runtime.records.signals import INTERRUPTED, WRONG_INPUT
from diloco_jax.tools.launch.common import VOLUME
from diloco_jax.tools.launch.files import HEADER, piece

USER = 10001  # of the image
DISK = "diloco-run"  # device name of the disk with the run's folder
STOP_S = 60  # for a container to end in good order
COORDINATOR_PORT = 8482  # of JAX, as it would choose by itself on a TPU

_FINAL = {"wrong input": WRONG_INPUT, "SIGTERM": INTERRUPTED, "SIGTERM before it could listen": 143}
# TPU devices belong to root, and locked memory must not be limited
_TPU_FLAGS = '--user root --privileged --env-file "$HOME/config/environment"'
_SYNCER_FLAGS = f"--user {USER} --env DILOCO_LOG=json --env DILOCO_CACHE={VOLUME}/cache"
_HOME_AT_BOOT = "export HOME=/var/lib/diloco\n"


def _script(about: str, *parts: str, flags: str) -> str:
    done, final = ", ".join(_FINAL), " | ".join(map(str, _FINAL.values()))
    lines = (*parts, piece("container", flags=flags, stop=STOP_S, volume=VOLUME, done=done, final=final))
    return HEADER + f"# {about}\nset -euo pipefail\n" + "\n".join(lines)


# of every host of a TPU slice in a managed instance group
LEARNER_AT_BOOT = _script(
    "Starts an island's container on a TPU host, at every start of the host.",
    *(_HOME_AT_BOOT, piece("metadata"), piece("secret"), piece("hosts", port=COORDINATOR_PORT), piece("docker")),
    flags=_TPU_FLAGS,
)
SYNCER_AT_BOOT = _script(
    "Starts the syncer's container, at every start of its machine. The run's folder is on a disk of its own.",
    *(_HOME_AT_BOOT, piece("metadata"), piece("secret"), piece("disk", disk=DISK, user=USER)),
    flags=_SYNCER_FLAGS,
)
# of a TPU VM, to which the files were copied
LEARNER_BY_HAND = _script(
    "Starts an island's container on a TPU VM: learner.sh IMAGE ARGUMENT... Run as root.",
    'HOME="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nexport HOME\n',
    piece("metadata"),
    'image="$1"\narguments=("${@:2}")\nmkdir -p "$HOME/var"\n',
    piece("docker"),
    flags=_TPU_FLAGS,
)


def secret_command(files: list[str]) -> str:
    """Pack certificates as the scripts unpack them, for the standard input of `gcloud secrets`."""
    return f"tar -cz -C certs {' '.join(map(shlex.quote, files))}"
