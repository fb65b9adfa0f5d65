"""Opens a built site in headless Chromium, page by page, and returns what the pages show.

The site's server adds a script to each page that records its errors; `browser.js` opens the pages
in a frame of the requested width and sends its report to the server. So Chromium needs no driver.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = (
    '<!doctype html><link rel="icon" href="data:,"><body>'
    f"<script>{Path(__file__).with_suffix('.js').read_text()}</script>"
)
# Runs before every script of a page.
RECORDER = """<script>
window.errors = [];
console.error = (...words) => errors.push(words.join(" "));
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
addEventListener(
  "error",
  (event) => errors.push(event.message || `cannot load ${event.target.src || event.target.href}`),
  true,
);
</script>"""


def report(
    site: Path, profile: Path, widths: Sequence[int], words: Sequence[str], limit_s: float = 900
) -> dict[str, Any]:
    """Returns `views`, one per page and width; `missing`, the words that the site's search does
    not find; `refused`, the requests for files that do not exist.

    `profile` is an empty folder for Chromium.
    """
    paths = ["/" + path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    request = {"paths": paths, "widths": widths, "words": words}
    with Server(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        server.driver_request = request
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/driver"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        browser = subprocess.Popen(
            [str(CHROMIUM), *flags, "--remote-debugging-port=0", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            found = server.reports.get(timeout=limit_s)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
        return found | {"refused": server.refused}


class Server(ThreadingHTTPServer):
    """A server with what the driver asks for, and its report."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.driver_request: dict[str, Any] = {}
        self.reports = Queue[dict[str, Any]]()
        self.refused = list[str]()


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, its pages with the recorder, and the driver."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if self.path == "/driver":
            self.reply(DRIVER, "text/html")
        elif self.path == "/request":
            self.reply(json.dumps(self.server.driver_request), "application/json")
        elif (page := path / "index.html" if path.is_dir() else path).suffix == ".html":
            self.reply(page.read_text().replace("<head>", f"<head>{RECORDER}", 1), "text/html")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self.server.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.reply("", "text/plain")

    def reply(self, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, *words: Any, **others: Any) -> None:
        self.server.refused.append(self.path)
        super().send_error(code, *words, **others)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""
