"""Drive Debian's chromium, headless, by its DevTools protocol over a pipe
(chromedevtools.github.io/devtools-protocol).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS = 60


class Chromium:
    """One page in a browser of its own, whose profile is in ``folder``.

    Raises:
        FileNotFoundError: there is no chromium; apt-get install chromium.
    """

    def __init__(self, folder: Path) -> None:
        program = shutil.which("chromium")
        if program is None:
            raise FileNotFoundError("no chromium: apt-get install chromium")
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}"]  # fmt: skip
        # The browser requires the ends of the pipe at file descriptors 3 and 4.
        shell = f'exec 3<&{commands} 4>&{answers}; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *flags], pass_fds=(commands, answers), stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        self._answers = open(self._from, "rb")
        self._number = 0
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)
        self._answers.close()
        self._process.terminate()
        self._process.wait(SECONDS)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return the browser's answer. Keep the events that arrive before it in ``events``."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "chromium has ended"
            message += byte
        return dict(json.loads(message))

    def open(self, path: Path) -> None:
        """Open the file and wait until its scripts have drawn."""
        before = self._loads()
        self.ask("Page.navigate", url=path.as_uri())
        while self._loads() == before:
            self.events.append(self._next())
        self.settle()

    def _loads(self) -> int:
        """Return how many pages have loaded. Earlier ones tell nothing of the next."""
        return sum(event.get("method") == "Page.loadEventFired" for event in self.events)

    def settle(self) -> None:
        """Wait until two frames have been drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, expression: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **parameters: Any) -> None:
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **parameters)

    def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.settle()

    def picture(self, path: Path) -> None:
        """Return a PNG of the whole page."""
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
