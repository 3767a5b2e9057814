"""Every flag of gcloud that the scripts use, by command (testdata/gcloud_flags.txt).

Source of each: the command's page below docs.cloud.google.com/sdk/gcloud/reference/, such as
.../compute/instance-groups/managed/create, and `gcloud help` of version 528, whose parser took all of them
(test_scripts.py). How they go together: /compute/docs/tpus/create-tpu-mig-multi-host-slice (workload policy and group),
/tpu/docs/spot-compute (spot templates), /tpu/docs/queued-resources, /kubernetes-engine/docs/how-to/tpus (node pools;
.../concepts/tpu-ironwood for their placement-policy),
/secret-manager/docs/creating-and-accessing-secrets.
"""

from pathlib import Path

# All commands have these flags: docs.cloud.google.com/sdk/gcloud/reference.
EVERYWHERE = {"project", "format", "quiet"}

FLAGS = {
    command: set(flags.split())
    for command, _, flags in (
        line.partition(":")
        for line in Path(__file__).with_name("testdata").joinpath("gcloud_flags.txt").read_text("utf-8").splitlines()
    )
}


def command_of(words: list[str]) -> str:
    """Name the command among those above; "" if it is none of them."""
    text = " ".join(words[1:]) + " "
    return max((name for name in FLAGS if text.startswith(name + " ")), key=len, default="")


def flags_of(words: list[str]) -> set[str]:
    """Return the names of its flags."""
    return {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
