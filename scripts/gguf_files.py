"""Writes the GGUF files of crates/gemmule-weights/tests/gguf, and the values that the Python package gguf reads from them.

    pip install gguf numpy
    python3 scripts/gguf_files.py

Nothing is downloaded.
"""

import pathlib
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/gemmule-weights/tests/gguf"

# Positions of the f16 numbers in a block. The other bytes may have any values.
HALVES = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
    Type.IQ4_NL: [0],
    Type.IQ4_XS: [0],
}


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quants() -> None:
    """Random blocks of each type as the tensor `TYPE`, and their values as `TYPE.f32`."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(OUT / "quants.gguf", "test")
    for kind, halves in HALVES.items():
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        rows = 2 if elements == 256 else 4
        blocks = rng.integers(0, 256, (rows, size), dtype=np.uint8)
        for at in halves:
            scale = rng.normal(0, 0.05, (rows, 1)).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8)
        writer.add_tensor(kind.name, blocks, raw_dtype=kind)
        values = gguf.quants.dequantize(blocks, kind)
        assert values.dtype == np.float32 and np.isfinite(values).all()
        writer.add_tensor(f"{kind.name}.f32", values)
    values = rng.normal(0, 1, (2, 3)).astype(np.float32)
    writer.add_tensor("F16", values.astype(np.float16))
    writer.add_tensor("F16.f32", values.astype(np.float16).astype(np.float32))
    brain = gguf.quants.quantize(values, Type.BF16)
    writer.add_tensor("BF16", brain, raw_dtype=Type.BF16)
    writer.add_tensor("BF16.f32", gguf.quants.dequantize(brain, Type.BF16))
    write(writer)


def values() -> None:
    """A value of each type of the metadata, and tensors of several shapes."""
    writer = gguf.GGUFWriter(OUT / "values.gguf", "test")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "naïve ▁")
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("reals", [0.5, -0.25])
    writer.add_array("texts", ["a", "", "ß"])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_custom_alignment(64)
    writer.add_tensor("matrix", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("cube", np.arange(24, dtype=np.float16).reshape(2, 3, 4))
    writer.add_tensor("row", np.arange(5, dtype=np.float32))
    write(writer)


def split() -> None:
    """A model in three files."""
    writer = gguf.GGUFWriter(OUT / "split.gguf", "test", split_max_tensors=1)
    writer.add_string("text", "only in the first file")
    for i in range(3):
        writer.add_tensor(f"t{i}", np.full((2, 2), i, dtype=np.float32))
    write(writer)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    quants()
    values()
    split()


if __name__ == "__main__":
    sys.exit(main())
