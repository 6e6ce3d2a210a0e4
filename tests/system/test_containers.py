"""The container recipes, without a container engine: commands, probes, ports, mounts and schemas."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
import pytest
import typer

from outrider.cli.main import app
from tests.support.serving import builtin, serving

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "containers"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
MANIFESTS = {d["kind"]: d for d in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}
POOL = {d["kind"]: d for d in yaml.safe_load_all((FOLDER / "inferencepool.yaml").read_text())}
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
POD = MANIFESTS["Deployment"]["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
UVICORN = 5  # seconds that the server waits for connections after its drain


def image_command() -> list[str]:
    return json.loads(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.M)[-1])


COMMANDS = {"image": image_command(), "compose": COMPOSE["services"]["server"]["command"], "pod": CONTAINER["args"]}


def options_of(words: list[str]) -> dict[str, Any]:
    """What our own command line makes of them. Raises an error that names the option which does not exist."""
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    return command.make_context(words[0], list(words[1:])).params


@pytest.mark.parametrize("where", COMMANDS)
def test_our_command_line_takes_them(where: str) -> None:
    found = options_of(COMMANDS[where])
    assert found["host"] == "0.0.0.0"
    assert found["port"] == 8000
    assert json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.M)[-1]) == ["outrider"]


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        options_of([*COMMANDS["pod"], "--no-such-option"])


def test_ports_and_labels_agree() -> None:
    [port] = CONTAINER["ports"]
    assert port["containerPort"] == options_of(COMMANDS["pod"])["port"]
    assert int(re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.M)[0]) == port["containerPort"]
    labels = POD["metadata"]["labels"]
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert MANIFESTS["Service"]["spec"]["selector"].items() <= labels.items()
    assert MANIFESTS["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    pool = POOL["InferencePool"]["spec"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert pool["targetPorts"] == [{"number": port["containerPort"]}]
    [backend] = POOL["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", POOL["InferencePool"]["metadata"]["name"])
    assert options_of(COMMANDS["pod"])["metrics_prefix"] == "vllm"  # the names that the endpoint picker reads


def test_the_secret_is_the_servers_key() -> None:
    params = typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    assert [one["name"] for one in CONTAINER["env"]] == [p.envvar for p in params if p.name == "api_key"]
    assert CONTAINER["env"][0]["valueFrom"]["secretKeyRef"]["optional"] is True  # a pod starts without it, too


def test_there_is_time_to_drain() -> None:
    sleep, seconds = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    patience = options_of(COMMANDS["pod"])["shutdown_timeout"] + UVICORN
    assert POD["spec"]["terminationGracePeriodSeconds"] >= int(seconds) + patience
    grace = COMPOSE["services"]["server"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= options_of(COMMANDS["compose"])["shutdown_timeout"] + UVICORN


def test_a_real_server_answers_the_probes() -> None:
    health = re.findall(r"urlopen\('http://127.0.0.1:(\d+)(/\w+)'", DOCKERFILE)
    assert health == [("8000", "/health")]
    with serving(builtin()) as live:
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = CONTAINER[name]["httpGet"]
            assert probe["port"] == CONTAINER["ports"][0]["name"]
            assert httpx.get(live.url + probe["path"]).status_code == 200
        live.service.engine.problem = "the engine has died"
        assert httpx.get(live.url + CONTAINER["livenessProbe"]["httpGet"]["path"]).status_code == 503
        live.service.engine.problem = None


def test_what_is_mounted_is_there(tmp_path: Path) -> None:
    for service in COMPOSE["services"].values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert source in COMPOSE["volumes"] or (FOLDER / source).is_file(), mount
        for config in service.get("configs", ()):
            assert config["source"] in COMPOSE["configs"]
    build = COMPOSE["services"]["server"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    copied = [
        word for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M) for word in shlex.split(line)[:-1]
    ]
    assert len(copied) > 4
    assert all((ROOT / word).exists() for word in copied)
    kept = {line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {word.removeprefix("./") for word in copied}


def test_promtool_takes_the_configuration(tmp_path: Path) -> None:
    content = COMPOSE["configs"]["prometheus"]["content"]
    found = yaml.safe_load(content)
    [target] = found["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == f"server:{options_of(COMMANDS['compose'])['port']}"
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    (tmp_path / "prometheus.yml").write_text(content)
    shutil.copy(ROOT / "recipes" / "monitoring" / "alerts.yml", tmp_path)
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for manifest in MANIFESTS.values():
        validate.validate(manifest, "1.31", strict=True)


def reaches_docker(path: str) -> bool:
    """Whether `.dockerignore` leaves a file in. The last line decides that names it, or a folder above it."""
    sent, names = True, [PurePosixPath(path), *PurePosixPath(path).parents][:-1]
    for line in (FOLDER / "Dockerfile.dockerignore").read_text().split():
        pattern = line.removeprefix("!")
        every = pattern.startswith("**/")
        if any(fnmatch(name.name, pattern[3:]) if every else fnmatch(str(name), pattern) for name in names):
            sent = line.startswith("!")
    return sent


def copy(source: Path, into: Path, kept: Any) -> None:
    """COPY: a file goes into a folder, and a folder's files do. kept: whether a file is there for it."""
    for file in [source] if source.is_file() else [one for one in source.rglob("*") if one.is_file()]:
        if kept(file):
            to = into / (file.name if source.is_file() else file.relative_to(source))
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, to)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the root of the image: its lines COPY and its commands of pip and sed are obeyed there, in a new environment.

    pip finds the libraries of this environment, and no package of outrider. The kernels are not compiled, which takes a minute.
    """
    root, libraries = tmp_path_factory.mktemp("image"), tmp_path_factory.mktemp("libraries")
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if not one.name.startswith(("outrider", "__editable__")) and one.suffix != ".pth":
            (libraries / one.name).symlink_to(one)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    [packages] = (root / "venv").glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(str(libraries))
    (root / "venv/bin/pip").write_text(f'#!/bin/sh\nexec {root}/venv/bin/python -m pip "$@"\n')
    (root / "venv/bin/pip").chmod(0o755)
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment = {"PATH": f"{root}/venv/bin:{os.environ['PATH']}", "HOME": str(root), "CXX": "false", **pip}
    folder = root
    for line in DOCKERFILE.replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "WORKDIR":
            folder = root / rest.removeprefix("/")
            folder.mkdir(parents=True)
        elif word == "COPY":
            built = rest.startswith("--from")
            *sources, into = shlex.split(rest)[built:]
            to = root / into.removeprefix("/") if built else folder / into
            for source in sources:
                if built:
                    copy(root / source.removeprefix("/"), to, lambda _: True)
                else:
                    copy(ROOT / source, to, lambda file: reaches_docker(file.relative_to(ROOT).as_posix()))
        elif word == "RUN":
            for command in rest.split("&&"):
                if command.split()[0] in ("pip", "sed"):
                    there = re.sub(r"(?<![\w.])/(wheels|tmp)/?\b", rf"{root}/\1/", command)
                    done = subprocess.run(
                        there, shell=True, cwd=folder, env=environment, capture_output=True, text=True
                    )
                    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.mark.long  # an installation; the tests above read the same lines
def test_what_the_image_holds_starts_the_commands(image: Path) -> None:
    """One start with the options of the image, of compose and of the pod."""
    assert {tuple(words[:2]) for words in COMMANDS.values()} == {("serve", "builtin:code")}
    options = {k: v for words in COMMANDS.values() for k, v in zip(words[2::2], words[3::2], strict=True)}
    options |= {"--port": "0", "--host": "127.0.0.1"}
    environment = {"PATH": f"{image}/venv/bin:{os.environ['PATH']}", "HOME": str(image / "home/outrider")}
    command = ["outrider", "serve", "builtin:code", *(word for pair in options.items() for word in pair)]
    with subprocess.Popen(
        command, cwd=image, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            line = next((line for line in server.stdout if line.startswith("curl")), "")
            assert line, server.stderr.read()
            [url] = re.findall(r"http://127\.0\.0\.1:\d+", line)
            assert httpx.get(f"{url}/health").status_code == 200
            body = {"model": "code", "prompt": "def f(x):", "max_tokens": 4}
            answer = httpx.post(f"{url}/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 4
        finally:
            server.kill()
