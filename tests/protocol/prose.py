"""Messages and effects as words, one line each: what golden transcripts are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from diloco_jax.protocol.effects import (
    Adopt,
    AdoptState,
    Discard,
    Drop,
    DropParts,
    Effect,
    Finish,
    KeepPart,
    Merge,
    Note,
    Restore,
    SaveSnapshot,
    SaveState,
    Send,
    Stage,
    StageState,
    Unstage,
    UnstageState,
)
from diloco_jax.protocol.leases import BOOK
from diloco_jax.protocol.messages import (
    SYNCER,
    Advance,
    AnchorRequest,
    AnchorValue,
    Expel,
    FragmentValue,
    GlobalFragment,
    Heartbeat,
    Hello,
    Lease,
    Leave,
    Message,
    PullRequest,
    Refuse,
    StateDone,
    StateEnd,
    StatePart,
    StatePull,
    StateRefused,
    StateRequest,
    StateUnavailable,
    StepReport,
    Stop,
    Welcome,
)


def versions_text(versions: Iterable[int]) -> str:
    return " ".join("-" if version < 0 else str(version) for version in versions)


def _life(epoch: int) -> str:
    return f", life {epoch}" if epoch > 1 else ""  # most stories know one life of the syncer only


def message_text(message: Message) -> str:
    """A message as it reads in a transcript. Lives of the syncer are shown when they are not the first."""
    match message:
        case Hello(_, incarnation, _, versions):
            return f"Hello, incarnation {incarnation}, holds [{versions_text(versions)}]{_life(message.epoch)}"
        case StepReport():
            held = versions_text(a.version for a in message.adopted)
            return f"StepReport, step {message.local_step}, {message.tokens} tokens, holds [{held}]"
        case FragmentValue():
            return (
                f"FragmentValue {message.fragment_id} for round {message.global_step}, as after step "
                f"{message.local_step}: {message.steps} steps and {message.tokens} tokens since version "
                f"{message.base_version}"
            )
        case Heartbeat():
            return "Heartbeat"
        case Leave():
            return f"Leave, {message.reason}"
        case Welcome(global_step, versions, epoch):
            return f"Welcome at global step {global_step}, versions [{versions_text(versions)}]{_life(epoch)}"
        case Refuse(reason):
            return f"Refuse, {reason}"
        case Expel(reason):
            return f"Expel, {reason}"
        case Lease(first_sample, start, stop):
            book, first = divmod(first_sample, BOOK)
            of = f" of its book {book + 1}" if book else ""
            return f"Lease of samples {start} to {stop - 1}, its own from {first}{of} on"
        case PullRequest(global_step, fragment_id, local_step):
            return f"PullRequest {fragment_id} for round {global_step}, as after step {local_step}"
        case GlobalFragment(global_step, fragment_id, version, epoch):
            step = f" as a step from {message.base}" if message.base >= 0 else ""
            return f"GlobalFragment {fragment_id}, version {version}{step}, at global step {global_step}{_life(epoch)}"
        case Advance(global_step):
            return f"Advance to global step {global_step}"
        case Stop(global_step, reason):
            return f"Stop at global step {global_step}, {reason}"
        case _:
            return _recovery_text(message)


def _recovery_text(message: Any) -> str:
    match message:
        case AnchorRequest(fragment_id, version):
            return f"AnchorRequest {fragment_id}, version {version}"
        case AnchorValue():
            return f"AnchorValue {message.fragment_id}, version {message.version}"
        case StateRequest(donor=""):
            return f"StateRequest, of anybody who has seen global step {message.clock}"
        case StateRequest():
            return (
                f"StateRequest, part {message.part} of the state of {message.donor} as after step {message.donor_step}"
            )
        case StatePull(receiver, clock, 0):
            return f"StatePull for {receiver}, once global step {clock} is seen"
        case StatePull(receiver, _, donor_step, part):
            return f"StatePull for {receiver}, part {part} of the state as after step {donor_step}"
        case StatePart():
            of = f"part {message.part} of {message.parts} of the state of {message.learner_id}"
            return f"StatePart for {message.receiver}, {of} as after step {message.local_step}"
        case StateRefused():
            return f"StateRefused for {message.receiver}, {message.reason}"
        case StateDone():
            return f"StateDone, all of {message.donor} is here" if message.donor else "StateDone, no more is wanted"
        case StateEnd(receiver):
            return f"StateEnd for {receiver}"
        case StateUnavailable(donor, reason):
            return f"StateUnavailable from {donor or 'anybody'}, {reason}"
        case _:
            raise AssertionError(f"no words for {message}")


def effect_text(effect: Effect) -> str:
    """An effect as it reads in a transcript, without the name of the machine that asked for it."""
    match effect:
        case Send(peer, message):
            return f"sends {peer}: {message_text(message)}"
        case Stage(fragment_id, local_step):
            return f"stages fragment {fragment_id} as after step {local_step}"
        case Unstage(fragment_id, local_step):
            return f"frees its copy of fragment {fragment_id} as after step {local_step}"
        case Adopt(fragment_id, version):
            return f"adopts fragment {fragment_id}, version {version}"
        case StageState(local_step):
            return f"copies its state as after step {local_step}"
        case UnstageState(local_step):
            return f"frees the copy of its state as after step {local_step}"
        case KeepPart(part, parts):
            return f"keeps part {part} of {parts}"
        case DropParts():
            return "drops the parts that it kept"
        case AdoptState("", global_step, fragments):
            return f"takes over its own state of global step {global_step}, parameters of [{versions_text(fragments)}]"
        case AdoptState(donor, step, fragments):
            return f"takes over the state of {donor} as after step {step}, parameters of [{versions_text(fragments)}]"
        case SaveState(global_step):
            return f"saves its state of global step {global_step}"
        case Merge(global_step, fragment_id, parts):
            shares = ", ".join(f"{p.learner_id} ({p.steps} steps, {p.tokens} tokens)" for p in parts)
            return f"merges fragment {fragment_id} in round {global_step} from {shares}"
        case Restore(fragment_id, version):
            return f"has version {version} of fragment {fragment_id} again"
        case SaveSnapshot(global_step):
            return f"takes a snapshot of global step {global_step}"
        case Discard(global_step):
            return f"frees the payloads of round {global_step}"
        case Drop(peer, reason):
            return f"drops what {'it' if peer == SYNCER else peer} said: {reason}"
        case Note():
            return _note_text(effect)
        case Finish(reason):
            return f"stops: {reason}"


def _note_text(note: Note) -> str:
    members = ", ".join(note.members)
    match note.kind:
        case "closed":
            what = f"fragment {note.fragment_id}" if note.fragment_id >= 0 else "no fragment due"
            return f"closes round {note.global_step} ({what}) with {members}: {note.reason}"
        case "merged":
            return f"fragment {note.fragment_id} is now version {note.global_step}"
        case "abandoned":
            return f"gives up round {note.global_step} (fragment {note.fragment_id}): {note.reason}"
        case "finished":
            return f"the run ends at global step {note.global_step}: {note.reason}"
        case "restarted":
            return f"begins anew at global step {note.global_step}: {note.reason}"
        case "restored" | "lost":
            return f"fragment {note.fragment_id} {note.kind}: {note.reason}"
        case "recovering" | "recovered":
            receiver, donor = note.members
            return f"{receiver} {'takes' if note.kind == 'recovering' else 'has'} the state of {donor}"
        case _:
            return f"{members} {note.kind}: {note.reason}"
