"""Loading: what is found, at which precision, with which end tokens; and for everything that cannot work, an error that
says what was given and what would."""

from __future__ import annotations

import ctypes
import json
import platform
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
from architectures import VOCAB, prompts, tiny
from huggingface_hub import HfApi, errors
from light import Late, torch, transformers

from outrider.kernels import cpu as native
from outrider.models import checkpoint
from outrider.models.load import load
from outrider.models.nodes import Nodes
from tests.support.tiny_models import tiny_config, whole_config

hf = Late("outrider.models.hf.model")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama in bfloat16."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    raw = tiny("llama").bfloat16()
    raw.generation_config.eos_token_id = [5, 7]
    raw.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(saved, tmp_path / "llama"))


def logits(model, ids: list[int]) -> torch.Tensor:
    return torch.from_numpy(model.forward(Nodes(np.array([ids]), model.new_cache(1, 64), [0])).logits[0])


def change(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_dtype_auto_keeps_what_is_stored(saved: Path) -> None:
    loaded = load(saved, kv_cache_dtype="float32")
    assert (loaded.weights, loaded.end_ids, loaded.tokenizer, loaded.name) == ("bfloat16", (5, 7), None, str(saved))
    with torch.inference_mode():
        raw = transformers.AutoModelForCausalLM.from_pretrained(saved).float()
        expected = raw(torch.tensor(prompts(9))).logits[0]
    torch.testing.assert_close(logits(loaded.model, prompts(9)[0]), expected, atol=2e-4, rtol=1e-4)


def test_float32_computes_the_same_of_16_bit_weights(saved: Path) -> None:
    wide, narrow = load(saved, dtype=torch.float32), load(saved, kv_cache_dtype="float32")
    assert wide.weights == "float32"
    assert torch.equal(logits(wide.model, prompts(9)[0]), logits(narrow.model, prompts(9)[0]))


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_keys_and_values_are_rounded_where_the_weights_are(saved: Path) -> None:
    kept = {kind: load(saved, quantization=kind).model.kv_cache_dtype for kind in ("int8", "int4", None)}
    assert kept == {"int8": "bfloat16", "int4": "bfloat16", None: "bfloat16"}
    wide = load(saved, dtype="float32")
    assert wide.model.new_cache(1, 8).dtype == wide.model.kv_cache_dtype == "auto"
    exact, rounded = load(saved, kv_cache_dtype="float32").model, load(saved).model
    assert (exact.new_cache(1, 8).dtype, rounded.new_cache(1, 8).dtype) == ("float32", "bfloat16")
    gap = (logits(exact, prompts(9)[0]) - logits(rounded, prompts(9)[0])).abs().max()
    assert 0 < gap < 0.1


def test_sharded_weights(tmp_path: Path) -> None:
    raw = tiny("gpt2")
    raw.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    with torch.inference_mode():
        expected = raw(torch.tensor(prompts(9))).logits[0]
    torch.testing.assert_close(logits(load(tmp_path).model, prompts(9)[0]), expected, atol=1e-4, rtol=1e-4)
    assert load(tmp_path).tokenizer is None
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=rf"1 of {len(shards)} files of weights .*{shards[1].name}.*incomplete"):
        load(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_the_file_is_let_go_of(name: str, tmp_path: Path) -> None:
    """Else the weights as stored would stay in memory beside the packed ones."""
    tiny(name).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert loaded.model.vocab_size == VOCAB


def test_end_tokens_of_the_configuration_and_of_the_tokenizer() -> None:
    raw = tiny("llama")
    raw.config.eos_token_id = 11
    assert load(raw).end_ids == (11,)
    raw.config.eos_token_id = None

    class Tokenizer:
        eos_token_id = 13

    assert load(raw, Tokenizer()).end_ids == (13,)
    assert load(raw).end_ids == ()


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantisation(saved: Path, quantization: str) -> None:
    loaded = load(saved, quantization=quantization)
    assert loaded.weights == quantization
    gap = torch.cosine_similarity(logits(loaded.model, prompts(9)[0]), logits(load(saved).model, prompts(9)[0]))
    assert gap.mean() > (0.99 if quantization == "int8" else 0.75)


def test_without_the_native_kernels(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(load(saved, kv_cache_dtype="float32").model, prompts(9)[0])
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "why", lambda: "of this test")
    with pytest.warns(RuntimeWarning, match="not in use \\(of this test\\)"):
        loaded = load(saved)
    assert isinstance(loaded.model, hf.HFModel)
    torch.testing.assert_close(logits(loaded.model, prompts(9)[0]), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="quantization='int8' needs the native CPU kernels: of this test"):
        load(saved, quantization="int8")


def test_wrong_names_of_precisions_and_devices(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"got 'bf16' \(did you mean 'bfloat16'"):
        load(saved, dtype="bf16")
    with pytest.raises(ValueError, match=r"got 'flaot32' \(did you mean 'float32'"):
        load(saved, dtype="flaot32")
    with pytest.raises(ValueError, match="give quantization='int8'"):
        load(saved, dtype="int8")
    with pytest.raises(ValueError, match=r"None, 'int8' or 'int4', got 'int3' \(did you mean 'int"):
        load(saved, quantization="int3")
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda, got 'gpu'"):
        load(saved, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="use device='cpu'"):
            load(saved, device="cuda")


def test_names_that_lead_nowhere(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no built-in model 'builtin:cod' \(did you mean 'builtin:code'\?\); there"):
        load("builtin:cod")
    for name in (str(tmp_path / "nowhere"), "./nowhere", "~/no/where", "a/b/c"):
        with pytest.raises(
            FileNotFoundError, match=r"there is no folder .*a GGUF file, a hub name, or one of builtin:code"
        ):
            load(name)
    with pytest.raises(FileNotFoundError, match=r"is a file, and not a .gguf one"):
        load(folder / "model.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"no config.json and no .gguf file; give the folder that save_pretrained wrote"
    ):
        load(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"a config.json and no weights .*the download is incomplete"):
        load(folder)


def test_damaged_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged, message in (
        (whole[:-10], rf"model.safetensors is not whole: it has {len(whole) - 10} bytes of {len(whole)}; download it"),
        (whole[:100], "table alone is longer than the 100 bytes"),
        (b"", "longer than the 0 bytes"),
        (whole[:8] + b"x" + whole[9:], "table cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "run `git lfs pull`"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            load(folder)


def test_weights_that_are_not_all_there(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"model.layers.2\S* of a LlamaForCausalLM is in no file. Download it again"):
        load(folder)


def test_configurations_that_cannot_run(folder: Path) -> None:
    config = folder / "config.json"
    whole = config.read_text()
    for changes, error, message in (
        ({"model_type": "lama"}, ValueError, r"model_type 'lama' .* does not know \(did you mean 'llama'"),
        ({"model_type": None}, ValueError, "model_type None"),
        ({"model_type": "own", "auto_map": {}}, ValueError, "its own code .* is not run here.*give the object: LLM"),
        ({"model_type": "t5"}, hf.UnsupportedModel, "an encoder-decoder"),
        ({"model_type": "vit"}, hf.UnsupportedModel, "transformers has no causal language model"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            hf.UnsupportedModel,
            "quantised by gptq.*give the unquantised",
        ),
        ({"hidden_size": "wide"}, ValueError, "cannot be read"),
    ):
        change(config, **changes)
        with pytest.raises(error, match=message):
            load(folder)
        config.write_text(whole)
    config.write_text(whole[:-20])
    with pytest.raises(ValueError, match="is not JSON"):
        load(folder)


def test_weights_that_do_not_fit(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = checkpoint.sizes("it", saved)
    assert sizes is not None
    raw = tiny("llama")
    everything = sum(p.numel() for p in raw.parameters())
    assert (sizes.stored, sizes.bytes("bfloat16")) == ("bfloat16", 2 * everything)

    def free(share: float) -> None:
        monkeypatch.setattr(checkpoint, "free_memory", lambda _: int(sizes.bytes("bfloat16") * share))

    free(1.2)
    load(saved)
    with pytest.raises(
        MemoryError, match=r"needs .* GiB as float32, and .* GiB are free on cpu; bfloat16 weights would"
    ):
        load(saved, dtype="float32")
    free(1.0)
    with pytest.raises(MemoryError, match=r"as bfloat16.*int8 weights would fit .*quantization='int8'"):
        load(saved)
    free(0.1)
    with pytest.raises(MemoryError, match="no precision of this model fits here"):
        load(saved, dtype="float32")
    monkeypatch.setattr(checkpoint, "free_memory", lambda _: 0)  # not known: nothing is refused
    load(saved)


def test_free_memory_is_known_here() -> None:
    assert checkpoint.free_memory("cpu") > 2**20


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    asked = []

    def model_info(self, name: str, timeout: float) -> None:
        asked.append(timeout)
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(
        ConnectionError, match=r"hub cannot be reached .*Name or service.*folder.*builtin:code.*hf download"
    ):
        load("some/model")
    assert len(asked) == 1  # no second try
    assert asked[0] <= 60
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(saved / "config.json"))
    assert load("some/model").model.vocab_size == VOCAB


def test_a_hub_that_does_not_know_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(self, name: str, timeout: float) -> None:
        raise errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)

    monkeypatch.setattr(HfApi, "model_info", model_info)
    with pytest.raises(FileNotFoundError, match=r"no such model on the hub .*check the spelling"):
        load("some/modle")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not a folder here and cannot be a name on the hub"):
        load("some model!")


def test_a_model_that_cannot_run_is_refused_by_its_configuration(tmp_path: Path) -> None:
    """A class whose memory of earlier tokens is not one of each token: why, and what would run. Its weights are not needed."""
    tiny_config(whole_config("rwkv")).save_pretrained(tmp_path)
    says = r"^RwkvForCausalLM cannot .* \(it has a recurrent state\).*give another model.*docs/models.md.*transformers alone"
    with pytest.raises(hf.UnsupportedModel, match=says):
        load(tmp_path)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps freed memory in another way")
def test_freed_memory_is_given_back(saved: Path) -> None:
    libc, count, size = ctypes.CDLL(None), 60_000, 1_000
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    load(saved)
    before = psutil.Process().memory_info().rss
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:  # the last one holds the end of the heap where it is
        libc.free(block)
    kept = psutil.Process().memory_info().rss - before
    load(saved)
    assert kept > 0.8 * count * size  # or glibc gives it back itself, and the next line shows nothing
    assert psutil.Process().memory_info().rss - before < 0.5 * count * size
    libc.free(blocks[-1])
