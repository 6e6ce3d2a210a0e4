"""Heads that are written here give the same numbers in the code of others, and are read by it.

Without the other packages every test is skipped. `requirements.txt` beside this file says how to make an environment. Code that
is in no package registry is taken from checkouts: OUTRIDER_FOREIGN names the folder that holds them, each as `OWNER+NAME`.
Each test prints the largest difference; docs/guides/heads.md keeps the table.
"""

from __future__ import annotations

import os
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import small_config
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.drafters.heads.block import BlockConfig
from outrider.drafters.heads.eagle import EagleConfig
from outrider_lab.heads.modules import BlockModule, Eagle, config_for, floats
from outrider_lab.heads.writers import write_block, write_eagle
from outrider_lab.train.methods import unrolled

CHECKOUTS = Path(os.environ.get("OUTRIDER_FOREIGN", "no checkouts"))
VOCAB, HIDDEN, TEXT, STEPS, CLOSE = 128, 32, 24, 4, 1e-4
IDS, TAPS = [2, 4, 8], (1, 3, 7)
SOME = torch.arange(VOCAB)[5::3]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all tokens": {"draft_vocab_size": VOCAB},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
}


def checkout(name: str, *path: str) -> Path:
    found = CHECKOUTS / name
    if not found.joinpath(*path).exists():
        pytest.skip(f"there is no checkout {found}; OUTRIDER_FOREIGN names the folder that holds it")
    return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    torch.manual_seed(7)
    made = LlamaForCausalLM(small_config(VOCAB, HIDDEN)).eval()
    folder = tmp_path_factory.mktemp("target")
    made.save_pretrained(folder)
    made.config._name_or_path = str(folder)
    return made


@pytest.fixture(scope="module")
def text() -> tuple[Tensor, Tensor]:
    """(tokens [1, n], features [1, n, 3 * hidden]). The features are any numbers: a head cannot tell."""
    torch.manual_seed(8)
    return torch.randint(0, VOCAB - 1, (1, TEXT)), torch.randn(1, TEXT, 3 * HIDDEN)


def said(what: str, worst: float) -> None:
    print(f"{what}: largest difference {worst:.1e}")
    assert worst < CLOSE


def random_(head: torch.nn.Module) -> None:
    """Norms far from one, which would hide a missing norm."""
    torch.manual_seed(9)
    for p in head.parameters():
        if p.requires_grad:
            p.data = torch.randn_like(p) * 0.2 if p.dim() == 2 else torch.rand_like(p) + 0.5


def eagle(target: LlamaForCausalLM, **flags: Any) -> Eagle:
    flags = {"draft_vocab_size": len(SOME)} | flags
    config = config_for(EagleConfig, target.config, taps=TAPS, **flags)
    head = Eagle(config, SOME if config.draft_vocab_size < VOCAB else None)
    head.initialise_(target.get_input_embeddings().weight, target.lm_head.weight)  # pyright: ignore[reportArgumentType]
    head.lm_head.requires_grad_(False)
    random_(head)
    return head.eval()


def block(target: LlamaForCausalLM, rank: int, ids: Tensor) -> BlockModule:
    config = BlockConfig(
        hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=len(ids), taps=TAPS, target_hidden_size=HIDDEN,
        num_layers=2, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, block_size=5,
        mask_token_id=VOCAB - 1, from_anchor=rank > 0, markov_rank=rank, confidence=rank > 0, confidence_markov=rank > 0,
        max_position_embeddings=256, verifier=target.config._name_or_path,
    )  # fmt: skip
    table, rows = target.get_input_embeddings().weight.data, target.lm_head.weight.data[ids]  # pyright: ignore
    made = BlockModule(config, ids, table, rows)  # pyright: ignore[reportArgumentType]
    random_(made)
    return made.eval()


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_speculators_reads_an_eagle_head_and_gives_its_logits(
    name: str, target: LlamaForCausalLM, text: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    speculators = pytest.importorskip("speculators")
    head, (tokens, features) = eagle(target, **VARIANTS[name]), text
    write_eagle(tmp_path, head.weights(embedding=True), dtype="float32")
    config = speculators.SpeculatorModelConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs, logits = speculators.SpeculatorModel.from_pretrained(tmp_path, config=config).eval(), list[Tensor]()
    theirs.lm_head.register_forward_hook(lambda _m, _i, out: logits.append(out[0].clone()))
    theirs(
        hidden_states=features[:, :-1],
        input_ids=tokens[:, 1:],
        document_ids=torch.zeros(1, TEXT - 1, dtype=torch.long),
        ttt_steps=STEPS,
    )
    anchors = torch.arange(TEXT - 2 - STEPS)[None]
    ours = list(unrolled(head, tokens, features, anchors, STEPS))
    worst = max(float((logits[k][: anchors.shape[1]] - ours[k][0]).abs().max()) for k in range(STEPS))
    said(f"speculators {version('speculators')}, EAGLE-3 {name}, steps 0 to {STEPS - 1}", worst)


@torch.no_grad()
@pytest.mark.parametrize("ids", [torch.arange(VOCAB), SOME], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize(("name", "rank"), [("dflash", 0), ("dspark", 8)])
def test_speculators_reads_a_block_drafter_and_gives_its_numbers(
    name: str, rank: int, ids: Tensor, target: LlamaForCausalLM, text: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    speculators = pytest.importorskip("speculators")
    made, (tokens, features) = block(target, rank, ids), text
    write_block(tmp_path, made.weights(), dtype="float32")
    config = speculators.SpeculatorModelConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = speculators.SpeculatorModel.from_pretrained(tmp_path, config=config).eval()
    assert type(theirs).__name__ == ("DSparkDraftModel" if rank else "DFlashDraftModel")
    last, documents = torch.randn(1, TEXT, HIDDEN), torch.zeros(1, TEXT, dtype=torch.long)
    hidden, _, _, _, index = theirs._backbone_forward(
        features, tokens, torch.ones(1, TEXT), last, documents, max_anchors=6
    )
    anchors = index.view(1, -1, 5)[..., 0] - 1
    z = made(tokens.gather(1, anchors + 1), features, anchors)
    ours = z.flatten(1, 2)
    worst = float((hidden - ours).abs().max())
    worst = max(worst, float((theirs.lm_head(hidden) - made.lm_head(ours)).abs().max()))
    if made.markov_head is not None:
        seen = theirs.markov_head.markov_w1(tokens[0])
        bias = theirs.markov_head.markov_w2(seen) - made.markov_head.markov_w2(made.markov_head.markov_w1(tokens[0]))
        worst = max(worst, float(bias.abs().max()))
    said(f"speculators {version('speculators')}, {name}, {len(ids)} tokens", worst)


def slots(made: BlockModule, tokens: Tensor, p: int) -> Tensor:
    """The embeddings of the block whose root is token p."""
    ids = torch.full((1, made.config.block_size), made.config.mask_token_id)
    ids[0, 0] = tokens[0, p]
    return made.embed_tokens(ids)


@torch.no_grad()
def test_transformers_runs_a_dflash_drafter(target: LlamaForCausalLM, text: tuple[Tensor, Tensor]) -> None:
    import transformers

    if not hasattr(transformers, "MuseGlimmerAssistantModel"):
        pytest.skip("this transformers has no block drafter")
    made, (tokens, features), p = block(target, 0, torch.arange(VOCAB)), text, 13
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, rms_norm_eps=1e-6, rope_parameters=made.config.rope_parameters, max_position_embeddings=256,
        layer_types=["full_attention"] * 2, block_size=5, mask_token_id=VOCAB - 1, target_layer_ids=IDS,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    theirs = transformers.MuseGlimmerAssistantModel(config).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    found = theirs.load_state_dict(
        {names.get(n, n): floats(t) for n, t in made.weights().tensors.items()}, strict=False
    )
    assert not found.missing_keys
    assert not found.unexpected_keys
    got = theirs(
        noise_embeds=slots(made, tokens, p),
        context_hidden_states=features[:, :p],
        position_ids=torch.arange(p + 5)[None],
    ).last_hidden_state
    ours = made(tokens[:, p : p + 1], features, torch.tensor([[p - 1]]))
    said(f"transformers {transformers.__version__}, MuseGlimmerAssistant", float((got - ours[0]).abs().max()))


def qwen(made: BlockModule, **more: Any) -> Any:
    from transformers import Qwen3Config

    c = made.config
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters=c.rope_parameters, layer_types=["full_attention"] * 2, use_sliding_window=False,
        attention_bias=False, pad_token_id=None,
    )  # fmt: skip
    for name, value in ({"block_size": c.block_size} | more).items():
        setattr(config, name, value)
    config._attn_implementation = "eager"
    return config


@torch.no_grad()
def test_z_labs_code_runs_a_dflash_drafter(target: LlamaForCausalLM, text: tuple[Tensor, Tensor]) -> None:
    source = checkout("z-lab+dflash", "dflash", "model.py") / "dflash" / "model.py"
    module: dict[str, Any] = {"__name__": "z_lab"}
    exec(compile(source.read_text(), str(source), "exec"), module)
    made, (tokens, features), p = block(target, 0, torch.arange(VOCAB)), text, 13
    ids = {"target_layer_ids": [i - 1 for i in IDS], "mask_token_id": VOCAB - 1}
    theirs = module["DFlashDraftModel"](qwen(made, num_target_layers=8, dflash_config=ids)).eval()
    found = theirs.load_state_dict({n: floats(t) for n, t in made.weights().tensors.items()}, strict=False)
    assert not found.missing_keys
    assert not found.unexpected_keys
    got = theirs(
        position_ids=torch.arange(p + 5)[None], noise_embedding=slots(made, tokens, p), target_hidden=features[:, :p]
    )
    ours = made(tokens[:, p : p + 1], features, torch.tensor([[p - 1]]))
    said("z-lab/dflash", float((got - ours[0]).abs().max()))


@torch.no_grad()
def test_deepspecs_code_runs_a_dspark_drafter(target: LlamaForCausalLM, text: tuple[Tensor, Tensor]) -> None:
    sys.path.insert(0, str(checkout("deepseek-ai+DeepSpec", "deepspec")))
    sys.modules.setdefault("deepspec.utils.hfai_suspend", types.ModuleType("deepspec.utils.hfai_suspend"))
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel  # pyright: ignore[reportMissingImports]

    made, (tokens, features), p = block(target, 8, torch.arange(VOCAB)), text, 13
    config = qwen(
        made, target_layer_ids=[i - 1 for i in IDS], mask_token_id=VOCAB - 1, num_anchors=4, enable_confidence_head=True,
        confidence_head_with_markov=True, markov_rank=8, markov_head_type="vanilla",
    )  # fmt: skip
    theirs = Qwen3DSparkModel(config).eval()
    tables = {"embed_tokens.weight": made.embed_tokens.weight, "lm_head.weight": made.lm_head.weight}
    found = theirs.load_state_dict({n: floats(t) for n, t in made.weights().tensors.items()} | tables, strict=False)
    assert not found.missing_keys
    hidden = theirs._forward_backbone(
        position_ids=torch.arange(p + 5)[None],
        noise_embedding=slots(made, tokens, p),
        target_hidden_states=features[:, :p],
    )
    ours = made(tokens[:, p : p + 1], features, torch.tensor([[p - 1]]))[0]
    worst = float((hidden - ours).abs().max())
    drawn, _ = theirs.sample_draft_tokens(
        theirs.compute_logits(hidden), first_prev_token_ids=tokens[:, p], hidden_states=hidden
    )
    sure = theirs.predict_confidence_step(hidden, torch.cat([tokens[:, p : p + 1], drawn[:, :-1]], 1)).flatten()
    told = torch.cat([tokens[:, : p + 1], drawn], 1)
    for k, (logits, own) in enumerate(made.drafts(told, features, torch.tensor([[p - 1]]))):
        assert int(logits[0, 0].argmax()) == int(drawn[0, k])
        assert own is not None
        worst = max(worst, float((own[0, 0] - sure[k]).abs()))
    said("deepseek-ai/DeepSpec, DSpark with confidence", worst)


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "all tokens"])
def test_safeailabs_code_runs_an_eagle_head(name: str, target: LlamaForCausalLM, text: tuple[Tensor, Tensor]) -> None:
    source = checkout("SafeAILab+EAGLE", "eagle", "model", "cnets.py") / "eagle" / "model" / "cnets.py"
    code = source.read_text()
    start, end = code.index("try:\n    from .configs"), code.index("\n\n", code.index("prepare_logits_processor"))
    module: dict[str, Any] = {"__name__": "cnets"}
    exec(compile(code[:start] + code[end:], str(source), "exec"), module)
    head, (tokens, features) = eagle(target, **VARIANTS[name]), text
    c = head.config
    config = types.SimpleNamespace(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=c.intermediate_size, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=c.rms_norm_eps, hidden_act="silu",
        rope_theta=c.rope_parameters["rope_theta"], pad_token_id=None, draft_vocab_size=c.draft_vocab_size,
        rope_scaling=None, pretraining_tp=1,
    )  # fmt: skip
    theirs = module["Model"](config, total_tokens=13, depth=3, top_k=4, threshold=1.0).eval()
    own = {n.replace("layers.0.", "midlayer."): t for n, t in head.state_dict().items()}
    found = theirs.load_state_dict(own, strict=False)
    assert set(found.missing_keys) <= {"d2t", "t2d"}
    worst, t = 0.0, 10
    y, past = theirs(features[:, : t + 1], input_ids=tokens[:, 1 : t + 2], use_cache=True)
    y = y[:, -1:]
    ours = list(unrolled(head, tokens, features, torch.tensor([[t]]), STEPS))
    for k in range(STEPS):
        worst = max(worst, float((theirs.lm_head(theirs.norm(y))[0, 0] - ours[k][0, 0]).abs().max()))
        y, past = theirs(y, input_ids=tokens[:, t + 2 + k : t + 3 + k], past_key_values=past, use_cache=True)
    said(f"SafeAILab/EAGLE, {name}, steps 0 to {STEPS - 1}", worst)
