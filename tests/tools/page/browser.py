"""Chromium without a window, driven through two pipes (Chrome DevTools Protocol), without a driver or a library."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe --no-first-run"


class Browser:
    """One page in a separate browser.

    Args:
        folder: for its profile.
    """

    def __init__(self, folder: Path) -> None:
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        # the browser reads commands from its file 3 and writes answers to its file 4
        words = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={folder}", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", *words]
        self._process = subprocess.Popen(shell, pass_fds=(commands, answers), stderr=subprocess.DEVNULL)
        for each in (commands, answers):
            os.close(each)
        self._number, self._rest, self._session = 0, b"", ""
        # Errors on the page's console.
        self.problems: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            line, found, self._rest = self._rest.partition(b"\0")
            if not found:
                self._rest = line + (data := os.read(self._in, 1 << 20))
                assert data, "the browser has ended"
                continue
            answer = json.loads(line)
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(answer["params"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the page a size, and the night."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Go to a page."""
        self.ask("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, timeout_s: float = 60.0) -> Any:
        """Return the value of an expression once it is true."""
        ends_s = time.monotonic() + timeout_s
        while time.monotonic() < ends_s:
            # A page that loads has no result yet.
            with contextlib.suppress(AssertionError):
                if value := self.run(script):
                    return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}; {self.problems}; {self.run('document.body.innerText')}")

    def press(self, key: str) -> None:
        """Press and release a key."""
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def picture(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait()
