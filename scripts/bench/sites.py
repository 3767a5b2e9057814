"""Measure what the syncer of many islands sends and receives, as the centre of a star and through a bucket.

A real syncer has a model with fragments of the quickstart's size. Stub learners on real links, gRPC and sockets on
loopback or objects in memory, report a step every `--step-s` seconds and answer every pull with the same int4 value.
Everything is one process, and nobody trains. A round merges all learners. The two ways run in turn, and ratios are
taken within a run. `planned` is what `diloco plan` has the syncer send with as many rounds per second.
"""

import argparse
import contextlib
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from _control import FRAGMENTS, TinyModel, await_status, config_of, live_of, payloads_of, read
from scaling import row, show

from diloco_jax.protocol.messages import Adopted, FragmentValue, GlobalFragment, Hello, Lease, PullRequest, StepReport
from diloco_jax.runtime.records.files import ADDRESS_FILE
from diloco_jax.runtime.syncer.run import SyncerRun
from diloco_jax.settings.resolved import resolve
from diloco_jax.tools.plan.bucket import DAY_S, BucketTraffic, requests
from diloco_jax.transport.endpoints.dialler import Dialler
from diloco_jax.transport.link import LinkClosed, TransportConfig

# In int4 a fragment has 64 kB, as the mean fragment of the quickstart.
WIDTH = 352
TOKENS, SAMPLES, LOSS, LEAVE_S = 128, 1, 2.0, 30.0


class Traffic(NamedTuple):
    """The traffic of a syncer until a moment, or between two."""

    seconds: float
    rounds: float
    sent: float
    received: float


class Model(TinyModel):
    """The description of a model with one matrix for each fragment."""

    shapes = dict.fromkeys(TinyModel.shapes, (WIDTH, WIDTH))


def learn(transport: TransportConfig, name: str, agreed: Any, payload: bytes, step_s: float) -> None:
    """Report steps, and answer pulls with one payload, until the syncer ends."""
    link = Dialler(transport, run_id=config_of().name, learner_id=name, incarnation=1).connect(0)
    link.send(Hello(name, 1, agreed, (-1,) * FRAGMENTS, (0,) * FRAGMENTS, 0, SAMPLES, 0))
    adopted, arrived = [Adopted()] * FRAGMENTS, list[tuple[int, int, float]]()
    staged, step, granted, global_step, due_s = adopted, 0, 0, 0, time.monotonic()
    with contextlib.suppress(LinkClosed):
        while link.open:
            delivery = link.receive(max(0.0, due_s - time.monotonic()))
            message = delivery.message if delivery else None
            if isinstance(message, GlobalFragment):
                global_step = max(global_step, message.global_step)
                adopted[message.fragment_id] = Adopted(message.version, step, step * TOKENS)
                arrived.append((message.fragment_id, message.version, time.monotonic()))
            elif isinstance(message, Lease):
                granted = max(granted, message.first_sample + message.stop - message.start)
            elif isinstance(message, PullRequest):
                round_, fragment, at = message
                steps, base = max(1, at - staged[fragment].local_step), staged[fragment].version
                counters = round_, fragment, at, steps, steps * TOKENS, base, at, len(payload)
                link.send(FragmentValue(name, 1, *counters), payload)
            if time.monotonic() < due_s:
                continue
            due_s += step_s
            if granted and all(each.version >= 0 for each in adopted):
                step, staged, now_s = step + 1, list(adopted), time.monotonic()
                seen = tuple((fragment, version, now_s - at_s) for fragment, version, at_s in arrived)
                state = step, step * TOKENS, global_step, tuple(adopted), step_s, LOSS
                arrived.clear()
                link.send(StepReport(name, 1, *state, min(step, granted), granted, seen))
    link.close(0.0)


def measure(address: str, model: Any, payload: bytes, arguments: argparse.Namespace) -> Traffic:
    """Run a syncer of a model at an address with all learners, and return its traffic during some rounds."""
    base, stop, count = config_of(), threading.Event(), arguments.learners
    transport = replace(base.transport, address=address)
    islands, protocol = replace(base.islands, count=count), replace(base.protocol, quorum=count)
    config = replace(base, islands=islands, protocol=protocol, transport=transport)
    agreed = resolve(config, model.shapes, model.kinds).fingerprint("")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        syncer = threading.Thread(target=lambda: SyncerRun(config, folder, stop, model).run(), daemon=True)
        syncer.start()
        try:
            await_status(folder, lambda _: (folder / ADDRESS_FILE).exists())
            there = replace(transport, address=(folder / ADDRESS_FILE).read_text(encoding="utf-8"))
            for number in range(count):
                words = there, f"site-{number}", agreed, payload, arguments.step_s
                threading.Thread(target=learn, args=words, daemon=True).start()
            await_status(folder, lambda told: live_of(told) == count)
            first = traffic(folder, read(folder)["global_step"] + FRAGMENTS)
            last = traffic(folder, int(first.rounds) + arguments.rounds)
        finally:
            stop.set()
            syncer.join(LEAVE_S)
    return Traffic(*(after - before for after, before in zip(last, first, strict=True)))


def traffic(folder: Path, rounds: int) -> Traffic:
    """Wait until the syncer has closed this many rounds, and return its traffic until then."""
    await_status(folder, lambda told: told["global_step"] >= rounds)
    told = read(folder)
    wire, objects = told["wire"], told["requests"]
    moved = (objects["sent_bytes"], objects["received_bytes"]) if objects else (wire["down_bytes"], wire["up_bytes"])
    return Traffic(told["said"]["unix_s"], told["global_step"], *moved)


def planned(way: str, run: Traffic, size: int, arguments: argparse.Namespace) -> float:
    """Return the bytes per second that `diloco plan` has a syncer send, with as many rounds per second as a run."""
    usual, due_s = TransportConfig(), run.seconds / run.rounds
    if way == "star":
        return float(arguments.learners * size / due_s)
    settings: dict[str, Any] = {"poll_s": usual.poll_s, "keepalive_s": usual.keepalive_s, "request_s": 0.0}
    settings |= {"islands": arguments.learners, "step_s": arguments.step_s, "due_s": due_s}
    return requests(BucketTraffic(**settings, up_bytes=[size], down_bytes=[size]))[1].sent_bytes / DAY_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4 * FRAGMENTS, help="rounds of a measurement")
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds of a learner's step")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object per result and line")
    arguments = parser.parse_args()
    # All fragments have one shape, and so one payload.
    payload = payloads_of(config_of(), resolve(config_of(), Model.shapes, Model.kinds).plan)[0]
    rows: dict[str, list[Traffic]] = {"star": [], "bucket": []}
    for number in range(arguments.runs):
        rows["star"].append(measure("127.0.0.1:0", Model(), payload, arguments))
        rows["bucket"].append(measure(f"memory://sites-{number}", Model(), payload, arguments))
    common, found = {"learners": arguments.learners, "step_s": arguments.step_s, "payload_bytes": len(payload)}, []
    for way, own in rows.items():
        for name, unit in (("rounds", "1/s"), ("sent", "B/s"), ("received", "B/s")):
            found.append(row(f"{name}_{way}", unit, [getattr(each, name) / each.seconds for each in own], common))
        shares = [each.sent / each.seconds / planned(way, each, len(payload), arguments) for each in own]
        found.append(row(f"sent_{way}_vs_planned", "ratio", shares, common))
    pairs = [a.sent / a.rounds * b.rounds / b.sent for a, b in zip(*rows.values(), strict=True)]
    show([*found, row("sent_per_round_star_vs_bucket", "ratio", pairs, common)], arguments)


if __name__ == "__main__":
    main()
