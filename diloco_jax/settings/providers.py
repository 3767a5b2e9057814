"""The providers of an island's machines, and the settings of an island that each of them uses."""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

# The ways of `diloco launch` that make islands one by one.
Provider = Literal["gke", "gce", "tpu-vm", "slurm", "sky"]
Capacity = Literal["on-demand", "spot", "reservation", "flex-start"]

_TPU = frozenset({"topology", "zone", "capacity"})
# The settings of islands.each.NAME that choose machines, by the provider that uses them. The other settings of an
# island belong to no provider.
USES: Mapping[str, frozenset[str]] = {
    "gke": _TPU | {"image"},
    "gce": _TPU,
    "tpu-vm": _TPU,
    "pathways": _TPU,
    "slurm": frozenset({"accelerator"}),
    "sky": frozenset({"accelerator", "region", "capacity", "image"}),
}
CHOOSES = tuple(sorted(frozenset().union(*USES.values())))
# SkyPilot has no other kinds of machines.
OF_SKY = ("on-demand", "spot")
FORMS = {
    "accelerator": (r"[A-Za-z0-9-]+", "a name of SkyPilot such as H100"),
    "region": (r"[a-z0-9]+(/[a-z0-9-]+){0,2}", "CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE, such as aws/us-east-1"),
    "image": (r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", "a container image, in letters, digits and . _ : / @ - only"),
}


class IslandPlace(NamedTuple):
    """An island's machines: where they are, of what kind, and their price."""

    # None if the config names none; then it is the target of `diloco launch`.
    provider: Provider | None
    # GPU by SkyPilot's name; "" if none is named.
    accelerator: str
    # SkyPilot's CLOUD/REGION; "" if SkyPilot chooses.
    region: str
    capacity: Capacity
    # Container image; "" if none is named.
    image: str
    # None if the config has no price for this island.
    price_per_chip_hour: float | None


def check(name: str, chosen: Mapping[str, Any], provider: str | None) -> None:
    """Check what an island chooses against its provider; ValueError names the first wrong setting.

    Args:
        name: the island.
        chosen: settings of islands.each.NAME; None means that a setting is left out.
        provider: None if it is not known yet.
    """
    where = f"islands.each.{name}"
    for setting, (pattern, form) in FORMS.items():
        value = chosen[setting]
        if value is not None and not re.fullmatch(pattern, value):
            raise ValueError(f"{where}.{setting} is {value!r}; write {form}")
    price = chosen["price_per_chip_hour"]
    if price is not None and not 0 <= price < float("inf"):
        raise ValueError(f"{where}.price_per_chip_hour is {price}; use a number of at least 0")
    if provider is None:
        return
    for setting in CHOOSES:
        if chosen[setting] is not None and setting not in USES[provider]:
            raise ValueError(
                f"{where}.{setting} is {chosen[setting]!r}, which {provider} does not use; it uses "
                f"{', '.join(sorted(USES[provider]))}: remove the setting, or choose another provider"
            )
    if provider == "sky" and chosen["capacity"] not in (None, *OF_SKY):
        raise ValueError(f"{where}.capacity is {chosen['capacity']}, but sky has only {' and '.join(OF_SKY)}; use one")
