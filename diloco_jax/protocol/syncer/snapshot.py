"""How the syncer comes back: its state as plain values, restarts of its process, and going back to a snapshot.

Restart. A syncer that died comes back with the values of its newest snapshot and, from its tape, with every decision
that it took. Newer values are in the hands of learners, bit for bit. Until it has them no round opens; training does
not stop.

    on_restart --learners return--> AnchorRequest -> AnchorValue -> Restore --all are back, or restore_s--> rounds

A version that nobody holds is lost: nothing of it reached a learner, and its fragment goes on from the newest that is
left. A round that was being merged counts as merged if somebody holds its result. Versions are never numbered again.

Rewind. When every process died, the run goes on from the snapshot alone: what came after it is void, and whoever
remembers it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from diloco_jax.protocol.effects import Discard, Drop, Effect, Restore, Send
from diloco_jax.protocol.membership import GONE, Held
from diloco_jax.protocol.messages import AnchorRequest, AnchorValue
from diloco_jax.protocol.syncer.collector import Collector
from diloco_jax.protocol.syncer.restoring import Restoring
from diloco_jax.protocol.syncer.rounds import MERGING, Pace, Round


class Restartable(Collector):
    """The part of the syncer's machine that survives its process."""

    def on_restart(self, held: Sequence[int], digests: Sequence[int], now_s: float) -> list[Effect]:
        """The process died and is back: links and values on their way are gone (snapshot.py).

        Args:
            held: version of each fragment of which the driver has the value.
            digests: of these values.
            now_s: the driver's clock.
        """
        assert len(held) == len(digests) == len(self.versions), f"{len(held)} fragments, not {len(self.versions)}"
        self.epoch += 1
        effects: list[Effect] = [self._note("restarted", -1, (), f"life {self.epoch} of the syncer")]
        awaited = {member.learner_id for member in self.membership.connected()}
        uncertain = {this.fragment_id: this for this in self._rounds.values() if this.phase == MERGING}
        if self._restoring is not None:  # it died again before all were back
            awaited |= self._restoring.awaited
            uncertain |= self._restoring.uncertain
        for this in self._rounds.values():
            self._reopen(this.fragment_id, this.values)
        self._forget_links(effects, now_s)
        wanted = {p for p, version in enumerate(held) if version != self.versions[p]} | set(uncertain)
        self._history = [[version] for version in self.versions]
        self._restoring = None
        if wanted:
            self._restoring = Restoring(held, digests, wanted, uncertain, awaited, None, self.config.resend_s)
        return effects

    def on_rewind(self, epoch: int, now_s: float) -> list[Effect]:
        """The whole run goes on from the snapshot that was just restored; what came after it is void.

        Args:
            epoch: this life of the syncer, above every earlier one.
            now_s: the driver's clock.
        """
        assert epoch > self.epoch, f"epoch {epoch} after {self.epoch}"
        self.epoch = self.rewound = epoch
        effects: list[Effect] = [self._note("restarted", -1, (), f"life {epoch}, from the snapshot")]
        self._restoring = None
        self._forget_links(effects, now_s)
        self._history = [[version] for version in self.versions]
        return effects

    @property
    def restoring(self) -> bool:
        """Whether newer values than the driver holds may still come from learners."""
        return self._restoring is not None

    def _reopen(self, fragment_id: int, learners: Iterable[str]) -> None:
        """What these learners gave of the fragment did not come through: it counts again."""
        for learner_id in learners:
            self.membership.members[learner_id].merged_base.pop(fragment_id, None)

    def _forget_links(self, effects: list[Effect], now_s: float) -> None:
        for member in self.membership.connected():
            self.membership.set_state(member, GONE, now_s)
        effects += [Discard(this.global_step) for this in self._rounds.values()]
        self._rounds, self._collecting, self._fresh = {}, None, set()
        self._bases.clear()  # their steps went with the process
        self._matches.clear()
        self._lease_check_s = now_s

    def _ask_anchors(self, effects: list[Effect], now_s: float) -> None:
        if self._restoring is not None:
            for learner_id, fragment_id, version in self._restoring.asks(self.membership.present(), now_s):
                effects.append(Send(learner_id, AnchorRequest(fragment_id, version)))

    def on_anchor(self, message: AnchorValue, now_s: float) -> list[Effect]:
        """A learner sends a global value that a restarted syncer lacks."""
        name, fragment_id, version = message.learner_id, message.fragment_id, message.version
        member = self.membership.get(name, message.incarnation)
        if member is None:
            return [Drop(name, "anchor before hello, or of an old incarnation")]
        member.heard_s = now_s
        restoring = self._restoring
        if restoring is None or fragment_id not in restoring.wanted or version <= restoring.held[fragment_id]:
            return [Drop(name, f"version {version} of fragment {fragment_id} is not needed")]
        effects: list[Effect] = []
        known = self.digests[fragment_id] if version == self.versions[fragment_id] else message.digest
        if message.digest != known:
            effects.append(Drop(name, f"version {version} of fragment {fragment_id} has another digest than was made"))
            member.offered = tuple(-1 if p == fragment_id else held for p, held in enumerate(member.offered))
            restoring.asked.pop(fragment_id, None)
            self._ask_anchors(effects, now_s)
        else:
            restoring.take(fragment_id, version, message.digest)
            effects.append(Restore(fragment_id, version))
        self._restored(effects, now_s)
        return effects + self._proceed(now_s)

    def _restored(self, effects: list[Effect], now_s: float) -> None:
        """Go on, once every version that anybody holds is here, or the wait for it is over."""
        restoring = self._restoring
        if restoring is None or not restoring.is_over(self.versions, now_s):
            return
        self._restoring = None
        for p in restoring.wanted:
            version, made, this = restoring.held[p], self.versions[p], restoring.uncertain.get(p)
            if this is not None and version == this.global_step:  # the merge had come through
                parts = [part for _, part in sorted(this.values.items())]
                self._renew(this, parts, restoring.digests[p], effects)
            elif version < made:
                self.leases.revert(p, version)
                self._reopen(p, self.membership.members)
                for member in self.membership.members.values():
                    if member.merged_round.get(p, version) > version:
                        del member.merged_round[p]  # what it gave is in no value that anybody holds
                effects.append(self._note("lost", p, (), f"version {made}: nobody holds it, {version} goes on"))
            elif this is not None:
                effects.append(self._note("abandoned", p, (), "its merge died with the syncer", this.global_step))
            else:
                effects.append(self._note("restored", p, (), f"version {version}, from a learner"))
            self.versions[p], self.digests[p], self._history[p] = version, restoring.digests[p], [version]
            self.global_step = max(self.global_step, version)
        for member in self.membership.connected():
            for p in restoring.wanted:
                if not member.offered or member.offered[p] != self.versions[p]:
                    effects.append(self._global(member, p))
        if self.finished:  # it died before its last snapshot
            self._end(effects)

    # ---- plain values ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything, as plain values that JSON keeps exactly."""
        return {
            "epoch": [self.epoch, self.rewound],
            "counts": [self.global_step, self.merged_rounds, self.merged_parts, self.finished],
            "versions": list(self.versions),
            "digests": list(self.digests),
            "bases": [[fragment_id, *base] for fragment_id, base in self._bases.items()],
            "history": [list(history) for history in self._history],
            "members": self.membership.to_plain(),
            "agreed": dict(self.membership.agreed),
            "leases": self.leases.state(),
            "matches": self._matches.state(),
            "rounds": [this.to_plain() for this in self._rounds.values()],
            "collecting": self._collecting.global_step if self._collecting is not None else None,
            "fresh": sorted(self._fresh),
            "pace": [*self._pace, self._closed_s],
            "lease_check_s": self._lease_check_s,
            "restoring": self._restoring.to_plain() if self._restoring is not None else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Become the machine that `state()` described; the configuration must be the same."""
        self.epoch, self.rewound = state["epoch"]
        self.global_step, self.merged_rounds, self.merged_parts, self.finished = state["counts"]
        self.versions, self.digests = list(state["versions"]), list(state["digests"])
        self._bases = {fragment_id: Held(*base) for fragment_id, *base in state["bases"]}
        self._history = [list(history) for history in state["history"]]
        self.membership.from_plain(state["members"])
        self.membership.agreed = dict(state["agreed"])
        self.leases.restore(state["leases"])
        self._matches.restore(state["matches"])
        self._rounds = {this.global_step: this for this in map(Round.from_plain, state["rounds"])}
        self._collecting = self._rounds.get(state["collecting"])
        self._fresh = set(state["fresh"])
        *averages, self._closed_s = state["pace"]
        self._pace = Pace(*averages)
        self._lease_check_s = state["lease_check_s"]
        self._restoring = Restoring.from_plain(state["restoring"]) if state["restoring"] is not None else None
