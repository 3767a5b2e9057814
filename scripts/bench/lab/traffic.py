"""`wan bytes`, `slow`, `utilisation` and `downlink`: the traffic of a real run, and the cost of narrow links."""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from lab.expected import decoupled_bytes, ring_bytes, round_rate, sustained_rate
from lab.network import Lab, Wan
from lab.results import result, rounded
from lab.run import WanRun, Window, job

from diloco_jax.runtime.records.files import TAPE_FILE
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.island import Island

MODELS: dict[str, dict[str, Any]] = {
    "5m": {"dim": 256, "num_layers": 6, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "mlp_dim": 1024},
    "1m": {"dim": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "mlp_dim": 512},
}
PACED = {"vocab_size": 256, "dim": 512, "mlp_dim": 768}  # 2**20 parameters
FRAGMENTS = 24  # P = H


def add_wire_words(parser: argparse.ArgumentParser) -> None:
    """Add the options of every bench that runs islands."""
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--up", help="format of outer gradients; default: the configuration's wire.up")
    parser.add_argument("--down", help="format of global fragments; default: the configuration's wire.down")


def add_run_words(
    parser: argparse.ArgumentParser, model: str, rate_mbit: float, steps: int, batch_size: int, seq_len: int
) -> None:
    """Add the options of a bench that trains a decoder over links of one rate, with these defaults."""
    add_wire_words(parser)
    parser.add_argument("--model", choices=MODELS, default=model, help="decoder with about this many parameters")
    parser.add_argument("--rate-mbit", type=float, default=rate_mbit, help="rate of each island's link")
    parser.add_argument("--steps", type=int, default=steps, help="global steps of the run or of the measurement")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="sequences per inner step and island")
    parser.add_argument("--seq-len", type=int, default=seq_len)


def decoder_job(arguments: argparse.Namespace, train: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Return the settings of a run that trains a decoder; `train` has further settings of that section."""
    sizes = {"batch_size": arguments.batch_size * arguments.islands, "seq_len": arguments.seq_len}
    model = {**MODELS[arguments.model], "seq_len_max": arguments.seq_len, "activation": "relu2"}
    return job(arguments.islands, model, train=sizes | train, wire=wire_section(arguments), **sections)


def wire_section(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the section `wire` of the configuration with the chosen formats."""
    return {name: value for name, value in (("up", arguments.up), ("down", arguments.down)) if value}


def formats(config: RunConfig) -> dict[str, str]:
    """Return the formats "up" and "down"."""
    return {"up": config.wire.up, "down": config.wire.down}


def island_names(arguments: argparse.Namespace) -> list[str]:
    return [f"island-{index}" for index in range(arguments.islands)]


def paced_model(step_s: float, spread: float = 0.0) -> dict[str, Any]:
    """Return a model with steps that mostly sleep, so that islands do not compete for the machine's cores.

    Args:
        step_s: least seconds of a step of the first island.
        spread: additional time of each island over the one before, as a share of step_s.
    """
    return {"module": "_paced_model:PacedModel", "args": {**PACED, "step_s": step_s, "spread": spread}}


class Sizes:
    """Number of parameters of a run's model, and the payload bytes of each fragment."""

    def __init__(self, config: RunConfig) -> None:
        self.formats = formats(config)
        up, down = self.formats["up"], self.formats["down"]
        island = Island(config.model, config.optimizer, config.islands.mesh, seed=0)
        run = resolve(config, island.shapes, island.kinds)
        self.num_parameters = run.num_parameters
        self.up = [*run.payload_bytes(up)]  # type: ignore[arg-type]
        self.down = [*run.payload_bytes(down)]  # type: ignore[arg-type]


def add_bytes_words(parser: argparse.ArgumentParser) -> None:
    add_run_words(parser, "5m", rate_mbit=1000.0, steps=240, batch_size=1, seq_len=32)


def measure_bytes(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the bytes per global step and learner, up plus down, as the shapers of the links count them."""
    settings = decoder_job(arguments, {})
    with Lab(island_names(arguments), Wan(rate_bit_s=1e6 * arguments.rate_mbit)) as lab:
        run = WanRun(lab, folder / "run", settings)
        run.start()
        run.await_everybody()
        joined = run.mark()
        sizes = Sizes(run.config)
        # After these steps late islands have the whole model, too.
        run.await_steps(FRAGMENTS, 600)
        begin = run.mark()
        run.await_steps(arguments.steps, 3600)
        end = run.mark()
        window = run.window(begin, end)
    join_bytes = statistics.mean(t.up + t.down for t in joined.traffic.values())
    return _bytes_result(arguments, sizes, window, join_bytes)


def _bytes_result(arguments: argparse.Namespace, sizes: Sizes, window: Window, join_bytes: float) -> dict[str, Any]:
    count, islands = sizes.num_parameters, arguments.islands
    shares = window.global_steps * islands
    wire = (window.up_bytes + window.down_bytes) / shares
    payload_up = sum(sizes.up[p] * members for p, members in window.merged) / shares
    payload_down = sum(sizes.down[p] for p, _ in window.merged) * islands / shares
    bounds = {
        "planned": decoupled_bytes(count, FRAGMENTS, **sizes.formats),
        "int4 both ways": decoupled_bytes(count, FRAGMENTS, "int4", "int4"),
        "bfloat16 all-reduce": ring_bytes(count, islands),
    }
    rows = [
        {"what": "measured", "up": window.up_bytes / shares, "down": window.down_bytes / shares},
        {"what": "of that payload", "up": payload_up, "down": payload_down},
        *({"what": name, "up": step.up, "down": step.down} for name, step in bounds.items()),
    ]
    for row in rows:
        row |= {"both": row["up"] + row["down"], "measured/this": wire / (row["up"] + row["down"])}
    frames = sum(window.frame_bytes) / shares
    return result(
        "wan_bytes",
        [wire],
        "bytes per global step and learner, up plus down",
        rows=[rounded(row) for row in rows],
        all_reduce_over_measured=round(sum(bounds["bfloat16 all-reduce"]) / wire, 3),
        rest_bytes=rounded(
            {
                "values sent again, other messages, their headers": frames - payload_up - payload_down,
                "HTTP/2, TCP, IP, Ethernet": wire - frames,
            }
        ),
        join_bytes_per_learner=round(join_bytes),
        parameters=count,
        islands=islands,
        **sizes.formats,
        rate_mbit=arguments.rate_mbit,
        global_steps=window.global_steps,
        inner_steps=window.inner_steps,
        contributors=round(window.contributors, 3),
        step_s=round(window.step_s, 4),
    )


def add_slow_words(parser: argparse.ArgumentParser) -> None:
    add_run_words(parser, "1m", rate_mbit=10.0, steps=300, batch_size=2, seq_len=64)


def measure_slow(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure a run that has narrow links from its first byte: its end, its lost learners and its memory."""
    settings = decoder_job(arguments, {"steps": arguments.steps})
    with Lab(island_names(arguments), Wan(rate_bit_s=1e6 * arguments.rate_mbit)) as lab:
        run = WanRun(lab, folder / "run", settings)
        run.start()
        run.await_everybody()
        begin = run.mark()
        summary = run.await_end(3600)
        traffic = {name: lab.traffic(name) for name in lab.islands}
        window = run.window(begin, begin._replace(t=summary["wall_s"], traffic=traffic))
    rows = [
        {"process": name, "peak_rss_mb": peak / 1e6}
        | {"participation": summary["learners"].get(name, {}).get("participation", "")}
        | {"inner_steps": summary["learners"].get(name, {}).get("local_steps", "")}
        for name, peak in run.peak_rss_bytes.items()
    ]
    lost = [text for text in window.lost if not text.startswith("abandoned")]
    return result(
        "wan_slow",
        [float(len(lost))],
        "learners that were silent or left before the end",
        rows=[rounded(row) for row in rows],
        complete=summary["complete"],
        lost=lost,
        abandoned_rounds=len(window.lost) - len(lost),
        rate_mbit=arguments.rate_mbit,
        **formats(run.config),
        parameters=summary["num_parameters"],
        **{key: summary[key] for key in ("global_steps", "wall_s", "goodput", "contributors_per_round", "eval_loss")},
    )


def add_utilisation_words(parser: argparse.ArgumentParser) -> None:
    add_wire_words(parser)
    multiples = (50.0, 20.0, 10.0, 5.0, 2.0, 1.0)
    parser.add_argument(
        "--multiples", nargs="+", type=float, default=multiples, help="rates as multiples of the planned rate"
    )
    parser.add_argument("--step-s", type=float, default=0.2, help="seconds of an inner step; mostly asleep")
    parser.add_argument("--overlap-steps", type=int, default=2, help="tau")
    parser.add_argument("--steps", type=int, default=96, help="measured global steps at each rate")
    parser.add_argument("--round-trip-ms", type=float, default=0.0)


def measure_utilisation(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the share of time in inner steps, and the participation, in a run whose links become narrower.

    The planned rate carries one fragment per step in the busier direction. Islands never wait for a round, so narrow
    links cost participation instead of steps. `value` is the utilisation at the rate of a round in tau steps.
    """
    settings = job(
        arguments.islands,
        paced_model(arguments.step_s),
        train={"batch_size": 4 * arguments.islands, "seq_len": 8},
        protocol={"overlap_steps": arguments.overlap_steps},
        wire=wire_section(arguments),
    )
    round_trip_s = arguments.round_trip_ms / 1e3
    rows = []
    with Lab(island_names(arguments), Wan(one_way_s=round_trip_s / 2)) as lab:
        run = WanRun(lab, folder / "run", settings)
        run.start()
        sizes = Sizes(run.config)
        step = decoupled_bytes(sizes.num_parameters, FRAGMENTS, **sizes.formats)
        planned = sustained_rate(step, arguments.step_s)
        fits = round_rate(step, arguments.step_s, arguments.overlap_steps, round_trip_s)
        run.await_everybody(FRAGMENTS)
        for rate in [*sorted((planned * m for m in arguments.multiples), reverse=True), fits]:
            lab.shape(rate)
            # After these steps the rounds of the previous rate have ended.
            run.await_steps(6 if rate >= planned else 12, 600)
            begin = run.mark()
            run.await_steps(arguments.steps, 3600)
            window = run.window(begin, run.mark())
            rows.append(_utilisation_row(window, rate, planned))
            sys.stderr.write(f"{rows[-1]}\n")
    at_fit = rows[-1]
    rows[-1] = {**at_fit, "times_planned": f"{at_fit['times_planned']:.3g} (round in tau)"}
    return result(
        "wan_utilisation",
        [at_fit["utilisation"]],
        f"share of time in inner steps at {fits / 1e6:.3g} Mbit/s, where a round takes tau steps",
        rows=rows,
        planned_mbit=round(planned / 1e6, 3),
        round_in_tau_mbit=round(fits / 1e6, 3),
        step_s=arguments.step_s,
        round_trip_ms=arguments.round_trip_ms,
        parameters=sizes.num_parameters,
        **sizes.formats,
        model="two matrices between an embedding and a head; steps padded with sleep",
    )


def _utilisation_row(window: Window, rate: float, planned: float) -> dict[str, Any]:
    values = list(window.utilisation.values())
    carried = 8 * max(window.up_bytes, window.down_bytes) / len(values) / window.seconds
    return rounded(
        {
            "times_planned": rate / planned,
            "mbit": rate / 1e6,
            "utilisation": statistics.mean(values),
            "lowest": min(values),
            "step_s": window.step_s,
            "contributors": window.contributors,
            "rounds_per_inner_step": len(window.merged) / (window.inner_steps / len(values)),
            "link_load": carried / rate,
            "lost": len(window.lost),
        }
    )


def add_downlink_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument(
        "--shares", nargs="+", type=float, default=(0.5, 0.95, 1.1), help="travel times of a version, in steps"
    )
    parser.add_argument("--step-s", type=float, default=0.4, help="seconds of the first island's steps; mostly asleep")
    parser.add_argument(
        "--spread", type=float, default=0.15, help="additional step time of each island over the one before, as a share"
    )
    parser.add_argument("--overlap-steps", type=int, default=2, help="tau")
    parser.add_argument("--steps", type=int, default=72, help="global steps that are measured at each rate")


def measure_downlink(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the share of versions that arrive within tau steps over slow downlinks.

    For every requested value the bench counts the inner steps of its learner, from the step of the requested copy to
    the step before the adoption of the round's result. An eighth of the downlink's bytes go up.
    """
    settings = job(
        arguments.islands,
        paced_model(arguments.step_s, arguments.spread),
        train={"batch_size": 4 * arguments.islands, "seq_len": 8},
        protocol={"overlap_steps": arguments.overlap_steps, "quorum": 1},
        wire={"up": "int4", "down": "float32"},
    )
    rows = []
    with Lab(island_names(arguments), Wan()) as lab:
        run = WanRun(lab, folder / "run", settings)
        run.start()
        version_bits = 8 * statistics.mean(Sizes(run.config).down)
        run.await_everybody(FRAGMENTS)
        for share in arguments.shares:
            lab.shape(version_bits / (share * arguments.step_s))
            # After these steps the averages are stable.
            run.await_steps(FRAGMENTS, 600)
            begin = run.mark()
            first = len(_tape(run))
            run.await_steps(arguments.steps, 3600)
            window, last = run.window(begin, run.mark()), len(_tape(run))
            # After these steps the last requested values have arrived if they are in time.
            run.await_steps(3 * arguments.overlap_steps, 600)
            waits = _waits(_tape(run)[first:], last - first)
            late = [steps for steps in waits if steps is None or steps > arguments.overlap_steps]
            known = sorted(steps for steps in waits if steps is not None)
            row = {"version_takes_steps": share, "values": len(waits), "late": len(late) / len(waits)}
            row |= {"median_steps": statistics.median(known), "longest_steps": known[-1]}
            row |= {"contributors": window.contributors, "step_s": window.step_s}
            rows.append(rounded(row))
            sys.stderr.write(f"{rows[-1]}\n")
    return result(
        "wan_downlink",
        [max(row["late"] for row in rows)],
        f"share of values that arrived more than {arguments.overlap_steps} steps later, at the worst of these rates",
        rows=rows,
        step_s=arguments.step_s,
        spread=arguments.spread,
        islands=arguments.islands,
    )


def _tape(run: WanRun) -> list[str]:
    return (run.folder / TAPE_FILE).read_text(encoding="utf-8").splitlines()


def _waits(tape: list[str], asked_lines: int) -> list[int | None]:
    """Return the steps until the adoption of the round's result (None: never) of each value in a tape's first lines."""
    # By learner and round.
    waits: dict[tuple[str, int], int | None] = {}
    asked: dict[tuple[str, int], int] = {}
    for number, line in enumerate(tape):
        kind, _, name, _, *facts = json.loads(line) if line.startswith(('["Frag', '["Step')) else ("", 0, "", 0)
        if kind == "FragmentValue" and number < asked_lines:
            global_step, _, local_step, *_ = facts
            asked[name, global_step], waits[name, global_step] = local_step, None
        elif kind == "StepReport":
            for version, local_step, _ in facts[3]:
                if (name, version) in asked:
                    waits[name, version] = local_step - asked.pop((name, version))
    return list(waits.values())
