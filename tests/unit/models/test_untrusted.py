"""A model is a folder that a stranger made. None of its code runs, and none of its numbers is believed before it was compared."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossed import crossed
from heads import GOLDEN, small_target
from ml_dtypes import bfloat16
from plain import write_checkpoint
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.drafters.heads.eagle import eagle_model, read_eagle
from outrider.kernels import cpu as native
from outrider.kernels.cpu import Packed
from outrider.models.checkpoint import LoadRequest
from outrider.models.load import load, tokenizer_named
from outrider.models.load import pack as write_pack
from outrider.models.packs import folder as packs
from outrider.models.packs.folder import CONFIG, MANIFEST, WEIGHTS, BadPack
from outrider.models.tokenizer import FastTokenizer, OwnCode

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen 3, which has norms of queries and keys."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", bfloat16)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


# -- code -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def evil(folder: Path) -> Path:
    (folder / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(folder / 'marker')!r}).touch()\n"
        "from transformers import PreTrainedTokenizerFast\nclass Evil(PreTrainedTokenizerFast): pass\n"
    )
    settings = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@needs_transformers
@pytest.mark.parametrize("read", [load, lambda folder: tokenizer_named(str(folder))], ids=["model", "tokenizer"])
def test_code_of_a_tokenizer_is_not_run_and_nobody_is_asked(
    read: Callable[[Path], Any], evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "y")
    with pytest.raises(
        OwnCode, match=r"tokenizer_config.json names code of its own \(auto_map\).*LLM\(model, tokenizer="
    ):
        read(evil)
    assert not asked
    assert not (evil / "marker").exists()


@needs_transformers
def test_the_command_leaves_its_standard_input_to_the_prompt(evil: Path) -> None:
    run = CliRunner().invoke(app, ["generate", "-", "-m", str(evil)], input="y\n")
    assert (run.exit_code, run.stdout) == (2, "")
    assert "auto_map" in run.stderr
    assert not (evil / "marker").exists()


def test_a_kernel_of_the_hub_in_a_configuration_is_not_fetched(folder: Path) -> None:
    change(folder / CONFIG, attn_implementation="nobody/kernel")
    assert "nobody/kernel" not in vars(load(folder).config).values()


# -- numbers of a configuration -------------------------------------------------------------------------------------------


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


LIES = [
    (
        {"num_hidden_layers": 10**9},
        r"config.json: num_hidden_layers is 1000000000, and the weights beside it have at most 2 layers",
    ),
    (
        {"num_hidden_layers": 500, "layer_types": ["full_attention"] * 500},
        r"config.json of .* asks for \d+ weights, and its files hold \d+|model.layers.2\S* of a \w+ is in no file",
    ),
    ({"num_hidden_layers": 0}, r"num_hidden_layers is 0, and a model has at least one"),
    (
        {"num_attention_heads": 10**9},
        r"num_attention_heads is 1000000000, and the weights beside it have at most 97 rows",
    ),
    ({"num_key_value_heads": 0}, r"num_key_value_heads is 0, and a model has at least one"),
    ({"hidden_size": -8}, r"hidden_size is -8, and a model has at least one"),
    (
        {"hidden_size": 2**31},
        r"tensor \S+ is \[.*\] in the weights, and the configuration asks for \[.*2147483648.*\]|makes no model",
    ),
    (
        {"intermediate_size": 10**7},
        r"tensor \S+ is \[.*\] in the weights, and the configuration asks for \[.*10000000.*\]",
    ),
    (
        {"vocab_size": 10**12},
        r"tensor \S+ is \[97, \d+\] in the weights, and the configuration asks for \[1000000000000, \d+\]",
    ),
    ({"vocab_size": 10**30}, r"vocab_size is beyond 64 bits"),
    ({"head_dim": 24}, r"tensor \S+ is \[.*\] in the weights, and the configuration asks for"),
    ({"text_config": {"num_hidden_layers": 10**9}}, r"text_config.num_hidden_layers is 1000000000"),
]


@pytest.mark.parametrize("kind", ["qwen3", "helium"])  # with a native program, and without
@pytest.mark.parametrize(("lie", "said"), LIES, ids=[str(lie)[:40] for lie, _ in LIES])
def test_a_configuration_is_compared_with_the_tensors_before_memory_is_taken(
    lie: dict[str, Any], said: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*given: Any, **more: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", read)
    monkeypatch.setattr("outrider.models.hf.folder.SMALL", 0)
    change(folder / CONFIG, model_type=kind, **lie)
    with pytest.raises(ValueError, match=said):
        load(folder)


def test_a_configuration_that_is_too_deep(folder: Path) -> None:
    (folder / CONFIG).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load(folder)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"shape": [2**40, 2**20]}, "takes"),
        ({"shape": [-1]}, "has shape"),
        ({"shape": ["9"]}, "has shape"),
        ({"data_offsets": [8, 4]}, "has shape"),
        ({"data_offsets": 8}, "cannot be read"),
        ({"dtype": "F64"}, "takes"),
    ],
)
def test_a_header_is_compared_with_itself(entry: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    whole = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    table = json.dumps({"w": {**whole, **entry}}).encode()
    file.write_bytes(len(table).to_bytes(8, "little") + table + bytes(16))
    from outrider.models.checkpoint import header

    with pytest.raises(ValueError, match=rf"model.safetensors is not whole: .*{said}"):
        header(file)


# -- packs ----------------------------------------------------------------------------------------------------------------

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
needs_kernels = pytest.mark.skipif(not native.available(), reason="needs the native kernels")


@pytest.fixture(scope="module")
def packed(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packs") / "pack"
    write_pack(saved, out, quantization="int8")
    return out


@pytest.fixture
def pack(packed: Path, tmp_path: Path) -> Path:
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


COUNTS = (
    "vocab_size", "max_position_embeddings", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip


@needs_kernels
@pytest.mark.parametrize(("name", "factor"), crossed(COUNTS, [8, 2, 0, -1, 2**40, 0.5, "text"], share=0.1))
def test_each_number_of_a_pack_is_compared_with_its_tensors(name: str, factor: Any, pack: Path) -> None:
    given = json.loads((pack / MANIFEST).read_text())
    settings = given["native"] if name == "vocab_size" else given["native"]["config"]
    settings[name] = str(settings[name]) if factor == "text" else settings[name] * factor
    (pack / MANIFEST).write_text(json.dumps(given))
    with pytest.raises(BadPack):
        packs.read(pack, LoadRequest("a pack"))


OTHER_LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no layers": lambda p: p["native"]["config"].update(num_hidden_layers=0),
    "a window before the text": lambda p: p["native"]["config"].update(sliding_window=-1, layer_types=None),
    "kinds of fewer layers": lambda p: p["native"]["config"].update(layer_types=["full_attention"]),
    "an unknown gate": lambda p: p["native"]["config"].update(hidden_act="relu"),
    "no scale": lambda p: p["native"]["numbers"].update({"model.rotary_emb.attention_scaling": math.inf}),
    "no epsilon": lambda p: p["native"]["config"].update(rms_norm_eps=None),
    "another class": lambda p: p["native"].update(kind="NoModel"),
    "a matrix of 2^36 rows, which is 0 in 32 bits": lambda p: p["matrices"]["lm_head"].update(n=2**36),
    "a matrix of no columns": lambda p: p["matrices"]["lm_head"].update(k=0),
    "another format": lambda p: p["matrices"]["lm_head"].update(formats=["Q4_0"]),
    "no format": lambda p: p["matrices"]["lm_head"].update(formats=[]),
    "half a row": lambda p: p["matrices"]["lm_head"].update(n=96.5),
    "parts that are not there": lambda p: p["matrices"]["lm_head"].update(parts=[{**p["matrices"]["lm_head"]}] * 2),
    "another matrix": lambda p: p["matrices"].update(lm_head={"same": "model.layers.0.self_attn.q_proj"}),
    "end tokens": lambda p: p.update(end_ids=["</s>"]),
    "layers in the configuration": lambda p: None,
}


@needs_kernels
@pytest.mark.parametrize("lie", OTHER_LIES)
def test_a_manifest_that_contradicts_itself(lie: str, pack: Path) -> None:
    given = json.loads((pack / MANIFEST).read_text())
    OTHER_LIES[lie](given)
    (pack / MANIFEST).write_text(json.dumps(given))
    if lie.endswith("configuration"):
        change(pack / CONFIG, num_hidden_layers=10**9)
    with pytest.raises(BadPack):
        packs.read(pack, LoadRequest("a pack"))


TENSORS = (
    "model.norm.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.0.self_attn.k_norm.weight",
    "model.embed_tokens",
    "model.rotary_emb.inv_freq",
)


@needs_kernels
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_a_pack_have_the_sizes_of_the_settings(name: str, pack: Path) -> None:
    """The checksums are in the same folder, so whoever writes it can make them right."""
    tensors = load_file(pack / WEIGHTS)
    tensors[name] = np.tile(tensors[name], [2] * tensors[name].ndim) if "inv_freq" in name else tensors[name][1:].copy()
    save_file(tensors, pack / WEIGHTS)
    given = json.loads((pack / MANIFEST).read_text())
    given["sums"][name] = packs.checksum(tensors[name])
    (pack / MANIFEST).write_text(json.dumps(given))
    with pytest.raises(BadPack):
        packs.read(pack, LoadRequest("a pack"))


@needs_kernels
def test_a_bias_is_of_floats() -> None:
    settings, buffers = Packed([np.ones((16, 32), np.float32)], "float32", [np.ones(16, np.float32)]).state()
    with pytest.raises(ValueError, match=r"bias.*float32.*bias.*int8"):
        Packed.from_state(settings, buffers | {"bias": buffers["bias"].astype("int8")})
    assert Packed.from_state(settings, buffers).n == 16


@needs_kernels
def test_sizes_that_wrap_around_in_64_bits_are_refused() -> None:
    settings, buffers = Packed([np.ones((16, 32), np.float32)], "float32").state()
    with pytest.raises(ValueError, match="it must have 1 to 2147483647 outputs and inputs"):
        Packed.from_state({**settings, "k": 32 + 2**58}, buffers)  # its panels have as many bytes, modulo 2^64


def test_a_tokenizer_that_fails_when_it_encodes_is_refused_when_it_is_read(folder: Path) -> None:
    Tokenizer(models.BPE({"a": 0}, [], unk_token="gone")).save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read"):
        FastTokenizer.of_folder(folder)
    Tokenizer(models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    assert tokenizer_named(str(folder))("a")["input_ids"] == [0]
    for wrong in ({"eos_token": {"content": 1}}, {"added_tokens_decoder": {"x": {}}}, {"chat_template": 3}, [1]):
        (folder / "tokenizer_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"tokenizer.*cannot be read"):
            tokenizer_named(str(folder))


@needs_kernels
def test_parts_have_the_panels_of_the_whole() -> None:
    from outrider.kernels.blocks import Blocks

    blocks = Blocks(np.zeros((32, 34), np.uint8), "Q8_0", 32)
    settings, buffers = Packed([blocks, np.ones((32, 32), np.float32)], "float32").state()
    assert Packed.from_state(settings, buffers).n == 64
    for lie in ({"n": 96}, {"n": 32}, {"k": 64}):
        with pytest.raises(ValueError, match="cannot have parts of 32 x 32, 32 x 32"):
            Packed.from_state({**settings, **lie}, buffers)


# -- heads and tokenizers -------------------------------------------------------------------------------------------------


@needs_kernels
def test_a_head_cannot_rotate_more_numbers_than_its_heads_have(tmp_path: Path) -> None:
    """The frequencies come from the settings alone, and native code writes as many numbers as there are."""
    folder = Path(shutil.copytree(GOLDEN / "eagle3", tmp_path / "head"))
    target = small_target()
    eagle_model(read_eagle(folder, target), target.model, 64)
    file = folder / CONFIG
    given = json.loads(file.read_text())
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 4.0}
    inner = given.get("transformer_layer_config", given)
    inner.update(rope_parameters=rope)
    file.write_text(json.dumps(given))
    with pytest.raises(ValueError, match=r"rotary frequencies|settings say"):
        eagle_model(read_eagle(folder, target), target.model, 64)


@pytest.mark.parametrize("name", ["transformer_layer_config", "max_position_embeddings", "rope_parameters"])
def test_a_setting_of_another_type_names_the_file(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "eagle3", tmp_path / "head"))
    given = json.loads((folder / CONFIG).read_text())
    inner = given if name in given else given["transformer_layer_config"]
    change(folder / CONFIG, **({name: [1]} if inner is given else {"transformer_layer_config": {**inner, name: [1]}}))
    with pytest.raises(ValueError, match=r"config.json"):
        read_eagle(folder, small_target())


def test_a_tokenizer_with_a_huge_id_is_refused_before_the_library_takes_memory_for_it(tmp_path: Path) -> None:
    words = Tokenizer(models.BPE({"a": 0, "12345678": 1}, []))
    words.save(str(tmp_path / "tokenizer.json"))
    FastTokenizer.of_folder(tmp_path)  # digits in a word are no number
    given = json.loads((tmp_path / "tokenizer.json").read_text())
    given["model"]["vocab"]["a"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(given))
    for read in (lambda: FastTokenizer.of_folder(tmp_path), lambda: tokenizer_named(str(tmp_path))):
        with pytest.raises((ValueError, FileNotFoundError), match=r"tokenizer.json is no vocabulary|no config.json"):
            read()
