"""The settings of an island that choose its machines: what each provider uses, and one home for each value."""

import pytest

from diloco_jax.settings.providers import IslandPlace
from diloco_jax.settings.text import parse


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"provider": "aws"}, "provider is 'aws'; it must be 'gke', 'gce', 'tpu-vm', 'slurm' or 'sky'"),
        (
            {"provider": "sky", "zone": "us-east5-a"},
            "zone is 'us-east5-a', which sky does not use; it uses accelerator",
        ),
        (
            {"provider": "slurm", "image": "x:1"},
            "image is 'x:1', which slurm does not use; it uses accelerator: remove",
        ),
        ({"provider": "gke", "accelerator": "H100"}, "accelerator is 'H100', which gke does not use"),
        ({"provider": "gce", "image": "x:1"}, "image is 'x:1', which gce does not use"),
        ({"provider": "sky", "capacity": "flex-start"}, "capacity is flex-start, but sky has only on-demand and spot"),
        ({"accelerator": "H 100"}, "accelerator is 'H 100'; write a name of SkyPilot such as H100"),
        ({"region": "us east"}, "region is 'us east'; write CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE"),
        ({"image": "$(reboot)"}, "image is '$(reboot)'; write a container image"),
        ({"price_per_chip_hour": -1}, "price_per_chip_hour is -1.0; use a number of at least 0"),
    ],
)
def test_what_a_provider_cannot_use_is_refused(own: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="island-1") as refused:
        parse({"islands": {"count": 2, "each": {"island-1": own}}}, "test")
    assert f"islands.each.island-1.{said}" in str(refused.value)


def test_an_island_has_the_settings_of_all_islands_unless_it_has_its_own() -> None:
    own = {"provider": "sky", "accelerator": "L40S", "region": "aws", "capacity": "spot", "image": "b:2"}
    settings = {
        "islands": {"count": 2, "each": {"island-1": {**own, "price_per_chip_hour": 0}}},
        "gpu": {"accelerator": "H100"},
        "cloud": {"image": "a:1"},
    }
    config = parse(settings, "test")
    assert config.place("island-0") == IslandPlace(None, "H100", "", "on-demand", "a:1", None)
    assert config.place("island-1") == IslandPlace("sky", "L40S", "aws", "spot", "b:2", 0.0)
    assert [config.island(name).accelerator for name in config.islands.names] == ["H100", "L40S"]
