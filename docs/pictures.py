"""Make the pictures of docs/images: views of the explainer and of the dashboard, in Chromium.

    python docs/pictures.py [--only explain dashboard]

Needs playwright (`pip install '.[dev]'`) and a Chromium in the path. The dashboard shows a real server at work, so let
the machine do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDTH = 1100
SPECULATION = {"method": ["suffix", "draft_model"], "model": "builtin:code-draft"}


def explain(browser: Any) -> None:
    """The sections of the explainer, on the built-in run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "explain.html"
        subprocess.run([sys.executable, "-m", "outrider", "explain", "-o", str(file), "--no-open"], check=True)
        for scheme, views in (("light", ("run", "speed", "shape", "attention")), ("dark", ("lossless",))):
            page = browser.new_context(viewport={"width": WIDTH, "height": 820}, color_scheme=scheme).new_page()
            page.goto(file.as_uri())
            page.wait_for_selector("body[data-ready=yes]")
            page.evaluate("document.querySelector('nav').style.setProperty('position', 'static')")
            page.get_by_role("radio", name="With noise").click()
            page.locator("#run-stage").focus()
            for key in ("Home", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowLeft"):
                page.keyboard.press(key)
            page.evaluate("document.activeElement.blur()")
            page.wait_for_timeout(400)
            for view in views:
                where = "#run-stage" if view == "run" else f"#{view}-body"
                page.locator(where).screenshot(path=IMAGES / f"explain-{view}.png")


def dashboard(browser: Any) -> None:
    """The dashboard of a server at work."""
    sys.path.insert(0, str(IMAGES.parents[1]))
    from benchmarks.scale_up import synthetic

    command = [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        str(synthetic("160M")),
        "--port",
        "0",
        "--served-model-name",
        "code",
    ]
    with subprocess.Popen(
        [*command, "--speculative-config", json.dumps(SPECULATION)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = next(m[1] for line in server.stdout if (m := re.search(r"health: (http://[\w.:]+)/", line)))
        stop = threading.Event()
        client = threading.Thread(target=_ask, args=(url, stop))
        try:
            page: Page = browser.new_context(viewport={"width": WIDTH, "height": 900}).new_page()
            page.goto(f"{url}/dashboard")
            client.start()
            page.wait_for_timeout(65_000)
            page.screenshot(path=IMAGES / "dashboard.png", clip={"x": 0, "y": 272, "width": WIDTH, "height": 424})
        finally:
            stop.set()
            client.join()
            server.terminate()


def _ask(url: str, stop: threading.Event) -> None:
    """One client, one request after the other."""
    number = 0
    while not stop.is_set():
        body = {"model": "code", "prompt": f"def read_{number}(path):\n", "max_tokens": 48}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=120).read()
        number += 1


def main() -> None:
    kinds = {"explain": explain, "dashboard": dashboard}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=kinds, default=list(kinds))
    chosen = parser.parse_args().only
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("there is no Chromium in the path; Debian has it as the package chromium")
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=program, args=FLAGS)
        for kind in chosen:
            kinds[kind](browser)
        browser.close()


if __name__ == "__main__":
    main()
