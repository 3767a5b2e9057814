"""The verdict of a plan, from figures that are written by hand."""

from typing import Any

import pytest

from diloco_jax.tools.plan.verdict import describe_verdict, verdict

GB = 10**9


def result(
    *,
    chip: int = 10,
    chip_limit: int = 95,
    host: int = 10,
    share: float = 1.0,
    tau: int = 2,
    parallel: float = 0.3,
    rigid: float = 0.9,
    syncer: float = 0.1,
) -> dict[str, Any]:
    """Return the parts of a forecast that a verdict reads; memory in GB."""
    island = {
        "islands": ["west", "east"],
        "hbm": {"parameters": chip * GB},
        "hbm_limit_bytes": chip_limit * GB,
        "host": {"process": host * GB},
        "host_limit_bytes": chip_limit and 448 * GB,
    }
    advice = [
        {"setting": "protocol.sync_every", "value": {"mlp": 8, "rest": 48}, "change": True},
        {"setting": "wire.up", "value": "int4", "change": False},
    ]
    link, memory = {"utilisation": share, "data_parallel_utilisation": parallel}, {"islands": [island]}
    growth = {"given": True, "share": syncer, "syncer_link_gbit_per_s": 2.0}
    figures = {"goodput": {"rigid_goodput": rigid}, "growth": growth, "slices": [], "advice": advice}
    return {"run": {"overlap_steps": tau}, "link": link, "memory": memory, **figures}


def test_what_fits() -> None:
    found = verdict(result())
    assert (found["fits"], found["link_enough"], found["problems"]) == (True, True, [])
    assert found["change"] == {"protocol.sync_every": {"mlp": 8, "rest": 48}}
    first, second = describe_verdict(found)
    assert first == "verdict       yes: the link is enough; memory is enough, before activations"
    assert "--protocol.sync_every '{'\"'\"'mlp'\"'\"': 8" in second, "ready for a shell"


@pytest.mark.parametrize(("parallel", "rigid", "enough"), [(1.0, 0.99, True), (1.0, 0.94, False), (0.94, 1.0, False)])
def test_where_data_parallel_alone_loses_nothing_nobody_needs_islands(
    parallel: float, rigid: float, enough: bool
) -> None:
    lines = describe_verdict(verdict(result(parallel=parallel, rigid=rigid)))
    assert ("data parallel alone would lose nothing: it would compute 99.0%" in lines[1]) == enough, lines
    lost = describe_verdict(verdict(result(parallel=parallel, rigid=rigid, share=0.5)))
    assert not any("lose nothing" in line for line in lost), "a link that is too slow for islands"


def test_without_chips_memory_is_not_judged() -> None:
    found = verdict(result(chip_limit=0))
    assert found["fits"] is None and not found["problems"]
    assert "memory is not judged" in describe_verdict(found)[0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"chip": 96}, "a chip of west needs 96 GB and has 95 GB"),
        ({"host": 449}, "a host of west needs 449 GB and has 448 GB"),
        ({"share": 0.94}, "over this link only 94% of the due rounds are made"),
        ({"share": 0.94, "tau": 0}, "over this link only 94% of the time is left for steps"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], problem: str) -> None:
    found = verdict(result(**changes))
    assert found["problems"] == [problem]
    assert describe_verdict(found)[0] == f"verdict       no: {problem}"


def test_a_full_chip_fits_and_a_link_at_its_limit_is_enough() -> None:
    found = verdict(result(chip=95, share=0.95))
    assert (found["fits"], found["link_enough"]) == (True, True)


def test_a_link_of_the_syncer_that_cannot_carry_all_islands_is_a_problem() -> None:
    found = verdict(result(syncer=1.06))
    assert found["problems"] == ["rounds would fill 106% of the syncer's link of 2 Gbit/s"] and not found["link_enough"]
    assumed = result(syncer=1.06)
    assumed["growth"]["given"] = False
    assert not verdict(assumed)["problems"], "the link of the syncer is only assumed"
