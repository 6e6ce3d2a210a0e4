"""Node and a real Chromium for the tests of the pages. Where one is absent, its tests are skipped."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

from outrider.serve.page import ASSETS
from outrider_lab.pages import explained

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages' modules in a folder where node takes them for ES modules."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    folder = tmp_path_factory.mktemp("modules")
    for file in (*ASSETS.glob("*.js"), *explained.ASSETS.glob("*.js")):
        shutil.copy(file, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


@pytest.fixture(scope="session")
def javascript(modules: Path) -> Callable[[list[tuple[str, str, list[Any]]]], list[Any]]:
    """Call functions of the modules: [(module, function, arguments), ...] -> results."""
    code = (
        "import fs from 'node:fs'; const out = []; let n = 0;"
        "for (const [module, name, args] of JSON.parse(fs.readFileSync(0, 'utf8'))) {"
        "  const found = await import(`./${module}.js`); out.push(found[name](...args)); }"
        "console.log(JSON.stringify(out));"
    )

    def call(cases: list[tuple[str, str, list[Any]]]) -> list[Any]:
        done = subprocess.run(
            ["node", "--input-type=module", "-e", code],
            input=json.dumps(cases),
            capture_output=True,
            text=True,
            cwd=modules,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium. While it is open, this thread has a running event loop, which other tests must not find."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


class Visit:
    """A page in a context of its own. problems: errors and warnings of its console."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.context.set_default_timeout(1000 * PATIENCE)
        self.page, self.problems, self.asked = self.context.new_page(), list[str](), list[str]()
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.context.close()
        if kind is None:
            assert self.problems == []


@pytest.fixture
def visit(browser: Any) -> Callable[..., Visit]:
    return lambda url, **options: Visit(browser, url, **options)


def violations(page: Any) -> list[str]:
    """What axe finds, in short. The page's context needs bypass_csp."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return [f"{v['id']}: {node['html'][:160]} {node['failureSummary'][:200]}" for v in found for node in v["nodes"][:3]]
