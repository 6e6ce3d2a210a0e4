"""When a browser first paints the chat page: `python -m benchmarks.first_paint URL`. Needs playwright and a Chromium in the path.

Each visit has a context of its own, so nothing is cached and the process of the page is new. Milliseconds since the navigation.
"""

from __future__ import annotations

import argparse
import shutil
from statistics import median

from playwright.sync_api import sync_playwright

PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="a page of a server that runs, such as http://127.0.0.1:8000/")
    parser.add_argument("--visits", type=int, default=20)
    args = parser.parse_args()
    took = list[float]()
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for _ in range(args.visits + 1):
            page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            page.goto(args.url)
            page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length")
            took.append(page.evaluate(PAINT))
            page.context.close()
    took = sorted(took[1:])  # the first one also starts the browser
    print(f"{len(took)} visits: median {median(took):.0f} ms, {took[0]:.0f} to {took[-1]:.0f}")


if __name__ == "__main__":
    main()
