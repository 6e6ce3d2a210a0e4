"""The lines that a reader types first, in a new environment: README.md, the first ten minutes, the install page.

The lines are read from the pages. A copy of the tracked files stands in for the repository, and a free port for the usual one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE

pytestmark = pytest.mark.long  # two installations, and a measurement
ROOT = Path(__file__).parents[2]
LEFT_OUT = {
    r"^make test\b": "the suite itself",
    r"\./my-|my-prompts": "files of the reader",
    r"^make demo\b.*|^git clone|^source": "run once, for README.md",
}
SERVER = r"^outrider serve\b"
TALK = r"^outrider (run|chat)\b"  # a conversation: the reader types


def blocks(page: str, *sections: str) -> Iterator[tuple[str, str]]:
    """(language, text) of the fenced blocks in these sections of a page, in their order."""
    text = (ROOT / page).read_text()
    for section in sections:
        found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert found, f"{page} has no section {section}"
        yield from re.findall(r"^```(\w*)\n(.*?)^```", found[1], re.M | re.S)


def lines(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def environment(home: Path) -> dict[str, str]:
    """That of a new user: a home of its own, and no trace of the environment that runs the tests."""
    own = str(Path(sys.executable).parent)
    kept = {k: v for k, v in os.environ.items() if not re.match(r"(PYTHON|XDG_|OUTRIDER|VIRTUAL_ENV|COLUMNS)", k)}
    path = [folder for folder in kept["PATH"].split(os.pathsep) if folder != own]
    home.mkdir(exist_ok=True)
    new = {"HOME": str(home), "PATH": os.pathsep.join(path), "PIP_CACHE_DIR": str(home / "pip"), "BROWSER": "true"}
    return kept | new | {"PIP_RETRIES": "0"}  # an index that cannot be reached is left at once


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a repository of the tracked files, as they are now."""
    folder = tmp_path_factory.mktemp("install")
    repository = folder / "repository"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, listed.split("\0")):
        if (ROOT / file).exists():
            (repository / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, repository / file)
    author = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "-A", "-f"], [*author, "commit", "-q", "-m", "as it is"]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    return folder


class Shell:
    """A bash that goes on from line to line: its folder and its environment stay."""

    def __init__(self, place: Path, home: str) -> None:
        self.place, self.env, self.begin = place, environment(place / home), f"cd {place}"

    def script(self, line: str) -> str:
        return f"set -e\n{self.begin}\n{line}"

    def run(self, line: str) -> str:
        """What it prints. A line that changes the shell is said again before all later ones."""
        line = line.replace("URL-OF-THIS-REPOSITORY", str(self.place / "repository"))
        line = line.replace("/opt/outrider", str(self.place / "opt"))
        piped = f"printf 'Hi\\n' | {line}" if re.match(TALK, line) else line
        print(f"$ {piped}", flush=True)
        done = subprocess.run(
            ["bash", "-c", self.script(piped)], env=self.env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        print(done.stdout, flush=True)
        assert done.returncode == 0, f"{piped}\n{done.stdout[-4000:]}"
        if moved := re.search(r"\bcd \S+|^source .*", line):
            self.begin += f"\n{moved[0]}"
        return done.stdout

    def serve(self, line: str, port: int) -> subprocess.Popen[bytes]:
        """The server of a line, when it answers."""
        line = re.sub(r"\s*(#.*)?$", f" --port {port}", line, count=1)
        print(f"$ {line}", flush=True)
        server = subprocess.Popen(["bash", "-c", self.script(f"exec {line}")], env=self.env)

        for _ in range(int(PATIENCE)):
            assert server.poll() is None, f"{line} ended with {server.returncode}"
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    return server
            except httpx.TransportError:
                time.sleep(1)
        server.kill()
        pytest.fail(f"{line} does not answer")

    def read(self, every: Iterator[tuple[str, str]]) -> None:
        """All blocks. A server runs until the blocks end, or another one begins."""
        server, port = None, free_port()
        try:
            for language, text in every:
                if language == "python":
                    (self.place / "snippet.py").write_text(text)  # beside the clone, whose name is that of the package
                    self.run(f"python {self.place / 'snippet.py'}")
                    continue
                for line in lines(text):
                    if any(re.search(pattern, line) for pattern in LEFT_OUT):
                        continue
                    if re.match(SERVER, line):
                        server = self.serve(line, port)
                    else:
                        self.run(line.replace(":8000", f":{port}"))
        finally:
            if server is not None:
                server.send_signal(signal.SIGINT)
                assert server.wait(PATIENCE) in (0, 130)


@pytest.fixture(scope="module")
def shell(place: Path) -> Shell:
    """After the first lines of README.md: the installation, and the demo."""
    shell = Shell(place, "home")
    for _, text in blocks("README.md", "Two commands"):
        for line in lines(text):
            if not line.startswith("make test"):
                shell.run(line)
    return shell


@pytest.mark.parametrize(
    ("page", "sections"),
    [
        ("README.md", ["See it", "Use"]),
        ("docs/start.md", ["2. Generate", "3. From Python", "4. Does it help you?", "5. Serve", "6. Look inside"]),
    ],
)
def test_the_first_lines_of_a_reader_run(shell: Shell, page: str, sections: list[str]) -> None:
    shell.read(blocks(page, *sections))


def test_the_install_page(place: Path) -> None:
    shell = Shell(place, "service")
    for line in lines(next(blocks("docs/guides/operate.md", "Install"))[1]):
        shell.run(line)
    shell.run(".venv/bin/outrider generate 'def f(x):' -n 8")
    shell.run("du -sm .venv")
    server = shell.serve(".venv/bin/outrider serve builtin:code", free_port())
    server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE) in (0, 130)
