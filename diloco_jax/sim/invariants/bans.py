"""The checker of bans."""

from diloco_jax.protocol.effects import Drop, Merge, Note, Send
from diloco_jax.protocol.messages import Expel, Hello, LearnerMessage, Refuse, Welcome
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects


class BansHold(Checker):
    """From its ban until it is admitted, a learner gets no answer but refusals, and no merge gets a value of it.

    A ban outlives every process of the syncer, and rewinds. LeasesAccount checks that no data is lost.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._banned: set[str] = set()
        self._connected: set[str] = set()

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        self._connected.clear()

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if message is not None and message.learner_id in self._banned:
            allowed = (Drop, Send) if isinstance(message, Hello) else (Drop,)
            led = [each for each in effects if not isinstance(each, allowed)]
            self.check(not led, f"{message} of a banned learner led to {led}")
        for effect in effects:
            if isinstance(effect, Note):
                self._note(effect, effects)
            elif isinstance(effect, Merge):
                names = self._banned & {each.learner_id for each in effect.contributions}
                self.check(not names, f"round {effect.global_step} merges {sorted(names)}, who are banned")
            elif isinstance(effect, Send) and effect.peer in self._banned:
                told = isinstance(effect.message, Expel | Refuse)
                self.check(told, f"{effect.peer} is banned, but gets {effect.message}")
            elif isinstance(effect, Send) and isinstance(effect.message, Welcome):
                self._connected.add(effect.peer)

    def _note(self, note: Note, effects: Effects) -> None:
        if note.kind in ("left", "disconnected"):
            self._connected.discard(note.members[0])
        elif note.kind == "admitted":
            self._banned.discard(note.members[0])
        elif note.kind == "banned":
            (name,) = note.members
            self._banned.add(name)
            expelled = any(isinstance(e, Send) and e.peer == name and isinstance(e.message, Expel) for e in effects)
            self.check(expelled or name not in self._connected, f"{name} is banned and connected, but not expelled")
