"""Writes the quantized checkpoints for tests/models/quantized.rs, with the dequantized matrices and the logits.

    pip install torch==2.15.0 transformers==5.24.0 compressed-tensors==0.20.0 safetensors numpy
    python3 scripts/quantized_checkpoints.py

The script writes to tests/quantized:
- `matrices` has a folder for each layout, and `matrices.safetensors` has the dequantized matrices of all folders.
- `models` has whole models with random weights, each with the logits that transformers computes from the dequantized weights.
- `cached` has models with scales for a KV cache in E4M3. Each has tokens and logits that transformers computes with a cache whose rows are
  rounded with these scales.

With arguments, it only writes results whose names contain one of the arguments. Nothing is downloaded.

compressed-tensors writes and dequantizes its own formats. GPTQ layouts are packed here according to their definition. AWQ layouts are
checked with the converter of compressed-tensors. fp8 blocks are checked with transformers if the block size divides the matrix.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "quantized"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
E4M3 = torch.float8_e4m3fn


def pack(codes, bits, axis, order=None):
    """Packs a matrix of unsigned integers of `bits` bits into 32-bit words along an axis."""
    codes = codes.astype(np.uint32)
    if axis == 1:
        codes = codes.T
    n = 32 // bits
    assert codes.shape[0] % n == 0
    words = np.zeros((codes.shape[0] // n, codes.shape[1]), np.uint32)
    for place in range(n):
        words |= codes[(order or range(n))[place] :: n] << np.uint32(bits * place)
    words = words.view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(words.T if axis == 1 else words))


def grouped(weight, groups, bits, symmetric):
    """Quantizes a matrix. `groups` has the group of each column. Returns codes, scales `[out, groups]` and zero points."""
    n, top = int(groups.max()) + 1, 2**bits - 1
    codes = np.zeros(weight.shape, np.int64)
    scales = np.zeros((weight.shape[0], n), np.float16)
    zeros = np.zeros((weight.shape[0], n), np.int64)
    for group in range(n):
        part = weight[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scales[:, group] = np.maximum((high - low) / top, 1e-4).astype(np.float16)
        scale = scales[:, group].astype(np.float32)
        zeros[:, group] = 2 ** (bits - 1) if symmetric else np.clip(np.round(-low / scale), 1, top)
        codes[:, groups == group] = np.clip(np.round(part / scale[:, None]) + zeros[:, group : group + 1], 0, top)
    return codes, scales, zeros


def dequantized(codes, scales, zeros, groups):
    values = (codes - zeros[:, groups]).astype(np.float32) * scales.astype(np.float32)[:, groups]
    return torch.from_numpy(values)


def gptq(weight, bits=4, group_size=128, sym=True, desc_act=False, checkpoint_format="gptq", seed=0):
    weight = weight.numpy()
    rows, columns = weight.shape
    size = columns if group_size == -1 else group_size
    groups = np.arange(columns) // size
    if desc_act:
        groups = np.random.default_rng(seed).permutation(groups)
    codes, scales, zeros = grouped(weight, groups, bits, sym)
    stored = zeros - (checkpoint_format == "gptq")
    tensors = {
        "qweight": pack(codes.T, bits, 0),
        "qzeros": pack(stored.T, bits, 1),
        "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": desc_act,
        "checkpoint_format": checkpoint_format,
        "damp_percent": 0.01,
    }
    return tensors, dequantized(codes, scales, zeros, groups), config


def awq(weight, group_size=128):
    weight = weight.numpy()
    rows, columns = weight.shape
    groups = np.arange(columns) // (columns if group_size == -1 else group_size)
    codes, scales, zeros = grouped(weight, groups, 4, False)
    tensors = {
        "qweight": pack(codes.T, 4, 1, AWQ_ORDER),
        "qzeros": pack(zeros.T, 4, 1, AWQ_ORDER),
        "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
    }
    values = dequantized(codes, scales, zeros, groups)
    if group_size != -1:
        read_back(tensors, values, group_size)
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    return tensors, values, config


def read_back(tensors, values, group_size):
    """Checks that compressed-tensors dequantizes an AWQ matrix to `values`."""
    converter = AutoAWQConverter(group_size=group_size)
    converted = converter.process({f"m.{name}": tensor for name, tensor in tensors.items()})
    converted = {name.removeprefix("m."): tensor for name, tensor in converted.items()}
    converted["weight_scale"] = converted["weight_scale"].float()
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": False}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    assert torch.equal(compressor.decompress(converted, scheme)["weight"], values)


def blocks(scale, shape, block):
    scale = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return scale[: shape[0], : shape[1]]


def fp8(weight, strategy="tensor", block=None, name="weight_scale", ue8m0=False):
    rows, columns = weight.shape
    block = block or {"tensor": (rows, columns), "channel": (1, columns)}[strategy]
    height, width = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.zeros(height * block[0], width * block[1])
    padded[:rows, :columns] = weight
    largest = padded.view(height, block[0], width, block[1]).abs().amax((1, 3))
    scale = largest / 448
    if ue8m0:
        scale = torch.exp2(scale.log2().ceil()).to(torch.float8_e8m0fnu)
    values = (weight / blocks(scale.float(), weight.shape, block)).to(E4M3)
    expected = values.float() * blocks(scale.float(), weight.shape, block)
    if rows % block[0] == 0 and columns % block[1] == 0:
        same = Fp8Dequantize(None)._dequantize_one(values, scale, output_dtype=torch.float32)
        assert torch.equal(same, expected)
    return {"weight": values, name: scale.reshape(()) if strategy == "tensor" else scale}, expected


def compressed(weight, format, scale_dtype=torch.float32, activations=None, **weights):
    """Quantizes a matrix with compressed-tensors. Returns the stored tensors and the dequantized values."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    args = scheme.weights
    rows, columns = weight.shape
    block = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, args.group_size),
        "block": args.block_structure,
    }[args.strategy]
    height, width = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.zeros(height * block[0], width * block[1])
    padded[:rows, :columns] = weight
    parts = padded.view(height, block[0], width, block[1])
    low, high = parts.amin((1, 3)).clamp(max=0), parts.amax((1, 3)).clamp(min=0)
    state = {"weight": weight}
    if args.symmetric:
        scale = torch.maximum(-low, high) / (448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1)
    else:
        scale = (high - low) / (2**args.num_bits - 1)
        zero = (-(2 ** (args.num_bits - 1)) - low / scale).round()
        state["weight_zero_point"] = zero.clamp(-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1).to(torch.int8)
    scale = scale.to(scale_dtype)
    state["weight_scale"] = scale.reshape(1) if args.strategy == "tensor" else scale
    if not args.symmetric and args.strategy == "tensor":
        state["weight_zero_point"] = state["weight_zero_point"].reshape(1)
    compressor = BaseCompressor.get_value_from_registry(format)
    tensors = compressor.compress(dict(state), scheme)
    wide = {**tensors, "weight_scale": tensors["weight_scale"].float()}
    if args.strategy == "block":
        # compressed-tensors dequantizes blocks only if their size divides the matrix.
        values = tensors["weight"].float() * blocks(wide["weight_scale"], weight.shape, block)
    else:
        values = compressor.decompress(wide, scheme)["weight"]
    return tensors, values.float(), json.loads(scheme.model_dump_json())


def ordered(weight, group_size, seed):
    """Quantizes a matrix to packed integers with a stored group for each column, in the form of compressed-tensors before version 0.19."""
    rows, columns = weight.shape
    groups = np.random.default_rng(seed).permutation(np.arange(columns) // group_size)
    codes, scales, zeros = grouped(weight.numpy(), groups, 4, True)
    signed = torch.from_numpy(codes - 8).to(torch.int8)
    tensors = {
        "weight_packed": pack_to_int32(signed, 4),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor(weight.shape),
        "weight_g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": True, "actorder": "group"}
    return tensors, dequantized(codes, scales, zeros, groups), {"targets": ["Linear"], "weights": weights}


def groups_config(format, groups, **more):
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {f"group_{n}": group for n, group in enumerate(groups)},
        "ignore": [],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "version": "0.20.0",
        **more,
    }


def matrix(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


class Matrices:
    """Writes checkpoint folders that contain single matrices."""

    def __init__(self):
        self.expected = {}

    def add(self, case, config, modules, plain=(), key="quantization_config", **extra):
        folder = OUT / "matrices" / case
        folder.mkdir(parents=True)
        stored = dict(extra)
        for module, (tensors, values) in modules.items():
            stored |= {f"{module}.{name}": tensor for name, tensor in tensors.items()}
            self.expected[f"{case}/{module}.weight"] = values
        for name in plain:
            stored[name] = matrix(3, 4, 99).bfloat16()
            self.expected[f"{case}/{name}"] = stored[name].float()
        save(folder, {key: config}, stored)


def save(folder, config, tensors):
    text = json.dumps(config, indent=1)
    (folder / "config.json").write_text(text + "\n")
    tensors = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def matrices():
    cases = Matrices()
    settings = [
        # The last group is shorter than the others.
        ("gptq-v2", 24, 40, dict(group_size=16, sym=False, checkpoint_format="gptq_v2")),
        ("gptq-order", 16, 40, dict(group_size=8, desc_act=True)),
        ("gptq-order-ragged", 8, 56, dict(group_size=24, desc_act=True, sym=False, checkpoint_format="gptq_v2")),
        ("gptq-8", 12, 20, dict(bits=8, group_size=-1)),
        ("gptq-8-v2", 4, 132, dict(bits=8, group_size=128, sym=False, checkpoint_format="gptq_v2")),
        ("gptq-large-group", 8, 24, dict(group_size=128)),
    ]
    for seed, (case, rows, columns, options) in enumerate(settings):
        tensors, values, config = gptq(matrix(rows, columns, seed), seed=seed, **options)
        if case == "gptq-large-group":
            # Without `desc_act`, a checkpoint need not store the groups of columns.
            del tensors["g_idx"]
        config["dynamic"] = {r"-:.*\.gate$": {}}
        cases.add(case, config, {"model.layers.0.up": (tensors, values)}, ["model.layers.0.gate.weight"])
    for case, rows, columns, size in [("awq", 24, 40, 8), ("awq-whole", 16, 19, -1)]:
        tensors, values, config = awq(matrix(rows, columns, rows), size)
        config["modules_to_not_convert"] = ["gate"]
        cases.add(case, config, {"model.up": (tensors, values)}, ["model.gate.weight"])

    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    up, down = fp8(matrix(5, 7, 1)), fp8(matrix(3, 5, 2), "channel")
    activations = {"up.input_scale": torch.tensor(0.5), "attn.k_scale": torch.tensor(0.5)}
    cases.add("fp8", config, {"up": up, "down": down}, ["lm_head.weight", "norm.weight"], **activations)
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    cases.add("fbgemm", config, {"up": fp8(matrix(9, 4, 3), "channel")}, ["lm_head.weight"])
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "vision*"], "producer": {"name": "modelopt"}}
    cases.add("modelopt", config, {"up": fp8(matrix(9, 4, 4))}, ["lm_head.weight", "vision.up.weight"])
    block = lambda n, **o: fp8(matrix(*n, n[0]), "block", (16, 8), "weight_scale_inv", **o)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}
    cases.add("fp8-block", config, {"whole": block((32, 24)), "ragged": block((33, 23)), "small": block((3, 5))})
    wide = fp8(matrix(5, 200, 6), "block", (128, 128), "weight_scale_inv")
    cases.add("fp8-128", config | {"weight_block_size": [128, 128]}, {"wide": wide})
    config |= {"scale_fmt": "ue8m0"}
    cases.add("fp8-powers", config, {"whole": block((32, 8), ue8m0=True), "ragged": block((17, 9), ue8m0=True)})

    a8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    tensor = compressed(matrix(7, 5, 1), "float-quantized", type="float", strategy="tensor", activations=a8)
    channel = compressed(matrix(6, 5, 2), "float-quantized", torch.bfloat16, type="float", strategy="channel", activations=a8)
    blocked = compressed(matrix(9, 10, 3), "float-quantized", type="float", strategy="block", block_structure=[4, 4], activations=a8)
    for case, (tensors, values, group) in [("ct-fp8", tensor), ("ct-fp8-channel", channel), ("ct-fp8-block", blocked)]:
        cases.add(case, groups_config("float-quantized", [group]), {"up": (tensors, values)})

    a8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    for case, options in [
        ("ct-int8", dict(strategy="channel")),
        ("ct-int8-zeros", dict(strategy="channel", symmetric=False, scale_dtype=torch.bfloat16)),
        ("ct-int8-group", dict(strategy="group", group_size=4, symmetric=False)),
        ("ct-int8-tensor", dict(strategy="tensor")),
    ]:
        tensors, values, group = compressed(matrix(7, 12, 5), "int-quantized", activations=a8, **options)
        config = groups_config("int-quantized", [group], ignore=["lm_head", r"re:.*\.gate$"])
        plain = ["lm_head.weight", "mlp.gate.weight"]
        # Earlier versions of compressed-tensors use another name for this key of config.json.
        key = "compression_config" if case == "ct-int8" else "quantization_config"
        cases.add(case, config, {"mlp.gate_proj": (tensors, values)}, plain, key)

    for case, rows, columns, options in [
        ("ct-w4", 5, 24, dict(num_bits=4, strategy="group", group_size=8)),
        ("ct-w4-zeros", 11, 24, dict(num_bits=4, strategy="group", group_size=12, symmetric=False)),
        ("ct-w4-channel-zeros", 11, 21, dict(num_bits=4, strategy="channel", symmetric=False, scale_dtype=torch.bfloat16)),
        ("ct-w8", 5, 18, dict(num_bits=8, strategy="group", group_size=6)),
        ("ct-w8-zeros", 3, 7, dict(num_bits=8, strategy="channel", symmetric=False)),
    ]:
        tensors, values, group = compressed(matrix(rows, columns, rows), "pack-quantized", **options)
        cases.add(case, groups_config("pack-quantized", [group]), {"up": (tensors, values)})
    tensors, values, group = ordered(matrix(6, 40, 7), 8, 7)
    cases.add("ct-w4-order", groups_config("pack-quantized", [group]), {"up": (tensors, values)})

    # A configuration with several groups of layers, each with a different format. Their targets are names, patterns and classes.
    up = compressed(matrix(5, 24, 1), "pack-quantized", num_bits=4, strategy="group", group_size=8)
    down = compressed(matrix(5, 24, 2), "pack-quantized", num_bits=8, strategy="channel")
    gate = compressed(matrix(5, 24, 3), "float-quantized", type="float", strategy="channel", activations=None)
    targets = [["Linear"], [r"re:.*\.down$", "other"], ["layers.1.gate"]]
    formats = ["pack-quantized", "pack-quantized", "naive-quantized"]
    groups = [{**g, "targets": t, "format": f} for (_, _, g), t, f in zip([up, down, gate], targets, formats)]
    modules = {"layers.0.gate": up[:2], "layers.1.down": down[:2], "layers.1.gate": gate[:2]}
    cases.add("ct-mixed", groups_config("mixed-precision", groups), modules)
    save_file(dict(sorted(cases.expected.items())), OUT / "matrices.safetensors")


def models():
    small = dict(
        vocab_size=40,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        torch_dtype="float32",
    )
    w4 = dict(num_bits=4, strategy="group", group_size=24, symmetric=False)
    a8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    block = lambda weight: (
        *fp8(weight, "block", (32, 20), "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 20]},
    )
    large_block = lambda weight: (
        *fp8(weight, "block", (128, 128), "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    )
    # Models with group sizes that gemmule's kernels support, so that a GPU keeps the published values.
    wide = small | dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    w4_32 = dict(num_bits=4, strategy="group", group_size=32, symmetric=True)
    rows = [
        # The head is tied to the embedding table, which is not quantized.
        ("qwen3-fp8", "qwen3", True, block, []),
        # Q, K and V are one matrix in the checkpoint, whose columns are sorted (`desc_act`).
        ("phi3-gptq", "phi3", False, lambda w: gptq(w, group_size=16, desc_act=True, sym=False, checkpoint_format="gptq_v2"), ["lm_head"]),
        ("qwen2-awq", "qwen2", True, lambda w: awq(w, 24), []),
        ("llama-w4", "llama", False, lambda w: compressed(w, "pack-quantized", **w4), ["lm_head", r"re:.*layers\.1\.mlp\.down_proj$"]),
        # The head has separate quantized values, although config.json ties it to the embedding table.
        ("llama-int8-head", "llama", True, lambda w: compressed(w, "int-quantized", strategy="channel", activations=a8), ["embed_tokens"]),
        ("llama-gptq-32", "llama", False, lambda w: gptq(w, group_size=32), ["lm_head"]),
        ("llama-gptq-order-32", "llama", False, lambda w: gptq(w, group_size=32, desc_act=True), ["lm_head"]),
        ("phi3-gptq-order-32", "phi3", False, lambda w: gptq(w, group_size=32, desc_act=True, sym=False, checkpoint_format="gptq_v2"), ["lm_head"]),
        ("qwen2-awq-32", "qwen2", True, lambda w: awq(w, 32), []),
        ("phi3-w4-32", "phi3", False, lambda w: compressed(w, "pack-quantized", torch.bfloat16, **w4_32), ["lm_head"]),
        ("qwen3-fp8-128", "qwen3", True, large_block, []),
        ("qwen3-fp8-rows", "qwen3", True, lambda w: (*fp8(w), {"quant_method": "fp8", "activation_scheme": "dynamic"}), []),
    ]
    for case, kind, tied, quantize, ignore in rows:
        sizes = wide if case.endswith(("-32", "-rows", "-128")) else small
        if case.endswith("-128"):
            sizes = wide | dict(hidden_size=160, intermediate_size=136)
        torch.manual_seed(len(case))
        config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=tied)
        own_head = case.endswith("-head")
        config.tie_word_embeddings = tied and not own_head
        model = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        quantization = None
        for name, module in model.named_modules():
            is_head = name == "lm_head" and config.tie_word_embeddings
            is_ignored = name in ignore or (name.endswith("layers.1.mlp.down_proj") and len(ignore) == 2)
            if not isinstance(module, torch.nn.Linear) or is_head or is_ignored:
                continue
            parts, values, settings = quantize(module.weight.detach())
            quantization = quantization or settings
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            with torch.no_grad():
                module.weight.copy_(values)
        if "targets" in quantization:
            format = "int-quantized" if own_head else "pack-quantized"
            quantization = groups_config(format, [quantization], ignore=ignore)
        folder = OUT / "models" / case
        folder.mkdir(parents=True)
        written = {k: v for k, v in config.to_dict().items() if v is not None}
        written |= {"architectures": [type(model).__name__], "quantization_config": quantization, "tie_word_embeddings": tied}
        save(folder, written, tensors)
        ids = [[1, 7, 30, 12, 9], [5], [3, 39, 2, 8, 8, 8, 21, 17, 4]]
        logits = [model(torch.tensor([i])).logits[0, -1] for i in ids]
        expected = {"ids": ids, "next_logits": [[round(v, 5) for v in row.tolist()] for row in logits]}
        (folder / "expected.json").write_text(json.dumps(expected) + "\n")
        if own_head:
            # Check that transformers reads the same weights from the folder. Use a copy whose config.json does not tie the head.
            with tempfile.TemporaryDirectory() as copy:
                save(pathlib.Path(copy), written | {"tie_word_embeddings": False}, tensors)
                read = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
                # The first forward pass decompresses the weights. Ignore its logits, because transformers also quantizes activations.
                read(torch.tensor([ids[0]]))
                read = dict(read.named_parameters())
                assert all(torch.equal(read[name], values) for name, values in model.named_parameters())


class RoundedCache(DynamicCache):
    """A KV cache in which keys and values are divided by the scales of their layer, rounded to E4M3, and multiplied by the scales again.
    Also records the largest magnitude of the keys and of the values of each layer."""

    def __init__(self, scales):
        super().__init__()
        self.scales = scales
        self.largest = [[0.0, 0.0] for _ in range(2)]

    def update(self, keys, values, layer, *args, **kwargs):
        rows = [keys, values]
        for nth, x in enumerate(rows):
            self.largest[layer][nth] = max(self.largest[layer][nth], x.abs().max().item())
            if self.scales:
                scale = self.scales[layer][nth]
                rows[nth] = (x / scale).clamp(-448, 448).to(E4M3).float() * scale
        return super().update(*rows, layer, *args, **kwargs)


def cached():
    """Writes models with scales of keys and values, whose tensors have the names that different programs write."""
    small = dict(
        vocab_size=40,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    gemma2 = dict(attn_logit_softcapping=2.0, query_pre_attn_scalar=16, sliding_window=8, eos_token_id=2)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    fp8_config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "kv_cache_scheme": scheme}
    rows = [
        # Names of compressed-tensors.
        ("qwen3-compressed", "qwen3", {}, ["self_attn.k_scale", "self_attn.v_scale"], None),
        # Names of ModelOpt.
        ("llama-modelopt", "llama", {}, ["self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"], modelopt),
        # Names of AutoFP8. Queries, keys and values are computed with one matrix.
        ("phi3-fp8", "phi3", {}, ["self_attn.attn.k_scale", "self_attn.attn.v_scale"], fp8_config),
        # One scale for keys and values, a soft cap of scores, and a window.
        ("gemma2-fp8", "gemma2", gemma2, ["self_attn.kv_scale"] * 2, fp8_config),
    ]
    for case, kind, more, names, quantization in rows:
        torch.manual_seed(len(case))
        config = AutoConfig.for_model(kind, **small | more, tie_word_embeddings=False)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                norm = 0.0 if kind == "gemma2" else 1.0
                parameter.normal_(norm if parameter.dim() == 1 else 0.0, 0.3)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear) or name == "lm_head":
                continue
            if quantization is None or quantization["quant_method"] == "compressed-tensors":
                parts, values, group = compressed(module.weight.detach(), "float-quantized", type="float", strategy="tensor")
                quantization = groups_config("float-quantized", [group], ignore=["lm_head"], kv_cache_scheme=scheme)
            else:
                parts, values = fp8(module.weight.detach())
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            with torch.no_grad():
                module.weight.copy_(values)
        prompts = [[1, 7, 30, 12, 9], [5], [3, 39, 2, 8, 8, 8, 21, 17, 4, 3, 9]]
        exact = RoundedCache(None)
        with torch.no_grad():
            model(torch.tensor(prompts[2:]), past_key_values=exact, use_cache=True)
        scales = []
        for layer, largest in enumerate(exact.largest):
            # With a factor below 1, the largest scaled values exceed 448, the max of E4M3, and are clamped.
            both = [torch.tensor(x / 448 * f) for x, f in zip(largest, [0.6, 1.3])]
            if names[0] == names[1]:
                both = [max(both)] * 2
            if kind == "qwen3":
                both = [scale.reshape(1).bfloat16() for scale in both]
            scales.append([scale.float() for scale in both])
            tensors |= {f"model.layers.{layer}.{name}": scale for name, scale in zip(names, both)}
        folder = OUT / "cached" / case
        folder.mkdir(parents=True)
        written = {k: v for k, v in config.to_dict().items() if v is not None}
        written |= {"architectures": [type(model).__name__], "quantization_config": quantization, "tie_word_embeddings": False}
        save(folder, written, tensors)

        def run(ids, scales):
            with torch.no_grad():
                return model(torch.tensor([ids]), past_key_values=RoundedCache(scales), use_cache=True).logits[0]

        expected = []
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(12):
                ids.append(run(ids, scales)[-1].argmax().item())
            steps = slice(len(prompt) - 1, len(ids) - 1)
            logits = [run(ids, which)[steps] for which in (scales, None)]
            short = lambda rows: [[round(v, 5) for v in row.tolist()] for row in rows]
            expected.append({"prompt": prompt, "tokens": ids[len(prompt) :], "logits": short(logits[0]), "exact": short(logits[1])})
        (folder / "expected.json").write_text(json.dumps(expected) + "\n")


def main() -> None:
    parts = {"matrices": torch.no_grad()(matrices), "models": models, "cached": cached}
    for part in sys.argv[1:] or parts:
        shutil.rmtree(OUT / part, ignore_errors=True)
        parts[part]()


if __name__ == "__main__":
    main()
