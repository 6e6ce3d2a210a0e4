"""The Grafana dashboard and the alert rules fit the metrics of a real server, and a real Prometheus takes them."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.patience import PATIENCE
from tests.support.serving import Live, builtin, serving

FOLDER = Path(__file__).parents[2] / "recipes" / "monitoring"
GRAFANA = json.loads((FOLDER / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in GRAFANA["panels"] for target in panel["targets"]]
ALERTS = re.findall(
    r"expr: (?:>-\n)?((?:.(?!\n        \w+:)|\n(?!        \w+:))+.)", (FOLDER / "alerts.yml").read_text()
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin()) as found:
        for _ in range(3):
            body = {"model": "code", "prompt": "def f(x):", "max_tokens": 16, "ignore_eos": True}
            httpx.post(f"{found.url}/v1/completions", json=body).raise_for_status()
        yield found


def test_every_metric_that_is_named_exists(live: Live) -> None:
    there = set(re.findall(r"^(outrider:\w+)", httpx.get(f"{live.url}/metrics").text, re.M))
    assert len(EXPRESSIONS) > 15
    assert len(ALERTS) == 7
    named = {name for text in [*EXPRESSIONS, *ALERTS] for name in re.findall(r"outrider:\w+", text)}
    assert named
    assert named <= there, f"no such metrics: {named - there}"


def test_panels_have_places_and_numbers_of_their_own() -> None:
    panels = GRAFANA["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for p in panels
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("command", ["check config prometheus.yml", "test rules alerts.test.yml"])
def test_promtool_takes_them(command: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(["promtool", *command.split()], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_real_prometheus_reads_the_server_and_answers_every_panel(live: Live, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = (FOLDER / "prometheus.yml").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{live.port}")
    (tmp_path / "prometheus.yml").write_text(config.replace("15s", "1s"))
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    server = subprocess.Popen(
        ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.path=data"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        api = f"http://127.0.0.1:{port}/api/v1"

        def query(text: str) -> Any:
            answer = httpx.get(f"{api}/query", params={"query": text}).raise_for_status().json()
            assert answer["status"] == "success", f"{text}: {answer}"
            return answer["data"]["result"]

        _wait(lambda: query("outrider:generation_tokens_total"))
        for expression in EXPRESSIONS:
            query(_grafana(expression))
        [tokens] = query('sum(outrider:generation_tokens_total{model_name=~".*"})')
        assert float(tokens["value"][1]) == 48
        groups = httpx.get(f"{api}/rules").json()["data"]["groups"]
        _wait(lambda: all(r["health"] == "ok" for r in _rules(api)))
        assert sum(len(group["rules"]) for group in groups) == len(ALERTS)
        assert [r["name"] for r in _rules(api) if r["state"] == "firing"] == []
    finally:
        server.terminate()
        server.wait(PATIENCE)


def _rules(api: str) -> list[dict[str, Any]]:
    return [rule for group in httpx.get(f"{api}/rules").json()["data"]["groups"] for rule in group["rules"]]


def _grafana(expression: str) -> str:
    """The expression with Grafana's variables filled in."""
    return expression.replace("$model", ".*").replace("$__rate_interval", "1m")


def _wait(ready: Any, seconds: float = PATIENCE) -> None:
    for _ in range(int(seconds / 0.5)):
        try:
            if ready():
                return
        except (httpx.HTTPError, AssertionError):  # 503 while it starts
            pass
        time.sleep(0.5)
    raise AssertionError("Prometheus did not read the server")
