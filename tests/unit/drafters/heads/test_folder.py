"""`-d FOLDER` is enough: the method follows from the folder, and what cannot be is said."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heads import GOLDEN, KINDS, copied, head_folder, small_target
from helpers import configured
from safetensors.numpy import save_file

from outrider import LLM, SamplingParams
from outrider.drafters import make_drafters
from outrider.drafters.config import DrafterSetup, SpeculativeConfig
from outrider.drafters.heads.eagle import Pairs, eagle_model, read_eagle, survival
from outrider.drafters.heads.files import head_of, open_head
from outrider.drafters.heads.selftest import examine
from outrider.drafters.method import level_cost
from outrider.drafters.model.grower import TreeDrafter
from outrider.models.builtin.download import DOWNLOADS, find
from outrider.models.builtin.shipped import data_folder
from outrider.models.load import load
from outrider_lab.handover import exports
from outrider_lab.tune.candidates import TuneInputs, candidates

TARGET = small_target()
HEAD = str(GOLDEN / "eagle31")


def make(**config: Any) -> Any:
    return configured(config, TARGET, 2, 128)


def texts(config: dict[str, Any] | None) -> list[list[int]]:
    llm = LLM(TARGET, speculative_config=config, max_model_len=128)
    params = [SamplingParams(temperature=t, max_tokens=20, seed=3) for t in (0.0, 1.0)]
    return [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 2, params)]


@pytest.mark.parametrize(
    "config",
    [{"method": "eagle3", "quantization": "int8"}, {"method": "auto"}, {"method": ["suffix", "eagle"]}],
    ids=str,
)
def test_the_method_may_be_named(config: dict[str, Any]) -> None:
    assert texts({"model": HEAD, **config}) == texts(None)


METHODS = {kind: kind.split("-")[0] for kind in KINDS} | {kind: "eagle" for kind in KINDS if kind.startswith("eagle")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_enough(kind: str, tmp_path: Path) -> None:
    folder, method = str(head_folder(kind, tmp_path)), METHODS[kind].removesuffix("_qwen3").replace("dflash2", "dflash")
    assert SpeculativeConfig.of({"model": folder}).method == method
    ask = SpeculativeConfig.of({"method": "auto", "model": folder})
    auto = make_drafters(DrafterSetup(ask, TARGET, 1, 64, "cpu"))
    assert list(auto) == ["prediction", "suffix", method]
    assert 0 < level_cost(method, auto[method], TARGET.model) < 1
    tried = dict(candidates(TuneInputs(TARGET.weights, folder), None))
    assert tried[method] == {"method": method, "model": folder}
    assert "draft_model" not in tried


@pytest.mark.parametrize(("kind", "parallel"), [("eagle31", False), ("peagle", True)])
def test_other_engines_are_named_the_head(kind: str, parallel: bool) -> None:
    found = {e.engine: e.command for e in exports({"model": str(GOLDEN / kind), "num_speculative_tokens": 4})}
    assert f'"method": "eagle3", "num_speculative_tokens": 4, "model": "{GOLDEN / kind}"' in found["vLLM"]
    assert ('"parallel_drafting": true' in found["vLLM"]) == parallel
    assert ("--speculative-algorithm EAGLE3" in found["SGLang"]) != parallel


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'"method": "eagle", "model": "FOLDER"'):
        make(method="eagle")
    with pytest.raises(ValueError, match=r'is a trained head, not a draft model: \{"method": "eagle"'):
        make(method="draft_model", model=HEAD)
    with pytest.raises(ValueError, match="there is no folder no/such"):
        make(method="eagle", model="no/such")
    with pytest.raises(ValueError, match="is a head of the kind 'dspark'"):
        make(method="dflash", model=str(GOLDEN / "dspark"))
    refused = copied("eagle3", tmp_path, {"speculators_model_type": "xpress"})
    with pytest.raises(ValueError, match="kind 'xpress', which outrider does not run"):
        make(model=str(refused))
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text("{}")
    save_file({"model.layers.0.self_attn.q_proj.weight": np.zeros(1, np.float32)}, plain / "model.safetensors")
    with pytest.raises(ValueError, match="holds no head that outrider knows"):
        make(method="eagle", model=str(plain))


def test_auto_uses_a_head_where_the_package_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = replace(TARGET, name="builtin:small")
    ask = SpeculativeConfig.of({"method": "auto"})

    def drafters() -> list[str]:
        return list(make_drafters(DrafterSetup(ask, target, 1, 64, "cpu")))

    assert "eagle" not in drafters()
    by_name = SpeculativeConfig.of({"method": "eagle"})
    with pytest.raises(ValueError, match="this package has none for builtin:small"):
        make_drafters(DrafterSetup(by_name, target, 1, 64, "cpu"))
    monkeypatch.setattr("outrider.models.builtin.shipped.data_folder", lambda: tmp_path)
    heads = tmp_path / "heads"
    heads.mkdir()
    copied("eagle31", heads).rename(heads / "small")
    assert "eagle" in drafters()
    assert list(make_drafters(DrafterSetup(by_name, target, 1, 64, "cpu"))) == ["eagle"]
    with pytest.raises(
        ValueError, match='"medusa" needs the folder of a trained head'
    ):  # the package's is of another kind
        make_drafters(DrafterSetup(SpeculativeConfig.of({"method": "medusa"}), target, 1, 64, "cpu"))
    assert head_of(None, "builtin:small") == heads / "small"
    assert head_of(None, "builtin:other") is head_of(None, "small") is head_of(None, "builtin:") is None


def test_a_file_with_the_content_of_a_builtin_model_has_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tmp_path / "heads"
    heads.mkdir()
    copied("eagle31", heads).rename(heads / "small")
    file = tmp_path / "any-name.gguf"
    file.write_bytes(b"weights")
    known = replace(
        DOWNLOADS["builtin:smollm2-135m"], size=7, sha256=hashlib.sha256(b"weights").hexdigest(), file="other.gguf"
    )
    monkeypatch.setattr("outrider.models.builtin.download.DOWNLOADS", {"builtin:small": known})
    monkeypatch.setattr("outrider.models.builtin.shipped.data_folder", lambda: tmp_path)
    assert head_of(None, str(file)) == heads / "small"
    file.write_bytes(b"wEights")  # the size alone does not tell
    assert head_of(None, str(file)) is None


@pytest.mark.parametrize("folder", sorted((data_folder() or Path()).glob("heads/*/")), ids=lambda p: p.name)
def test_shipped_heads_are_whole_and_small(folder: Path) -> None:
    assert f"builtin:{folder.name}" in {*DOWNLOADS, "builtin:code"}
    opened = open_head(folder)
    assert opened.kind == "eagle3"
    assert "embed_tokens.weight" not in opened.tensors, "the embedding is the target's"
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 24 * 2**20
    assert "apache-2.0" in (folder / "MODEL_CARD.md").read_text()


def test_the_shipped_head_is_right_along_a_text() -> None:
    """With the model that it was trained for, where that is on this machine."""
    if find(DOWNLOADS["builtin:smollm2-135m"]) is None:
        pytest.skip("builtin:smollm2-135m is not here")
    target, head = load("builtin:smollm2-135m"), head_of(None, "builtin:smollm2-135m")
    assert head is not None
    model = eagle_model(read_eagle(head, target), target.model, 256)
    report = examine(TreeDrafter(Pairs(model, 1, 256)), [], survival, target, 256, head)
    assert report is not None
    assert sum(report.hits) > 0.5
