"""The result of `diloco stage`: the gates of a stage with what a run shows, the next stage, and the way back."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diloco_jax.runtime.records.files import CONFIG_FILE, SUMMARY_FILE
from diloco_jax.runtime.records.status import is_address
from diloco_jax.runtime.records.telemetry import read_object
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from diloco_jax.sim.goodput.settings import Assumptions
from diloco_jax.tools.plan.case import Case, case_of
from diloco_jax.tools.plan.forecast import cost, expected_goodput, link_state, recovery
from diloco_jax.tools.plan.growth import growth
from diloco_jax.tools.plan.law import distance, is_extrapolated
from diloco_jax.tools.replay.audit import audit
from diloco_jax.tools.stage.gates import RunFigures, gates, stage_of, with_sites

SITES_MIN = 2
PASSED, FAILED, UNKNOWN = "passed", "not passed", "not measured"


def stage(
    config: RunConfig,
    word: str,
    sites: int,
    assumed: Assumptions,
    run: str = "",
    facts: RunFigures | None = None,
    *,
    link_given: bool = False,
) -> dict[str, Any]:
    """Return the gates for a config with as many islands as sites, and a forecast of the next stage.

    Args:
        word: the config as the command line names it.
        run: the run as the command line names it; "" if there is none.
        facts: the figures of the run; None if there is none.
        link_given: whether `assumed` has a measured rate of the islands' links.

    Raises:
        ValueError: the number of sites is too small, or differs from the run's.
    """
    if sites < SITES_MIN:
        raise ValueError(f"--sites is {sites}; use at least {SITES_MIN}, because one site needs no stages")
    if facts is not None and (many := len(facts.learners)) != sites:
        raise ValueError(f"{run} has {many} islands, but --sites is {sites}; judge it with --sites {many}")
    now, own = stage_of(sites), _forecast(case_of(with_sites(config, sites), assumed))
    then = _forecast(case_of(with_sites(config, now.next_sites), assumed))
    found: list[dict[str, Any]] = []
    for gate in gates(own.pop("case"), word, run or "RUN", own["goodput"], link_given=link_given):
        seen = (facts and gate.judge(facts)) or gate.given
        row = {"gate": gate.name, "about": gate.about, "bar": gate.bar, "command": gate.command}
        state = UNKNOWN if seen is None else PASSED if seen[1] else FAILED
        found.append({**row, "state": state, "measured": seen and seen[0]})
    then.pop("case")
    return {
        "sites": sites,
        "stage": now.words,
        "islands_of_config": config.islands.count,
        "run": run or None,
        "gates": found,
        "now": own,
        "next": then,
        "back": _back(sites, run or "RUN"),
        "ready": _ready([each["state"] for each in found]),
    }


def _ready(states: Sequence[str]) -> bool | None:
    """Return whether all gates are passed; None if that is unknown, because some are not measured."""
    if FAILED in states:
        return False
    return None if UNKNOWN in states else True


def _forecast(case: Case) -> dict[str, Any]:
    """Return what plan expects of a number of islands, and the case itself."""
    grown = growth(case)
    goodput = expected_goodput(case, recovery(case)["seconds"])["goodput"]
    money = cost(case, goodput)
    names = ("egress_gb_per_day", "chips_per_day", "egress_per_day")
    return {
        "case": case,
        "sites": case.learners,
        "utilisation": link_state(case)["utilisation"],
        "goodput": goodput,
        "law": distance(case.learners, case.parameters),
        "law_extrapolated": is_extrapolated(case.learners, case.parameters),
        "growth": grown,
        "cost": {name: money[name] for name in names if name in money},
    }


def _back(sites: int, run: str) -> list[str]:
    last = f"island-{sites - 1}"
    return [
        f"diloco drain {last} {run}   (it stops after its step; the others continue, and its data goes to them)",
        f"diloco ban {last} {run} --why TEXT   (for an island that harms the run; diloco admit lets it return)",
        f"--islands.count {sites - 1} for the next start   (a drained run needs no change: rounds need only "
        "protocol.quorum)",
    ]


def facts_of(run: str, baseline: str, read: Callable[[str], dict[str, Any]]) -> RunFigures:
    """Read the figures of a run that is finished or still trains.

    Args:
        run: folder of the run, or host:port of its syncer, whose tapes cannot be audited from here.
        baseline: folder of a finished data-parallel run; "" if there is none.
        read: returns the status of a run.

    Raises:
        ValueError: there is no such run, or the baseline is not finished.
    """
    status, violations = read(run), None
    if not is_address(run):
        config = load(Path(run) / CONFIG_FILE)
        violations = audit(Path(run), config.protocol, config.train.steps, config.budget)["violations"]
    return RunFigures(status, violations, _baseline(baseline) if baseline else None)


def _baseline(folder: str) -> tuple[float, int]:
    try:
        summary = read_object(Path(folder) / SUMMARY_FILE, "eval_loss", "global_steps")
    except OSError as error:
        raise ValueError(f"--baseline {folder} has no {SUMMARY_FILE}; give the folder of a finished run") from error
    return summary["eval_loss"], summary["global_steps"]
