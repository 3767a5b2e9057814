"""The faults of a chaos run on virtual time (tools/chaos/schedule.py has their kinds).

kill, kill-donor    crash, until supervisor and Python are through
kill-syncer         syncer_crash, likewise
stop                pause
stop-syncer         a hold on every link: nothing reaches it, and nothing comes from it
cut                 disconnect, until the first attempt to connect
corrupt, duplicate  likewise: a stream that is damaged ends, and what it carried comes again
black-hole          hold; a connection that is silent for longer than the keepalive allows breaks
slow-link           narrow
nan                 bad_values: so many values are of no use
"""

from collections.abc import Iterable, Iterator

from diloco_jax.sim.fault import Fault
from twin.calibration import Calibration
from twin.cluster import restart_s
from twin.real_run import RealFault, RunSettings

UNKNOWN = {"full-disk": "what the syncer does while its disk takes nothing is not simulated"}
TIMED_ONLY = {"kill-donor": "whom it hits second depends on the run"}
NOTICE_S = 0.005  # until the syncer's transport sees the end of a connection, over loopback


def check_kinds(faults: Iterable[RealFault], *, timed: bool) -> None:
    """Refuse what cannot be simulated.

    Args:
        faults: of the run.
        timed: they are to happen at the times at which they did, not when they are due.

    Raises:
        ValueError: names kinds, and why.
    """
    refused = UNKNOWN if timed else UNKNOWN | TIMED_ONLY
    found = sorted({fault.kind for fault in faults} & set(refused))
    if found:
        reasons = "; ".join(f"{kind}: {refused[kind]}" for kind in found)
        raise ValueError(f"faults that cannot be simulated: {reasons}. Leave them out with `diloco chaos --kinds`")
    if not timed and any(fault.at_step < 0 for fault in faults):
        raise ValueError("chaos/faults.jsonl does not say at which global step faults were due; make a new chaos run")


def simulated(fault: RealFault, at_s: float, settings: RunSettings, calibration: Calibration) -> Iterator[Fault]:
    """Yield the simulated faults that stand for a real one.

    Args:
        fault: of a real run.
        at_s: when it happens, on virtual time.
        settings: of the run.
        calibration: how long things take.
    """
    who, lasts_s = (fault.target,), fault.duration_s
    reconnect_s = calibration.reconnects_s[0]
    if fault.kind in ("kill", "kill-donor"):
        yield Fault(at_s, "crash", who, restart_s(settings, calibration), notice_s=NOTICE_S)
    elif fault.kind == "kill-syncer":
        away_s = calibration.notice_s + settings.syncer_restart_delay_s + calibration.syncer_boot_s
        yield Fault(at_s, "syncer_crash", (), away_s)
    elif fault.kind == "stop":
        yield Fault(at_s, "pause", who, lasts_s)
    elif fault.kind == "stop-syncer":
        yield Fault(at_s, "hold", settings.names, lasts_s)
    elif fault.kind in ("cut", "corrupt", "duplicate"):
        yield Fault(at_s, "disconnect", who, reconnect_s, notice_s=NOTICE_S)
    elif fault.kind == "black-hole":
        yield Fault(at_s, "hold", who, lasts_s, direction=fault.direction)
    elif fault.kind == "slow-link":
        yield Fault(at_s, "narrow", who, lasts_s, factor=float(fault.amount))
    elif fault.kind == "nan":
        yield Fault(at_s, "bad_values", who, factor=float(fault.amount))
    else:
        raise ValueError(f"nobody knows how to simulate {fault.kind}, fault {fault.number} of the run")
