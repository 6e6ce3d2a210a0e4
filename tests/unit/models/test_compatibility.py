"""`outrider models check`: from a configuration and the table of classes, without weights and without code of the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, Gemma4TextConfig
from typer.testing import CliRunner

from outrider.cli import compatibility
from outrider.cli.compatibility import check
from outrider.cli.main import app
from outrider.models.hf.model import UnsupportedModel
from outrider.models.load import load
from tests.support.tiny_models import tiny_config, tiny_model, whole_config

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "dtype": "bfloat16",
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def written(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_large_model_from_its_configuration_alone(tmp_path: Path) -> None:
    found = check(written(tmp_path, **LLAMA))
    assert found["runs"]
    assert found["guarantee"] == "exact-tokens"
    assert found["parameters"] == pytest.approx(8.03e9, rel=0.001), "that is Llama 3 8B"
    assert found["memory_bytes"]["bfloat16"] == pytest.approx(2 * found["parameters"], rel=0.01)
    assert found["memory_bytes"]["int8"] < 0.6 * found["memory_bytes"]["bfloat16"]
    assert found["kv_bytes_per_token"] == 2 * 2 * 32 * 8 * 128
    assert check(str(tmp_path / "config.json"))["parameters"] == found["parameters"]


def test_the_cache_of_a_latent(tmp_path: Path) -> None:
    """DeepSeek-V3: the native step keeps one vector of 576 numbers a layer."""
    found = check(written(tmp_path, **DeepseekV3Config(dtype="bfloat16").to_dict()))
    assert (found["path"], found["kv_bytes_per_token"]) == ("native", 2 * 61 * 576)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    slow = check(
        written(tmp_path, **DeepseekV3Config(hidden_act="relu", rope_parameters=rope, dtype="bfloat16").to_dict())
    )
    assert (slow["path"], slow["kv_bytes_per_token"]) == ("general", 2 * 61 * 128 * 320)


def test_the_cache_of_layers_that_differ(tmp_path: Path) -> None:
    """Gemma 4: heads of 256 numbers in layers with windows and of 512 in others; the last four layers store nothing."""
    types = [*["sliding_attention"] * 4, "full_attention"] * 2
    config = Gemma4TextConfig(num_hidden_layers=10, num_kv_shared_layers=4, layer_types=types, dtype="bfloat16")
    found = check(written(tmp_path, **config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]}))
    assert (found["path"], found["kv_bytes_per_token"]) == ("native", 2 * 2 * 4 * (5 * 256 + 512))


def test_on_the_command_line(tmp_path: Path) -> None:
    name = written(tmp_path, **LLAMA)
    done = CliRunner().invoke(app, ["models", "check", name])
    assert done.exit_code == 0
    assert "runs here (LlamaForCausalLM, 8,030.3 M parameters, stored as bfloat16)" in done.output
    answer = json.loads(CliRunner().invoke(app, ["models", "check", name, "--json"]).output.splitlines()[-1])
    assert (answer["runs"], answer["status"]) == (True, "runs")
    refused = CliRunner().invoke(app, ["models", "check", written(tmp_path, model_type="t5")])
    assert refused.exit_code == 1
    assert "encoder-decoder" in refused.output
    assert "instead:" in refused.output


def test_a_quantised_model_says_what_it_takes(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq"}
    found = check(written(tmp_path, **LLAMA, quantization_config=settings))
    assert found["runs"]
    assert found["stored"] == "gptq"
    assert found["memory_bytes"]["gguf"] < 0.4 * found["memory_bytes"]["bfloat16"]
    odd = check(written(tmp_path, **LLAMA, quantization_config={"quant_method": "aqlm"}))
    assert not odd["runs"]
    assert "aqlm" in odd["reason"]


def test_code_of_the_model_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"open({str(mark)!r}, 'w')")
    name = written(
        tmp_path,
        model_type="their_own",
        auto_map={"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.C"},
    )
    with pytest.raises(ValueError, match=r"trust_remote_code\) is not run here"):
        check(name)
    name = written(tmp_path, **LLAMA, auto_map={"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.C"})
    assert check(name)["runs"]
    assert not mark.exists()


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["no_such_attention"] * 32}, "no_such_attention|layer_types"),
        ({"num_attention_heads": 31}, "attention heads|head"),
        ({"hidden_size": "large"}, "hidden_size"),
    ],
)
def test_a_configuration_that_lies_is_told(lie: dict[str, Any], what: str, tmp_path: Path) -> None:
    name = written(tmp_path, **{**LLAMA, **lie})
    assert re.search(what, _why_not(name))


def _why_not(name: str) -> str:
    try:
        found = check(name)
    except ValueError as error:
        return str(error)
    return "" if found["runs"] else found["reason"]


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"hf download owner/name config\.json"):
        check("owner/name")
    with pytest.raises(FileNotFoundError, match="fetches none"):
        check(str(tmp_path / "model.gguf"))
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="must hold settings"):
        check(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        check(str(tmp_path))


def test_the_built_in_model() -> None:
    found = check("builtin:code")
    assert found["runs"]
    assert found["path"] in ("native", "general")


def test_settings_that_change_what_the_table_says(tmp_path: Path) -> None:
    """The path is that of this model, not of its class."""
    assert check(written(tmp_path, **LLAMA))["path"] in ("native", "general")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert check(written(tmp_path, **LLAMA, rope_parameters=rope))["path"] == "general"
    bloom = {"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 97}
    biased = check(written(tmp_path, **bloom))
    assert biased["status"] == "refused"
    assert "ALiBi" in biased["reason"]


def test_a_class_that_was_never_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "classes.json"
    table.write_text('{"transformers": "1.0", "classes": {}}')
    monkeypatch.setattr(compatibility, "TABLE", table)
    found = check(written(tmp_path, **LLAMA))
    assert (found["runs"], found["status"]) == (False, "untried")
    assert "instead: load it" in "\n".join(compatibility.lines("it", found))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "falcon", "mamba", "xlnet"])
def test_the_table_says_what_a_load_says(kind: str, tmp_path: Path) -> None:
    raw = tiny_model(tiny_config(whole_config(kind)))
    raw.save_pretrained(tmp_path)
    found = check(str(tmp_path))
    if not found["runs"]:
        with pytest.raises(UnsupportedModel) as caught:
            load(str(tmp_path))
        assert (found["status"], found["reason"]) == ("refused", str(caught.value))
        return
    model = load(str(tmp_path)).model
    assert found["path"] == model.path
    assert found["guarantee"] == ("exact-tokens" if model.batch_invariant else "exact-distribution")


def test_code_of_a_model_is_never_run_by_a_load(tmp_path: Path) -> None:
    """A known model_type with code of its own is loaded by transformers' class; an unknown one is not loaded."""
    mark = tmp_path / "ran"
    raw = tiny_model(tiny_config(whole_config("llama")))
    raw.save_pretrained(tmp_path)
    (tmp_path / "modeling.py").write_text(f"open({str(mark)!r}, 'w')\nraise SystemExit('it ran')")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.C"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(str(tmp_path)).model.vocab_size == raw.config.vocab_size
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "their_own"}))
    with pytest.raises(ValueError, match=r"trust_remote_code\) is not run here"):
        load(str(tmp_path))
    assert not mark.exists()


def test_layer_types_that_the_weights_do_not_have_are_no_model(tmp_path: Path) -> None:
    """Weights of attention under a configuration of convolutions."""
    raw = tiny_model(tiny_config(whole_config("lfm2")))
    raw.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    kinds = {"conv": "full_attention", "full_attention": "conv"}
    told["layer_types"] = [kinds[kind] for kind in told["layer_types"]]
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"are in no file|cannot be loaded"):
        load(str(tmp_path))
