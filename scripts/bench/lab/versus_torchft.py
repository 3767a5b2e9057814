"""`wan vs_torchft`: torchft's DiLoCo and islands of diloco_jax over the same links.

Both train the same small model (2^20 float32 parameters) with steps of equal length that mostly sleep. torchft's
pseudo-gradients travel in one bucket per fragment as float32, because its quantised all-reduce needs a GPU (Triton).
"""

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from environments import python_with
from lab.network import SYNCER, Lab, Wan
from lab.results import result, rounded
from lab.run import SETTINGS_FILE, WanRun, job
from lab.traffic import FRAGMENTS, PACED, add_wire_words, formats, island_names, paced_model, wire_section
from recovery_jobs import Tail
from vs_torchft import PINS

from diloco_jax.settings.text import load

LIGHTHOUSE_PORT = 29510
SEQ_LEN, BATCH_SIZE = 8, 4
LIMIT_S = 3600.0


def add_words(parser: argparse.ArgumentParser) -> None:
    add_wire_words(parser)
    parser.add_argument("--rate-mbit", type=float, default=4.0, help="rate of each island's link")
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds of an inner step")
    parser.add_argument("--syncs", type=int, default=3, help="measured synchronisations of torchft per run")
    parser.add_argument(
        "--fragments", type=int, choices=(1, 2), default=2, help="fragments of torchft; ours are always 24"
    )
    parser.add_argument(
        "--delay", type=int, help="torchft's fragment_sync_delay, the steps that overlap; default: the largest"
    )
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side, in turn")


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the seconds per inner step of both over links of one rate, with equal compute per step and equal H."""
    theirs, ours = [], []
    for repeat in range(arguments.repeats):
        theirs.append(_torchft(arguments, folder / f"torchft-{repeat}"))
        sys.stderr.write(f"torchft {theirs[-1]}\n")
        ours.append(_islands(arguments, folder / f"islands-{repeat}"))
        sys.stderr.write(f"islands {ours[-1]}\n")
    ratios = [a["seconds_per_step"] / b["seconds_per_step"] for a, b in zip(theirs, ours, strict=True)]
    rows = []
    for side, found in (("torchft", theirs), ("diloco_jax", ours)):
        middle = {key: statistics.median(sample[key] for sample in found) for key in found[0]}
        rows.append(rounded({"side": side, **middle}))
    return result(
        "wan_vs_torchft",
        ratios,
        "seconds per inner step, torchft / diloco_jax",
        rows=rows,
        rate_mbit=arguments.rate_mbit,
        step_s=arguments.step_s,
        sync_every=FRAGMENTS,
        torchft=f"{arguments.fragments} fragments, fragment_sync_delay {_delay(arguments)}, float32, one bucket each",
        **formats(load(folder / "islands-0" / SETTINGS_FILE)),
    )


def _delay(arguments: argparse.Namespace) -> int:
    """Return the steps that torchft makes while a fragment travels; it allows one less than the steps between syncs."""
    return FRAGMENTS // arguments.fragments - 1 if arguments.delay is None else int(arguments.delay)


def _torchft(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run a lighthouse at the syncer's site and a replica at each island; measure from the second synchronisation."""
    folder.mkdir(parents=True)
    python = python_with("torchft", PINS)
    steps = FRAGMENTS // arguments.fragments
    with Lab(island_names(arguments), Wan(rate_bit_s=1e6 * arguments.rate_mbit)) as lab:
        lighthouse = [python.with_name("torchft_lighthouse"), "--bind", f"0.0.0.0:{LIGHTHOUSE_PORT}"]
        with (folder / "lighthouse.log").open("ab") as log:
            lab.spawn("lighthouse", SYNCER, [*lighthouse, "--min_replicas", len(lab.islands)], stdout=log)
        for name in lab.islands:
            words: dict[str, Any] = {"name": name, "events": str(folder / f"{name}.jsonl"), "host": lab.address(name)}
            words |= {"lighthouse": f"http://{lab.address(SYNCER)}:{LIGHTHOUSE_PORT}", "replicas_min": len(lab.islands)}
            words |= {"model": PACED, "batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "step_s": arguments.step_s}
            words |= {"sync_every": FRAGMENTS, "fragments": arguments.fragments, "syncs": arguments.syncs + 2}
            # One buffer for all tensors of a fragment needs fewer round trips.
            words |= {"diloco": {"fragment_sync_delay": _delay(arguments), "use_bucketization": True}, "timeout_s": 300}
            program = Path(__file__).parents[1] / "_torchft_replica.py"
            with (folder / f"{name}.log").open("ab") as log:
                lab.spawn(name, name, [python, program, json.dumps(words)], stdout=log)
        tails = [Tail(folder / f"{name}.jsonl") for name in lab.islands]
        for name, tail in zip(lab.islands, tails, strict=True):
            lab.wait_for(partial(_has_synced, tail, 2), LIMIT_S, f"the second synchronisation of {name}")
        before = [lab.traffic(name) for name in lab.islands]
        for name, tail in zip(lab.islands, tails, strict=True):
            lab.wait_for(partial(_has_synced, tail, arguments.syncs + 2), LIMIT_S, f"the end of {name}")
        after = [lab.traffic(name) for name in lab.islands]
    times = [[e["t"] for e in tail.records if e["event"] == "commit"][1:] for tail in tails]
    inner_steps = arguments.syncs * steps
    moved = sum(b.up + b.down - a.up - a.down for a, b in zip(before, after, strict=True))
    seconds = statistics.mean((t[-1] - t[0]) / inner_steps for t in times)
    per_step = moved / inner_steps / len(lab.islands)
    contributors = statistics.mean(e["participants"] for e in tails[0].records if e["event"] == "commit")
    figures = {"seconds_per_step": seconds, "bytes_per_step": per_step, "contributors": contributors}
    return {**figures, "model_syncs_per_24_steps": 1.0}


def _has_synced(tail: Tail, times: int) -> bool:
    return sum(event["event"] == "commit" for event in tail.look()) >= times


def _islands(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run our side over the same links, and measure over as many inner steps."""
    settings = job(
        arguments.islands,
        paced_model(arguments.step_s),
        train={"batch_size": BATCH_SIZE * arguments.islands, "seq_len": SEQ_LEN},
        wire=wire_section(arguments),
    )
    with Lab(island_names(arguments), Wan(rate_bit_s=1e6 * arguments.rate_mbit)) as lab:
        run = WanRun(lab, folder, settings)
        run.start()
        run.await_everybody(FRAGMENTS)
        begin = run.mark()
        run.await_inner_steps(arguments.syncs * FRAGMENTS // arguments.fragments + FRAGMENTS)
        window = run.window(begin, run.mark())
    inner_steps = window.inner_steps / arguments.islands
    return {
        "seconds_per_step": window.seconds / inner_steps,
        "bytes_per_step": (window.up_bytes + window.down_bytes) / window.inner_steps,
        "contributors": window.contributors,
        "model_syncs_per_24_steps": len(window.merged) / inner_steps,
    }
