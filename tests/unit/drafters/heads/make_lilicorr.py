"""Makes `golden/lilicorr`: the block of `golden/dflash2` with a small LiLiCorr head, and the scores that SGLang's head computes.

    python tests/unit/drafters/heads/make_lilicorr.py FILE

FILE is python/sglang/srt/models/lilicorr.py of github.com/sgl-project/sglang. Nothing else of SGLang is needed. The folder has
the flat layout, in which such heads are published.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file, save_file
from torch import nn

GOLDEN = Path(__file__).parent / "golden"
FLAT = ("head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads")
FLAT += ("num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "vocab_size")
SHAPE = {"candidate_topk": 4, "hidden_size": 24, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2.0, "factor_dim": 8}
SHAPE |= {"vector_eps": 1e-4, "logit_scale": 8.0}


@torch.no_grad()
def main(source: str) -> None:
    for name in ("sglang", "sglang.kernels", "sglang.srt"):
        sys.modules[name] = MagicMock()
    for name in ("kernels.ops.speculative.lilicorr", "srt.models.dflash"):
        sys.modules[f"sglang.{name}"] = MagicMock(DFlashDraftModel=nn.Module)
    for name in ("lilicorr_components.lilicorr_config", "lilicorr_utils"):
        sys.modules[f"sglang.srt.speculative.{name}"] = MagicMock()
    theirs: dict = {"__name__": "lilicorr"}
    exec(compile(Path(source).read_text(), source, "exec"), theirs)
    block = load_file(GOLDEN / "dflash2" / "model.safetensors")
    seen = load_file(GOLDEN / "dflash2" / "expected.safetensors")
    given = json.loads((GOLDEN / "dflash2" / "config.json").read_text())
    layer, size = given["transformer_layer_config"], given["block_size"]
    torch.manual_seed(2)
    config = SimpleNamespace(**SHAPE, resolve_hidden_size=lambda **_: SHAPE["hidden_size"])
    eps = layer["rms_norm_eps"]
    head = theirs["LiLiCorrHead"](model_hidden_size=32, block_size=size, rms_norm_eps=eps, config=config)
    for p in head.parameters():
        p.data = (torch.randn_like(p) * 0.4).bfloat16().float()
    head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    table = load_file(GOLDEN / "target.safetensors")["embedding"].float()
    values, ids = seen["logits"][:, 1:].topk(SHAPE["candidate_topk"])
    at = seen["anchors"]  # the last context is the one before
    context = nn.functional.rms_norm(
        seen["features"][(at - 1).clamp_min(0)] @ block["fc.weight"].float().T,
        (32,),
        block["hidden_norm.weight"].float(),
        eps,
    )

    def scored(known):
        return head.log_factors(
            *head.score(
                token_embeddings=table[ids][:, None],
                candidate_log_probs=(values - seen["logits"][:, 1:].logsumexp(-1, keepdim=True))[:, None],
                pass_hidden=seen["hidden"][:, None, 1:],
                anchor_hidden=context[:, None],
                anchor_valid=known[:, None],
            )
        )

    (start, pairs), (alone, _) = scored(at > 0), scored(at < 0)
    out = GOLDEN / "lilicorr"
    out.mkdir(exist_ok=True)
    weights = {n: t for n, t in block.items() if not n.startswith("candidate_selector.")}
    weights |= {f"lilicorr.{n}": t.bfloat16() for n, t in head.named_parameters()}
    save_file({n: t.contiguous() for n, t in weights.items()}, out / "model.safetensors")
    found = {"candidates": ids, "start": start[:, 0], "pairs": pairs[:, 0], "start_without_anchor": alone[:, 0]}
    expected = {n: seen[n] for n in ("tokens", "features", "anchors", "hidden", "logits")} | found
    save_file({n: t.contiguous() for n, t in expected.items()}, out / "expected.safetensors")
    settings = {name: layer[name] for name in FLAT} | {
        "architectures": ["LiLiCorrDraftModel"],
        "block_size": size,
        "dflash_config": {
            "mask_token_id": given["mask_token_id"],
            "target_layer_ids": [i - 1 for i in given["aux_hidden_state_layer_ids"]],
            "conv_kernel_size": given["conv_kernel_size"],
            "conv_group_size": given["conv_group_size"],
            **{f"lilicorr_{name}": value for name, value in SHAPE.items()},
        },
        "model_type": "qwen3",
    }
    (out / "config.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
