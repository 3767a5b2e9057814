"""Golden transcripts: commands in, everything that all participants did out.

A transcript is text. Each case is a comment that says what happens, the commands, a line `----`, and what came out:

    # One learner is enough for K = 1.
    join a
    ----
    a -> syncer: Hello, incarnation 1, holds [- -]

Commands (names are learners, numbers are seconds):

    new KEY=VALUE ...     a fresh run; keys are settings of the protocol, `total_steps`, `says_copies`, `state_parts`,
                          `steps`
    join NAME ... [incarnation=N step_samples=N]   start learners, with their own saved states if they have any
    step NAME ... [step_s=S tokens=N]  one inner step each, then everything under way arrives
    wait SECONDS          time passes
    cut, connect, crash, leave NAME ...    the link breaks; dial again; the learner dies; it says goodbye
    hold NAME ... | release NAME ...   what is sent to and from them stays under way; arrives now. NAME:StepReport
                          (or another message) holds only that
    pass NAME:StateChunk   the oldest of what is held of that kind arrives, and all that it leads to
    lose NAME ...         what is under way to and from them never arrives
    hold-merges | merge   merges take until `merge`
    drain NAME ...        somebody asks the syncer to let them go
    restart-syncer [lost_lines=N]   its process is killed; another takes its place, and nobody is connected to it yet;
                          the last N lines of its tape are lost, too
    die-in N              the same after N more inputs of the syncer: the last is on the tape, its effects never happen
    rewind [NAME ...]     every process but these is killed; the run resumes from its newest snapshot
    poison | cure NAME ...  their values cannot be used; can again
    misread | read NAME ...  their arithmetic of steps differs from the syncer's; does not any more
    break NAME ...        they cannot use any state that they take over
    status                the syncer's view
    samples               what became of the samples that were handed out, and who has which
    conditions            in what condition each learner is
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.protocol.watch.health import conditions
from tests.protocol.pair import Pair
from tests.protocol.prose import versions_text

FOLDER = Path(__file__).parent / "testdata"


class Case(NamedTuple):
    # The number of its first line.
    line: int
    comment: list[str]
    commands: list[str]
    output: list[str]

    def text(self) -> str:
        return "\n".join([*self.comment, *self.commands, "----", *self.output]) + "\n"


def parse(text: str) -> Iterator[Case]:
    """The cases of a transcript; they are separated by empty lines."""
    line = 1
    for block in text.split("\n\n"):
        rows = block.strip("\n").split("\n")
        head, output = rows, list[str]()
        if "----" in rows:
            head, output = rows[: rows.index("----")], rows[rows.index("----") + 1 :]
        comment = [row for row in head if row.startswith("#")]
        yield Case(line, comment, [row for row in head if row and not row.startswith("#")], output)
        line += block.count("\n") + 2


def run(cases: list[Case]) -> list[Case]:
    """The same cases with the output that the machines give now; at the end the tape is replayed."""
    pair = Pair()
    done: list[Case] = []
    for case in cases:
        for command in case.commands:
            name, *words = command.split()
            if name == "new":
                pair = Pair(**_settings(words))
            else:
                _execute(pair, name, words)
        done.append(case._replace(output=pair.lines or ["nothing happens"]))
        pair.lines = []
    pair.check_replay()
    return done


def _settings(words: list[str]) -> dict[str, Any]:
    return {key: float(value) if "." in value else int(value) for key, value in (word.split("=") for word in words)}


def _execute(pair: Pair, command: str, words: list[str]) -> None:
    names = [word for word in words if "=" not in word]
    settings = _settings([word for word in words if "=" in word])
    match command:
        case "join" | "step" | "cut" | "connect" | "crash" | "leave" | "drain" | "rewind" | "merge" | "restart-syncer":
            getattr(pair, command.replace("-", "_"))(*names, **settings)
        case "wait":
            pair.wait(float(names[0]))
        case "hold":
            pair.held.update(names)
        case "release":
            pair.held.difference_update(names)
            pair.deliver()
        case "pass":
            pair.let_pass(names[0])
        case "lose":
            for name in names:
                pair.lose_wire(name)
        case "hold-merges":
            pair.holds_merges = True
        case "die-in":
            pair.dies_in = int(names[0])
        case "poison":
            pair.poisoned.update(names)
        case "cure":
            pair.poisoned.difference_update(names)
        case "misread" | "read":
            for name in names:
                pair.drivers[name].misreads = command == "misread"
        case "break":
            pair.broken.update(names)
        case "status":
            pair.lines += _status(pair)
        case "samples":
            pair.lines += _samples(pair)
        case "conditions":
            pair.lines += _conditions(pair)
        case _:
            raise ValueError(f"unknown command {command!r}; see the top of {__file__}")


def _status(pair: Pair) -> Iterator[str]:
    syncer = pair.syncer
    yield f"global step {syncer.global_step}, versions [{versions_text(syncer.versions)}]"
    yield f"waits for {syncer.waiting_for(pair.now_s)}"
    for name, member in sorted(syncer.membership.members.items()):
        yield f"{name} is {member.state}, {member.total_steps} steps, merged in {member.rounds} rounds"


def _samples(pair: Pair) -> Iterator[str]:
    book = pair.syncer.leases.of("")
    yield ", ".join(f"{count} {fate}" for fate, count in book.fates._asdict().items())
    for name, holding in sorted(book.holdings.items()):
        ranges = ", ".join(f"{start} to {stop - 1}" for start, stop in holding.ranges) or "nothing"
        yield f"{name} has {ranges}"
    free = ", ".join(f"{start} to {stop - 1}" for start, stop in book.state()["pool"])
    if free:
        yield f"free again: {free}"


def _conditions(pair: Pair) -> Iterator[str]:
    for name, condition, since_s, reason in conditions(pair.syncer, pair.now_s):
        yield f"{name} is {condition} for {pair.now_s - since_s:.0f} s: {reason}"
