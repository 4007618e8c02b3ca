"""Writes the GGUF files of crates/gemmule-weights/tests/gguf, and the values that Python libraries read from them.

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

# Byte positions of the f16 numbers in a block of each format. All other bytes may have any value.
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
    """Writes a file with random blocks of each quantized type as the tensor `TYPE`, and their dequantized values as `TYPE.f32`."""
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
    """Writes a file with a metadata value of each type, and tensors of several shapes."""
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
    """Writes a model that is split into three files."""
    writer = gguf.GGUFWriter(OUT / "split.gguf", "test", split_max_tensors=1)
    writer.add_string("text", "only in the first file")
    for i in range(3):
        writer.add_tensor(f"t{i}", np.full((2, 2), i, dtype=np.float32))
    write(writer)


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of Llama's query or key weights in the order of llama.cpp, in which rows of the two halves of a head alternate."""
    rest = weights.shape[1:]
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *rest)
    return halves.swapaxes(1, 2).reshape(weights.shape)


def stored(arch: str, config, name: str, weights: np.ndarray) -> np.ndarray:
    """Converts a published tensor to the form in which llama.cpp stores it."""
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
    """Writes the metadata that most architectures have."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or config.n_inner)
    writer.add_head_count(config.num_attention_heads)
    if hasattr(config, "vocab_size"):
        writer.add_vocab_size(config.vocab_size)
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
    """Returns the frequency factors of the scaling `llama3` that llama.cpp stores, computed from transformers' inverse frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(head_dim=head, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = rope["rope_theta"] ** (-np.arange(0, head, 2, dtype=np.float32) / head)
    factors = plain / scaled.numpy()
    whole = np.isclose(factors, rope["factor"], rtol=1e-6)
    return np.where(whole, rope["factor"], factors).astype(np.float32)


KEYS = """
model_type architectures hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
head_dim max_position_embeddings rms_norm_eps vocab_size tie_word_embeddings attention_bias mlp_bias hidden_act
hidden_activation sliding_window layer_types query_pre_attn_scalar final_logit_softcapping use_bidirectional_attention
type_vocab_size layer_norm_eps n_embd n_inner n_layer n_head n_positions original_max_position_embeddings
layer_norm_epsilon activation_function bos_token_id eos_token_id pad_token_id
""".split()


def expected_config(model) -> dict:
    """Returns the keys and values of config.json that a reader of the GGUF file must derive from it."""
    values = model.config.to_dict()
    found = {key: values[key] for key in KEYS if values.get(key) is not None}
    found["architectures"] = [type(model).__name__]
    if model.config.model_type != "gemma3_text":
        found.pop("layer_types", None)
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


def model(arch: str, kind, config, add=lambda writer, config: None, quantized=(), name=None) -> None:
    """Writes a model of transformers with random weights as a GGUF file."""
    published = kind(config)
    tied = config.tie_word_embeddings
    shapes = {
        key: tensor.shape
        for key, tensor in published.state_dict().items()
        if not key.startswith("pooler.") and not (tied and key == "lm_head.weight")
    }
    write_model(arch, config, shapes, expected_config(published), add, quantized, name or arch)


def write_model(arch: str, config, shapes: dict, settings: dict, add, quantized, name: str) -> None:
    """Writes the GGUF file, a file with the published tensors, and the published settings."""
    torch.manual_seed(len(arch))
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), config.num_hidden_layers
    )
    writer = gguf.GGUFWriter(OUT / f"{name}.gguf", arch)
    expected = gguf.GGUFWriter(OUT / f"{name}-published.gguf", "published")
    common(writer, config)
    add(writer, config)
    for key, shape in shapes.items():
        # These values are exact in f16, and the values plus 1 are exact in f32.
        values = (torch.randint(-64, 64, shape) / 64).numpy()
        path, ending = key.rsplit(".", 1)
        new = names.get_name(path)
        assert new is not None, key
        data = np.ascontiguousarray(stored(arch, config, key, values))
        if any(part in key for part in quantized):
            blocks = gguf.quants.quantize(data, Type.Q8_0)
            writer.add_tensor(f"{new}.{ending}", blocks, raw_dtype=Type.Q8_0)
            # Store the published tensor in its original order of rows: find the permutation by permuting the row numbers, and invert it.
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
        writer.add_tensor("rope_freqs.weight", llama3_factors(llama3, config.head_dim))

    model(
        "llama", transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**wide, rope_parameters=llama3, tie_word_embeddings=False),
        llama, quantized=["q_proj", "k_proj", "gate_proj"],
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
        transformers.Phi3Config(
            **sizes, rope_parameters=long, original_max_position_embeddings=64, sliding_window=64, tie_word_embeddings=False
        ),
        phi3,
    )
    model(
        "olmo2", transformers.Olmo2ForCausalLM, transformers.Olmo2Config(**sizes, tie_word_embeddings=False)
    )


def nomic_bert() -> None:
    """Writes a model like nomic-embed-text. The shapes are listed here, because its published code is not part of transformers."""
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


TEXT = """The quick brown fox jumps over the lazy dog, and the dog doesn't mind. It's 1984 or 2024; they've seen 12345 foxes.
    Indented code() { return x += 10_000; }

Ein Fuchs läuft über die Straße, und der Hund schläft. Где лиса? 狐狸跑得很快。 Le renard était déjà là. We'll SHOUT: THE END!
Tokens are merged, tokenizers merge tokens, and merging tokens makes longer tokens.\r\n\tTabs and   spaces.
"""
SENTENCES = [
    "", " ", "The quick brown fox", " the dog doesn't", "it's THE END, WE'LL merge 1234567 tokens", "x  =   10_000;\n\n\ty",
    "Straße über cafe\u0301 café", "狐狸 и лиса 🦊", "a<s>b</s> <|end|>c", "  \r\n trailing  ", "<pad> tokens▁merged",
    "\n\nThe\n\n\n", "[CLS] the [MASK] dog's", "don't'S 3.14%",
]


def tokenizer_file(name: str, tokens: list, types: list, encode, add, arch="llama") -> None:
    """Writes a file with a tokenizer and only an embedding table as its model, and the ids that `encode` returns for sentences."""
    writer = gguf.GGUFWriter(OUT / f"{name}.gguf", arch)
    writer.add_context_length(8)
    writer.add_embedding_length(2)
    writer.add_block_count(1)
    writer.add_feed_forward_length(2)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    add(writer)
    expected = [[text, list(encode(text))] for text in SENTENCES]
    writer.add_string("expected", json.dumps(expected))
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 2), dtype=np.float16))
    if arch == "bert":
        writer.add_tensor("position_embd.weight", np.zeros((8, 2), dtype=np.float32))
        writer.add_tensor("token_types.weight", np.zeros((2, 2), dtype=np.float32))
    write(writer)


def byte_pair_files() -> None:
    from inspect import signature

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from tokenizers import Regex, normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    def split(expression):
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), plain])

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    llama3 = signature(TikTokenConverter.__init__).parameters["pattern"].default
    # Each case has a name, a pre-tokenizer, and three flags: whether characters are composed (NFC), whether merges are ignored for words
    # that are tokens, and whether a text begins with the BOS token.
    cases = [
        ("gpt-2", gpt2, False, False, False),
        ("llama-bpe", split(llama3), False, True, True),
        ("dbrx", split(llama3), False, False, False),
        ("qwen2", split(PRETOKENIZE_REGEX), True, False, False),
        ("smollm", digits, False, False, False),
        ("gpt-4o", split(GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]), False, False, False),
        ("tekken", split(GGUF_PRE_TOKENIZER_SPLITS["tekken"]), False, True, False),
    ]
    for pre, splitting, composes, ignores, bos in cases:
        tokenizer = Tokenizer(models.BPE(ignore_merges=ignores))
        tokenizer.pre_tokenizer = splitting
        tokenizer.decoder = decoders.ByteLevel()
        if composes:
            tokenizer.normalizer = normalizers.NFC()
        trainer = trainers.BpeTrainer(
            vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"],
            show_progress=False,
        )
        tokenizer.train_from_iterator([TEXT] * 3, trainer)
        tokenizer.add_tokens([AddedToken("<|end|>", normalized=False)])
        ends = pre == "qwen2"
        if bos or ends:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A" if bos else "$A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
            )
        saved = json.loads(tokenizer.to_str())
        tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())] + ["[PAD7]"]
        types_ = [3, 3] + [1] * (len(tokens) - 4) + [4, 5]

        def add(writer):
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(pre)
            writer.add_token_merges([" ".join(pair) for pair in saved["model"]["merges"]])
            writer.add_bos_token_id(0)
            writer.add_eos_token_id(1)
            if ends:
                writer.add_add_eos_token(True)

        tokenizer_file(f"tokenizer-{pre}", tokens, types_, lambda text: tokenizer.encode(text).ids, add)


def sentencepiece_files() -> None:
    import io

    import sentencepiece

    for name, prefix, own in [("llama", True, []), ("gemma", False, ["\n\n", "▁▁", "<|end|>"])]:
        saved = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.splitlines() * 3), model_writer=saved, model_type="bpe", vocab_size=520,
            byte_fallback=True, add_dummy_prefix=prefix, remove_extra_whitespaces=False,
            normalization_rule_name="identity", user_defined_symbols=own, character_coverage=0.98,
            minloglevel=2,
        )
        pieces = sentencepiece.SentencePieceProcessor(model_proto=saved.getvalue())
        tokens, types_, scores = [], [], []
        for i in range(pieces.vocab_size()):
            token = pieces.id_to_piece(i)
            kind = 2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
            if token in own:
                token, kind = token.replace("▁", " "), 4
            tokens.append(token)
            types_.append(kind)
            scores.append(-1000.0 if kind == 4 else pieces.get_score(i))

        def add(writer):
            writer.add_tokenizer_model("llama")
            writer.add_tokenizer_pre("default")
            writer.add_token_scores(scores)
            writer.add_bos_token_id(1)
            writer.add_eos_token_id(2)
            writer.add_unk_token_id(0)
            if not prefix:
                writer.add_add_space_prefix(False)
            writer.add_chat_template("{{ messages }}")

        def encode(text):
            # Skip these texts: SentencePiece does not recognize control tokens in texts, and treats ▁ as a space.
            if "<s>" in text or "▁" in text:
                return []
            return [1] + pieces.encode(text)

        tokenizer_file(f"tokenizer-{name}", tokens, types_, encode, add, arch=name)

    def phi3(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * 8)
        writer.add_bos_token_id(1)

    tokens = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "▁", "a", "▁a"]
    tokenizer_file("tokenizer-phi3", tokens, [2, 3, 3, 3, 3, 1, 1, 1], lambda text: [], phi3, arch="phi3")


def wordpiece_files() -> None:
    from tokenizers import BertWordPieceTokenizer

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    for lower in [True, False]:
        plain = BertWordPieceTokenizer(lowercase=lower)
        text = plain.normalize(TEXT)
        words = sorted({word for word, _ in plain._tokenizer.pre_tokenizer.pre_tokenize_str(text)})
        letters = sorted({letter for word in words for letter in word} - {"狐"})
        known = letters + [f"##{letter}" for letter in letters] + ["##ing", "##s", "##er"] + words[::2]
        vocab = {word: i for i, word in enumerate(dict.fromkeys(special + known))}
        tokenizer = transformers.BertTokenizer(vocab=vocab, do_lower_case=lower)
        words = sorted(vocab, key=vocab.get)
        tokens = [word if word in special else word[2:] if word.startswith("##") else "▁" + word for word in words]
        types_ = [3] * len(special) + [1] * (len(words) - len(special))

        def add(writer):
            writer.add_tokenizer_model("bert")
            writer.add_tokenizer_pre("jina-v2-en")
            writer.add_unk_token_id(1)
            writer.add_sep_token_id(3)
            writer.add_pad_token_id(0)
            writer.add_bos_token_id(2)
            writer.add_mask_token_id(4)

        name = "tokenizer-bert" if lower else "tokenizer-bert-cased"
        tokenizer_file(name, tokens, types_, lambda text: tokenizer(text)["input_ids"], add, arch="bert")


def templates() -> None:
    """Writes a file with several chat templates, and several tokens that end a text."""

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_pad_token_id(2)
        writer.add_eot_token_id(3)
        writer.add_chat_template("D")
        # Write the list of names here, because the method of the package `gguf` writes it in random order.
        writer.add_array("tokenizer.chat_templates", ["rag", "tool_use"])
        writer.add_string("tokenizer.chat_template.rag", "R")
        writer.add_string("tokenizer.chat_template.tool_use", "T")

    tokens = ["<s>", "</s>", "<p>", "<|im_end|>", "<|eot_id|>", "a"]
    tokenizer_file("tokenizer-templates", tokens, [3, 3, 3, 3, 3, 1], lambda text: [], add)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    quants()
    values()
    split()
    models()
    nomic_bert()
    byte_pair_files()
    sentencepiece_files()
    wordpiece_files()
    templates()


if __name__ == "__main__":
    sys.exit(main())
