"""The recipes for a service: systemd takes the unit, and nginx puts TLS, streams and limits before a real server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from outrider.cli.main import app
from outrider.serve.options import ServeOptions
from tests.support.patience import PATIENCE
from tests.support.serving import Live, builtin, serving

FOLDER = Path(__file__).parents[2] / "recipes" / "service"
UNIT = (FOLDER / "outrider.service").read_text()
NGINX = (FOLDER / "nginx.conf").read_text()
UVICORN = 5  # seconds that the server waits for connections after its drain
BURST = 20


def of_unit(name: str) -> str:
    return re.findall(rf"^{name}=(.*)$", UNIT, re.M)[-1]


def options() -> dict[str, Any]:
    """What our own command line makes of the unit's command."""
    _, command, *words = shlex.split(of_unit("ExecStart"))
    return typer.main.get_command(app).commands[command].make_context(command, words).params  # type: ignore[attr-defined]


def test_the_unit_and_the_proxy_agree_with_the_server() -> None:
    given, usual = options(), ServeOptions(model="m")
    assert f"server {given['host']}:{given['port']};" in NGINX
    assert int(of_unit("TimeoutStopSec")) > given["shutdown_timeout"] + UVICORN
    assert int(re.findall(r"proxy_read_timeout (\d+)s", NGINX)[0]) > given["request_timeout"]
    assert int(re.findall(r"client_max_body_size (\d+)m", NGINX)[0]) << 20 == usual.body_bytes
    assert "proxy_buffering off;" in NGINX


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "outrider.service"
    file.write_text(UNIT.replace("/opt/outrider/.venv/bin/outrider", f"{sys.executable} -m outrider"))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)  # 2.0 of 10: fails if it is more exposed
    assert done.returncode == 0, done.stdout[-200:] + done.stderr


class Stub(BaseHTTPRequestHandler):
    """An upstream that sends one event, and the next one only when the client has told that it has the first."""

    protocol_version = "HTTP/1.1"
    seen = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.chunk(b"data: 1\n\n")
        self.chunk(b"data: 2\n\n" if self.seen.wait(PATIENCE) else b"data: the first one was held back\n\n")
        self.chunk(b"")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, *_: Any) -> None:
        pass


@dataclass
class Proxy:
    """plain, secure: the ports of nginx. verify: trusts its certificate."""

    plain: int
    secure: int
    verify: ssl.SSLContext

    def client(self, address: str = "127.0.0.1") -> httpx.Client:
        transport = httpx.HTTPTransport(local_address=address, verify=self.verify)
        return httpx.Client(transport=transport, base_url=f"https://localhost:{self.secure}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(builtin()) as found:
        yield found


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, live: Live) -> Iterator[Proxy]:
    """nginx with the recipe; only addresses, files and the clock of the rate are the test's. /stub is the stub."""
    if shutil.which("nginx") is None or shutil.which("openssl") is None:
        pytest.skip("nginx or openssl is not installed")
    folder = tmp_path_factory.mktemp("nginx")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", "privkey.pem", "-out", "fullchain.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=stub.serve_forever, daemon=True).start()
    plain, secure = free_port(), free_port()
    site = NGINX
    for ours, tests in {
        "127.0.0.1:8000": f"127.0.0.1:{live.port}",
        "listen 80;": f"listen 127.0.0.1:{plain};",
        "listen 443 ": f"listen 127.0.0.1:{secure} ",
        "llm.example.org": "localhost",
        "/etc/ssl/outrider": str(folder),
        "rate=5r/s": "rate=1r/m",  # so that only the burst passes, however slow this machine is
        "location / {": f"location /stub {{ proxy_pass http://127.0.0.1:{stub.server_port}; }}\n    location / {{",
    }.items():
        assert ours in site, ours
        site = site.replace(ours, tests)
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi"))
    temporary += "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in ("uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"pid {folder}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}{site}\n}}\n"
    )
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    done = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with subprocess.Popen([*command, "-g", "daemon off;"]) as nginx:
        try:
            while nginx.poll() is None:
                with socket.socket() as s:
                    if s.connect_ex(("127.0.0.1", secure)) == 0:
                        break
            yield Proxy(plain, secure, ssl.create_default_context(cafile=str(folder / "fullchain.pem")))
        finally:
            nginx.terminate()
            nginx.wait(PATIENCE)
            stub.shutdown()


def test_an_event_passes_before_the_next_one_exists(proxy: Proxy) -> None:
    with proxy.client() as client, client.stream("GET", "/stub") as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert next(lines) == "data: 1"
        Stub.seen.set()
        assert next(lines) == "data: 2"


def test_a_stream_has_the_text_that_the_server_gives(proxy: Proxy, live: Live) -> None:
    body = {"model": "code", "prompt": "def f(x):", "max_tokens": 48, "ignore_eos": True, "seed": 7, "stream": True}
    with proxy.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        through = [line for line in answer.iter_lines() if line.startswith("data: {")]
    direct = httpx.post(f"{live.url}/v1/completions", json={**body, "stream": False}).json()
    pieces = [choice["text"] for line in through for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == direct["choices"][0]["text"]
    assert len(through) > 4


def test_plain_http_is_sent_to_tls(proxy: Proxy) -> None:
    answer = httpx.get(f"http://localhost:{proxy.plain}/v1/models")
    assert (answer.status_code, answer.headers["location"][:8]) == (301, "https://")


def test_bodies_and_watchers_are_limited(proxy: Proxy) -> None:
    with proxy.client() as client:
        assert client.post("/v1/completions", content=b" " * ((4 << 20) + 1)).status_code == 413
        assert client.get("/metrics").status_code == 200
    with proxy.client("127.0.0.2") as stranger:
        assert [stranger.get(path).status_code for path in ("/metrics", "/dashboard", "/health")] == [403] * 3


def test_an_address_that_asks_too_often_waits(proxy: Proxy) -> None:
    with proxy.client("127.0.0.3") as hasty:
        answers = [hasty.get("/v1/models") for _ in range(BURST + 5)]
    assert [a.status_code for a in answers] == [200] * (BURST + 1) + [429] * 4
    assert answers[-1].json()["error"]["code"] == "rate_limited"
    assert answers[-1].headers["retry-after"] == "1"
