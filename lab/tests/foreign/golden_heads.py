"""Makes `tests/unit/drafters/heads/golden`: small heads that speculators wrote, with the logits that its own modules compute.

Run by hand, in an environment of its own (`lab/tests/foreign/requirements.txt` says how it is made):

    python lab/tests/foreign/golden_heads.py

Weights are rounded to bfloat16 before anything is computed, so that the files are small and exact.
"""

import copy
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models import DFlashDraftModel, DSparkDraftModel, Eagle3DraftModel
from speculators.models.dflash2 import DFlash2DraftModel
from speculators.models.peagle import PEagleDraftModel
from speculators.models.peagle import core as peagle_core
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

OUT = Path(__file__).parents[3] / "tests" / "unit" / "drafters" / "heads" / "golden"
VOCAB, ROWS, LAYERS, HIDDEN, TEXT, STEPS = 128, 48, 8, 32, 20, 4
EAGLE3 = {
    "eagle3": {},
    "eagle3_full_vocab": {"full": True},
    "eagle31": {"fc_norm": True, "norm_output": True},
    "eagle3_before_fc": {"norm_before_fc": True},
    "eagle3_before_residual": {"norm_before_residual": True},
}
IDS = [2, 4, 8]  # 8 is the output of the last layer, before the final norm
BLOCK = {"dflash": DFlashDraftModel, "dspark": DSparkDraftModel, "dflash2": DFlash2DraftModel}


def rounded_(model: torch.nn.Module, scale: float) -> None:
    """Random weights; norms far from one, which would hide a missing norm."""
    for name, p in model.named_parameters():
        if "embed" in name or "lm_head" in name or "verifier" in name:
            continue
        p.data = torch.randn_like(p) * scale if p.ndim == 2 else torch.rand_like(p) + 0.5
    for p in model.parameters():
        p.data = p.data.bfloat16().float()


def target(folder: str):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )
    made = AutoModelForCausalLM.from_config(config).eval()
    rounded_(made, 0.1)
    made.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def features(model, tokens):
    """The residual stream before each layer of IDS. transformers gives the last one after the final norm, so hooks take them."""
    seen = {}
    hooks = [
        layer.register_forward_hook(
            lambda _m, _i, out, n=n: seen.__setitem__(n + 1, out[0] if isinstance(out, tuple) else out)
        )
        for n, layer in enumerate(model.model.layers)
    ]
    last = model(tokens, output_hidden_states=True).hidden_states[-1]
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[i] for i in IDS], -1), last


def keep(name: str, folder: Path, expected: dict) -> None:
    out = OUT / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "golden-target"
    (out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    weights = load_file(folder / "model.safetensors")
    save_file({n: t.bfloat16() if t.is_floating_point() else t for n, t in weights.items()}, out / "model.safetensors")
    save_file({n: t.contiguous() for n, t in expected.items()}, out / "expected.safetensors")


@torch.no_grad()
def main() -> None:
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as home:
        base = str(Path(home) / "target")
        model = target(base)
        ids = torch.randperm(VOCAB)[:ROWS].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[ids] = True
        x = torch.randint(0, VOCAB - 1, (1, TEXT))
        feats, last = features(model, x)
        one = AutoConfig.from_pretrained(base)
        one.num_hidden_layers = 1
        for name, given in EAGLE3.items():
            flags, folder = dict(given), Path(home) / name
            full = flags.pop("full", False)
            made = Eagle3DraftModel.from_training_args(
                copy.deepcopy(one),
                t2d=None if full else t2d,
                d2t=None if full else ids - torch.arange(ROWS),
                draft_vocab_size=VOCAB if full else ROWS,
                verifier_name_or_path=base,
                ttt_steps=STEPS,
                draft_attn_impl="eager",
                norm_before_residual=flags.pop("norm_before_residual", False),
                target_layer_ids=IDS,
                **flags,
            )
            rounded_(made, 0.2)
            made.save_pretrained(folder)
            config = SpeculatorModelConfig.from_pretrained(folder)
            config.transformer_layer_config._attn_implementation = "eager"
            head, logits = SpeculatorModel.from_pretrained(folder, config=config).eval(), []
            head.lm_head.register_forward_hook(lambda _m, _i, out, into=logits: into.append(out[0].clone()))
            head(
                hidden_states=feats[:, :-1],
                input_ids=x[:, 1:],
                document_ids=torch.zeros(1, TEXT - 1, dtype=torch.long),
                ttt_steps=STEPS,
            )
            keep(name, folder, {"tokens": x[0], "features": feats[0], "logits": torch.stack(logits[:STEPS])})
        blocks(home, base, x, feats, last)
        parallel(home, base, x, feats, last, ids)
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    save_file({"embedding": embedding.bfloat16(), "lm_head": head.bfloat16()}, OUT / "target.safetensors")


def parallel(home: str, base: str, x, feats, last, ids) -> None:
    """P-EAGLE: two layers of Llama, or of Qwen3 with all tokens, and an embedding of its own. Every anchor, all depths."""
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    for name, flags in {"peagle": {"fc_norm": True}, "peagle_qwen3": {"norm_before_residual": True}}.items():
        torch.manual_seed(3)
        folder, qwen = Path(home) / name, name == "peagle_qwen3"
        made = PEagleDraftModel.from_training_args(
            shape() if qwen else two_layers(base),
            t2d=None if qwen else t2d,
            d2t=None if qwen else ids - torch.arange(ROWS),
            draft_vocab_size=VOCAB if qwen else ROWS,
            verifier_name_or_path=base,
            target_layer_ids=IDS,
            mask_token_id=VOCAB - 1,
            num_depths=STEPS,
            draft_attn_impl="eager",
            **flags,
        )
        rounded_(made, 0.2)
        own = made.embed_tokens.weight.data
        made.embed_tokens.weight.data = (own + torch.randn_like(own) * 0.2).bfloat16().float()
        made.mask_hidden.data = torch.randn_like(made.mask_hidden).bfloat16().float()
        made.save_pretrained(folder)
        config = SpeculatorModelConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"
        head, logits, drawn = SpeculatorModel.from_pretrained(folder, config=config).eval(), [], []
        head.lm_head.register_forward_hook(lambda _m, _i, out, into=logits: into.append(out[0].clone()))
        inner = peagle_core.generate_cod_sample_indices
        peagle_core.compute_metrics = lambda **_: (None, {})  # the loss needs Triton
        peagle_core.generate_cod_sample_indices = lambda **given: drawn.append(inner(**given)) or drawn[-1]
        head(
            hidden_states=feats[:, :-1],
            input_ids=x[:, 1:],
            document_ids=torch.zeros(1, TEXT - 1, dtype=torch.long),
            verifier_last_hidden_states=last[:, :-1],
            num_depths=STEPS,
            down_sample_ratio=1.0,
            down_sample_ratio_min=1.0,
        )
        peagle_core.generate_cod_sample_indices = inner
        anchors, depths = drawn[0]
        expected = {"tokens": x[0], "features": feats[0], "anchors": anchors, "depths": depths, "logits": logits[0]}
        keep(name, folder, expected)


def two_layers(base: str):
    config = AutoConfig.from_pretrained(base)
    config.num_hidden_layers = 2
    return config


def blocks(home: str, base: str, x, feats, last) -> None:
    size = 5
    for name, kind in BLOCK.items():
        folder = Path(home) / name
        more = {
            "dspark": {"markov_rank": 8},
            "dflash2": {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6},
        }.get(name, {})
        made = kind.from_training_args(
            shape(),
            draft_vocab_size=VOCAB,
            verifier_name_or_path=base,
            target_layer_ids=IDS,
            block_size=size,
            mask_token_id=VOCAB - 1,
            draft_attn_impl="eager",
            **more,
        )
        rounded_(made, 0.2)
        made.save_pretrained(folder)
        hidden, _, _, _, index = made.eval()._backbone_forward(
            feats, x, torch.ones(1, TEXT), last, torch.zeros(1, TEXT, dtype=torch.long), max_anchors=6
        )
        more = {}
        if name == "dflash2":  # the scores of each slot's candidates after the tokens of the text
            before = made._predecessor_ids(x, index).reshape(1, -1)
            found = made.candidate_selector.select(made.lm_head(hidden), hidden, before)
            more = {
                n: t[0].reshape(-1, size, t.shape[-1]) for n, t in zip(("candidates", "scores"), found, strict=True)
            }
        keep(
            name,
            folder,
            {
                **more,
                "tokens": x[0],
                "features": feats[0],
                "anchors": index.view(-1, size)[:, 0].clone(),
                "hidden": hidden[0].reshape(-1, size, HIDDEN),
                "logits": made.lm_head(hidden)[0].reshape(-1, size, VOCAB),
            },
        )


def shape() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        layer_types=["full_attention"] * 2,
        use_sliding_window=False,
        attention_bias=False,
        pad_token_id=None,
    )


if __name__ == "__main__":
    sys.exit(main())
