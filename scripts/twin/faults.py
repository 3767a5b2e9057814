"""Simulated faults that replace the faults of a chaos run (tools/chaos/schedule.py lists their kinds).

kill, kill-donor    crash for the time that supervisor and Python need to restart the process
kill-syncer         syncer_crash, likewise
stop                pause
stop-syncer         hold on every link: no message reaches the syncer, and none leaves it
cut                 disconnect until the first attempt to connect
corrupt, duplicate  disconnect too: a damaged stream ends, and its messages are sent again
black-hole          hold; a connection breaks if it is silent for longer than the keepalive allows
slow-link           narrow
nan                 bad_values: the next `amount` values are unusable
"""

from collections.abc import Iterable, Iterator

from diloco_jax.sim.fault import Fault
from twin.calibration import Calibration
from twin.cluster import restart_s
from twin.real_run import RealFault, RunSettings

UNKNOWN = {"full-disk": "the simulator has no disk that can be full"}
TIMED_ONLY = {"kill-donor": "its second target depends on the run"}
# The time until the syncer's transport sees the end of a connection over loopback.
NOTICE_S = 0.005


def check_kinds(faults: Iterable[RealFault], *, timed: bool) -> None:
    """Refuse faults that cannot be simulated.

    Args:
        faults: faults of the run.
        timed: True if faults happen at their real times, False if they happen at their global steps.

    Raises:
        ValueError: a fault cannot be simulated; the message names its kind and the reason.
    """
    refused = UNKNOWN if timed else UNKNOWN | TIMED_ONLY
    found = sorted({fault.kind for fault in faults} & set(refused))
    if found:
        reasons = "; ".join(f"{kind}: {refused[kind]}" for kind in found)
        raise ValueError(f"faults that cannot be simulated: {reasons}. Leave them out with `diloco chaos --kinds`")
    if not timed and any(fault.at_step < 0 for fault in faults):
        raise ValueError("chaos/faults.jsonl has no global steps of its faults (`at_step`); make a new chaos run")


def simulated(fault: RealFault, at_s: float, settings: RunSettings, calibration: Calibration) -> Iterator[Fault]:
    """Yield the simulated faults that replace a real one.

    Args:
        fault: fault of a real run.
        at_s: its time on the virtual clock.
        settings: settings of the run.
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
        raise ValueError(
            f"fault {fault.number} of the run has the kind {fault.kind}, which has no simulation; add it to "
            "twin/faults.py"
        )
