"""One process of a run's syncer: made from its config, begun, driven (driver.py), and concluded with a summary."""

from __future__ import annotations

import logging
import math
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import TapedSyncer
from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.protocol.watch.stats import RunStats, never_merged
from diloco_jax.runtime.model.arithmetic import Arithmetic, local_arithmetic
from diloco_jax.runtime.model.global_model import make_model
from diloco_jax.runtime.model.merge_shards import MergeShards
from diloco_jax.runtime.model.model_share import make_setup
from diloco_jax.runtime.model.offered import OfferedModel, describe_run, layout_of
from diloco_jax.runtime.records.files import CONFIG_FILE, SUMMARY_FILE, TAPE_FILE
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.records.status import NOTHING_EARLIER, read_earlier
from diloco_jax.runtime.records.tape_file import TapeFile, TapeStopped, last_time_s
from diloco_jax.runtime.records.telemetry import write_json
from diloco_jax.runtime.syncer.begin import FAILOVER, FRESH, begin, mode_of
from diloco_jax.runtime.syncer.driver import FAREWELL_S, SyncerDriver
from diloco_jax.runtime.syncer.exposition import Exposition
from diloco_jax.runtime.syncer.host_alarms import HostAlarms
from diloco_jax.runtime.syncer.parts import Merges, Parts, Results, RunClock
from diloco_jax.runtime.syncer.sharded_listener import LISTEN_PATIENCE_S, Life, open_listener
from diloco_jax.runtime.syncer.snapshots import SnapshotWriter
from diloco_jax.runtime.syncer.watch import Watch
from diloco_jax.settings.cutting import cut, settle
from diloco_jax.settings.fingerprint import fingerprint
from diloco_jax.settings.run import RunConfig

if TYPE_CHECKING:  # which reads data: a syncer whose islands bring the model starts without
    from diloco_jax.runtime.model.evaluation import Evaluator

log = logging.getLogger(__name__)


class SyncerRun:
    """One process of a run's syncer, from the listening socket to the summary.

    In a folder with a tape it goes on where the process before it died.

    Args:
        model: of the run: `Evaluator(config)`, or the one that an island brought.
        rewind: nobody is alive; go on from the newest snapshot and let what came after it be void.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        stop: threading.Event,
        model: Evaluator | OfferedModel,
        *,
        rewind: bool = False,
    ) -> None:
        self._pulse = Pulse(config.watchdog, "the syncer's loop", (run_dir, "syncer"))
        self._pulse.phase("drawing the initial model")
        plan = cut(config, model.shapes, model.kinds)
        self._config = config = settle(config, plan)
        self._run_dir = run_dir
        self._stop = stop
        self._rewind = rewind
        self._results, self._events = Results(), Results()
        threads = config.syncer.merge_threads or os.cpu_count() or 1
        setup = make_setup(config, plan)
        self._shards = None
        if setup.shares.count > 1:
            path, death = run_dir / CONFIG_FILE, self._results.put
            self._shards = MergeShards(setup, plan, path, threads, self._events.put, death)
        arithmetic = Arithmetic(setup, self._shards.shares) if self._shards else local_arithmetic(setup, threads)
        self._initial = model.initial_parameters
        self._model = make_model(config, plan, self._initial(), arithmetic)
        corpus = "" if config.data.remote else model.corpus  # what has to be fetched only islands need
        self._fingerprint = fingerprint(config, plan.fingerprint, corpus)
        numbers = range(len(plan.fragments))
        self._machine = Syncer(
            config.protocol,
            config.train.steps,
            self._fingerprint,
            payload_bytes={number: self._model.value_bytes(number) for number in numbers},
            step_bytes={number: size for number in numbers if (size := self._model.step_bytes(number))},
            budget=config.budget,
            plan=config.evaluations,
        )
        self._num_parameters = sum(map(math.prod, model.shapes.values()))
        self._description = describe_run(config, layout_of(model.shapes, model.kinds))
        self._stats = RunStats(config.islands.names, self._num_parameters, self._machine)

    def run(self) -> dict[str, Any]:
        """Serve until the last global step, or until stopped; returns the summary.

        Raises:
            ValueError: the address is in use or not allowed, the tape belongs to another process, or there is nothing
                from which the run could go on.
        """
        config, run_dir, stop, machine = self._config, self._run_dir, self._stop, self._machine
        mode = mode_of(run_dir, rewind=self._rewind)
        tape = TapeFile(run_dir / TAPE_FILE, stop, lambda: watch.tell())
        clock, taped = RunClock(run_dir, last_time_s(run_dir / TAPE_FILE) or 0.0), TapedSyncer(machine, tape.write)
        parts = Parts(config, run_dir, stop, clock, tape, machine, taped, self._model, self._stats)
        writer = SnapshotWriter(parts)
        exposed, earlier = Exposition(parts, writer), NOTHING_EARLIER if mode == FRESH else read_earlier(run_dir)
        watch = Watch(parts, earlier, HostAlarms(parts, writer), self._pulse, exposed)
        merges = Merges(self._model, self._results.put, Pulse(config.watchdog, "a merge", None))
        listener, ended_s = None, 0.0
        try:
            self._pulse.phase("opening its port" if mode == FRESH else "recovering from its folder")
            exposed.open(LISTEN_PATIENCE_S if mode == FAILOVER else 0.0, stop)
            effects = begin(parts, self._initial, mode, clock.now_s())
            watch.begins(mode)
            lingers = mode == FAILOVER and machine.over
            life = Life(mode, machine.epoch, stop, self._fingerprint, self._description)
            listener = open_listener(config, run_dir, life, self._shards, self._events)
            watch.listens(listener)
            driver = SyncerDriver(parts, listener, self._results, merges, writer, watch)
            driver.serve(effects)
            ended_s = clock.now_s()
            driver.bid_farewell(lingers=lingers)
        except TapeStopped as error:
            log.warning(str(error))
            ended_s = ended_s or clock.now_s()
        except Exception:
            if listener is not None:  # before it listens, nothing has begun that could end early
                log.exception("the run ends early")
                self._pulse.patient()
                writer.rescue()
            raise
        finally:
            self._pulse.patient()
            if listener is not None:
                listener.close(FAREWELL_S)
            merges.close()
        summary = self._conclude(watch, writer, ended_s)
        writer.close()
        tape.close()
        if self._shards is not None:
            self._shards.end()
        self._pulse.close()
        return summary

    def _conclude(self, watch: Watch, writer: SnapshotWriter, ended_s: float) -> dict[str, Any]:
        watch.tell()
        self._pulse.patient()
        summary = self._stats.summary(watch.wire(), ended_s)
        if not writer.saved:
            writer.save_last(watch.tell)
        found = {"eval_loss": watch.eval_loss, "eval_bits_per_byte": watch.eval_bits, "eval_scores": watch.eval_scores}
        alarms = watch.alarms()
        final = self._machine.evaluations
        if self._machine.finished and (reason := "stopped before it was" if final.open else final.reason):
            found = dict.fromkeys(found, None) | {"eval_scores": {}}
            alarms.append(Alarm("evaluation", "", f"the final model is not evaluated ({reason})").told())
        if warning := never_merged(summary["unmerged_fragments"]):
            alarms.append(Alarm("unmerged-fragments", "", warning).told())
        summary = {**found, **summary, "alarms": alarms}
        summary |= {"complete": self._machine.finished, "num_parameters": self._num_parameters}
        write_json(self._run_dir / SUMMARY_FILE, summary)
        if warning:
            log.warning(warning)
        watch.tell()
        watch.close()
        return summary
