"""The process of one slice: it follows, or leads, until the run or its own time is over."""

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from diloco_jax.protocol.messages import RUN_COMPLETE
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
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.link import TransportError
from diloco_jax.transport.slices.links import SliceLinks

# A leader that was asked to end and is not making a step says goodbye to the syncer after so long.
HAND_OVER_S = 3.0
# A leader that cannot reach the syncer tries again after so long.
AGAIN_S = 2.0

log = logging.getLogger(__name__)


class SlicePlace(NamedTuple):
    """This process's place in its island."""

    own: int
    # Where each slice listens for the others.
    addresses: tuple[str, ...]


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
            # The others count on a slice that they can reach, so it must be able to follow by then.
            links = SliceLinks(config.transport, config.name, self._learner_id, own, self._place.addresses, MESSAGES)
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
            reason = self._learn(leadership, hurry)
        except SliceLost as error:
            log.warning(f"slice {self._place.own} leads no more: {error}")
            return INTERRUPTED if self._stop.is_set() else FAILED
        except RefusedForGood:
            leadership.end(WRONG_INPUT)
            raise
        finally:
            ended.set()
            leadership.close()
        complete = reason == RUN_COMPLETE
        leadership.end(0 if complete else INTERRUPTED)
        log.info(f"{self._learner_id}: {reason}")
        return 0 if complete else INTERRUPTED

    def _learn(self, leadership: Leadership, hurry: threading.Event) -> str:
        """Be the learner until the syncer or this process ends it, and return the reason.

        The syncer may be down while a slice takes over. The state is in memory only, so the leader waits for it.
        """
        with closing(island_pulse(self._config, self._run_dir, self._learner_id)) as pulse:
            while True:
                incarnation, member = self._incarnation(), self._member
                kept = None
                if member.copy is not None and member.name is not None and member.name.local_step:
                    kept = KeptState(member.name, member.copy)
                joining = Joining(
                    self._config, self._learner_id, incarnation, self._address, self._run_dir, pulse, None, kept
                )
                loop = SlicedLoop(leadership, shrinks=self._config.islands.slices_batch == "shrink")
                run = LearnerRun(joining, hurry, make_loop=lambda *_, made=loop: made)
                loop.machine = run.joined.machine
                try:
                    return run.run()
                except TransportError as error:
                    if not leadership.unchanged or self._stop.is_set():
                        raise
                    log.warning(f"{error}; slice {self._place.own} tries again, since the state is in its memory")
                    self._stop.wait(AGAIN_S)
                    leadership.look()

    def _hurry(self, hurry: threading.Event, ended: threading.Event) -> None:
        while not ended.is_set():
            if self._stop.wait(0.5):
                if not ended.wait(HAND_OVER_S):
                    hurry.set()
                return
