"""A GGUF file again, with its blocks of 5 bits in 8 bits (Q8_0): OpenVINO GenAI reads no blocks of 5 bits.

    python -m benchmarks.peers.requantize qwen2.5-coder-0.5b.gguf qwen2.5-coder-0.5b-q8.gguf

All other tensors and the metadata are copied. The weights are those of the file, rounded once more.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

FIVE = (GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.Q5_K)


def requantize(source: Path, out: Path) -> int:
    """Write the file `out`. Returns how many tensors were changed."""
    reader = GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer, changed = GGUFWriter(out, fields.pop("general.architecture").contents()), 0
    for name, field in fields.items():
        kind, *rest = field.types
        writer.add_key_value(name, field.contents(), kind, rest[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind in FIVE:
            data, changed = quants.quantize(quants.dequantize(data, kind), GGMLQuantizationType.Q8_0), changed + 1
            kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return changed


if __name__ == "__main__":
    print(f"{requantize(Path(sys.argv[1]), Path(sys.argv[2]))} tensors have 8 bits in place of 5")
