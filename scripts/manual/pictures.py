"""Pictures of the manual: those of the concepts follow the rules of the machines; one shows processes and ports."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, get_args

from diloco_jax.core.codec import Format, encoded_size
from diloco_jax.protocol.closing import grace_window_s
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.turns import Turns

# The picture has its own background, because the page may be dark while the system is light.
STYLE = """
  .paper { fill: #ffffff } text { fill: #24292f } .small { font-size: 11.5px; fill: #57606a } .late { fill: #cf222e }
  .step { fill: #b6d0fb } .wait { fill: #fff1c2 } .work { fill: #d8c7f5 } .back { fill: #bfe5c8 }
  .line { stroke: #57606a; fill: none } .a { stroke: #cf222e } .b { stroke: #9a6700 } .c { stroke: #1a7f37 }
  .gone { fill: #ffd7d5 } .none { fill: #eaeef2 } .last { fill: #f5d19e } .dot { fill: #24292f }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #131416 } text { fill: #e6edf3 } .small { fill: #9198a1 } .late { fill: #ff7b72 }
    .step { fill: #27477a } .wait { fill: #5a4a12 } .work { fill: #4b3a75 } .back { fill: #23552f }
    .gone { fill: #5f2420 } .none { fill: #24292f } .last { fill: #6e4a1a } .dot { fill: #e6edf3 }
    .line { stroke: #9198a1 } .a { stroke: #ff7b72 } .b { stroke: #e3b341 } .c { stroke: #56d364 }
  }
"""


def svg(title: str, width: int, height: int, body: list[str]) -> str:
    """Return a drawing as the text of a complete SVG file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = 'role="img" font-family="system-ui, sans-serif" font-size="13"'
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="6"/>'
    return "\n".join(
        [f"{head} {font}>", f"<title>{title}</title>", f"<style>{STYLE}</style>", paper, *body, "</svg>\n"]
    )


def box(kind: str, x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle."""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def turns() -> str:
    """Draw the fragment that is due at each global step for three numbers of fragments, with H = 6."""
    body, cell, steps = [words(16, 26, "fragment that is due at each global step, H = 6")], 34, 18
    rows = ((1, "P = 1: DiLoCo"), (3, "P = 3: Streaming DiLoCo"), (6, "P = H = 6: one in every step"))
    for row, (fragments, about) in enumerate(rows):
        table, y = Turns(6, fragments), 44 + row * 58
        body.append(words(16, y + 21, about))
        for step in range(steps):
            due, x = table.due(step), 210 + step * cell
            kinds = ("step", "back", "work", "wait", "gone", "last")
            body.append(box("none" if due < 0 else kinds[due], x, y, cell - 3, 32))
            body.append(words(x + cell / 2 - 1.5, y + 21, "" if due < 0 else str(due), anchor="middle"))
            if row == 2:
                body.append(words(x + cell / 2 - 1.5, y + 50, str(step), "small", "middle"))
    body.append(words(16, 210, "global step", "small"))
    return svg("The table of turns for one, three and six fragments", 840, 226, body)


class Pace(NamedTuple):
    """An island of the picture of a round."""

    name: str
    # The time of an inner step.
    step_s: float
    # The end of its first step in the picture.
    first_s: float


def a_round() -> str:
    """Draw one round: quorum, grace window, pulls, merge, broadcast; one island is too late for it."""
    islands = (Pace("island-0", 1.0, 0.5), Pace("island-1", 1.1, 0.9), Pace("island-2", 1.9, 1.75))
    config = ProtocolConfig(sync_every=6, num_fragments=6, quorum=1, overlap_steps=2)
    pull_s, merge_s, send_s = 0.25, 0.3, 0.3
    opens, quorum = 0.0, min(island.first_s for island in islands)
    grace = grace_window_s(config, step_s=1.0, quorum_s=quorum, sync_s=pull_s + merge_s + send_s)
    closes = quorum + grace
    spans = [("wait", "quorum", opens, quorum), ("wait", "grace", quorum, closes)]
    for kind, about, length in (("work", "pull", pull_s), ("work", "merge", merge_s), ("back", "send", send_s)):
        spans.append((kind, about, spans[-1][3], spans[-1][3] + length))
    arrives, body = spans[-1][3], [words(16, 26, "one round of one fragment, K = 1, tau = 2")]

    def x(seconds: float) -> float:
        return 110 + seconds * 188

    for row, island in enumerate(islands):
        y, end = 44 + row * 44, island.first_s
        body.append(words(16, y + 19, island.name))
        body.append(box("step", x(0), y, x(end) - x(0) - 3, 28))
        while end < 3.7:
            body.append(box("step", x(end), y, min(x(end + island.step_s), x(3.8)) - x(end) - 3, 28))
            end += island.step_s
        inside = island.first_s <= closes
        body.append(
            f'<circle cx="{x(island.first_s) - 1.5:.1f}" cy="{y + 14}" r="5" class="{"dot" if inside else "late"}"/>'
        )
        about = "report" if inside else "report: too late, so the island is not in this round"
        body.append(words(x(island.first_s) + 9, y + 18, about, "small" if inside else "small late"))
        adopts = next(t for t in _ends(island) if t >= arrives)
        body.append(f'<path class="line c" stroke-width="2" d="M{x(adopts) - 1.5:.1f} {y - 4}v36"/>')
    y = 44 + 3 * 44 + 6
    body.append(words(16, y + 19, "syncer"))
    for kind, about, begins, ends in spans:
        body.append(box(kind, x(begins), y, x(ends) - x(begins) - 2, 28))
        body.append(words((x(begins) + x(ends)) / 2, y + 18, about, "small", "middle"))
    lines = ("blue: inner steps, which never wait; a dot: the report after a step",)
    lines += ("green line: an island adopts the new value between two steps; the late island adopts it, too",)
    body += [words(110, y + 50 + 17 * i, line, "small") for i, line in enumerate(lines)]
    return svg(
        "One round: quorum, grace window, pulls, merge and broadcast, while islands continue to step", 840, 284, body
    )


def _ends(island: Pace) -> Iterator[float]:
    end = island.first_s
    while True:
        yield end
        end += island.step_s


def adoption() -> str:
    """Draw a parameter of an island that sends it, keeps training, and adopts the merged value in one of three ways."""
    sent_at, arrives_at, last = 4, 6, 9
    # The island changes its parameter by itself.
    local = [10 - 0.9 * step for step in range(arrives_at + 1)]
    merged, alpha = 7.6, 0.25
    now, sent = local[arrives_at], local[sent_at]
    ways = (
        ("overwrite: global", merged, "a"),
        ("blend: alpha local + (1 - alpha) global", alpha * now + (1 - alpha) * merged, "b"),
        ("rebase: global + (local now - local sent)", merged + now - sent, "c"),
    )

    def at(step: float, value: float) -> str:
        return f"{70 + step * 46:.1f} {250 - value * 21:.1f}"

    body = [words(16, 26, "one parameter of an island; tau = 2 steps pass while its fragment travels")]
    path = "L".join(at(step, value) for step, value in enumerate(local))
    body.append(f'<path class="line" stroke-width="2" d="M{path}"/>')
    for name, value, kind in ways:
        after = "L".join(at(arrives_at + i, value - 0.9 * i) for i in range(last - arrives_at + 1))
        body.append(f'<path class="line {kind}" stroke-width="2" d="M{at(arrives_at, now)}L{after}"/>')
        end_y = 250 - (value - 0.9 * (last - arrives_at)) * 21
        body.append(words(70 + last * 46 + 10, end_y + 4, name, "small"))
    for step, about in ((sent_at, "sent"), (arrives_at, "arrives")):
        body.append(f'<path class="line" stroke-dasharray="4 3" d="M{at(step, 0.6)}V40"/>')
        body.append(words(70 + step * 46, 256, about, "small", "middle"))
    body.append(f'<circle cx="{70 + arrives_at * 46}" cy="{250 - merged * 21:.1f}" r="5" class="dot"/>')
    body.append(words(70 + arrives_at * 46 + 10, 250 - merged * 21 - 8, "merged value", "small"))
    return svg("Three ways to adopt a merged value: overwrite, blend, rebase", 840, 270, body)


def wire() -> str:
    """Draw the bytes of a fragment of a million parameters in each format, as the codec counts them."""
    body, shape = [words(16, 26, "bytes of a fragment of 1,048,576 parameters, per island and direction")], (1024, 1024)
    for row, name in enumerate(get_args(Format)):
        size, y = encoded_size([shape], name), 42 + row * 34
        body += [words(16, y + 18, name), box("step", 100, y, size / 8000, 26)]
        body.append(words(108 + size / 8000, y + 18, f"{size / 1e6:.2f} MB", "small"))
    return svg("Sizes of a fragment in the formats of the wire", 840, 254, body)


def leases() -> str:
    """Draw the order of samples, the ranges that islands hold, and the ranges after an island has failed."""
    owners = ("merged", "merged", "island-0", "island-1", "island-2", "island-0", "", "", "")
    after = ("merged", "merged", "merged", "released", "island-2", "merged", "island-0", "", "")
    last = ("merged", "merged", "merged", "island-2", "merged", "merged", "island-0", "island-2", "")
    kinds = {"": "none", "merged": "back", "released": "gone"}
    body = [words(16, 26, "the samples of a run in their shuffled order, cut into ranges")]
    for row, (about, held) in enumerate((("leased", owners), ("island-1 fails", after), ("leased again", last))):
        y = 44 + row * 46
        body.append(words(16, y + 20, about))
        for index, who in enumerate(held):
            body.append(box(kinds.get(who, "step"), 120 + index * 78, y, 75, 30))
            body.append(words(120 + index * 78 + 37, y + 20, who, "small", "middle"))
    return svg("Ranges of samples: leased, merged, released, and leased again", 840, 188, body)


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return a line from the side that connects to the side that listens, with a head at its end."""
    angle = math.atan2(to_y - y, to_x - x)
    ends = [(to_x - 9 * math.cos(angle + turn), to_y - 9 * math.sin(angle + turn)) for turn in (-0.4, 0.4)]
    head = f"M{ends[0][0]:.1f} {ends[0][1]:.1f}L{to_x:.1f} {to_y:.1f}L{ends[1][0]:.1f} {ends[1][1]:.1f}"
    return f'<path class="line" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}{head}"/>'


def processes() -> str:
    """Draw the processes of a run by machine, and the ports where they listen."""
    body = []
    machines = (
        (16, 40, 230, 66, "machine of island-0"),
        (16, 124, 230, 66, "your laptop, behind a router"),
        (16, 208, 230, 128, "two hosts of one island"),
        (340, 40, 230, 296, "machine of the syncer"),
        (664, 40, 160, 296, "you"),
    )
    for x, y, width, height, about in machines:
        body += [box("none", x, y, width, height), words(x + 8, y + 18, about, "small")]
    islands = ((64, "diloco learner"), (148, "your loop with join"), (232, "host 0, the leader"), (290, "host 1"))
    for y, about in islands:
        body += [box("step", 24, y, 214, 34), words(131, y + 22, about, "", "middle")]
    servers = (
        ("wait", 64, "syncer", "50051, the open port"),
        ("work", 166, "metrics (option)", "9464, loopback"),
        ("work", 268, "page (option)", "8642, loopback"),
    )
    for kind, y, about, port in servers:
        body += [box(kind, 348, y, 214, 48), words(356, y + 20, about), words(356, y + 38, port, "small")]
    people = ((64, "diloco status"), (166, "Prometheus"), (268, "browser, ssh -L"))
    for y, about in people:
        body += [box("back", 672, y, 144, 48), words(744, y + 29, about, "", "middle")]
    body += [arrow(238, y, 348, to_y) for y, to_y in ((81, 76), (165, 88), (249, 100))]
    body.append(arrow(131, 290, 131, 266))
    body += [arrow(672, y, 562, y) for y in (88, 190, 292)]
    body.append(words(16, 24, "an arrow leads from the side that connects to the side that listens"))
    body.append(
        words(
            16,
            358,
            "Islands listen for nobody outside; the hosts of an island reach each other in its network.",
            "small",
        )
    )
    return svg("The processes of a run by machine, and the ports where they listen", 840, 372, body)


PICTURES: dict[str, Callable[[], str]] = {
    "turns.svg": turns,
    "round.svg": a_round,
    "adoption.svg": adoption,
    "wire.svg": wire,
    "leases.svg": leases,
    "processes.svg": processes,
}
