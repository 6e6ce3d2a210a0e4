"""A Llama of any size that computes the function of a small one: costs of a big model, acceptance of a trained pair.

    python -m benchmarks.scale_up builtin:code --size 0.5B --out FOLDER --check

No matrix of the big model is zero, sparse or structured in a way that a kernel could use. So its forwards take as long as with
random weights. Let d be the source width, D the big width, and P [D, d] a matrix with orthonormal columns:

residual    x' = P x, dense. RMSNorm sees the mean square of D numbers, which is d/D of the small model's. So eps' = eps d/D,
            and the next matrix takes back the extra factor sqrt(D/d).
embedding   E P^T. Dense.
q k v gate  sqrt(d/D) W diag(w) P^T + R (I - P P^T): the small matrix, plus noise of the same size that P x cannot see.
up lm_head  Dense; the columns are divided by the big norm's own random weights g.
q k         The big head rotates more pairs of dimensions than the small one, at frequencies in between. In those pairs q is
            random, and k is random at 1e-12 of its size: dense, and below the rounding of any score. Scores are divided
            by sqrt(head_dim), so q contains the ratio.
v o         v' = B v with a random B of orthonormal columns; o' = P (O / c + N) B^T + M (I - B B^T). The big model has c
            copies of a head with different noise. N sums to zero over them, and B v cannot see M.
gate up     Each small neuron has c shuffled copies with different noise; down' = P down / c + N, and N sums to zero over them.
down
new layers  Random q, k, v, gate and up of trained size; heads and neurons come in twins with the same rows, and the columns
            of o and down that read twins are o and -o. They add zero, up to rounding, at every precision.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import WORK
from benchmarks.ruler import fingerprint, parser, source_folder
from benchmarks.texts import humaneval

QUIET = 1e-12  # scale of k in the pairs of dimensions that the small model does not have


@dataclass(frozen=True)
class Size:
    """The shape of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    def parameters(self, vocab: int) -> int:
        """Number of parameters, with separate (untied) embedding and head."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + 2 * vocab * self.hidden


SIZES = {
    "15M": Size(384, 8, 12, 4, 32, 1024),
    "160M": Size(768, 24, 12, 4, 64, 2048),
    "0.28B": Size(1024, 24, 16, 4, 64, 2816),
    "0.5B": Size(1280, 28, 20, 4, 64, 3584),
    "1.1B": Size(2048, 24, 32, 4, 64, 5632),
    "8B": Size(4096, 36, 32, 8, 128, 14336),
}


def orthonormal(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """[rows, columns] with orthonormal columns."""
    return torch.linalg.qr(torch.randn(rows, columns, generator=draw, dtype=torch.float64)).Q.float()


def rms(t: Tensor) -> Tensor:
    return t.pow(2).mean().sqrt().clamp_min(1e-8)


class Inflater:
    """Makes the tensors of the big model, group by group. Raises ValueError if `size` cannot hold the source."""

    def __init__(self, source: LlamaForCausalLM, size: Size, dtype: torch.dtype, seed: int = 0) -> None:
        self.config: Any = source.config
        self.size, self.dtype = size, dtype
        self.weights = {k: v.detach().float() for k, v in source.state_dict().items()}
        self.draw = torch.Generator().manual_seed(seed)
        self._check()
        c = self.config
        self.ratio = (c.hidden_size / size.hidden) ** 0.5
        self.P = orthonormal(size.hidden, c.hidden_size, self.draw)
        at = [round((i + 0.5) * size.layers / c.num_hidden_layers - 0.5) for i in range(c.num_hidden_layers)]
        self.real = dict(zip(at, range(c.num_hidden_layers), strict=True))

    def _check(self) -> None:
        c, s = self.config, self.size
        group = s.heads // s.kv_heads
        copies = s.kv_heads // c.num_key_value_heads
        rope = c.rope_parameters or {}
        wrong = {
            "layers": s.layers < c.num_hidden_layers,
            "hidden": s.hidden < c.hidden_size,
            "intermediate": s.intermediate < c.intermediate_size or s.intermediate % 2 != 0,
            "kv_heads": copies < 1 or s.heads % s.kv_heads != 0 or (group % 2 != 0 and s.kv_heads % 2 != 0),
            "heads": copies * group < c.num_attention_heads // c.num_key_value_heads,
            "head_dim": s.head_dim % c.head_dim != 0,
            "rope": s.head_dim != c.head_dim and rope.get("rope_type", "default") != "default",
            "bias": bool(c.attention_bias or c.mlp_bias),
        }
        if any(wrong.values()):
            names = ", ".join(k for k, v in wrong.items() if v)
            raise ValueError(f"{s} cannot hold a Llama of {c.num_hidden_layers} layers x {c.hidden_size}: see {names}")

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw)

    def gain(self) -> Tensor:
        """Random weights of a norm, as they will be stored."""
        return (0.5 + torch.rand(self.size.hidden, generator=self.draw)).to(self.dtype).float()

    def hidden(self, rows: Tensor) -> Tensor:
        """rows [*, D] without the part that P x can see."""
        return rows - (rows @ self.P) @ self.P.T

    def reads(self, weight: Tensor, norm: Tensor, gain: Tensor) -> Tensor:
        """[n, D]: a matrix that reads the residual stream through a norm."""
        signal = self.ratio * (weight * norm) @ self.P.T
        return (signal + self.hidden(rms(signal) * self.normal(*signal.shape))) / gain

    def split(self, columns: Tensor, source: Tensor) -> Tensor:
        """[D, n]: columns of the big model. Column i is a share of the source column source[i], plus noise that cancels."""
        count = torch.bincount(source)[source]
        share = (self.P @ columns[:, source]) / count
        noise = rms(share) * self.normal(*share.shape)
        mean = torch.zeros(len(share), int(source.max()) + 1).index_add_(1, source, noise)[:, source] / count
        return share + noise - mean

    def attention(self, layer: str, norm: Tensor, gain: Tensor) -> dict[str, Tensor]:
        c, s = self.config, self.size
        small = {n: self.weights[f"{layer}self_attn.{n}_proj.weight"] for n in "qkvo"}
        hd, group, width = c.head_dim, c.num_attention_heads // c.num_key_value_heads, s.heads // s.kv_heads
        step = s.head_dim // hd
        pairs = torch.arange(hd // 2) * step
        turned = torch.cat([pairs, pairs + s.head_dim // 2])
        rest = torch.ones(s.head_dim, dtype=torch.bool)
        rest[turned] = False
        q, k, v = (self.normal(n * s.head_dim, s.hidden) for n in (s.heads, s.kv_heads, s.kv_heads))
        o = torch.empty(s.hidden, s.heads * s.head_dim)
        source, used = [], [0] * c.num_key_value_heads
        for t in range(s.kv_heads):
            kv = t % c.num_key_value_heads
            for _ in range(width):
                source.append(kv * group + used[kv] % group)
                used[kv] += 1
        heads = torch.tensor(source)
        values = torch.cat([torch.arange(hd) + h * hd for h in source])
        shares = self.split(small["o"], values).view(s.hidden, s.heads, hd)
        for t in range(s.kv_heads):
            kv = t % c.num_key_value_heads
            block = k[t * s.head_dim : (t + 1) * s.head_dim]
            signal = self.reads(small["k"][kv * hd : (kv + 1) * hd], norm, gain)
            block[turned], block[rest] = signal, QUIET * rms(signal) * block[rest]
            B = orthonormal(s.head_dim, hd, self.draw)
            # the noise of v must be in the span of B: the rest would reach o through M
            v[t * s.head_dim : (t + 1) * s.head_dim] = B @ self.reads(small["v"][kv * hd : (kv + 1) * hd], norm, gain)
            for j in range(t * width, (t + 1) * width):
                signal = step**0.5 * self.reads(small["q"][heads[j] * hd : (heads[j] + 1) * hd], norm, gain)
                block = q[j * s.head_dim : (j + 1) * s.head_dim]
                block[turned], block[rest] = signal, rms(signal) * block[rest]
                M = rms(shares[:, j]) * self.normal(s.hidden, s.head_dim)
                o[:, j * s.head_dim : (j + 1) * s.head_dim] = shares[:, j] @ B.T + M - (M @ B) @ B.T
        return {"q": q, "k": k, "v": v, "o": o}

    def mlp(self, layer: str, norm: Tensor, gain: Tensor) -> dict[str, Tensor]:
        small = {n: self.weights[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")}
        count = self.config.intermediate_size
        source = (torch.arange(self.size.intermediate) % count)[
            torch.randperm(self.size.intermediate, generator=self.draw)
        ]
        out = {n: self.reads(small[n][source], norm, gain) for n in ("gate", "up")}
        return {**out, "down": self.split(small["down"], source)}

    def empty(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A layer that adds zero, up to rounding: its neurons and heads are twins whose columns cancel."""
        s = self.size
        group, scale = s.heads // s.kv_heads, s.hidden**-0.5
        q, k, v = (scale * self.normal(n * s.head_dim, s.hidden) for n in (s.heads, s.kv_heads, s.kv_heads))
        index = torch.arange(s.heads)
        if group % 2 == 0:  # neighbours in a group are twins
            twin = index // 2 * 2
        else:  # the groups of the two halves are twins
            twin = index % (s.heads // 2)
            half = s.kv_heads // 2 * s.head_dim
            k[half:], v[half:] = k[:half], v[:half]
        q = q.view(s.heads, s.head_dim, s.hidden)[twin].reshape(-1, s.hidden)
        o = (s.heads * s.head_dim) ** -0.5 * self.normal(s.hidden, s.heads, s.head_dim)[:, twin]
        o[:, twin != index] *= -1
        gate, up = (scale * self.normal(s.intermediate // 2, s.hidden).repeat(2, 1) for _ in range(2))
        down = s.intermediate**-0.5 * self.normal(s.hidden, s.intermediate // 2)
        return {"q": q, "k": k, "v": v, "o": o.reshape(s.hidden, -1)}, {
            "gate": gate,
            "up": up,
            "down": torch.cat([down, -down], 1),
        }  # fmt: skip

    def groups(self) -> Iterator[dict[str, Tensor]]:
        """Embedding and head, then a dict per layer, under the names of transformers."""
        w = self.weights
        embedding, gain = w["model.embed_tokens.weight"], self.gain()
        head = embedding if self.config.tie_word_embeddings else w["lm_head.weight"]
        yield self.stored(
            {
                "model.embed_tokens.weight": embedding @ self.P.T,
                "model.norm.weight": gain,
                "lm_head.weight": self.reads(head, w["model.norm.weight"], gain),
            }
        )
        for i in range(self.size.layers):
            first, second = self.gain(), self.gain()
            if i in self.real:
                layer = f"model.layers.{self.real[i]}."
                attention = self.attention(layer, w[f"{layer}input_layernorm.weight"], first)
                mlp = self.mlp(layer, w[f"{layer}post_attention_layernorm.weight"], second)
            else:
                attention, mlp = self.empty()
            name = f"model.layers.{i}."
            yield self.stored(
                {f"{name}self_attn.{n}_proj.weight": t for n, t in attention.items()}
                | {f"{name}mlp.{n}_proj.weight": t for n, t in mlp.items()}
                | {f"{name}input_layernorm.weight": first, f"{name}post_attention_layernorm.weight": second}
            )

    def stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: t.to(self.dtype).contiguous() for k, t in tensors.items()}

    def big_config(self) -> LlamaConfig:
        s = self.size
        fields = self.config.to_dict() | {
            "hidden_size": s.hidden,
            "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "intermediate_size": s.intermediate,
            "rms_norm_eps": self.config.rms_norm_eps * self.config.hidden_size / s.hidden,
            "tie_word_embeddings": False,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        return type(self.config)(**{k: v for k, v in fields.items() if k not in ("model_type", "architectures")})


def inflate(source: LlamaForCausalLM, size: Size, folder: Path, dtype: torch.dtype, seed: int = 0) -> None:
    """Write the big model as transformers would, a shard per layer, so that two layers are in memory at most."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    big = Inflater(source, size, dtype, seed)
    index, total = dict[str, str](), 0
    for i, tensors in enumerate(big.groups()):
        name = f"model-{i + 1:05d}-of-{size.layers + 1:05d}.safetensors"
        save_file(tensors, fresh / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    meta: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": index}
    (fresh / "model.safetensors.index.json").write_text(json.dumps(meta, indent=1))
    config = big.big_config()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(fresh)
    source.generation_config.save_pretrained(fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


@torch.inference_mode()
def compare(small: LlamaForCausalLM, big: LlamaForCausalLM, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Largest difference and size of the logits along the small model's greedy text, and greedy tokens that differ."""
    gap, size, differ, total = 0.0, 0.0, 0, 0
    for p in prompts:
        kw: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        a, b = (cast(Any, m).generate(torch.tensor([p]), **kw)[0] for m in (small, big))
        differ += int((a != b).sum())
        total += tokens
        x, y = (m(a[None]).logits.float() for m in (small, big))
        gap, size = max(gap, float((x - y).abs().max())), max(size, float(x.abs().max()))
    return {"max_logit_difference": gap, "max_logit": size, "differing_tokens": differ, "tokens": total}


def write(name: str, size: str, folder: Path, dtype: str) -> LlamaForCausalLM:
    """Write a model of this size that computes the function of the named one, which is returned."""
    path = source_folder(name)
    source = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    inflate(source, SIZES[size], folder, getattr(torch, dtype))
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)  # pyright: ignore[reportAttributeAccessIssue]
    return source


def synthetic(size: str, dtype: str = "bfloat16") -> Path:
    """The built-in code model at the cost of a larger one. It is written once and kept under work/bench."""
    folder = WORK / "models" / f"code-{size}-{dtype}"
    stamp, mark = folder / "source.txt", fingerprint("builtin:code")
    if not (stamp.exists() and stamp.read_text() == mark):
        print(f"making {folder.name}", file=sys.stderr, flush=True)
        write("builtin:code", size, folder, dtype)
        stamp.write_text(mark)
    return folder


def main() -> None:
    options = parser(__doc__)
    options.add_argument("source", help="a small Llama: builtin:code, builtin:code-draft, or a folder")
    options.add_argument("--size", choices=SIZES, required=True, help="the shape to write")
    options.add_argument("--out", type=Path, required=True, help="the folder to write")
    options.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options.add_argument("--check", action="store_true", help="compare with the source afterwards, in float32")
    args = options.parse_args()
    source = write(args.source, args.size, args.out, args.dtype)
    result: dict[str, Any] = {"parameters": SIZES[args.size].parameters(source.config.vocab_size)}
    if args.check:
        tokenizer: Any = AutoTokenizer.from_pretrained(args.out)
        big = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
        result |= compare(source, big, [tokenizer(p)["input_ids"] for p in humaneval(4)], 64)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
