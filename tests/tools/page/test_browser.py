"""The page in a real browser, Chromium without a window: as the run grows, by mouse, by keyboard, in any width."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_jax.protocol.watch.alarms import Alarm
from tests.limits import HANGS_S
from tests.runtime.helpers import SLOW_STEP_S, kill_processes, processes_of, start, wait_for, write_config
from tests.sockets import free_port
from tests.tools.page.browser import CHROMIUM, Browser
from tests.tools.page.made import append, lost, made_run, one_round, row, status, step
from tests.tools.page.test_server import served

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here: install Debian's package chromium"),
]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    made = Browser(tmp_path / "profile")
    try:
        yield made
        assert made.problems == []
    finally:
        made.close()


def shows(browser: Browser, place: str, words: str) -> None:
    browser.until(f"document.querySelector({place!r})?.innerText.includes({words!r})")


def test_a_run_is_shown_and_what_happens_to_it(browser: Browser, tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run<b>")
    with served(folder) as server:
        browser.size(1280, 900)
        browser.open(server.url)
        shows(browser, "h1", "run<b>")
        shows(browser, "#state", "running")
        shows(browser, "#alarm-list", "None")
        shows(browser, "#island-table", "training")
        shows(browser, "#events", "b joined: incarnation 1")
        shows(browser, "#samples", "50.0%")
        gone = row("b", state="gone", condition="gone", reason="no connection")  # b is killed
        told = [Alarm("gone", "b", "b is disconnected: no connection").as_dict()]
        (folder / "status.json").write_text(json.dumps(status(learners=[row("a"), gone], alarms=told)))
        append(folder, step("b", 5.25, 2, 30), lost("b", 6.0), *one_round(2, 7.0))
        shows(browser, "#alarm-list", "b is disconnected")
        shows(browser, "#alarm-list", "look at its machine")
        shows(browser, "#events", "b disconnected: lost")
        disabled = "[...document.querySelectorAll('.drain')].map(button => button.disabled)"
        assert browser.until(f"({disabled})[1] && {disabled}") == [False, True]
        browser.until("document.querySelectorAll('#timeline .round').length === 2")
        click = "dispatchEvent(new Event('click', {bubbles: true}))"
        browser.run(f"document.querySelector('#timeline .round rect').{click}")
        words = "Round 1, fragment 2, merged: quorum 1.00 s, grace 1.00 s, pulls 500 ms, merge 500 ms, broadcast 250 ms"
        shows(browser, "#picked", words)
        shows(browser, "#picked", "Late: b by 1.75 s.")
        browser.run("document.querySelector('[aria-label=\"Log of a\"]').click()")
        shows(browser, "#log", "<b>last line</b>")


def test_a_run_without_records_is_no_skeleton_of_headings(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "late"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: mine\n")
    with served(folder) as server:
        browser.size(1280, 900)
        browser.open(server.url)
        shows(browser, "h1", "mine")
        heads = "[...document.querySelectorAll('h2')].filter(e => e.offsetParent).length"
        assert browser.run("document.querySelector('main').innerText.trim()") == "waiting for the first record"
        assert browser.run(heads) == 0
        append(folder, step("a", 1.0, 1, 10))
        browser.until(f"{heads} > 5")
        assert "waiting for the first" not in browser.run("document.querySelector('main').innerText")


def test_the_keyboard_reaches_everything(browser: Browser, tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    append(folder, *one_round(2, 7.0))
    with served(folder) as server:
        browser.size(1280, 900)
        browser.open(server.url)
        shows(browser, "#island-table", "training")
        seen = []
        for _ in range(40):
            browser.press("Tab")
            at = "document.activeElement"
            seen.append(browser.run(f"{at}.id || {at}.getAttribute('aria-label') || {at}.innerText || {at}.name"))
            if seen[-1] == "timeline":
                break
        assert seen[0] == "Skip to the islands" and {"Log of a", "Let a leave", "timeline"} <= set(seen), seen
        browser.press("ArrowLeft")
        shows(browser, "#picked", "Round 2,")
        browser.press("ArrowLeft")
        shows(browser, "#picked", "Round 1,")
        browser.run("document.querySelector('[aria-label=\"Let a leave\"]').focus()")
        browser.press("Enter")
        shows(browser, "dialog[open]", "Let a leave?")
        # The button that keeps the island has the focus.
        browser.press("Enter")
        browser.until("!document.querySelector('dialog[open]')")
        assert browser.run("document.activeElement.getAttribute('aria-label')") == "Let a leave"
        assert browser.run("document.getElementById('drained').innerText") == ""
        nodes = browser.ask("Accessibility.getFullAXTree")["nodes"]
        named = {(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node["ignored"]}
        roles = ["rowheader", "row", "columnheader", "progressbar", "region", "heading", "radio", "status", "image"]
        assert {*roles} <= {role for role, _ in named}
        assert ("button", "Log of a") in named and ("region", "Rounds") in named
        bare = [role for role, name in named if role in ("button", "image", "region", "radio", "combobox") and not name]
        assert bare == []


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_every_width(dark: bool, browser: Browser, tmp_path: Path) -> None:
    names = [made_run(tmp_path / name, learners=[row(f"island-{n}") for n in range(16)]) for name in ("one", "two")]
    with served(*names) as server:
        for width in (360, 768, 1280, 2560):
            browser.size(width, 900, dark=dark)
            browser.open(server.url)
            shows(browser, "#runs-table", "global steps")
            browser.until("document.querySelectorAll('#island-table tbody tr').length === 16")
            assert browser.run("document.documentElement.scrollWidth") <= width
            colours = browser.run(
                "[document.body, document.querySelector('.soft')].map(e => getComputedStyle(e).color)"
            )
            ground = browser.run("getComputedStyle(document.body).backgroundColor")
            assert all(contrast(colour, ground) >= 4.5 for colour in colours), (colours, ground)


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminances, as WCAG 2 has it."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[4:-1].split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_without_the_token_it_says_what_to_do(browser: Browser, tmp_path: Path) -> None:
    with served(made_run(tmp_path / "run")) as server:
        browser.open(server.url.partition("#")[0])
        shows(browser, "#link", "open the whole address")
        assert "run" not in browser.run("document.querySelector('h1').innerText")
        assert all("403" in problem for problem in browser.problems)
        browser.problems.clear()


@pytest.mark.slow
def test_a_real_run_whose_island_and_syncer_are_killed_while_the_page_is_open(browser: Browser, tmp_path: Path) -> None:
    run_dir, page = tmp_path / "run", f"127.0.0.1:{free_port()}"
    changes = {"train": {"steps": 100_000}, "syncer": {"page": page}, "islands": {"restart_delay_s": 5.0}}
    process = start("train", write_config(tmp_path, **changes), "--run-dir", run_dir, "--quiet", step_s=SLOW_STEP_S)

    def kill(word: str) -> None:
        os.kill(next(pid for pid, words in processes_of(run_dir).items() if word in words), signal.SIGKILL)

    try:
        token = wait_for(lambda: (run_dir / "page.token").exists() and (run_dir / "page.token").read_text(), "a token")
        wait_for(lambda: "the page is at" in (run_dir / "logs/syncer.log").read_text(), "the page")
        assert (run_dir / "page.token").stat().st_mode & 0o77 == 0
        browser.open(f"http://{page}/#{token.strip()}")
        shows(browser, "#state", "running")
        # Rounds are drawn up to their broadcasts.
        browser.until("document.querySelectorAll('#timeline .ph4').length > 3")
        kill("island-1")
        shows(browser, "#alarm-list", "island-1 is disconnected")
        browser.until("runs[0].events.filter(e => e.kind === 'joined' && e.who[0] === 'island-1').length === 2")
        shows(browser, "#alarm-list", "None")
        # The page ends with the syncer, and returns at the same address.
        kill("diloco_jax syncer")
        shows(browser, "#events", "restarted")
        shows(browser, "#state", "running")
        times = browser.until("runs[0].times")
        assert times["islands"]["island-1"]["away"] > 4.9 and times["goodput"] < 1
        browser.run("document.querySelector('[aria-label=\"Let island-0 leave\"]').click()")
        browser.run("document.querySelector('dialog .bad').click()")
        shows(browser, "#drained", "island-0 leaves after its current step")
        shows(browser, "#events", "island-0 left: drained")
        # The console has errors of broken connections.
        browser.problems.clear()
    finally:
        process.terminate()
        process.communicate(timeout=HANGS_S)
        kill_processes(run_dir)
