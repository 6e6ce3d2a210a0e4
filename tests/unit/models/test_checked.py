"""A family's program is compared with transformers before it serves: one that misreads a setting is caught, once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from architectures import FAMILIES, tiny
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from docs.checked import table
from outrider.kernels import cpu as native
from outrider.models.config import config_of
from outrider.models.hf import checked
from outrider.models.hf.skeleton import skeleton_of
from outrider.models.hf.tensors import ModuleTensors, config_for
from outrider.models.load import load
from outrider.models.native.families import family, family_of
from outrider.models.native.model import NativeModel, outlined, supports

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))

GRANITE = "GraniteForCausalLM"
FACTORS = ("logits_scaling", "attention_multiplier", "residual_multiplier", "embedding_multiplier")


class Misread:
    """A configuration that a family reads, and one setting of it as if it was another number."""

    def __init__(self, config: Any, name: str) -> None:
        self._config, self._name = config, name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._config, name)
        return found * 1.25 if name == self._name else found


@pytest.fixture(params=FACTORS)
def wrong(request: pytest.FixtureRequest) -> Iterator[str]:
    """Granite's family is wrong for this setting."""
    right = family_of(GRANITE)
    assert right is not None
    family(GRANITE)(lambda b, c: right(b, Misread(c, request.param)))
    yield request.param
    family(GRANITE)(right)


def differs(model: Any, read: dict[str, Any] | None = None) -> str | None:
    """read: the settings of its program; None for some that no table has."""
    return checked.differs(config_of(model.config.to_dict()), read or {"new": True})


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_family_that_misreads_a_setting_does_not_serve(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / wrong
    tiny("granite", num_hidden_layers=3).save_pretrained(folder)
    monkeypatch.setattr(checked, "_table", dict)
    with warnings.catch_warnings(record=True):  # it is said once in a process
        assert not isinstance(load(str(folder), device="cpu").model, NativeModel)
    assert "does not compute what transformers does" in str(differs(tiny("granite", num_hidden_layers=3)))


def test_it_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, compare = tiny("gemma2"), list[Any](), checked._difference
    monkeypatch.setattr(checked, "_difference", lambda config: asked.append(config) or compare(config))
    assert differs(model) is None
    assert differs(model) is None
    assert len(asked) == 1


def settings_of(model: Any) -> dict[str, Any]:
    """What its program is made of."""
    return outlined(config_for(model), ModuleTensors(model)).facts["config"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_has_the_tiny_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their logits are compared in `test_families.py`. So a start of a model like them imports nothing for a check."""
    kind, changes = FAMILIES[name]
    model = tiny(kind, **changes)
    monkeypatch.setattr(checked, "smaller", lambda config: pytest.fail("it is compared again"))
    assert differs(model, settings_of(model)) is None


def test_what_the_table_does_not_have_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = tiny("llama"), list[Any]()
    monkeypatch.setattr(checked, "_difference", lambda config: asked.append(config) or "a reason")
    read = settings_of(model)
    for other in ({"hidden_act": "gelu_new"}, {"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}}):
        assert checked.differs(config_of(model.config.to_dict() | other), read | other) == "a reason"
    assert len(asked) == 2


@pytest.mark.long
def test_the_table_is_what_agrees() -> None:
    made = table()
    assert json.loads(checked.TABLE.read_text(encoding="utf-8")) == made, "run: python -m docs.checked"


def test_it_is_left_out_where_transformers_is_not_installed(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(checked, "find_spec", lambda name: None)
    assert differs(tiny("granite", num_hidden_layers=3)) is None


_THREE = ["sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("kind", "changes", "layers"),
    [
        ("llama", {"num_hidden_layers": 9, "vocab_size": 5000, "intermediate_size": 200}, 2),
        ("gemma3_text", {"num_hidden_layers": 8, "layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 3}, 6),
        ("gemma4_text", {"num_hidden_layers": 12, "layer_types": None, "num_kv_shared_layers": 6}, 12),
        ("gemma4_text", {"num_hidden_layers": 9, "layer_types": _THREE * 3, "num_kv_shared_layers": 6}, 6),
    ],
)
def test_the_small_model_has_a_layer_of_each_kind(kind: str, changes: dict[str, Any], layers: int) -> None:
    small = checked.smaller(config_of(tiny(kind, **changes).config.to_dict()))
    assert small.num_hidden_layers == layers
    assert small.vocab_size <= 64
    assert small.intermediate_size <= 64
    assert small.hidden_size == 32
    if kind == "gemma4_text":
        assert small.num_kv_shared_layers == layers // 2
        assert differs(tiny(kind, global_head_dim=16, **changes)) is None


@pytest.mark.parametrize("config", [DeepseekV3Config(), Qwen3MoeConfig(num_experts=128)])
def test_the_small_model_of_a_mixture_is_small(config: Any) -> None:
    """DeepSeek-V3 has 671 billion weights. Its groups of experts stay."""
    model = skeleton_of(type(config).from_dict(checked.smaller(config_of(config.to_dict())).to_dict()))
    assert sum(p.numel() for p in model.parameters()) < 1e8
    assert supports(model) is None


def test_a_small_model_of_groups_agrees() -> None:
    config = DeepseekV3Config(
        vocab_size=97, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, kv_lora_rank=16, q_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    small = checked.smaller(config_of(config.to_dict()))
    assert (small.n_routed_experts, small.num_hidden_layers, small.num_attention_heads) == (32, 2, 8)
    assert differs(AutoModelForCausalLM.from_config(config)) is None
