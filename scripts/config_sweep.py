"""Writes `tests/references/config_sweep.json`, which shows the effect of each key of config.json in transformers.

For every shipped family of models, a tiny model with random weights runs with its unchanged config.json, and then with one key changed at a
time. The keys are those that transformers writes, and those in `EXTRA`, which other families or older versions have. Weights are generated
as in `scripts/reference.py`.

The result of each change is a case. It has the key, its value (absent if the key is removed), and a few values of each output (absent if
they equal those of the unchanged config.json). Values that transformers refuses have no case.

    python3 scripts/config_sweep.py tests/references [FAMILY ...]
"""
import argparse, contextlib, copy, io, json, logging, os, warnings

import numpy as np, torch
import transformers as tf
from reference import SEED, normal, published, DEVIATION, TRANSLATOR_DEVIATION

LENS = [13, 5]
VOCAB = 60
BASE = dict(vocab_size=VOCAB, max_position_embeddings=40)
USUAL = dict(hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=20, num_labels=3)
ROTARY = dict(USUAL, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
TRANSLATOR = dict(d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=20,
                  decoder_ffn_dim=28, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None)
T5 = dict(d_model=24, d_kv=8, num_layers=2, num_decoder_layers=2, num_heads=3, d_ff=20, relative_attention_num_buckets=8,
          relative_attention_max_distance=20, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
SPECIALS = dict(pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2)

# Outputs of heads, each with the suffix of the transformers class that computes the output.
CLASSIFIES = ("sequence_logits", "ForSequenceClassification"), ("token_logits", "ForTokenClassification"), ("mlm_logits", "ForMaskedLM")
WRITES = ("next_token_logits", "ForCausalLM"), ("sequence_logits", "ForSequenceClassification")
TRANSLATES = (("written", "ForConditionalGeneration"),)


def family(description, name, sizes, *heads, trunk="Model", states="last_hidden_state", keys=None, named=False):
    """Returns the settings of a family. The sweep changes all keys of its config.json, or only `keys`. If `keys` or `named` is given,
    `architectures` in config.json names the class of the head."""
    outputs = {states: trunk} | dict(heads)
    return dict(description=description, config=f"{name}Config", sizes=BASE | sizes, outputs={o: f"{name}{c}" for o, c in outputs.items()}, keys=keys, named=named or bool(keys))


FAMILIES = {
    "bert": family("bert", "Bert", USUAL, *CLASSIFIES),
    "roberta": family("roberta", "Roberta", USUAL, *CLASSIFIES),
    "xlm_roberta": family("roberta", "XLMRoberta", USUAL, *CLASSIFIES),
    "camembert": family("roberta", "Camembert", USUAL, *CLASSIFIES),
    "xlm_roberta_xl": family("xlm_roberta_xl", "XLMRobertaXL", USUAL, *CLASSIFIES),
    "distilbert": family("distilbert", "DistilBert", dict(dim=24, n_heads=3, n_layers=2, hidden_dim=20, num_labels=3), *CLASSIFIES),
    "albert": family("albert", "Albert", dict(USUAL, embedding_size=16), *CLASSIFIES),
    "albert_groups": family("albert", "Albert", dict(USUAL, embedding_size=16, num_hidden_layers=5, num_hidden_groups=2, inner_group_num=2), *CLASSIFIES[:2],
                            keys=["num_hidden_layers", "num_hidden_groups", "inner_group_num"]),
    "electra": family("electra", "Electra", dict(USUAL, embedding_size=16), *CLASSIFIES),
    "mpnet": family("mpnet", "MPNet", USUAL, *CLASSIFIES),
    "deberta_v2": family("deberta_v2", "DebertaV2", dict(USUAL, relative_attention=True, share_att_key=True, norm_rel_ebd="layer_norm", pos_att_type=["c2p", "p2c"],
                                                         position_buckets=8, position_biased_input=False, type_vocab_size=0), *CLASSIFIES[:2]),
    "deberta": family("deberta", "Deberta", dict(USUAL, relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False), *CLASSIFIES[:2]),
    "roformer": family("roformer", "RoFormer", dict(USUAL, embedding_size=16), *CLASSIFIES),
    "modernbert": family("modernbert", "ModernBert", dict(USUAL, num_hidden_layers=4, local_attention=6, **SPECIALS), *CLASSIFIES),
    "gemma3_text": family("gemma3_text", "Gemma3Text", dict(ROTARY, num_hidden_layers=4, sliding_window=4, query_pre_attn_scalar=8,
                                                            layer_types=["sliding_attention", "full_attention"] * 2), trunk="Model"),
    "gemma3_writer": family("gemma3_text", "Gemma3", dict(ROTARY, num_hidden_layers=4, sliding_window=4, query_pre_attn_scalar=8,
                                                          layer_types=["sliding_attention", "full_attention"] * 2), WRITES[0], trunk="TextModel")
    | {"config": "Gemma3TextConfig"},
    "gemma": family("gemma", "Gemma", ROTARY, *WRITES),
    "gemma2": family("gemma2", "Gemma2", dict(ROTARY, num_hidden_layers=4, sliding_window=4, query_pre_attn_scalar=8, attn_logit_softcapping=0.7,
                                              final_logit_softcapping=1.5), *WRITES),
    "gemma2_tokens": family("gemma2", "Gemma2", dict(ROTARY, sliding_window=4, query_pre_attn_scalar=8), CLASSIFIES[1], keys=["num_labels"]),
    "gemma_tokens": family("gemma", "Gemma", ROTARY, CLASSIFIES[1], keys=["num_labels"]),
    "clip_text": family("clip_text", "CLIPText", dict(USUAL, projection_dim=12, eos_token_id=50, bos_token_id=1, pad_token_id=0), ("text_embeds", "ModelWithProjection")),
    "gpt2": family("gpt2", "GPT2", dict(n_positions=40, n_embd=24, n_layer=2, n_head=3, n_inner=20, num_labels=3), ("next_token_logits", "LMHeadModel"), WRITES[1]),
    "llama": family("llama", "Llama", ROTARY, *WRITES),
    "mistral": family("llama", "Mistral", dict(ROTARY, sliding_window=None), *WRITES),
    "mistral_window": family("llama", "Mistral", dict(ROTARY, sliding_window=4), *WRITES),
    "qwen2": family("qwen2", "Qwen2", ROTARY, *WRITES),
    "qwen3": family("qwen3", "Qwen3", ROTARY, *WRITES),
    "gpt2_tokens": family("gpt2", "GPT2", dict(n_positions=40, n_embd=24, n_layer=2, n_head=3, n_inner=20, num_labels=3), CLASSIFIES[1], keys=["num_labels"]),
    "llama_tokens": family("llama", "Llama", ROTARY, CLASSIFIES[1], keys=["num_labels"]),
    "qwen2_tokens": family("qwen2", "Qwen2", ROTARY, CLASSIFIES[1], keys=["num_labels"]),
    "qwen3_tokens": family("qwen3", "Qwen3", ROTARY, CLASSIFIES[1], keys=["num_labels"]),
    "phi3": family("phi3", "Phi3", dict(USUAL, num_attention_heads=3, num_key_value_heads=1, pad_token_id=0), *WRITES),
    "phi3_window": family("phi3", "Phi3", dict(USUAL, num_attention_heads=3, num_key_value_heads=1, pad_token_id=0, sliding_window=4), *WRITES),
    "phi3_tokens": family("phi3", "Phi3", dict(USUAL, num_attention_heads=3, num_key_value_heads=1, pad_token_id=0), CLASSIFIES[1], keys=["num_labels"]),
    "olmo2": family("olmo2", "Olmo2", dict(ROTARY, pad_token_id=0), *WRITES),
    "olmo3": family("olmo3", "Olmo3", dict(ROTARY, num_hidden_layers=4, sliding_window=4, pad_token_id=0), *WRITES),
    "eurobert": family("eurobert", "EuroBert", dict(ROTARY, pad_token_id=0), *CLASSIFIES),
    "starcoder2": family("starcoder2", "Starcoder2", dict(USUAL, num_attention_heads=3, num_key_value_heads=1, pad_token_id=0), *WRITES),
    "starcoder2_tokens": family("starcoder2", "Starcoder2", dict(USUAL, num_attention_heads=3, num_key_value_heads=1, pad_token_id=0), CLASSIFIES[1], keys=["num_labels"]),
    "stablelm": family("stablelm", "StableLm", dict(USUAL, num_attention_heads=3, num_key_value_heads=1, pad_token_id=0), *WRITES),
    "stablelm_tokens": family("stablelm", "StableLm", dict(USUAL, num_attention_heads=3, num_key_value_heads=1, pad_token_id=0), CLASSIFIES[1], keys=["num_labels"]),
    "phi": family("phi", "Phi", dict(USUAL, num_attention_heads=3, num_key_value_heads=3, pad_token_id=0), *WRITES),
    "phi_tokens": family("phi", "Phi", dict(USUAL, num_attention_heads=3, num_key_value_heads=3, pad_token_id=0), CLASSIFIES[1], keys=["num_labels"]),
    "smollm3": family("smollm3", "SmolLM3", dict(ROTARY, num_hidden_layers=4, sliding_window=4, pad_token_id=0), *WRITES),
    "smollm3_tokens": family("smollm3", "SmolLM3", dict(ROTARY, num_hidden_layers=4, pad_token_id=0), CLASSIFIES[1], keys=["num_labels"]),
    "granite": family("granite", "Granite", dict(ROTARY, pad_token_id=0), WRITES[0]),
    "cohere": family("cohere", "Cohere", dict(ROTARY, hidden_size=32), WRITES[0]),
    "cohere_norms": family("cohere", "Cohere", dict(ROTARY, hidden_size=32, use_qk_norm=True), WRITES[0]),
    "cohere2": family("cohere2", "Cohere2", dict(USUAL, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, sliding_window=4, bos_token_id=1,
                                                 eos_token_id=2), WRITES[0]),
    "glm": family("glm", "Glm", dict(ROTARY, pad_token_id=0), *WRITES),
    "glm4": family("glm", "Glm4", dict(ROTARY, pad_token_id=0), *WRITES),
    "glm_tokens": family("glm", "Glm", dict(ROTARY, pad_token_id=0), CLASSIFIES[1], keys=["num_labels"]),
    "exaone4": family("exaone4", "Exaone4", dict(ROTARY, num_hidden_layers=4, sliding_window=4), *WRITES),
    "exaone4_full": family("exaone4", "Exaone4", dict(ROTARY, sliding_window=None, layer_types=["full_attention"] * 2), *WRITES),
    "exaone4_tokens": family("exaone4", "Exaone4", dict(ROTARY, sliding_window=4), CLASSIFIES[1], keys=["num_labels"]),
    "seed_oss": family("seed_oss", "SeedOss", ROTARY, *WRITES),
    "seed_oss_tokens": family("seed_oss", "SeedOss", ROTARY, CLASSIFIES[1], keys=["num_labels"]),
    "ernie4_5": family("ernie4_5", "Ernie4_5", ROTARY, WRITES[0]),
    "helium": family("helium", "Helium", dict(ROTARY, hidden_size=32), *WRITES),
    "helium_tokens": family("helium", "Helium", dict(ROTARY, hidden_size=32), CLASSIFIES[1], keys=["num_labels"]),
    "hunyuan_v1_dense": family("hunyuan_v1_dense", "HunYuanDenseV1", ROTARY, *WRITES),
    "arcee": family("arcee", "Arcee", dict(ROTARY, bos_token_id=1, eos_token_id=2), *WRITES),
    "arcee_tokens": family("arcee", "Arcee", dict(ROTARY, bos_token_id=1, eos_token_id=2), CLASSIFIES[1], keys=["num_labels"]),
    "nemotron": family("nemotron", "Nemotron", dict(ROTARY, hidden_size=32), *WRITES),
    "nemotron_tokens": family("nemotron", "Nemotron", ROTARY, CLASSIFIES[1], keys=["num_labels"]),
    "olmo": family("olmo", "Olmo", dict(USUAL, num_attention_heads=3, num_key_value_heads=1, eos_token_id=2), *WRITES),
    "mpt": family("mpt", "Mpt", dict(d_model=24, n_heads=3, n_layers=2, max_seq_len=40, num_labels=3), *WRITES),
    "mpt_tokens": family("mpt", "Mpt", dict(d_model=24, n_heads=3, n_layers=2, max_seq_len=40), CLASSIFIES[1], keys=["num_labels"]),
    "gpt_bigcode": family("gpt_bigcode", "GPTBigCode", dict(n_positions=40, n_embd=24, n_layer=2, n_head=3, n_inner=20, num_labels=3), *WRITES),
    "gpt_bigcode_tokens": family("gpt_bigcode", "GPTBigCode", dict(n_positions=40, n_embd=24, n_layer=2, n_head=3, n_inner=20), CLASSIFIES[1], keys=["num_labels"]),
    "gpt_neo": family("gpt_neo", "GPTNeo", dict(hidden_size=24, num_layers=2, num_heads=3, intermediate_size=20, window_size=4, attention_types=[[["global", "local"], 1]],
                                                num_labels=3), *WRITES),
    "gpt_neo_tokens": family("gpt_neo", "GPTNeo", dict(hidden_size=24, num_layers=2, num_heads=3, window_size=4, attention_types=[[["global", "local"], 1]]), CLASSIFIES[1],
                             keys=["num_labels"]),
    "xglm": family("xglm", "XGLM", dict(d_model=24, num_layers=2, attention_heads=3, ffn_dim=20), WRITES[0]),
    "biogpt": family("biogpt", "BioGpt", USUAL, *WRITES),
    "biogpt_tokens": family("biogpt", "BioGpt", USUAL, CLASSIFIES[1], keys=["num_labels"]),
    "exaone": family("exaone", "Llama", ROTARY, WRITES[0]) | {"config": "ExaoneConfig"},
    "internlm3": family("internlm3", "Llama", ROTARY, WRITES[0]) | {"config": "InternLM3Config"},
    "openai_gpt": family("openai_gpt", "OpenAIGPT", dict(n_positions=40, n_embd=24, n_layer=2, n_head=3, num_labels=3), ("next_token_logits", "LMHeadModel"), WRITES[1]),
    "modernbert_decoder": family("modernbert_decoder", "ModernBertDecoder", dict(USUAL, num_hidden_layers=4, local_attention=9, **SPECIALS), *WRITES),
    "roberta_prelayernorm": family("roberta_prelayernorm", "RobertaPreLayerNorm", USUAL, *CLASSIFIES),
    "data2vec_text": family("roberta", "Data2VecText", USUAL, *CLASSIFIES),
    "luke": family("roberta", "Luke", dict(USUAL, entity_vocab_size=10, entity_emb_size=8), CLASSIFIES[1]),
    "hyperclovax": family("granite", "HyperCLOVAX", dict(ROTARY, pad_token_id=0), WRITES[0]),
    "megatron_bert": family("megatron_bert", "MegatronBert", USUAL, *CLASSIFIES),
    "rembert": family("rembert", "RemBert", dict(USUAL, input_embedding_size=12, output_embedding_size=16), *CLASSIFIES),
    "blenderbot": family("blenderbot", "Blenderbot", TRANSLATOR, *TRANSLATES, trunk="ForConditionalGeneration", states="encoder_last_hidden_state"),
    "blenderbot_small": family("blenderbot_small", "BlenderbotSmall", TRANSLATOR, *TRANSLATES, trunk="ForConditionalGeneration", states="encoder_last_hidden_state"),
    "gptj": family("gptj", "GPTJ", dict(n_positions=40, n_embd=24, n_layer=2, n_head=3, n_inner=20, rotary_dim=4, num_labels=3), *WRITES),
    "falcon": family("falcon", "Falcon", dict(hidden_size=24, num_attention_heads=3, num_hidden_layers=2, ffn_hidden_size=20, num_labels=3), *WRITES),
    "falcon_groups": family("falcon", "Falcon", dict(hidden_size=32, num_attention_heads=4, num_kv_heads=2, num_hidden_layers=2, ffn_hidden_size=20, num_labels=3,
                                                     new_decoder_architecture=True), *WRITES),
    "falcon_rw": family("falcon", "Falcon", dict(hidden_size=24, num_attention_heads=3, num_hidden_layers=2, ffn_hidden_size=20, num_labels=3, alibi=True,
                                                 multi_query=False, parallel_attn=False, bias=True), *WRITES),
    "falcon_tokens": family("falcon", "Falcon", dict(hidden_size=24, num_attention_heads=3, num_hidden_layers=2, ffn_hidden_size=20), CLASSIFIES[1], keys=["num_labels"]),
    "gpt_neox": family("gpt_neox", "GPTNeoX", USUAL, *WRITES),
    "bloom": family("bloom", "Bloom", dict(hidden_size=24, n_head=3, n_layer=2, num_labels=3), *WRITES),
    "bloom_slices": family("bloom", "Bloom", dict(hidden_size=24, n_head=3, n_layer=2, num_labels=3, slow_but_exact=True), *WRITES, keys=["pretraining_tp"]),
    "opt": family("opt", "OPT", dict(hidden_size=24, num_attention_heads=3, num_hidden_layers=2, ffn_dim=20, num_labels=3, pad_token_id=0), *WRITES),
    "marian": family("marian", "Marian", TRANSLATOR, ("written", "MTModel"), trunk="MTModel", states="encoder_last_hidden_state"),
    "bart": family("bart", "Bart", TRANSLATOR, *TRANSLATES, trunk="ForConditionalGeneration", states="encoder_last_hidden_state"),
    "bart_classifier": family("bart_classifier", "Bart", dict(TRANSLATOR, num_labels=3), CLASSIFIES[0], named=True),
    "mbart": family("mbart", "MBart", TRANSLATOR, *TRANSLATES, trunk="ForConditionalGeneration", states="encoder_last_hidden_state"),
    "m2m_100": family("m2m_100", "M2M100", TRANSLATOR, *TRANSLATES, trunk="ForConditionalGeneration", states="encoder_last_hidden_state"),
    "pegasus": family("pegasus", "Pegasus", TRANSLATOR | dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0), *TRANSLATES,
                      trunk="ForConditionalGeneration", states="encoder_last_hidden_state"),
    "t5": family("t5", "T5", T5, *TRANSLATES, trunk="ForConditionalGeneration", states="encoder_last_hidden_state"),
    "mt5": family("t5", "MT5", T5, *TRANSLATES, trunk="ForConditionalGeneration", states="encoder_last_hidden_state"),
    "umt5": family("t5", "UMT5", T5, *TRANSLATES, trunk="ForConditionalGeneration", states="encoder_last_hidden_state"),
}

# Keys that are not changed, because they have no effect on these results: names, versions, settings of loaders and trainers, and the form
# of results.
SKIPPED = {"model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "return_dict", "output_attentions", "output_hidden_states",
           "_attn_implementation", "attn_implementation", "id2label", "label2id", "task_specific_params", "_commit_hash", "quantization_config"}
# Keys (with their families) that are not changed, because their effect also depends on other files: on the end token, or on whether the
# checkpoint has a separate head.
UNDECIDED = {("eos_token_id", "clip_text"), ("tie_word_embeddings", "t5"), ("tie_word_embeddings", "mt5"), ("tie_word_embeddings", "umt5")}
SCALED = {"rope_type": "linear", "factor": 2.0}
EXTRA = {
    "is_causal": [False, True], "use_bidirectional_attention": [True, False], "sliding_window": [4, 1000], "use_sliding_window": [True, False], "max_window_layers": [1],
    "layer_types": [["sliding_attention", "full_attention"] * 2, ["sliding_attention", "full_attention"], ["full_attention"] * 2], "attention_bias": [True], "mlp_bias": [True],
    "tie_word_embeddings": [True, False], "rope_theta": [50.0], "rope_scaling": [SCALED], "rope_parameters": [SCALED | {"rope_theta": 100.0}, {"rope_type": "default", "rope_theta": 77.0}],
    "partial_rotary_factor": [0.5], "head_dim": [16], "num_key_value_heads": [1, 4], "attn_logit_softcapping": [0.5], "final_logit_softcapping": [0.5],
    "query_pre_attn_scalar": [16], "pretraining_tp": [2], "scale_embedding": [True, False], "normalize_before": [True, False], "normalize_embedding": [True, False],
    "add_final_layer_norm": [True, False], "static_position_embeddings": [True, False], "add_bias_logits": [True], "position_embedding_type": ["relative_key", "absolute"],
    "embedding_size": [12], "chunk_size_feed_forward": [2], "cross_attention_hidden_size": [12], "add_cross_attention": [True], "is_decoder": [True], "is_encoder_decoder": [True],
    "layer_norm_eps": [0.1], "rms_norm_eps": [0.1], "layer_norm_epsilon": [0.1], "use_cache": [False], "problem_type": ["regression", "multi_label_classification"],
    "num_labels": [2, 5], "num_hidden_layers": [1], "hidden_act": ["relu"], "scale_attn_weights": [False], "scale_attn_by_inverse_layer_idx": [True], "reorder_and_upcast_attn": [True],
    "pruned_heads": [{"0": [1]}], "type_vocab_size": [1, 0], "share_encoder_decoder_embeddings": [False], "scale_decoder_outputs": [True, False], "hidden_size": [32],
    "logit_scale": [2.0], "logits_scaling": [2.0], "residual_multiplier": [0.5], "embedding_multiplier": [2.0], "attention_multiplier": [0.5], "use_qk_norm": [True], "num_ln_in_parallel_attn": [1, 2],
    "qk_layernorm": [True],
    "num_experts": [2], "n_ctx": [30], "rotary_pct": [0.5], "use_parallel_residual": [True], "torchscript": [True], "tie_encoder_decoder": [True], "rescale_every": [1],
    "feed_forward_proj": ["relu", "gated-gelu", "gated-silu", "gated-relu", "gelu"],
    "classifier_pooling": ["mean", "cls", "bos", "late"], "conv_kernel_size": [3], "summary_type": ["mean", "first", "cls_index"], "pooler_hidden_act": ["relu", "gelu"],
}
ACTIVATIONS = ["relu", "gelu", "gelu_new", "silu", "tanh", "quick_gelu", "gelu_pytorch_tanh", "gelu_fast", "sigmoid", "mish"]


def values_of(key, value):
    """Returns plausible values of a key other than `value`."""
    if isinstance(value, bool):
        return [not value]
    if key.endswith("token_id"):
        return [0, 1, 3, None]
    if isinstance(value, int):
        return [v for v in (value + 1, 2 * value, 1, 3, 0) if v != value and not ("layers" in key and v == 0) and not (key in ("vocab_size", "max_position_embeddings", "n_positions", "max_seq_len") and v < 40)]
    if isinstance(value, float):
        return [v for v in (value * 2 or 0.5, 0.3, 0.0) if v != value]
    if isinstance(value, str):
        if value in ACTIVATIONS:
            return [v for v in ACTIVATIONS if v != value]
        return ["relative_key", "none"] if key == "position_embedding_type" else []
    if isinstance(value, list):
        return [list(reversed(value)), value[:1]] if value else []
    if isinstance(value, dict):
        inner = [value | {k: v} for k, own in value.items() for v in values_of(k, own)]
        return inner + ([value | SCALED] if "rope_theta" in value else [])
    return [1, 3, 0.5, True]


def fill(model, deviation):
    """Fills a model with random weights. A tensor with several names is generated once. Its seed is the first of its names, without the
    prefix of the trunk."""
    done, prefix = set(), getattr(model, "base_model_prefix", "") + "."
    # Generate embedding tables first, so that a head that is tied to a table has the values of the table.
    for name, p in sorted(model.state_dict().items(), key=lambda item: "embeddings" not in item[0]):
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        if not p.is_floating_point() or p.data_ptr() in done or "Sinus" in owner:
            continue
        done.add(p.data_ptr())
        bare = published(model, name).removeprefix(prefix)
        mean = np.float32(1.0 if p.dim() == 1 and bare.endswith("weight") else 0.0)
        p.copy_(torch.from_numpy((mean + np.float32(deviation) * normal(bare, p.numel())).reshape(p.shape)))
    return model.eval()


def digest(t):
    """Returns the first few values of the last row of a tensor."""
    return [round(float(x), 5) for x in t.reshape(-1, t.shape[-1])[-1][:6]]


def outputs_of(own, config):
    found = {}
    for output, name in own["outputs"].items():
        cfg = getattr(tf, own["config"]).from_dict(copy.deepcopy(config))
        # See the comment on Falcon in `scripts/reference.py`.
        cfg._attn_implementation = "sdpa" if getattr(cfg, "alibi", False) else "eager"
        model = fill(getattr(tf, name)(cfg), TRANSLATOR_DEVIATION if "written" in own["outputs"] else DEVIATION)
        values = []
        for ids in sequences(own):
            ids = torch.tensor([ids])
            if output == "written":
                o = model.generate(ids, max_new_tokens=5, num_beams=2, do_sample=False, eos_token_id=None, bos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=2,
                                   suppress_tokens=[1], output_scores=True, return_dict_in_generate=True, length_penalty=1.0, early_stopping=False, use_cache=True)
                values += o.sequences[0, 1:].tolist() + [round(float(o.sequences_scores[0]), 5)]
            elif output == "encoder_last_hidden_state":
                values += digest(model.get_encoder()(ids).last_hidden_state)
            else:
                o = model(input_ids=ids, return_dict=True)
                field = {"last_hidden_state": "last_hidden_state", "text_embeds": "text_embeds"}.get(output, "logits")
                t = o[field]
                # Also store the last row of the first half, which shows whether tokens attend to later tokens.
                values += digest(t[0][: t.shape[1] // 2]) if output == "last_hidden_state" else []
                values += digest(t)
        if not np.isfinite(values).all():
            raise ValueError("no finite values")
        found[output] = values
    return found


def sequences(own):
    ids = np.random.default_rng(SEED).integers(5, 40, sum(LENS))
    own_ids = [part.tolist() for part in np.split(ids, np.cumsum(LENS)[:-1])]
    ends = {"clip_text": 50, "bart_classifier": 2}
    end = ends.get(own["description"])
    return [part[:-1] + [end] for part in own_ids] if end else own_ids


def is_equal(a, b):
    return type(a) is type(b) and a == b


def is_same(a, b):
    return a.keys() == b.keys() and all(len(a[k]) == len(b[k]) and np.allclose(a[k], b[k], atol=2e-5, rtol=1e-4) for k in a)


def sweep(name):
    own = FAMILIES[name]
    cfg = getattr(tf, own["config"])(**own["sizes"])
    config = json.loads(cfg.to_json_string(use_diff=False))
    config = {k: v for k, v in config.items() if k not in SKIPPED or k in ("model_type",)}
    if own["named"]:
        config["architectures"] = list(own["outputs"].values())[-1:]
    base, cases, n_refused = outputs_of(own, config), [], 0
    for key in own["keys"] or list(config) + [k for k in EXTRA if k not in config]:
        if key in SKIPPED:
            continue
        if (key, own["description"]) in UNDECIDED:
            continue
        null = [] if isinstance(config.get(key), bool) else [None]
        values = (values_of(key, config[key]) + null if key in config else []) + EXTRA.get(key, [])
        others = [v for i, v in enumerate(values) if not any(is_equal(v, w) for w in values[:i]) and not (key in config and is_equal(v, config[key]))]
        changes = [{"value": value} for value in others] + ([{}] if key in config else [])
        for change in changes:
            changed = {k: v for k, v in config.items() if k != key} | ({key: change["value"]} if change else {})
            try:
                with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                    warnings.simplefilter("ignore")
                    found = outputs_of(own, changed)
            except Exception:
                n_refused += 1
                continue
            cases.append({"key": key} | change | ({} if is_same(found, base) else {"outputs": found}))
    moved = sorted({c["key"] for c in cases if "outputs" in c})
    print(name, len(cases), "cases,", n_refused, "refused; moved by", ", ".join(moved), flush=True)
    return dict(description=own["description"], config=config, ids=sequences(own), outputs=base, cases=cases)


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    ap.add_argument("families", nargs="*", help="the families to renew; all, if none is given")
    a = ap.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    tf.logging.set_verbosity(tf.logging.CRITICAL)
    os.makedirs(a.out, exist_ok=True)
    file = os.path.join(a.out, "config_sweep.json")
    stored = json.load(open(file)) if os.path.exists(file) else {}
    for name in a.families or FAMILIES:
        stored[name] = sweep(name)
    with open(file, "w") as f:
        f.write("{\n" + ",\n".join(f" {json.dumps(k)}: " + json.dumps(v, separators=(",", ":")) for k, v in sorted(stored.items())) + "\n}\n")
    print(os.path.getsize(file), "bytes")
