"""Messages and effects as words, one line each: what golden transcripts are made of."""

from __future__ import annotations

from collections.abc import Iterable

from diloco_jax.protocol.messages import (
    SYNCER,
    Adopt,
    Advance,
    Discard,
    Drop,
    Effect,
    Finish,
    FragmentValue,
    GlobalFragment,
    Heartbeat,
    Hello,
    Leave,
    Merge,
    Message,
    Note,
    PullRequest,
    Refuse,
    Send,
    Stage,
    StepReport,
    Stop,
    Unstage,
    Welcome,
)


def versions_text(versions: Iterable[int]) -> str:
    return " ".join("-" if version < 0 else str(version) for version in versions)


def message_text(message: Message) -> str:
    """A message as it reads in a transcript. Incarnations are shown when they are not the first."""
    match message:
        case Hello(_, incarnation, _, versions):
            return f"Hello, incarnation {incarnation}, holds [{versions_text(versions)}]"
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
        case Welcome(global_step, versions):
            return f"Welcome at global step {global_step}, versions [{versions_text(versions)}]"
        case Refuse(reason):
            return f"Refuse, {reason}"
        case PullRequest(global_step, fragment_id, local_step):
            return f"PullRequest {fragment_id} for round {global_step}, as after step {local_step}"
        case GlobalFragment(global_step, fragment_id, version):
            return f"GlobalFragment {fragment_id}, version {version}, at global step {global_step}"
        case Advance(global_step):
            return f"Advance to global step {global_step}"
        case Stop(global_step, reason):
            return f"Stop at global step {global_step}, {reason}"


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
        case Merge(global_step, fragment_id, parts):
            shares = ", ".join(f"{p.learner_id} ({p.steps} steps, {p.tokens} tokens)" for p in parts)
            return f"merges fragment {fragment_id} in round {global_step} from {shares}"
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
        case _:
            return f"{members} {note.kind}: {note.reason}"
