"""The files that people keep in git, and the options behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider_ray.options import DeployOptions

RECIPES = Path(__file__).parents[2] / "recipes" / "ray"
DRAFT = '{"method": "draft_model", "model": "builtin:code-draft"}'
COMMANDS = {
    "two_replicas.yaml": "--replicas 2 --cpus 0.5 --max-num-seqs 4",
    "autoscaled.yaml": "--min-replicas 1 --max-replicas 4 --target-requests 8",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_recipes_are_what_the_command_writes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    made = tmp_path / "made.yaml"
    command = ["deploy", "builtin:code", "--speculative-config", DRAFT, "--write-config", str(made)]
    result = CliRunner().invoke(app, [*command, *COMMANDS[name].split()], env={"OUTRIDER_API_KEY": "secret"})
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(made.read_text()) == yaml.safe_load((RECIPES / name).read_text())
    assert "secret" not in made.read_text()


def configs() -> dict[str, dict[str, Any]]:
    found = {name: yaml.safe_load((RECIPES / name).read_text()) for name in COMMANDS}
    manifest = yaml.safe_load((RECIPES / "rayservice.yaml").read_text())
    return {**found, "rayservice.yaml": yaml.safe_load(manifest["spec"]["serveConfigV2"])}


@pytest.mark.parametrize("name", [*COMMANDS, "rayservice.yaml"])
def test_ray_and_outrider_take_the_configurations(name: str) -> None:
    schema = pytest.importorskip("ray.serve.schema").ServeDeploySchema
    from outrider_ray.deployments import build, build_engines, build_front

    config = configs()[name]
    taken = schema.model_validate(config)
    engines, front = taken.applications
    options = DeployOptions.model_validate(front.args)
    assert options == DeployOptions.model_validate(engines.args)
    assert options.engines == engines.name
    assert (front.route_prefix, engines.route_prefix) == ("/", None)
    assert (front.import_path, engines.import_path) == (
        "outrider_ray:build_front",
        "outrider_ray:build_engines",
    )
    as_ray_does = pytest.importorskip("ray.serve._private.api").call_user_app_builder_with_args_if_necessary
    text = {"model": "builtin:code", "replicas": "2", "cpus": "0.5", "speculative_config": DRAFT}  # of a command line
    for builder, args in ((build_engines, engines.args), (build_front, front.args), (build, text)):
        made = as_ray_does(builder, args)
        assert isinstance(made, pytest.importorskip("ray.serve").Application)


def test_the_manifest_gives_workers_room_for_the_replicas() -> None:
    spec = yaml.safe_load((RECIPES / "rayservice.yaml").read_text())["spec"]
    options = DeployOptions.model_validate(configs()["rayservice.yaml"]["applications"][0]["args"])
    [group] = spec["rayClusterConfig"]["workerGroupSpecs"]
    [worker] = group["template"]["spec"]["containers"]
    assert float(worker["resources"]["requests"]["cpu"]) >= options.cpus
    assert (group["minReplicas"], group["maxReplicas"]) == (options.min_replicas, options.max_replicas)
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > options.shutdown_timeout


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"replicas": 2, "max_replicas": 3}, "fixed number"),
        ({"max_replicas": 3}, "go together"),
        ({"min_replicas": 4, "max_replicas": 3}, "more than"),
        ({"pad_stream": 5.0}, "proxy"),
        ({"speculative_config": {"method": "sufix"}}, "suffix"),
        ({"speculative_config": '{"method": "sufix"}'}, "suffix"),
        ({"tool_call_parser": "x"}, "tool-call-parser"),
        ({"replica": 2}, "Extra inputs"),
    ],
)
def test_options_that_cannot_work_are_refused_before_a_replica_starts(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        DeployOptions.model_validate({"model": "builtin:code", **given})


def test_the_front_is_replaced_only_for_its_own_options() -> None:
    one = DeployOptions(model="builtin:code", replicas=2)
    same = DeployOptions(
        model="builtin:code", replicas=3, speculative_config={"method": "suffix"}, max_num_seqs=2, port=1
    )
    other = DeployOptions(model="builtin:code", replicas=2, request_timeout=5)
    assert one.front_name == same.front_name != other.front_name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--replicas", "99"], "fewer replicas"),
        (["--address", "127.0.0.1:1"], "ray start --head"),
        (["--address", "nonsense"], "HOST:PORT"),
        (["--host", "127.0.0.1", "--port", "TAKEN"], "--port 0"),
        (["--replicas", "2", "--max-replicas", "3"], "fixed number"),
    ],
)
def test_bad_commands_end_at_once_and_say_what_works(arguments: list[str], says: str) -> None:
    import socket

    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["deploy", "builtin:code", *[a.replace("TAKEN", port) for a in arguments]])
    assert result.exit_code == 2
    assert says in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
