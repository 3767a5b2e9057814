"""A learner with the built-in loop: it steps the config's model, and `Joined` does everything else."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import jax

from diloco_jax.protocol.leases import Batch
from diloco_jax.protocol.messages import STOPPED_OUTSIDE
from diloco_jax.runtime.island.built_in import LOADING, BuiltInLoop
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.learner.effects import Signals
from diloco_jax.runtime.learner.joined import Joined, Joining, StepSize
from diloco_jax.runtime.learner.metrics import IslandMetrics, own_metrics
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.flops import model_flops
from diloco_jax.training.island import Island

log = logging.getLogger(__name__)


class LearnerRun:
    """One learner, from its hello to its last step.

    Args:
        joining: Settings of this process in the run; with several hosts this one leads.
        stop: Set from outside to leave the run.
        devices: Devices of the island; all that JAX sees by default.
        make_sender: Creates the thread that sends payloads, from the host and a function that takes its errors.
        explain: Returns the reason of the goodbye after an error; "" for no goodbye, as if the process had ended.
    """

    def __init__(
        self,
        joining: Joining,
        stop: threading.Event,
        *,
        devices: Sequence[jax.Device] | None = None,
        make_loop: Callable[[RunConfig, str, Sequence[jax.Device] | None], BuiltInLoop] = BuiltInLoop,
        make_sender: Callable[[Host, Callable[[Exception], None]], PayloadSender] = lambda _, fail: PayloadSender(fail),
        explain: Callable[[Exception], str] = lambda error: "",
    ) -> None:
        joining.pulse.phase(LOADING)
        signals = Signals(stop)
        self._stop, self._explain = stop, explain
        self.loop = loop = make_loop(joining.config, joining.learner_id, devices)
        self.host = host = joining.host(loop.island, loop.warm_up, loop.evaluate, stop)
        # Of a whole step: the batch of an island of several slices may be smaller now, and leases must cover both.
        samples = host.run.config.island(joining.learner_id).batch_size
        tokens = samples * host.run.config.train.seq_len
        size = StepSize(samples, tokens, loop.corpus, loop.epoch_samples, loop.tokenizer, loop.island.base.digest)
        payloads = make_sender(host, signals.fail)
        metrics = metrics_of(host.run.config, joining.learner_id, loop.island)
        self.joined = Joined(joining, host, size, signals, payloads, metrics)

    def run(self) -> str:
        """Train until the syncer or `stop` ends it, and return the reason.

        Raises:
            TransportError: The syncer cannot be reached at the start.
            ValueError: The syncer refused this learner.
            ConnectionError: The syncer expelled this incarnation; a new one may join.
        """
        reason = ""
        try:
            if self.joined.begin():
                self._train()
        except Exception as error:
            if reason := self._explain(error):
                self._stop.set()
            raise
        finally:
            self.joined.leave(reason or STOPPED_OUTSIDE)
            self.loop.close()
        self.joined.check_end()
        return self.joined.finished

    def _train(self) -> None:
        """Make inner steps until the learner ends; the samples of each step are copied while the previous one runs."""
        host, loop, joined = self.host, self.loop, self.joined
        log.info(f"the first step begins at global step {joined.machine.global_step}")
        batch, going = self._put_next(), True
        while going:
            began_s, clock = time.monotonic(), joined.machine.schedule_step
            host.tell_step(clock)
            handle = loop.step(clock)
            following = self._put_next()
            metrics = {**loop.wait(handle), "learning_rate": loop.rate(clock)}
            going = joined.stepped(batch, clock, metrics, time.monotonic() - began_s)
            batch = following

    def _put_next(self) -> Batch:
        """Let all hosts read the samples of the next step, and those of later steps ahead."""
        batch, ahead = self.joined.take_batch(self.loop.batch_size), self.joined.upcoming(self.loop.prefetch)
        self.host.tell_batch(batch.ranges, ahead)
        self.loop.put_batch(batch.ranges, ahead)
        return batch


def follow(joining: Joining, stop: threading.Event) -> int:
    """Make the steps of a following host until its leader ends; return the exit status."""
    joining.pulse.phase(LOADING)
    loop = BuiltInLoop(joining.config, joining.learner_id)
    host = joining.host(loop.island, loop.warm_up, loop.evaluate, stop)
    follower = joining.follower(host, stop, loop.put_batch)
    while (clock := follower.next_step()) is not None:
        loop.step(clock)
    loop.close()
    return follower.leave()


def metrics_of(config: RunConfig, name: str, island: Island) -> IslandMetrics:
    """Return the metrics of an island that trains the run's model; ValueError if a callback cannot be loaded."""
    batch, seq_len, devices = config.island(name).batch_size, config.train.seq_len, list(island.mesh.devices.flat)
    flops = model_flops(config.model, island.shapes, batch, seq_len, config.data.soft_tokens).flops
    return own_metrics(config, name, devices, flops / (batch * seq_len))
