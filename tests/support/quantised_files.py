"""Small quantised checkpoints, written here by the published formulas: not by the code of the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from architectures import tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZE = 64  # of the matrices; two groups of 32


def words(values: Tensor, bits: int) -> Tensor:
    """int [..., n] of 0 to 2^bits - 1 -> int32 [..., n * bits / 32], one bit at a time."""
    stream = (values.long()[..., None] >> torch.arange(bits) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 32)).unflatten(-1, (-1, 32))
    return (stream << torch.arange(32)).sum(-1).to(torch.uint32).view(torch.int32)


def integers(rows: int, columns: int, bits: int, groups: int, seed: int, sym: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q [out, in], zero [out, group], scale float16 [out, group]: random."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 1 << bits, (rows, columns), generator=draw)
    zero = torch.full((rows, groups), 1 << bits - 1)
    if not sym:
        zero = torch.randint(1, (1 << bits) - 1, (rows, groups), generator=draw)
    scale = (torch.rand(rows, groups, generator=draw) * 0.05 + 0.01).half()
    return q, zero, scale


class Checkpoint:
    """A tiny model whose matrices of the layers are quantised. exact: float32 values of each by name, as the formula has them."""

    def __init__(self, folder: Path, settings: dict[str, Any], name: str = "llama", **changes: Any) -> None:
        sizes = {"hidden_size": SIZE, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
        model = tiny(name, **{**sizes, **changes}).half()
        model.save_pretrained(folder)
        self.folder, self.changes, self.exact = folder, changes, dict[str, Tensor]()
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
        self.config["dtype"] = "float16"
        self.names = [n for n in self.tensors if n.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))]

    def replace(self, name: str, exact: Tensor, tensors: dict[str, Tensor]) -> None:
        """Put quantised tensors, by suffix, in the place of a matrix."""
        del self.tensors[name]
        self.exact[name] = exact
        self.tensors |= {name.removesuffix("weight") + n: t.clone().contiguous() for n, t in tensors.items()}

    def save(self) -> Path:
        tensors = {n: t.contiguous() for n, t in self.tensors.items()}
        save_file(tensors, self.folder / "model.safetensors", {"format": "pt"})
        (self.folder / "config.json").write_text(json.dumps(self.config))
        return self.folder


def gptq(
    folder: Path,
    bits: int = 4,
    size: int = 32,
    sym: bool = True,
    order: bool = False,
    version: str = "gptq",
    name: str = "llama",
    **changes: Any,
) -> Checkpoint:
    made = Checkpoint(
        folder,
        {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": size,
            "sym": sym,
            "desc_act": order,
            "checkpoint_format": version,
        },
        name,
        **changes,
    )
    for i, name in enumerate(made.names):
        rows, columns = made.tensors[name].shape
        size_ = columns if size == -1 else size
        q, zero, scale = integers(rows, columns, bits, columns // size_, i, sym)
        group = torch.arange(columns) // size_
        if order:
            group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(i))]
        exact = scale.float()[:, group] * (q - zero[:, group])
        made.replace(
            name,
            exact,
            {
                "qweight": words(q, bits).T,
                "qzeros": words(zero.T - int(version == "gptq"), bits),
                "scales": scale.T,
                "g_idx": group.int(),
            },
        )
    return made


def awq(folder: Path, size: int = 32) -> Checkpoint:
    made = Checkpoint(
        folder, {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    )
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for i, name in enumerate(made.names):
        rows, columns = made.tensors[name].shape
        q, zero, scale = integers(rows, columns, 4, columns // size, i, sym=False)
        exact = scale.float().repeat_interleave(size, 1) * (q - zero.repeat_interleave(size, 1))

        def packed(t: Tensor) -> Tensor:
            return words(t.T.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)

        made.replace(name, exact, {"qweight": packed(q), "qzeros": packed(zero), "scales": scale.T})
    return made


def _compressed(folder: Path, form: str, weights: dict[str, Any]) -> Checkpoint:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return Checkpoint(folder, settings)


def pack_quantized(folder: Path, bits: int = 4, size: int = 32, sym: bool = True) -> Checkpoint:
    made = _compressed(
        folder,
        "pack-quantized",
        {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "group", "group_size": size},
    )
    for i, name in enumerate(made.names):
        rows, columns = made.tensors[name].shape
        q, zero, scale = integers(rows, columns, bits, columns // size, i, sym)
        exact = scale.float().repeat_interleave(size, 1) * (q - zero.repeat_interleave(size, 1))
        tensors = {
            "weight_packed": words(q, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        made.replace(name, exact, tensors if sym else {**tensors, "weight_zero_point": words(zero.T, bits).T})
    return made


def int_quantized(folder: Path) -> Checkpoint:
    made = _compressed(
        folder, "int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    )
    for i, name in enumerate(made.names):
        rows, columns = made.tensors[name].shape
        q, _, scale = integers(rows, columns, 8, 1, i, sym=True)
        made.replace(
            name, scale.float() / 16 * (q - 128), {"weight": (q - 128).to(torch.int8), "weight_scale": scale / 16}
        )
    return made


def fp8(folder: Path, block: tuple[int, int] | None) -> Checkpoint:
    """block: rows and columns of a tile; None for one scale a matrix."""
    settings = {
        "quant_method": "fp8",
        "weight_block_size": None if block is None else [*block],
        "activation_scheme": "dynamic",
    }
    made = Checkpoint(folder, settings)
    for i, name in enumerate(made.names):
        rows, columns = made.tensors[name].shape
        draw = torch.Generator().manual_seed(i)
        values = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
        tile = block or (rows, columns)
        scale = torch.rand(-(-rows // tile[0]), -(-columns // tile[1]), generator=draw) * 0.2 + 0.05
        exact = values.float() * scale.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]
        made.replace(name, exact, {"weight": values, "weight_scale_inv": scale if block else scale.reshape(())})
    return made


def nf4(folder: Path, nested: bool) -> Checkpoint:
    """bitsandbytes' nf4. nested: the scales are quantised, too."""
    made = Checkpoint(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    code = torch.linspace(-1, 1, 16)
    for i, name in enumerate(made.names):
        rows, columns = made.tensors[name].shape
        draw = torch.Generator().manual_seed(i)
        index = torch.randint(0, 16, (rows * columns,), generator=draw)
        scales = torch.rand(rows * columns // 64, generator=draw) + 0.1
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [rows, columns]}
        tensors = {"weight.quant_map": code, "weight.absmax": scales}
        if nested:
            inner = torch.randint(0, 256, (len(scales),), generator=draw)
            table, outer = torch.linspace(-1, 1, 256), torch.rand(-(-len(scales) // 256), generator=draw)
            state |= {"nested_blocksize": 256, "nested_offset": 0.75, "nested_dtype": "float32"}
            scales = table[inner] * outer.repeat_interleave(256)[: len(inner)] + 0.75
            tensors |= {
                "weight.absmax": inner.to(torch.uint8),
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": table,
            }
        exact = (code[index] * scales.repeat_interleave(64)).view(rows, columns)
        packed = (index[::2] << 4 | index[1::2]).to(torch.uint8)[:, None]
        made.replace(
            name,
            exact,
            {
                "weight": packed,
                **tensors,
                "weight.quant_state.bitsandbytes__nf4": torch.tensor(
                    list(json.dumps(state).encode()), dtype=torch.uint8
                ),
            },
        )
    return made


def mxfp4(folder: Path) -> Checkpoint:
    """gpt-oss. exact: [expert, in, out], as its parameters are."""
    made = Checkpoint(folder, {"quant_method": "mxfp4"}, "gpt_oss", num_local_experts=3, intermediate_size=SIZE)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for i, name in enumerate(n for n in [*made.tensors] if n.endswith(("gate_up_proj", "down_proj"))):
        experts, columns, rows = made.tensors.pop(name).shape
        draw = torch.Generator().manual_seed(i)
        index = torch.randint(0, 16, (experts, rows, columns), generator=draw)
        power = torch.randint(120, 126, (experts, rows, columns // 32), generator=draw)
        exact = table[index] * 2.0 ** (power - 127).repeat_interleave(32, -1)
        made.exact[name] = exact.transpose(1, 2)
        packed = (index[..., ::2] | index[..., 1::2] << 4).to(torch.uint8).view(experts, rows, -1, 16)
        made.tensors |= {f"{name}_blocks": packed, f"{name}_scales": power.to(torch.uint8)}
    return made
