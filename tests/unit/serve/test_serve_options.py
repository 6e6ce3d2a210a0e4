"""The options of a server: units, keys, and which part of a deployment gets which."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from light import HAS_RAY

from outrider.cli.main import app
from outrider.serve.options import PANELS, BatchOptions, ServeOptions, panel, shown
from outrider_ray.options import DeployOptions, serve_config


def test_units_are_those_of_the_command_line_and_the_server_converts_once() -> None:
    options = ServeOptions(model="m", max_body=2, pad_stream=50)
    assert options.body_bytes == 2048


def test_keys_come_from_options_and_a_file_and_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("two\nthree\n")
    options = ServeOptions(model="m", api_key=["one"], api_key_file=file)
    assert (options.api_key, options.api_key_file) == (["one", "two", "three"], None)
    assert "three" not in repr(options)
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no key"):
        ServeOptions(model="m", api_key_file=file)


def test_a_changed_option_changes_what_is_derived() -> None:
    one = ServeOptions(model="owner/first")
    assert one.names == ("owner/first", "owner/first")
    two = one.with_(served_model_name="second")
    assert two.names == ("second",)
    with pytest.raises(ValueError, match="max_queue"):
        one.with_(max_queue=-1)


def test_front_and_replica_get_their_own_options_and_a_file_has_no_key() -> None:
    options = DeployOptions(model="m", api_key=["secret"], max_num_seqs=3, request_timeout=7, patience=9, port=9000)
    replica, front = options.of_replica(), options.of_front()
    assert (replica.api_key, replica.max_num_seqs, replica.request_timeout) == ([], 3, 7)
    assert (front.api_key, front.max_num_seqs, front.request_timeout, front.patience) == (["secret"], 8, 7, 9)
    text = serve_config(options, "name")
    assert "secret" not in text
    assert text.count("9000") == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("serve", ServeOptions),
        pytest.param("deploy", DeployOptions, marks=pytest.mark.skipif(not HAS_RAY, reason="needs: pip install ./ray")),
        ("batch", BatchOptions),
    ],
)
def test_a_command_has_every_option_that_is_declared_with_its_default_and_help(name: str, kind: type) -> None:
    command = typer.main.get_command(app).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    given = {parameter.name: parameter for parameter in command.params}
    for field, declared in shown(kind).items():
        assert panel(declared) in PANELS
        assert given[field].help == declared.description
        default = declared.get_default(call_default_factory=True)
        assert given[field].default == (None if default == [] else default)
