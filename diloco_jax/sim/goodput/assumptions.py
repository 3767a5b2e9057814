"""Assumptions of a forecast beside the config: links, machines, prices. Each is an option of `diloco plan`."""

import math
from dataclasses import dataclass

from diloco_jax.sim.goodput.settings import CHIPS_MAX, SLICES_MAX, YEAR_S, setting

MEASURED = "measured, docs/log.md of 2026-11-21"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Links, machines and prices; 0 stands for "not said"."""

    link_gbit_per_s: float = setting(5.0, "rate of each site's link, each way", "the paper: 2 to 5")
    round_trip_ms: float = setting(60.0, "round trip between a learner and the syncer", "a continent")
    tcp_window_mb: float = setting(4.0, "what one connection may have under way", "Linux's default")
    sites: int = setting(0, "data centres among which the learners are dealt out; 0: one for each learner", "")
    step_s: float = setting(0.0, "seconds per inner step; 0: from model FLOPs and --mfu, where chips are known", "")
    mfu: float = setting(0.4, "share of the chips' peak that model FLOPs reach", "between preflight's 0.3 and 0.5")
    chips: int = setting(0, "chips of all learners together; 0: those of the config's islands", "")
    slices: int = setting(0, "slices of all learners together that fail one by one; 0: one per island", "")
    mtbi_years: float = setting(1.0, "mean time between two failures of one chip", "the paper: 1")
    restart_s: float = setting(60.0, "from the return of a slice until its processes ask to join", "assumed")
    syncer_cores: int = setting(16, "cores of the syncer's host", "assumed")
    syncer_ms_per_mb: float = setting(2.43, "processor time per megabyte that learners send, int4", MEASURED)
    merge_ns: float = setting(0.7, "processor time of a merge per parameter and learner, int4", MEASURED)
    shard_mb_per_s: float = setting(314.0, "megabytes that one merging process takes in per second", MEASURED)
    price_per_chip_hour: float = setting(0.0, "of one chip", "yours")
    price_per_egress_gb: float = setting(0.0, "of 1e9 bytes that leave a site", "yours")

    def __post_init__(self) -> None:
        positive = ("link_gbit_per_s", "tcp_window_mb", "mtbi_years", "syncer_cores", "shard_mb_per_s")
        for name in self.__slots__:
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            if not math.isfinite(value) or value < 0 or (name in positive and value == 0):
                raise ValueError(
                    f"{option} is {value}; use a number {'above' if name in positive else 'of at least'} 0"
                )
        if not 0 < self.mfu <= 1:
            raise ValueError(f"--mfu is {self.mfu}; use a share above 0 and at most 1")
        if self.mtbi_years * YEAR_S < 1:
            raise ValueError(f"--mtbi-years is {self.mtbi_years}, less than a second; use at least {1 / YEAR_S:.1e}")
        for name, most in (("slices", SLICES_MAX), ("chips", CHIPS_MAX)):
            if getattr(self, name) > most:
                raise ValueError(f"--{name} is {getattr(self, name)}; use at most {most:g}")
        if self.sites == 1:
            raise ValueError("--sites is 1: one site needs no wide-area link; use at least 2")
