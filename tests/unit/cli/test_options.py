"""Option groups: typer sees each field, and no option of a command gets lost."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from light import HAS_RAY
from pydantic import Field
from typer.testing import CliRunner

from outrider.cli.command import as_command, full_name, grouped
from outrider.cli.main import app
from outrider.cli.options import PromptSpeculationOptions, SamplingOptions, SpeculationOptions, TraceOptions
from outrider.serve.options import Options, setting

# command -> how many options it has
OPTIONS = {
    "": 1, "run": 25, "generate": 35, "serve": 47, "batch": 29, "models": 1, "methods": 1, "doctor": 6, "deploy":
    56, "bench": 28, "certify": 29, "demo": 8, "explain": 5, "export": 6, "layers": 6, "replay": 5, "train": 19,
    "tune": 19, "models list": 1, "models pull": 1, "models rm": 2, "models pack": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("smollm2", "builtin:smollm2-135m"),
        ("smollm2-135m", "builtin:smollm2-135m"),
        ("code", "builtin:code"),
        ("builtin:code", "builtin:code"),
        ("cod", "cod"),
        ("owner/code", "owner/code"),
        (None, None),
    ],
)
def test_a_short_name_is_a_builtin_model(given, full) -> None:
    assert full_name(given) == full


def test_a_file_here_goes_before_a_builtin_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("code").mkdir()
    assert full_name("code") == "code"


def test_no_option_is_lost() -> None:
    command: Any = typer.main.get_command(app)
    parts = {f"models {name}": one for name, one in command.commands["models"].commands.items()}
    found = {
        name: sum(parameter.param_type_name == "option" for parameter in one.params)
        for name, one in {"": command, **command.commands, **parts}.items()
    }
    assert found == {name: count for name, count in OPTIONS.items() if HAS_RAY or name != "deploy"}


def test_each_option_and_argument_says_what_it_means() -> None:
    """A parameter that the docstring does not name would have an empty line on the help page."""
    command: Any = typer.main.get_command(app)
    parts = {f"models {name}": one for name, one in command.commands["models"].commands.items()}
    silent = [
        f"outrider {name}: {parameter.name}"
        for name, one in {**command.commands, **parts}.items()
        for parameter in one.params
        if not parameter.help
    ]
    assert not silent


def test_a_docstring_and_a_signature_make_the_options() -> None:
    small = typer.Typer()
    seen = list[Any]()

    @as_command("Use", "draw a.txt", to=small)
    def draw(
        file: Path,
        colours: list[str] | None = None,
        *,
        out: Path,
        step: Annotated[int | None, Field(ge=0, le=9)] = None,
        quick: bool = True,
        json_: bool = False,
    ) -> None:
        """Draw it.

        Now.

        Args:
            file (PICTURE): What to draw, and this text
                goes on.
            colours: Which.
            out (FOLDER): Where.
            step: One of them.
            quick: Fast.
            json_: As JSON.
        """
        seen.append((file, colours, out, step, quick, json_))

    def run(*words: str) -> Any:
        return CliRunner().invoke(small, [*words], env={"COLUMNS": "100"})

    assert run("a.txt", "red", "blue", "-o", "x", "-s", "3", "--no-quick", "--json").exit_code == 0
    assert run("a.txt", "--out", "x").exit_code == 0
    assert seen == [
        (Path("a.txt"), ["red", "blue"], Path("x"), 3, False, True),
        (Path("a.txt"), None, Path("x"), None, True, False),
    ]
    for words in ((), ("a.txt",), ("a.txt", "-o", "x", "-s", "10"), ("a.txt", "-o", "x", "--step", "-1")):
        assert run(*words).exit_code == 2
    page = " ".join(run("--help").output.replace("│", " ").split())
    for said in (
        "Draw it. Now.",
        "PICTURE",
        "What to draw, and this text goes on.",
        "-o --out FOLDER Where. Required.",
        "-s --step",
        "draw a.txt",
    ):
        assert said in page
    assert "Args:" not in page


class Shape(Options):
    width: int = setting(2, "How", "How wide.", "--width", "-w", ge=1)
    names: list[str] | None = setting(None, "How", "Names.")


class OtherShape(Options):
    width: int = setting(3, "How", "How wide.")


def test_a_command_takes_a_group() -> None:
    small = typer.Typer()
    seen = list[tuple[Path, Shape, bool]]()

    @small.command()
    @grouped
    def draw(file: Path, shape: Shape, quick: bool = False) -> None:
        """Draw it."""
        seen.append((file, shape, quick))

    assert CliRunner().invoke(small, ["a.txt", "-w", "5", "--names", "x", "--names", "y", "--quick"]).exit_code == 0
    assert CliRunner().invoke(small, ["b.txt"]).exit_code == 0
    assert CliRunner().invoke(small, ["b.txt", "-w", "0"]).exit_code == 2
    assert seen == [(Path("a.txt"), Shape(width=5, names=["x", "y"]), True), (Path("b.txt"), Shape(), False)]
    page = CliRunner().invoke(small, ["--help"]).output
    assert "Draw it." in page
    assert "How" in page
    assert page.index("--width") < page.index("--names")


def test_two_groups_with_one_name_are_refused() -> None:
    def draw(one: Shape, two: OtherShape) -> None: ...

    draw.__annotations__ = {"one": Shape, "two": OtherShape}
    with pytest.raises(ValueError, match="duplicate parameter name: 'width'"):
        grouped(draw)


@pytest.mark.parametrize(
    ("options", "model", "expected"),
    [
        ({}, "me/big", {"method": "auto"}),
        ({}, "builtin:code", {"method": "auto"}),
        ({"num_speculative_tokens": 4}, "me/big", {"method": "auto", "num_speculative_tokens": 4}),
        ({"draft_model": "head", "tree_width": 3}, "builtin:code", {"model": "head", "tree_width": 3}),
        ({"num_speculative_tokens": 2}, "me/big.gguf", {"method": "auto", "num_speculative_tokens": 2}),
        ({"verifier": "block"}, "me/big", {"method": "auto", "verifier": "block"}),
        ({"verifier": "block"}, "builtin:code", {"model": "builtin:code-draft", "verifier": "block"}),
        ({"method": "none"}, "builtin:code", {"method": "none"}),
        ({"method": "draft_model"}, "builtin:code", {"method": "draft_model", "model": "builtin:code-draft"}),
        ({"draft_model": "me/small", "tree_width": 3}, "me/big", {"model": "me/small", "tree_width": 3}),
        ({"method": "auto", "draft_model": "s"}, "me/big", {"method": "auto", "model": "s"}),
        ({"method": "draft-model", "draft_model": "s"}, "m", {"method": "draft_model", "model": "s"}),
        ({"method": "eagle3", "draft_model": "head"}, "m", {"method": "eagle", "model": "head"}),
        ({"prediction": Path("a.py")}, "builtin:code", {"method": "prediction"}),
        ({"corpus": ["a.py"]}, "builtin:code", {"method": "suffix", "corpus": ["a.py"]}),
        ({"speculative_config": '{"method": "ngram"}'}, "builtin:code", {"method": "ngram"}),
    ],
)
def test_the_configuration_that_options_ask_for(options, model, expected) -> None:
    assert PromptSpeculationOptions(**options).config(model) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "suffix", "draft_model": "s"}, "--method suffix uses no draft model; leave out --draft-model s"),
        ({"method": "suffix", "speculative_config": "{}"}, "--speculative-config replaces --method"),
        ({"tree_width": 2, "speculative_config": "{}"}, "--speculative-config replaces --tree-width"),
        ({"speculative_config": "[]"}, "must be a JSON object"),
        ({"speculative_config": "no-file"}, "is not JSON .* names no file"),
    ],
)
def test_options_that_exclude_each_other(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        SpeculationOptions(**options).config("builtin:code")


def test_a_group_becomes_what_it_stands_for(tmp_path: Path) -> None:
    params = SamplingOptions(temperature=0.5, stop=["x"], seed=None).params(11, "text")
    assert (params.temperature, params.stop, params.seed, params.prediction) == (0.5, ["x"], 11, "text")
    assert SamplingOptions(seed=3).params(11).seed == 3
    assert TraceOptions().recorder("counts") is None
    with pytest.raises(ValueError, match="--trace-detail probs needs a file"):
        TraceOptions(trace_detail="probs").recorder("counts")


HEAD = ["-d", "HEAD", "-k", "4", "--tree-width", "3", "--tree-nodes", "8"]


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "MODEL"],
        ["deploy", "MODEL", "--write-config", "ray.yaml"],
        ["batch", "in.jsonl", "-o", "out", "-m", "MODEL"],
    ],
)
def test_speculation_has_the_same_options_wherever_a_model_runs(words, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()

    def stop(_: Any, **given: Any) -> None:
        asked.append((given["model"], given["speculative_config"]))
        raise ValueError("enough")

    if words[0] == "deploy" and not HAS_RAY:
        pytest.skip("needs outrider-ray")
    monkeypatch.setattr("outrider.serve.options.ModelOptions.__init__", stop)
    assert "enough" in CliRunner().invoke(app, [*words, *HEAD]).output
    assert asked == [("MODEL", {"model": "HEAD", "num_speculative_tokens": 4, "tree_width": 3, "tree_nodes": 8})]


@pytest.mark.parametrize("command", ["serve", "deploy"])
def test_a_server_has_a_model(command: str) -> None:
    if command == "deploy" and not HAS_RAY:
        pytest.skip("needs outrider-ray")
    done = CliRunner().invoke(app, [command])
    assert (done.exit_code, "name a model" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ({"draft_model": "x"}, {"method": "draft_model", "model": "x"}),
        ({"speculative_model": "x"}, {"method": "draft_model", "model": "x"}),
        ({"draft-model": "x", "num-speculative-tokens": 3}, {"model": "x", "num_speculative_tokens": 3}),
        ({"method": ["ngram", "layer-skip"], "layers": [0, 1]}, {"method": ["ngram", "layer_skip"]}),
    ],
)
def test_the_names_of_options_are_keys_too(words: dict[str, Any], given: dict[str, Any]) -> None:
    from outrider.drafters.config import SpeculativeConfig

    config = SpeculativeConfig.of(words)
    assert {name: getattr(config, name) for name in given} == given


FILE = """
model = "MODEL"
port = 8001
allowed-host = ["a", "b"]
log_prompts = true
chat_template = "t.jinja"
memory-days = 0.25
[speculative_config]
method = "suffix"
"""
OF_FILE = {
    "port": 8001,
    "allowed_host": ["a", "b"],
    "log_prompts": True,
    "chat_template": Path("t.jinja"),
    "memory_days": 0.25,
}


@pytest.mark.parametrize(
    ("words", "model", "differing"),
    [
        ([], "MODEL", {}),
        (["OTHER"], "OTHER", {}),
        (["--port", "9", "--allowed-host", "c"], "MODEL", {"port": 9, "allowed_host": ["c"]}),
    ],
)
def test_a_file_has_options_and_the_command_line_goes_before_it(
    words: list[str], model: str, differing: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()

    def stop(**given: Any) -> None:
        asked.append(given)
        raise ValueError("enough")

    monkeypatch.setattr("outrider.cli.serve.ServeOptions", stop)
    (file := tmp_path / "serve.toml").write_text(FILE)
    assert "enough" in CliRunner().invoke(app, ["serve", *words, "--config", str(file)]).output
    [options] = asked
    assert options["model"] == model
    assert options["speculative_config"] == {"method": "suffix"}
    assert {name: options[name] for name in OF_FILE} == OF_FILE | differing


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prot = 1", "there is no option 'prot' (did you mean 'port'?)"),
        ("config = 'other.toml'", "there is no option 'config'"),
        ("d = 'x'", "there is no option 'd'"),
        ("port = 80.5", "Invalid value for '--port'"),
        ("port = true", "true and false are for options without a value"),
        ("log_prompts = 1", "true and false are for options without a value"),
        ("port = [1, 2]", "port takes one value, got 2"),
        ("max_num_seqs = 0", "Invalid value for '--max-num-seqs'"),
        ("[server]\nport = 1", "there is no option 'server'"),
        ("[host]\nname = 1", "only speculative_config may be a table"),
        ("max_model_len = 1979-05-27", "Invalid value for '--max-model-len'"),
        ("port: 8000", "is not TOML"),
    ],
)
def test_a_file_with_a_mistake_starts_no_server(text: str, why: str, tmp_path: Path) -> None:
    (file := tmp_path / "serve.toml").write_text(text)
    done = CliRunner().invoke(app, ["serve", "builtin:cod", "--config", str(file)])
    said = " ".join(done.output.replace("│", " ").split())
    assert (done.exit_code, why in said) == (2, True), said


def test_a_file_that_is_not_there_is_named() -> None:
    assert "no.toml: No such file" in CliRunner().invoke(app, ["serve", "--config", "no.toml"]).output


def test_the_file_in_the_guide_is_one() -> None:
    from outrider.cli.options import read_config

    guide = (Path(__file__).parents[3] / "docs" / "guides" / "serve.md").read_text()
    [text] = re.findall(r"```toml\n(.*?)```", guide, re.S)
    context = typer.main.get_command(app).commands["serve"].make_context("serve", ["x"])  # pyright: ignore[reportAttributeAccessIssue]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        read_config(context, Path(file.name))
    assert context.default_map["allowed_host"] == ["llm.example.org"]
