"""The process of one slice: it follows a leader, or leads, until the run ends or somebody asks it to end.

A slice that follows finds a new leader when its leader is lost. A slice that has led and cannot lead any more ends, and
its supervisor starts it again.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from hashlib import blake2s
from pathlib import Path
from typing import NamedTuple

import jax

from diloco_jax.protocol.messages import RUN_COMPLETE
from diloco_jax.protocol.syncer.progress import GLOBAL_STEPS
from diloco_jax.runtime.island.adoptions import GlobalValues
from diloco_jax.runtime.island.built_in import BuiltInLoop
from diloco_jax.runtime.island.kept_state import KeptState
from diloco_jax.runtime.island.threads import start_thread
from diloco_jax.runtime.learner.joined import Joining, island_pulse
from diloco_jax.runtime.learner.run import LearnerRun
from diloco_jax.runtime.records.signals import FAILED, INTERRUPTED, WRONG_INPUT, RefusedForGood
from diloco_jax.runtime.slices.following import Chosen, FollowingSlice
from diloco_jax.runtime.slices.leading import Leadership, SlicedLoop, SliceLost
from diloco_jax.runtime.slices.member import SliceMember
from diloco_jax.runtime.slices.messages import MESSAGES
from diloco_jax.settings.fingerprint import own_corpus
from diloco_jax.settings.resolved import ResolvedRun, resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.endpoints.reach import await_listener
from diloco_jax.transport.link import TransportError
from diloco_jax.transport.slices.links import QUEUE_BYTES_MAX, SliceLinks

# A leader that was asked to end and is not making a step says goodbye to the syncer after so long.
HAND_OVER_S = 3.0

log = logging.getLogger(__name__)


class SlicePlace(NamedTuple):
    """This process's place in its island."""

    own: int
    # Where each slice listens for the others.
    addresses: tuple[str, ...]


def settings_of(run: ResolvedRun, loop: BuiltInLoop) -> str:
    """Return a digest of what must be equal on all slices of an island, so that they compute the same bits."""
    # An operator may raise the limits of a run, and start its slices again one after the other.
    agreed = [pair for pair in run.fingerprint(loop.corpus, loop.island.base.digest) if pair[0] != GLOBAL_STEPS]
    corpus = own_corpus(run.config, loop.corpus, 0, "").content
    mesh = loop.island.mesh
    devices = [*mesh.shape.items()], mesh.devices.flat[0].device_kind, jax.__version__
    return blake2s(repr((agreed, corpus, loop.batch_size, devices)).encode(), digest_size=8).hexdigest()


class SliceProcess:
    """One slice from the start of its process to the end.

    Args:
        config: the run's, not resolved.
        learner_id: name of the island.
        address: of the syncer.
        incarnation: returns the number of the learner's next incarnation.
        stop: is set when this process shall end.

    Raises:
        ValueError: the model cannot be divided over slices, or the connections are refused by a setting.
    """

    _member: SliceMember

    def __init__(
        self,
        config: RunConfig,
        learner_id: str,
        place: SlicePlace,
        address: str,
        run_dir: Path,
        incarnation: Callable[[], int],
        stop: threading.Event,
    ) -> None:
        self._config, self._learner_id, self._place = config, learner_id, place
        self._address, self._run_dir, self._incarnation, self._stop = address, run_dir, incarnation, stop
        loop = BuiltInLoop(config, learner_id)
        self._run = resolve(config, loop.island.shapes, loop.island.kinds)
        self._loop = loop

    def run(self) -> int:
        """Train until the run ends, or this process shall; return the exit status."""
        config, islands, own, loop = self._config, self._config.islands, self._place.own, self._loop
        with closing(island_pulse(config, self._run_dir, self._learner_id, 1 + own)) as pulse:
            pulse.phase("compiling")
            loop.warm_up_steps()
            loop.island.warm_up_exchange(self._run.fragments)
            # A slice that comes to lead reads values of the syncer at once, and their kernels take seconds to load.
            GlobalValues(self._run.fragments, config.wire.down)
            # A slice that computes all parts queues a gradient, and at the start of a term two models before it.
            queue = max(QUEUE_BYTES_MAX, 4 * loop.parts.size * (2 + islands.slices))
            who = config.transport, config.name, self._learner_id, own, self._place.addresses
            # The others count on a slice that they can reach, so it must be able to follow by now.
            links = SliceLinks(*who, MESSAGES, queue, settings_of(self._run, loop))
            member = self._member = SliceMember(own, self._run, loop, links)
            try:
                follower = FollowingSlice(
                    member,
                    len(self._place.addresses),
                    islands.slices_least,
                    islands.straggler_s,
                    self._stop.is_set,
                    pulse,
                )
                while (chosen := follower.elect()) is not None:
                    if chosen.leader == own:
                        # The learner's own signs of life count from now on.
                        pulse.rest()
                        pulse.phase("")
                        return self._lead(chosen)
                    ended = follower.follow(chosen)
                    if ended == "over":
                        return follower.status
                return INTERRUPTED
            finally:
                links.close(1.0)
                loop.close()

    def _lead(self, chosen: Chosen) -> int:
        """Be the island's learner with the other slices; return the exit status."""
        islands, ended = self._config.islands, threading.Event()
        log.info(f"slice {self._place.own} leads {self._learner_id} in term {chosen.term}")
        leadership = Leadership(self._member, chosen, islands.slices_least, islands.straggler_s, self._stop.is_set)
        hurry = threading.Event()
        start_thread(lambda: self._hurry(hurry, ended), "hurry", daemon=True)
        try:
            leadership.gather()
            if self._member.copy is not None:
                self._await_syncer(leadership, hurry)
            with closing(island_pulse(self._config, self._run_dir, self._learner_id)) as pulse:
                incarnation, member = self._incarnation(), self._member
                kept = None
                if member.copy is not None and member.name is not None:
                    kept = KeptState(member.name, member.copy)
                    leadership.has_unloaded = True
                joining = Joining(
                    self._config, self._learner_id, incarnation, self._address, self._run_dir, pulse, None, kept
                )
                loop = SlicedLoop(leadership, shrinks=islands.slices_batch == "shrink")
                run = LearnerRun(joining, hurry, make_loop=lambda *_: loop)  # type: ignore[arg-type]
                loop.machine = run.joined.machine
                reason = run.run()
        except SliceLost as error:
            log.warning(f"slice {self._place.own} leads no more: {error}")
            return INTERRUPTED if self._stop.is_set() else FAILED
        except RefusedForGood:
            leadership.end(WRONG_INPUT)
            raise
        finally:
            ended.set()
            leadership.close()
        log.info(f"{self._learner_id}: {reason}")
        if self._stop.is_set() and reason != RUN_COMPLETE:
            # Only this slice was asked to end.
            return INTERRUPTED
        leadership.end(0)
        return 0

    def _await_syncer(self, leadership: Leadership, hurry: threading.Event) -> None:
        """Wait without a limit until the syncer listens, because the island's state would be lost with this process."""
        transport = replace(self._config.transport, address=self._address)
        while not hurry.is_set():
            try:
                await_listener(transport, "the syncer's address", log.warning, hurry)
                break
            except TransportError as error:
                log.warning(f"{error}; waiting on, because this slice has the island's state")
                leadership.look()
        if hurry.is_set():
            raise SliceLost("this slice was asked to end while no syncer listened")

    def _hurry(self, hurry: threading.Event, ended: threading.Event) -> None:
        while not ended.is_set():
            if self._stop.wait(0.5):
                if not ended.wait(HAND_OVER_S):
                    hurry.set()
                return
