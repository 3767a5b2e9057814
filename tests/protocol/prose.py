"""Messages and effects as sentences, one line each, for the golden transcripts."""

from collections.abc import Iterable
from typing import Any

from diloco_jax.protocol import effects as e
from diloco_jax.protocol import messages as m
from diloco_jax.protocol.leases import BOOK

# Effects whose sentence is always the same.
_WORDS: dict[type, str] = {
    m.FragmentValue: (
        "FragmentValue {0.fragment_id} for round {0.global_step}, as after step {0.local_step}: {0.steps} steps and "
        "{0.tokens} tokens since version {0.base_version}"
    ),
    m.Heartbeat: "Heartbeat",
    m.Leave: "Leave, {0.reason}",
    m.Refuse: "Refuse, {0.reason}",
    m.Expel: "Expel, {0.reason}",
    m.PullRequest: "PullRequest {0.fragment_id} for round {0.global_step}, as after step {0.local_step}",
    m.Advance: "Advance to global step {0.global_step}",
    m.Stop: "Stop at global step {0.global_step}, {0.reason}",
    m.AnchorRequest: "AnchorRequest {0.fragment_id}, version {0.version}",
    m.AnchorValue: "AnchorValue {0.fragment_id}, version {0.version}",
    m.StateChunk: (
        "StateChunk for {0.receiver}, part {0.part} of {0.parts} of the state of {0.learner_id} as after step "
        "{0.local_step}"
    ),
    m.StateRefused: "StateRefused for {0.receiver}, {0.reason}",
    m.StateEnd: "StateEnd for {0.receiver}",
    e.Stage: "stages fragment {0.fragment_id} as after step {0.local_step}",
    e.Unstage: "frees its copy of fragment {0.fragment_id} as after step {0.local_step}",
    e.Adopt: "adopts fragment {0.fragment_id}, version {0.version}",
    e.StageState: "copies its state as after step {0.local_step}",
    e.UnstageState: "frees the copy of its state as after step {0.local_step}",
    e.KeepChunk: "keeps part {0.part} of {0.parts}",
    e.DropChunks: "drops the parts that it kept",
    e.SaveState: "saves its state of global step {0.global_step}",
    e.Restore: "has version {0.version} of fragment {0.fragment_id} again",
    e.SaveSnapshot: "takes a snapshot of global step {0.global_step}",
    e.Discard: "frees the payloads of round {0.global_step}",
    e.Finish: "stops: {0.reason}",
}
_NOTES: dict[str, str] = {
    "merged": "fragment {0.fragment_id} is now version {0.global_step}",
    "abandoned": "gives up round {0.global_step} (fragment {0.fragment_id}): {0.reason}",
    "finished": "the run ends at global step {0.global_step}: {0.reason}",
    "restarted": "restarts at global step {0.global_step}: {0.reason}",
    "restored": "fragment {0.fragment_id} restored: {0.reason}",
    "lost": "fragment {0.fragment_id} lost: {0.reason}",
    "recovering": "{0.members[0]} takes the state of {0.members[1]}",
    "recovered": "{0.members[0]} has the state of {0.members[1]}",
}


def versions_text(versions: Iterable[int]) -> str:
    return " ".join("-" if version < 0 else str(version) for version in versions)


def _epoch(epoch: int) -> str:
    # Most stories have only one epoch of the syncer.
    return f", epoch {epoch}" if epoch > 1 else ""


def message_text(message: Any) -> str:
    """Describe a message in one line; the syncer's epoch is shown if it is not the first."""
    match message:
        case m.Hello(_, incarnation, _, versions):
            return f"Hello, incarnation {incarnation}, holds [{versions_text(versions)}]{_epoch(message.epoch)}"
        case m.StepReport():
            held = versions_text(a.version for a in message.adopted)
            return f"StepReport, step {message.local_step}, {message.tokens} tokens, holds [{held}]"
        case m.Welcome(global_step, versions, epoch):
            return f"Welcome at global step {global_step}, versions [{versions_text(versions)}]{_epoch(epoch)}"
        case m.Lease(first_sample, start, stop):
            book, first = divmod(first_sample, BOOK)
            of = f" of its book {book + 1}" if book else ""
            return f"Lease of samples {start} to {stop - 1}, its own from {first}{of} on"
        case m.GlobalFragment(global_step, fragment_id, version, epoch):
            step = f" as a step from {message.base}" if message.base >= 0 else ""
            return f"GlobalFragment {fragment_id}, version {version}{step}, at global step {global_step}{_epoch(epoch)}"
        case m.StateRequest(_, _, clock, donor, donor_step, part):
            of = f"part {part} of the state of {donor} as after step {donor_step}"
            return f"StateRequest, {of if donor else f'of anybody who has seen global step {clock}'}"
        case m.StatePull(receiver, clock, donor_step, part):
            of = f"part {part} of the state as after step {donor_step}"
            return f"StatePull for {receiver}, {of if donor_step else f'once global step {clock} is seen'}"
        case m.StateDone(_, _, donor):
            return f"StateDone, all of {donor} is here" if donor else "StateDone, no more is wanted"
        case m.StateUnavailable(donor, reason):
            return f"StateUnavailable from {donor or 'anybody'}, {reason}"
        case _:
            return _WORDS[type(message)].format(message)


def effect_text(effect: e.Effect) -> str:
    """Describe an effect in one line, without the name of its machine."""
    match effect:
        case e.Send(peer, message):
            return f"sends {peer}: {message_text(message)}"
        case e.AdoptState(donor, step, fragments):
            of = f"the state of {donor} as after step {step}" if donor else f"its own state of global step {step}"
            return f"takes over {of}, parameters of [{versions_text(fragments)}]"
        case e.Merge(global_step, fragment_id, parts):
            shares = ", ".join(f"{p.learner_id} ({p.steps} steps, {p.tokens} tokens)" for p in parts)
            return f"merges fragment {fragment_id} in round {global_step} from {shares}"
        case e.Drop(peer, reason):
            return f"drops what {'it' if peer == m.SYNCER else peer} said: {reason}"
        case e.Note("closed", global_step, fragment_id, members, reason):
            due = f"fragment {fragment_id}" if fragment_id >= 0 else "no fragment due"
            return f"closes round {global_step} ({due}) with {', '.join(members)}: {reason}"
        case e.Note(kind):
            return (
                _NOTES[kind].format(effect)
                if kind in _NOTES
                else f"{', '.join(effect.members)} {kind}: {effect.reason}"
            )
        case _:
            return _WORDS[type(effect)].format(effect)
