"""Writes the GGUF files of crates/gemmule-weights/tests/gguf, and the values that other programs read from them.

    pip install gguf numpy sentencepiece tokenizers torch transformers==5.24.0
    python3 scripts/gguf_files.py

Nothing is downloaded.
"""

import json
import math
import pathlib
import sys
import types

import gguf
import numpy as np
import torch
import transformers
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


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """The rows of queries or keys of Llama in the order of llama.cpp: the two halves of a head alternate."""
    rest = weights.shape[1:]
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *rest)
    return halves.swapaxes(1, 2).reshape(weights.shape)


def stored(arch: str, config, name: str, weights: np.ndarray) -> np.ndarray:
    """A published tensor as llama.cpp stores it."""
    if arch == "llama" and "q_proj" in name:
        return permuted(weights, config.num_attention_heads)
    if arch == "llama" and "k_proj" in name:
        return permuted(weights, config.num_key_value_heads)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return weights + 1
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return weights.T
    return weights


def common(writer: gguf.GGUFWriter, config) -> None:
    """The metadata that most architectures have."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or config.n_inner)
    writer.add_head_count(config.num_attention_heads)
    if hasattr(config, "num_key_value_heads"):
        writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if hasattr(config, "layer_norm_eps"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    if hasattr(config, "layer_norm_epsilon"):
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    if hasattr(config, "head_dim"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type")
    if kind in ["linear", "yarn"]:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ["longrope", "yarn"]:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def llama3_factors(rope: dict, head: int) -> np.ndarray:
    """The factors of the wavelengths that `llama3` scales, from transformers' inverse frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(head_dim=head, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = rope["rope_theta"] ** (-np.arange(0, head, 2, dtype=np.float32) / head)
    factors = plain / scaled.numpy()
    whole = np.isclose(factors, rope["factor"], rtol=1e-6)
    return np.where(whole, rope["factor"], factors).astype(np.float32)


KEYS = """model_type architectures hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
max_position_embeddings rms_norm_eps vocab_size tie_word_embeddings attention_bias mlp_bias hidden_act hidden_activation
sliding_window layer_types query_pre_attn_scalar final_logit_softcapping use_bidirectional_attention type_vocab_size
layer_norm_eps n_embd n_inner n_layer n_head n_positions layer_norm_epsilon activation_function bos_token_id eos_token_id
pad_token_id""".split()


def expected_config(model) -> dict:
    """The values of config.json that a reader of the file must find."""
    values = model.config.to_dict()
    found = {key: values[key] for key in KEYS if values.get(key) is not None}
    found["architectures"] = [type(model).__name__]
    if model.config.model_type == "gemma3_text" and found.get("use_bidirectional_attention"):
        # transformers halves the published number for itself.
        found["sliding_window"] = (found["sliding_window"] - 1) * 2
    rope = values.get("rope_parameters")
    if rope and "full_attention" in rope:
        found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if rope:
        rope = dict(rope)
        found["rope_theta"] = rope.pop("rope_theta")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            found["partial_rotary_factor"] = rope["partial_rotary_factor"]
        rope.pop("partial_rotary_factor", None)
        if rope["rope_type"] != "default":
            found["rope_scaling"] = rope
    return found


def model(arch: str, kind, config, add=lambda writer, config: None, quantised=(), name=None) -> None:
    """A model of transformers with random weights."""
    published = kind(config)
    tied = config.tie_word_embeddings
    shapes = {
        key: tensor.shape
        for key, tensor in published.state_dict().items()
        if not key.startswith("pooler.") and not (tied and key == "lm_head.weight")
    }
    write_model(arch, config, shapes, expected_config(published), add, quantised, name or arch)


def write_model(arch: str, config, shapes: dict, settings: dict, add, quantised, name: str) -> None:
    """The file, the published tensors as another file, and the published settings."""
    torch.manual_seed(len(arch))
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), config.num_hidden_layers
    )
    writer = gguf.GGUFWriter(OUT / f"{name}.gguf", arch)
    expected = gguf.GGUFWriter(OUT / f"{name}-published.gguf", "published")
    common(writer, config)
    add(writer, config)
    for key, shape in shapes.items():
        # Exact in f16, and one more is exact in f32.
        values = (torch.randint(-64, 64, shape) / 64).numpy()
        path, ending = key.rsplit(".", 1)
        new = names.get_name(path)
        assert new is not None, key
        data = np.ascontiguousarray(stored(arch, config, key, values))
        if any(part in key for part in quantised):
            blocks = gguf.quants.quantize(data, Type.Q8_0)
            writer.add_tensor(f"{new}.{ending}", blocks, raw_dtype=Type.Q8_0)
            # The order of rows is undone by permuting with the numbers of rows.
            order = stored(arch, config, key, np.arange(len(values)).reshape(-1, 1))[:, 0]
            values = np.empty_like(values)
            values[order] = gguf.quants.dequantize(blocks, Type.Q8_0)
            expected.add_tensor(key, values.astype(np.float32))
        else:
            kind_ = np.float32 if values.ndim == 1 else np.float16
            writer.add_tensor(f"{new}.{ending}", data.astype(kind_))
            expected.add_tensor(key, values.astype(np.float16))
    expected.add_string("config", json.dumps(settings))
    write(writer)
    write(expected)


def models() -> None:
    sizes = dict(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
        max_position_embeddings=512, vocab_size=40, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )
    wide = sizes | dict(hidden_size=32, num_hidden_layers=1)
    llama3 = dict(
        rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )

    def llama(writer, config):
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
        writer.add_tensor("rope_freqs.weight", llama3_factors(llama3, config.head_dim))

    model(
        "llama", transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**wide, rope_parameters=llama3, tie_word_embeddings=False),
        llama, quantised=["q_proj", "k_proj", "gate_proj"],
    )
    linear = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
    model(
        "llama", transformers.LlamaForCausalLM,
        transformers.LlamaConfig(
            **sizes, rope_parameters=linear, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
        ),
        name="llama-bias",
    )
    yarn = dict(
        rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=128
    )
    model(
        "qwen2", transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config(**sizes, rope_parameters=yarn, tie_word_embeddings=True),
    )
    model(
        "qwen3", transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True),
    )
    model(
        "gpt2", transformers.GPT2LMHeadModel,
        transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=4, n_inner=64, n_positions=32, vocab_size=40, bos_token_id=None, eos_token_id=None,
        ),
    )
    bert = dict(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, max_position_embeddings=32,
        vocab_size=40, pad_token_id=None,
    )

    def pooled(writer, config):
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)

    model("bert", transformers.BertModel, transformers.BertConfig(**bert), pooled)
    model(
        "gemma", transformers.GemmaForCausalLM, transformers.GemmaConfig(**sizes, head_dim=8)
    )
    gemma3 = sizes | dict(num_hidden_layers=6, head_dim=4, query_pre_attn_scalar=4, sliding_window=64)
    ropes = dict(
        full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
        sliding_attention=dict(rope_type="default", rope_theta=10000.0),
    )

    def windowed(writer, config):
        writer.add_sliding_window(64)

    model(
        "gemma3", transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig(**gemma3, rope_parameters=ropes), windowed,
    )

    def embedding(writer, config):
        windowed(writer, config)
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)

    plain = {name: dict(rope, rope_type="default") for name, rope in ropes.items()}
    plain["full_attention"].pop("factor")
    model(
        "gemma-embedding", transformers.Gemma3TextModel,
        transformers.Gemma3TextConfig(**gemma3, rope_parameters=plain, use_bidirectional_attention=True), embedding,
    )
    long = dict(
        rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=64, partial_rotary_factor=1.0,
        long_factor=[1.0, 1.5], short_factor=[1.0, 1.25],
    )

    def phi3(writer, config):
        writer.add_rope_dimension_count(4)
        writer.add_sliding_window(64)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(512 / 64) / math.log(64)))
        writer.add_tensor("rope_factors_long.weight", np.array(long["long_factor"], dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(long["short_factor"], dtype=np.float32))

    model(
        "phi3", transformers.Phi3ForCausalLM,
        transformers.Phi3Config(**sizes, rope_parameters=long, sliding_window=64, tie_word_embeddings=False), phi3,
    )
    model(
        "olmo2", transformers.Olmo2ForCausalLM, transformers.Olmo2Config(**sizes, tie_word_embeddings=False)
    )


def nomic_bert() -> None:
    """nomic-embed-text, whose published code is not part of transformers."""
    config = types.SimpleNamespace(
        max_position_embeddings=32, hidden_size=16, num_hidden_layers=2, intermediate_size=24, num_attention_heads=4,
        layer_norm_epsilon=1e-12, rope_parameters=dict(rope_theta=1000.0),
    )
    shapes = {
        "embeddings.word_embeddings.weight": (40, 16),
        "embeddings.token_type_embeddings.weight": (2, 16),
        "emb_ln.weight": (16,),
        "emb_ln.bias": (16,),
    }
    for i in range(2):
        layer = {
            "attn.Wqkv.weight": (48, 16), "attn.out_proj.weight": (16, 16), "mlp.fc11.weight": (24, 16),
            "mlp.fc12.weight": (24, 16), "mlp.fc2.weight": (16, 24),
            "norm1.weight": (16,), "norm1.bias": (16,), "norm2.weight": (16,), "norm2.bias": (16,),
        }
        shapes |= {f"encoder.layers.{i}.{name}": shape for name, shape in layer.items()}
    settings = dict(
        model_type="nomic_bert", n_embd=16, n_layer=2, n_head=4, n_inner=24, n_positions=32, rotary_emb_base=1000.0,
        layer_norm_epsilon=1e-12, vocab_size=40, type_vocab_size=2, activation_function="swiglu",
    )

    def add(writer, config):
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)

    write_model("nomic-bert", config, shapes, settings, add, (), "nomic-bert")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    quants()
    values()
    split()
    models()
    nomic_bert()


if __name__ == "__main__":
    sys.exit(main())
