"""Writes the expected results (references) of the tests, computed by PyTorch and Hugging Face transformers.

Weights are not stored. They are generated from a seed and each tensor's name, by the same generator as
in `src/runtime/weights/random.rs`, so that a test creates the same model without PyTorch. Only small
data are stored: token ids, lengths, and some rows of the outputs.

    pip install torch transformers safetensors numpy
    python3 scripts/reference.py tests/references                # random weights, every family
    python3 scripts/reference.py tests/references --minilm DIR   # also real sentences
"""
import argparse, contextlib, json, os
import numpy as np, torch
from safetensors.numpy import save_file
import transformers as tf

import compact_json

SEED, DEVIATION, TRANSLATOR_DEVIATION = 20, 0.1, 0.3
LENS = {"one_token": [1], "tiny": [5, 1, 17], "mixed": [512, 1, 100, 33, 64, 65, 129], "long": [4500, 1, 700]}
PREFIXES = ("deberta.", "bert.", "roberta.", "roformer.", "mpnet.", "distilbert.", "albert.", "model.", "text_model.", "gpt_neox.", "biogpt.",
            "roberta_prelayernorm.", "data2vec_text.", "rembert.", "luke.")
# Decoders in which `transformer` is the name of the trunk (the model without its head).
WITH_TRANSFORMER = ("gpt2", "bloom", "gptj", "falcon", "mpt", "gpt_bigcode", "gpt_neo", "openai-gpt")
# Models whose weights have different names in transformers than in published files: pairs of transformers' name and the published name.
# Names with a leading dot may be anywhere in a tensor's name. Other names are prefixes.
RENAMED = {"exaone": (("norm.", "ln_f."), ("embed_tokens.", "wte."), ("layers.", "h."), (".self_attn.", ".attn.attention."), (".o_proj.", ".out_proj."),
                      (".input_layernorm.", ".ln_1."), (".post_attention_layernorm.", ".ln_2."), (".gate_proj.", ".c_fc_0."), (".up_proj.", ".c_fc_1."),
                      (".down_proj.", ".c_proj."))}
SENTENCES = [
    "A transformer is compiled into kernels written for it.",
    "The model description is turned into CUDA source.",
    "It rained all afternoon, so the picnic was moved indoors.",
    "Heavy rain forced us to have the picnic inside.",
    "Short.",
    "Batches of different lengths run without padding: every token of every sequence lies beside the "
    "next one in memory, and no arithmetic is spent on tokens that are not there, which is where most of "
    "the time of a padded batch goes when its longest sentence is much longer than the others.",
    "¿Dónde está la biblioteca?",
    "Der Zug nach München fährt um acht Uhr ab.",
]
GAMMA = np.uint64(0x9E3779B97F4A7C15)


def normal(name, n):
    """Returns `n` values of the tensor `name`, with the same bits as gemmule's `RandomWeights`."""
    with np.errstate(over="ignore"):
        state = np.uint64(SEED) ^ np.uint64(0xCBF29CE484222325)
        for b in name.encode():
            state = (state ^ np.uint64(b)) * np.uint64(0x100000001B3)
        z = state + GAMMA * np.arange(1, n + 1, dtype=np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    parts = sum(((z >> np.uint64(16 * i)) & np.uint64(0xFFFF)) for i in range(4))
    return (parts.astype(np.float32) - np.float32(131070.0)) / np.float32(37837.23)


def published(model, name):
    """Returns the published name of a parameter. If it differs from the name in transformers, the prefix of the trunk is removed."""
    for own, other in RENAMED.get(model.config.model_type, ()):
        name = name.removeprefix("model.")
        name = name.replace(own, other) if own.startswith(".") or name.startswith(own) else name
    return name


def fill(model, deviation=DEVIATION):
    """Fills a model with random weights. The published name of a parameter, without the prefix of the trunk, selects its values."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    shared = any(name.endswith("shared.weight") for name in model.state_dict())
    for name, p in model.state_dict().items():
        if tied and name in ("lm_head.weight", "output_projection.weight"):
            continue
        # Skip the decoder of a masked-LM head, because it is tied to other tensors.
        decoder = ("decoder.weight", "decoder.bias", "vocab_projector.weight") if model.config.model_type != "rembert" else ()
        if not p.is_floating_point() or name != "decoder.bias" and name.endswith(decoder):
            continue
        # Skip further names of a table that encoder, decoder and head share. Skip position tables of sines and cosines, which are not
        # random.
        if shared and name.endswith("embed_tokens.weight") or (name.endswith("embed_positions.weight") and "Sinus" in type(model.get_submodule(name.removesuffix(".weight"))).__name__):
            continue
        bare = published(model, name)
        # Remove `transformer.` only in GPT-2 and similar models, in which it is the prefix of the trunk. In DistilBERT, it is the name of
        # the layers.
        for prefix in PREFIXES + (("transformer.",) if model.config.model_type in WITH_TRANSFORMER else ()):
            bare = bare.removeprefix(prefix)
        mean = np.float32(1.0 if p.dim() == 1 and bare.endswith("weight") else 0.0)
        values = mean + np.float32(deviation) * normal(bare, p.numel())
        p.copy_(torch.from_numpy(values.reshape(p.shape)))
    return model.eval()


def rows_of(lens):
    """Returns the rows of a few tokens of every sequence: the first, the last, and some between."""
    rows, start = [], 0
    for n in lens:
        rows += [start + i for i in sorted({0, 1, n // 2, n - 2, n - 1}) if 0 <= i < n]
        start += n
    return np.array(rows, dtype=np.int64)


def run(model, ids, lens):
    """Runs sequences as a padded batch. `ids` has the ids of all sequences, one after another. Returns the model's output and the mask."""
    width = max(lens)
    padded = torch.zeros(len(lens), width, dtype=torch.long)
    mask = torch.zeros_like(padded)
    start = 0
    for i, n in enumerate(lens):
        padded[i, :n] = torch.from_numpy(ids[start:start + n])
        mask[i, :n] = 1
        start += n
    return model(input_ids=padded, attention_mask=mask), mask.bool()


FAMILIES = {
    "bert": (tf.BertConfig, tf.BertModel, tf.BertForSequenceClassification, tf.BertForTokenClassification, tf.BertForMaskedLM),
    "roberta": (tf.RobertaConfig, tf.RobertaModel, tf.RobertaForSequenceClassification, tf.RobertaForTokenClassification, tf.RobertaForMaskedLM),
    "distilbert": (tf.DistilBertConfig, tf.DistilBertModel, tf.DistilBertForSequenceClassification, tf.DistilBertForTokenClassification, tf.DistilBertForMaskedLM),
    "mpnet": (tf.MPNetConfig, tf.MPNetModel, tf.MPNetForSequenceClassification, tf.MPNetForTokenClassification, tf.MPNetForMaskedLM),
    "modernbert": (tf.ModernBertConfig, tf.ModernBertModel, tf.ModernBertForSequenceClassification, tf.ModernBertForTokenClassification, tf.ModernBertForMaskedLM),
    "xlm_roberta_xl": (tf.XLMRobertaXLConfig, tf.XLMRobertaXLModel, tf.XLMRobertaXLForSequenceClassification, tf.XLMRobertaXLForTokenClassification, tf.XLMRobertaXLForMaskedLM),
    "roformer": (tf.RoFormerConfig, tf.RoFormerModel, tf.RoFormerForSequenceClassification, tf.RoFormerForTokenClassification, tf.RoFormerForMaskedLM),
    "roberta_prelayernorm": (tf.RobertaPreLayerNormConfig, tf.RobertaPreLayerNormModel, tf.RobertaPreLayerNormForSequenceClassification,
                             tf.RobertaPreLayerNormForTokenClassification, tf.RobertaPreLayerNormForMaskedLM),
    "data2vec_text": (tf.Data2VecTextConfig, tf.Data2VecTextModel, tf.Data2VecTextForSequenceClassification, tf.Data2VecTextForTokenClassification, tf.Data2VecTextForMaskedLM),
    "megatron_bert": (tf.MegatronBertConfig, tf.MegatronBertModel, tf.MegatronBertForSequenceClassification, tf.MegatronBertForTokenClassification, tf.MegatronBertForMaskedLM),
    "luke": (tf.LukeConfig, tf.LukeModel, None, tf.LukeForTokenClassification, None),
    "rembert": (tf.RemBertConfig, tf.RemBertModel, tf.RemBertForSequenceClassification, tf.RemBertForTokenClassification, tf.RemBertForMaskedLM),
    "albert": (tf.AlbertConfig, tf.AlbertModel, tf.AlbertForSequenceClassification, tf.AlbertForTokenClassification, tf.AlbertForMaskedLM),
}


# Families for which few results are stored.
SMALL = ("roberta_prelayernorm", "data2vec_text", "luke", "megatron_bert", "rembert")


def config(family, hidden, heads, layers=3, inner=1000, vocab=1003, **more):
    if family == "distilbert":
        sizes = dict(dim=hidden, n_heads=heads, n_layers=layers, hidden_dim=inner)
    else:
        sizes = dict(hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=layers, intermediate_size=inner)
    if family == "albert":
        sizes["embedding_size"] = 128
    if family == "modernbert":
        sizes |= dict(pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2)
    positions = 514 if family in ("roberta", "mpnet", "xlm_roberta_xl", "roberta_prelayernorm", "data2vec_text", "luke") else 512
    return FAMILIES[family][0](vocab_size=vocab, max_position_embeddings=positions, num_labels=3, attn_implementation="eager", **sizes, **more)


def random_model(out, name, family, lens_names, **sizes):
    cfg = config(family, **sizes)
    _, trunk, sequence, token, mlm = FAMILIES[family]
    heads = {"sequence_logits": sequence, "token_logits": token, "mlm_logits": mlm}
    heads = {output: head for output, head in heads.items() if head}
    models = {"trunk": fill(trunk(cfg))} | {k: fill(m(cfg)) for k, m in heads.items()}
    tensors = {}
    for lens_name in lens_names:
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, cfg.vocab_size, sum(lens))
        rows = rows_of(lens)
        put = lambda key, t: tensors.__setitem__(f"{lens_name}.{key}", np.ascontiguousarray(t.detach().numpy()))
        tensors[f"{lens_name}.ids"] = ids.astype(np.int64)
        tensors[f"{lens_name}.lens"] = np.array(lens, dtype=np.int64)
        tensors[f"{lens_name}.rows"] = rows
        o, mask = run(models["trunk"], ids, lens)
        h = o.last_hidden_state
        put("last_hidden_state", h[mask][rows])
        w = mask[..., None].float()
        put("sentence_embedding", torch.nn.functional.normalize((h * w).sum(1) / w.sum(1), dim=1))
        if getattr(o, "pooler_output", None) is not None:
            put("pooler_output", o.pooler_output)
        for key in heads:
            logits = run(models[key], ids, lens)[0].logits
            if key == "mlm_logits" and family in ("bert", "distilbert", "modernbert"):
                w = mask[..., None].float()
                put("sparse", torch.log1p(torch.relu(logits * w)).max(1).values)
            put(key, logits if key == "sequence_logits" else logits[mask][rows][:, :64])
    save_file(tensors, os.path.join(out, f"{name}.safetensors"))
    with open(os.path.join(out, f"{name}.json"), "w") as f:
        keep = {k: v for k, v in cfg.to_dict().items() if isinstance(v, (int, float, str, bool)) and k not in ("transformers_version", "dtype", "_attn_implementation")}
        if family == "modernbert":
            # Store these keys of published files, because transformers 5 replaces them by other keys.
            keep |= {k: v for k, v in sizes.items() if k.startswith("global_") or k.startswith("local_")}
        f.write(compact_json.dumps(dict(sorted((keep | {"id2label": {str(i): f"LABEL_{i}" for i in range(3)}}).items()))))
    print(name, {k: v.shape for k, v in tensors.items() if k.startswith("tiny")})


def small_encoder(out, family):
    more = {"rembert": dict(input_embedding_size=36, output_embedding_size=44), "luke": dict(entity_vocab_size=10, entity_emb_size=8)}.get(family, {})
    random_model(out, f"{family}_head20", family, ["tiny"], hidden=60, heads=3, inner=100, layers=2, vocab=203, **more)


# Settings of greedy search, by the name of the results.
RULES = {"greedy": {}, "rules": dict(repetition_penalty=1.3, no_repeat_ngram_size=2)}
# Settings of beam search, by the name of the results.
BEAMS = {
    "beams": dict(num_beams=4),
    "early": dict(num_beams=3, length_penalty=2.0, early_stopping=True),
    "never": dict(num_beams=5, length_penalty=0.6, early_stopping="never", no_repeat_ngram_size=2),
}
# Settings of diverse beam search (beams in groups), which transformers 5 no longer supports. `search_groups` implements it.
GROUPS = {
    "groups": dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    "ruled": dict(num_beams=6, num_beam_groups=3, diversity_penalty=0.8, repetition_penalty=1.3, no_repeat_ngram_size=2),
    "full": dict(num_beams=4, num_beam_groups=2, diversity_penalty=1.0, early_stopping=True, length_penalty=2.0, repetition_penalty=0.8),
    "summed": dict(num_beams=6, num_beam_groups=3, diversity_penalty=2.0, early_stopping="never", length_penalty=0.6, repetition_penalty=1.3, renormalize_logits=True),
}
# Settings of searches with a min length of the text.
LEAST = {"least": dict(min_new_tokens=9), "least_beams": dict(num_beams=4, min_length=14)}


def search_groups(logits_of, start, ends, most, num_beams, num_beam_groups, diversity_penalty, length_penalty=1.0, early_stopping=False,
                  repetition_penalty=1.0, no_repeat_ngram_size=0, renormalize_logits=False, suppress_tokens=(), forced_bos_token_id=None):
    """Runs diverse beam search (Vijayakumar et al. 2016) after the tokens `start`. Returns the hypotheses, best first, and their scores.

    Follows `_group_beam_search` and `BeamSearchScorer` of transformers 4, with one difference. In transformers 4, a group that is done
    continues with padding tokens, which the diversity penalty counts as tokens of an earlier group. Here, a group that is done chooses no
    tokens. `logits_of` returns the logits of the next token for several sequences of equal lengths. `most` is the max number of new tokens.
    """
    rules = tf.LogitsProcessorList()
    if repetition_penalty != 1.0:
        rules.append(tf.RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if no_repeat_ngram_size:
        rules.append(tf.NoRepeatNGramLogitsProcessor(no_repeat_ngram_size))
    if forced_bos_token_id is not None:
        rules.append(tf.ForcedBOSTokenLogitsProcessor(forced_bos_token_id))
    if suppress_tokens:
        rules.append(tf.SuppressTokensLogitsProcessor(list(suppress_tokens)))
    if renormalize_logits:
        rules.append(tf.LogitNormalization())
    n = num_beams // num_beam_groups
    running = [[(0.0, start)] + [(-1e9, start)] * (n - 1) for _ in range(num_beam_groups)]
    ended, is_done = [[] for _ in running], [False] * num_beam_groups

    def add(group, score, tokens):
        own, score = ended[group], score / (len(tokens) - len(start)) ** length_penalty
        if len(own) < n or score > min(own)[0]:
            own.append((score, tokens))
        if len(own) > n:
            own.remove(min(own))

    for n_new in range(1, most + 1):
        taken = []
        for group in range(num_beam_groups):
            if is_done[group]:
                continue
            tokens = torch.tensor([own for _, own in running[group]])
            scores = torch.log_softmax(logits_of(tokens).float(), -1)
            vocab = scores.shape[1]
            # The diversity penalty is applied before the other rules.
            scores = scores - diversity_penalty * torch.bincount(torch.tensor(taken, dtype=torch.long), minlength=vocab)
            scores = rules(tokens, scores) + torch.tensor([score for score, _ in running[group]])[:, None]
            top = scores.flatten().topk(max(2, 1 + len(ends)) * n)
            going = []
            for rank, (score, at) in enumerate(zip(top.values.tolist(), top.indices.tolist())):
                behind = running[group][at // vocab][1] + [at % vocab]
                if at % vocab not in ends and len(going) < n:
                    going.append((score, behind))
                # Only the best n candidates may end a hypothesis, where n is the number of beams of a group.
                if at % vocab in ends and rank < n:
                    add(group, score, behind)
            running[group] = going
            taken += [own[-1] for _, own in going]
            longest = most if early_stopping == "never" and length_penalty > 0 else n_new
            best = top.values[0].item() / longest ** length_penalty
            is_done[group] = len(ended[group]) == n and (early_stopping is True or min(ended[group])[0] >= best)
        if all(is_done):
            break
    for group, is_done_now in enumerate(is_done):
        for score, own in running[group] if not is_done_now else []:
            add(group, score, own)
    found = sorted((one for own in ended for one in own), key=lambda one: -one[0])
    return [own[len(start):] for _, own in found], [score for score, _ in found]


def store_groups(written, kind, i, prompt, ends, found):
    """Stores the results of a diverse beam search: the tokens of all hypotheses one after another, and the hypotheses' lengths and
    scores."""
    tokens, scores = found
    for key, value in (("prompt", prompt), ("ends", ends), ("tokens", sum(tokens, [])), ("lens", [len(t) for t in tokens])):
        written[f"{kind}.{i}.{key}"] = np.array(value, dtype=np.int64)
    written[f"{kind}.{i}.scores"] = np.array(scores, dtype=np.float32)


class Feeding(torch.nn.Module):
    """The gated feed-forward network of Llama, with the interface of gpt-oss's mixture of experts, which it replaces."""

    def __init__(self, cfg):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)), None


def dense_gpt_oss(cfg):
    """Returns gpt-oss with a dense feed-forward network instead of experts: the model of `examples/sinks_decoder.ron`."""
    model = tf.GptOssForCausalLM(cfg)
    for layer in model.model.layers:
        layer.mlp = Feeding(cfg)
    return model


DECODERS = {
    "dense_gpt_oss": (dense_gpt_oss, lambda s: tf.GptOssConfig(num_local_experts=1, num_experts_per_tok=1, **common(s))),
    "gpt2": (tf.GPT2LMHeadModel, lambda s: tf.GPT2Config(
        vocab_size=s["vocab"], n_positions=512, n_embd=s["hidden"], n_layer=s["layers"], n_head=s["heads"],
        n_inner=s["inner"], attn_implementation="eager", **s["more"])),
    "llama": (tf.LlamaForCausalLM, lambda s: tf.LlamaConfig(**common(s))),
    "gemma": (tf.GemmaForCausalLM, lambda s: tf.GemmaConfig(**common(s))),
    "gemma2": (tf.Gemma2ForCausalLM, lambda s: tf.Gemma2Config(**common(s))),
    "gemma3_text": (tf.Gemma3ForCausalLM, lambda s: tf.Gemma3TextConfig(**common(s))),
    "phi3": (tf.Phi3ForCausalLM, lambda s: tf.Phi3Config(pad_token_id=0, **common(s))),
    "olmo2": (tf.Olmo2ForCausalLM, lambda s: tf.Olmo2Config(**common(s))),
    "starcoder2": (tf.Starcoder2ForCausalLM, lambda s: tf.Starcoder2Config(**common(s))),
    "stablelm": (tf.StableLmForCausalLM, lambda s: tf.StableLmConfig(**without(s, "head_dim"))),
    "phi": (tf.PhiForCausalLM, lambda s: tf.PhiConfig(**without(s, "head_dim"))),
    "smollm3": (tf.SmolLM3ForCausalLM, lambda s: tf.SmolLM3Config(pad_token_id=0, **common(s))),
    "granite": (tf.GraniteForCausalLM, lambda s: tf.GraniteConfig(**common(s))),
    "gpt_neox": (tf.GPTNeoXForCausalLM, lambda s: tf.GPTNeoXConfig(**without(s, "head_dim", "num_key_value_heads"))),
    "bloom": (tf.BloomForCausalLM, lambda s: tf.BloomConfig(
        vocab_size=s["vocab"], hidden_size=s["hidden"], n_layer=s["layers"], n_head=s["heads"], attn_implementation="eager", **s["more"])),
    "opt": (tf.OPTForCausalLM, lambda s: tf.OPTConfig(
        vocab_size=s["vocab"], max_position_embeddings=512, hidden_size=s["hidden"], num_hidden_layers=s["layers"], num_attention_heads=s["heads"],
        ffn_dim=s["inner"], attn_implementation="eager", **s["more"])),
    "cohere": (tf.CohereForCausalLM, lambda s: tf.CohereConfig(**common(s))),
    "falcon": (tf.FalconForCausalLM, lambda s: tf.FalconConfig(num_kv_heads=s["kv_heads"], ffn_hidden_size=s["inner"], **{
        key: value for key, value in common(s).items() if key not in ("head_dim", "num_key_value_heads", "intermediate_size")}
        # The eager attention of transformers 5.24 adds ALiBi's biases twice. Use its default attention, which adds them once, like earlier
        # versions.
        | ({"attn_implementation": "sdpa"} if s["more"].get("alibi") else {}))),
    "gptj": (tf.GPTJForCausalLM, lambda s: tf.GPTJConfig(
        vocab_size=s["vocab"], n_positions=512, n_embd=s["hidden"], n_layer=s["layers"], n_head=s["heads"], n_inner=s["inner"],
        attn_implementation="eager", **s["more"])),
    "cohere2": (tf.Cohere2ForCausalLM, lambda s: tf.Cohere2Config(**without(s, "head_dim"))),
    "glm": (tf.GlmForCausalLM, lambda s: tf.GlmConfig(pad_token_id=0, **common(s))),
    "glm4": (tf.Glm4ForCausalLM, lambda s: tf.Glm4Config(pad_token_id=0, **common(s))),
    "exaone4": (tf.Exaone4ForCausalLM, lambda s: tf.Exaone4Config(**common(s))),
    "seed_oss": (tf.SeedOssForCausalLM, lambda s: tf.SeedOssConfig(**common(s))),
    "ernie4_5": (tf.Ernie4_5ForCausalLM, lambda s: tf.Ernie4_5Config(**common(s))),
    "helium": (tf.HeliumForCausalLM, lambda s: tf.HeliumConfig(**common(s))),
    "hunyuan_v1_dense": (tf.HunYuanDenseV1ForCausalLM, lambda s: tf.HunYuanDenseV1Config(**common(s))),
    "arcee": (tf.ArceeForCausalLM, lambda s: tf.ArceeConfig(**common(s))),
    "nemotron": (tf.NemotronForCausalLM, lambda s: tf.NemotronConfig(**common(s))),
    "olmo": (tf.OlmoForCausalLM, lambda s: tf.OlmoConfig(**without(s, "head_dim"))),
    "mpt": (tf.MptForCausalLM, lambda s: tf.MptConfig(
        vocab_size=s["vocab"], max_seq_len=512, d_model=s["hidden"], n_layers=s["layers"], n_heads=s["heads"], attn_implementation="eager", **s["more"])),
    "gpt_bigcode": (tf.GPTBigCodeForCausalLM, lambda s: tf.GPTBigCodeConfig(
        vocab_size=s["vocab"], n_positions=512, n_embd=s["hidden"], n_layer=s["layers"], n_head=s["heads"], n_inner=s["inner"],
        attn_implementation="eager", **s["more"])),
    "gpt_neo": (tf.GPTNeoForCausalLM, lambda s: tf.GPTNeoConfig(
        vocab_size=s["vocab"], max_position_embeddings=512, hidden_size=s["hidden"], num_layers=s["layers"], num_heads=s["heads"],
        intermediate_size=s["inner"], attn_implementation="eager", **s["more"])),
    "xglm": (tf.XGLMForCausalLM, lambda s: tf.XGLMConfig(
        vocab_size=s["vocab"], max_position_embeddings=512, d_model=s["hidden"], num_layers=s["layers"], attention_heads=s["heads"],
        ffn_dim=s["inner"], attn_implementation="eager", **s["more"])),
    "biogpt": (tf.BioGptForCausalLM, lambda s: tf.BioGptConfig(**without(s, "head_dim", "num_key_value_heads"))),
    "hyperclovax": (tf.HyperCLOVAXForCausalLM, lambda s: tf.HyperCLOVAXConfig(**common(s))),
    "exaone": (tf.LlamaForCausalLM, lambda s: tf.ExaoneConfig(**common(s))),
    "internlm3": (tf.LlamaForCausalLM, lambda s: tf.InternLM3Config(**common(s))),
    "openai_gpt": (tf.OpenAIGPTLMHeadModel, lambda s: tf.OpenAIGPTConfig(
        vocab_size=s["vocab"], n_positions=512, n_embd=s["hidden"], n_layer=s["layers"], n_head=s["heads"], **s["more"])),
    "modernbert_decoder": (tf.ModernBertDecoderForCausalLM, lambda s: tf.ModernBertDecoderConfig(
        pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2, **without(s, "head_dim", "num_key_value_heads"))),
    "qwen2": (tf.Qwen2ForCausalLM, lambda s: tf.Qwen2Config(**common(s))),
    "qwen3": (tf.Qwen3ForCausalLM, lambda s: tf.Qwen3Config(**common(s))),
}


def common(s):
    """Returns the keys of config.json that most decoders share."""
    return dict(vocab_size=s["vocab"], max_position_embeddings=512, hidden_size=s["hidden"], num_hidden_layers=s["layers"],
                num_attention_heads=s["heads"], num_key_value_heads=s["kv_heads"], head_dim=s["head"],
                intermediate_size=s["inner"], attn_implementation="eager", **s["more"])


@contextlib.contextmanager
def exact_slopes():
    """Makes transformers compute Falcon's ALiBi biases in f32 instead of rounding slopes, positions and their products to bf16."""
    falcon, rounded = tf.models.falcon.modeling_falcon, torch.Tensor.bfloat16
    build = falcon.build_alibi_tensor

    def exact(*args, **more):
        torch.Tensor.bfloat16 = torch.Tensor.float
        try:
            return build(*args, **more)
        finally:
            torch.Tensor.bfloat16 = rounded

    falcon.build_alibi_tensor = exact
    try:
        yield
    finally:
        falcon.build_alibi_tensor = build


def without(s, *keys):
    """Returns the keys of `common` except `keys`."""
    return {key: value for key, value in common(s).items() if key not in keys}


def write_config(out, name, cfg, **more):
    with open(os.path.join(out, f"{name}.json"), "w") as f:
        dropped = ("transformers_version", "dtype", "_attn_implementation", "task_specific_params", "id2label", "label2id")
        keep = {k: v for k, v in cfg.to_dict().items() if isinstance(v, (int, float, str, bool, dict)) and k not in dropped}
        # Also filter the keys of MPT's nested attention settings.
        keep |= {k: {key: value for key, value in v.items() if key not in dropped} for k, v in keep.items() if k == "attn_config"}
        f.write(compact_json.dumps(dict(sorted((keep | more).items()))))


def store_least(written, kind, i, prompt, ends, o, tokens):
    """Stores the result of a search with a min length: the tokens up to the first end token, and the score of the best beam. For greedy
    search, stores the min difference between the best and the second best logit instead of a score."""
    tokens = tokens.numpy().astype(np.int64)
    at = [j for j, t in enumerate(tokens) if t in ends]
    written[f"{kind}.{i}.prompt"] = prompt.numpy().astype(np.int64)
    written[f"{kind}.{i}.tokens"] = tokens[:at[0] + 1] if at else tokens
    written[f"{kind}.{i}.ends"] = np.array(ends, dtype=np.int64)
    if getattr(o, "sequences_scores", None) is not None:
        written[f"{kind}.{i}.score"] = o.sequences_scores[:1].numpy()
    else:
        top = torch.stack(o.scores).squeeze(1).topk(2, -1).values
        written[f"{kind}.{i}.margin"] = (top[:, 0] - top[:, 1]).min().reshape(1).numpy()


def decoder(out, name, family, lens_names, vocab=1003, layers=3, more={}, searches=True, **sizes):
    """Stores states, logits and log-probabilities of a generative model, which runs each sequence separately. Also stores the tokens that
    it generates with greedy search, and with all other searches unless `searches` is false."""
    head, make = DECODERS[family]
    cfg = make(dict(vocab=vocab, layers=layers, more=more, **sizes))
    model = fill(head(cfg))
    tensors = {}
    for lens_name in lens_names:
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, cfg.vocab_size, sum(lens))
        states, logits, scores, start = [], [], [], 0
        for n in lens:
            own = torch.from_numpy(ids[start:start + n])
            o = model(input_ids=own[None], output_hidden_states=True)
            states.append(o.hidden_states[-1][0])
            logits.append(o.logits[0])
            after = torch.log_softmax(o.logits[0, :-1].double(), -1)[torch.arange(n - 1), own[1:]]
            scores.append(torch.cat([torch.zeros(1).double(), after]).float())
            start += n
        rows = rows_of(lens)
        put = lambda key, t: tensors.__setitem__(f"{lens_name}.{key}", np.ascontiguousarray(t.detach().numpy()))
        tensors[f"{lens_name}.ids"] = ids.astype(np.int64)
        tensors[f"{lens_name}.lens"] = np.array(lens, dtype=np.int64)
        tensors[f"{lens_name}.rows"] = rows
        put("last_hidden_state", torch.cat(states)[rows])
        put("token_logits", torch.cat(logits)[rows][:, :64])
        put("next_token_logits", torch.stack([x[-1] for x in logits]))
        put("log_probability", torch.cat(scores)[rows][:, None])
    if tensors:
        save_file(tensors, os.path.join(out, f"{name}.safetensors"))
    lists = {key: value for key, value in more.items() if value is None or isinstance(value, list)}
    write_config(out, name, cfg, **lists, **({"attention_layers": cfg.attention_layers} if family == "gpt_neo" else {}))
    print(name, {k: v.shape for k, v in tensors.items() if k.startswith("tiny")})
    written = {}
    for rules_name, rules in RULES.items():
        lens, prompts = LENS["tiny"], []
        for n in lens:
            prompts.append(torch.from_numpy(np.random.default_rng(SEED + n).integers(5, cfg.vocab_size, n)))
        for i, prompt in enumerate(prompts):
            o = model.generate(prompt[None], max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None,
                               bos_token_id=None, output_scores=True, return_dict_in_generate=True, **rules)
            top = torch.stack(o.scores).squeeze(1).topk(2, -1).values
            written[f"{rules_name}.{i}.prompt"] = prompt.numpy().astype(np.int64)
            written[f"{rules_name}.{i}.tokens"] = o.sequences[0, len(prompt):].numpy().astype(np.int64)
            # Store the min over all steps of the difference between the best and the second best logit.
            written[f"{rules_name}.{i}.margin"] = (top[:, 0] - top[:, 1]).min().reshape(1).numpy()
    if not searches:
        save_file(written, os.path.join(out, f"{name}.written.safetensors"))
        return
    # Use tokens of the greedy search as end tokens, so that beams end at several lengths.
    ends = sorted({int(written[f"greedy.{i}.tokens"][3 * i + 4]) for i in range(3)})
    for beams_name, beams in BEAMS.items():
        for i, prompt in enumerate(prompts):
            o = model.generate(prompt[None], max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=ends,
                               bos_token_id=None, output_scores=True, return_dict_in_generate=True, **beams)
            tokens = o.sequences[0, len(prompt):].numpy().astype(np.int64)
            at = [j for j, t in enumerate(tokens) if t in ends]
            written[f"{beams_name}.{i}.prompt"] = prompt.numpy().astype(np.int64)
            written[f"{beams_name}.{i}.tokens"] = tokens[:at[0] + 1] if at else tokens
            written[f"{beams_name}.{i}.score"] = o.sequences_scores[:1].numpy()
            written[f"{beams_name}.{i}.ends"] = np.array(ends, dtype=np.int64)
    for kind, how in LEAST.items():
        for i, prompt in enumerate(prompts):
            o = model.generate(prompt[None], max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=ends,
                               bos_token_id=None, return_dict_in_generate=True, output_scores=True, **how)
            store_least(written, kind, i, prompt, ends, o, o.sequences[0, len(prompt):])
    for kind, how in GROUPS.items():
        for i, prompt in enumerate(prompts):
            logits_of = lambda tokens: model(input_ids=tokens).logits[:, -1]
            store_groups(written, kind, i, prompt, ends, search_groups(logits_of, prompt.tolist(), ends, 16, **how))
    save_file(written, os.path.join(out, f"{name}.written.safetensors"))


def small_decoders():
    """Yields decoders for which few results are stored: name, family and sizes."""
    usual = dict(hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=2)
    narrow = dict(usual, head=20)
    yield "cohere2_head24", "cohere2", dict(usual, layers=4, more=dict(sliding_window=5, logit_scale=0.5))
    yield "cohere2_biases", "cohere2", dict(usual, layers=3, more=dict(sliding_window=3, attention_bias=True, layer_types=["full_attention", "sliding_attention", "full_attention"]))
    yield "glm_head24", "glm", usual
    yield "glm4_head20", "glm4", dict(narrow, more=dict(attention_bias=False, tie_word_embeddings=True))
    yield "exaone4_head24", "exaone4", dict(usual, layers=4, more=dict(sliding_window=5))
    yield "exaone4_full", "exaone4", dict(narrow, more=dict(sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=True))
    yield "seed_oss_head20", "seed_oss", dict(narrow, more=dict(attention_out_bias=True))
    yield "ernie4_5_head20", "ernie4_5", dict(narrow, more=dict(use_bias=True))
    yield "helium_head24", "helium", usual
    stretched = dict(rope_type="dynamic", rope_theta=10000.0, factor=1.0, alpha=1000.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
    yield "hunyuan_v1_dense_head20", "hunyuan_v1_dense", dict(narrow, more=dict(tie_word_embeddings=True, rope_parameters=stretched))
    yield "hunyuan_v1_dense_head24", "hunyuan_v1_dense", usual
    yield "arcee_head20", "arcee", narrow
    yield "nemotron_head24", "nemotron", usual
    yield "olmo_head24", "olmo", usual
    yield "mpt_head12", "mpt", dict(usual, heads=6)
    yield "gpt_bigcode_head24", "gpt_bigcode", usual
    yield "gpt_bigcode_heads", "gpt_bigcode", dict(narrow, more=dict(multi_query=False, tie_word_embeddings=False))
    yield "gpt_neo_head24", "gpt_neo", dict(usual, layers=4, more=dict(window_size=5, attention_types=[[["global", "local"], 2]]))
    yield "xglm_head24", "xglm", usual
    yield "biogpt_head24", "biogpt", usual
    yield "exaone_head24", "exaone", dict(usual, more=dict(tie_word_embeddings=True))
    yield "internlm3_head24", "internlm3", usual
    yield "hyperclovax_head24", "hyperclovax", dict(usual, more=dict(embedding_multiplier=6.0, residual_multiplier=0.25, logits_scaling=0.3))
    yield "openai_gpt_head24", "openai_gpt", dict(usual, inner=288)
    yield "modernbert_decoder_head24", "modernbert_decoder", dict(usual, layers=4, more=dict(local_attention=9))


def long_context(out, name, scaling, original=128, **sizes):
    """Stores results of Phi-3 in which all sequences use the long factors of LongRoPE.

    transformers applies the long factors only to forward passes with more than the original number of positions, `original`. To apply them
    to shorter sequences, the model is created with one original position. The attention factor is still computed from `original`.
    """
    attention = float(np.sqrt(1 + np.log(512 / original) / np.log(original)))
    short = dict(original_max_position_embeddings=1, rope_parameters=dict(scaling, attention_factor=attention))
    published = dict(original_max_position_embeddings=original, rope_parameters=scaling)
    decoder(out, name, "phi3", ["tiny", "mixed"], more=short, **sizes)
    head, make = DECODERS["phi3"]
    configs = [make(dict(vocab=1003, more=more, **sizes)) for more in (short, published)]
    for n in (original + 1, 512):
        ids = torch.from_numpy(np.random.default_rng(SEED).integers(5, 1003, n))[None]
        logits = [fill(head(cfg))(input_ids=ids).logits for cfg in configs]
        torch.testing.assert_close(*logits)
    write_config(out, name, configs[1], max_context=512)


TRANSLATORS = {
    "marian": (tf.MarianMTModel, tf.MarianConfig),
    "bart": (tf.BartForConditionalGeneration, tf.BartConfig),
    "mbart": (tf.MBartForConditionalGeneration, tf.MBartConfig),
    "m2m_100": (tf.M2M100ForConditionalGeneration, tf.M2M100Config),
    "t5": (tf.T5ForConditionalGeneration, tf.T5Config),
    "blenderbot": (tf.BlenderbotForConditionalGeneration, tf.BlenderbotConfig),
    "blenderbot_small": (tf.BlenderbotSmallForConditionalGeneration, tf.BlenderbotSmallConfig),
}


def translator(out, name, family, lens_names, vocab=503, hidden=64, heads=4, inner=100, layers=2, decoder_layers=2, searches=True, **more):
    """Stores encoder states and generated tokens of an encoder-decoder model, which runs each sequence separately. The tokens are those of
    greedy search and of plain beam search, and of all other searches unless `searches` is false."""
    head, config = TRANSLATORS[family]
    if family == "t5":
        sizes = dict(num_layers=layers, num_decoder_layers=decoder_layers, num_heads=heads, d_ff=inner)
    else:
        sizes = dict(max_position_embeddings=160, encoder_layers=layers, decoder_layers=decoder_layers, encoder_attention_heads=heads,
                     decoder_attention_heads=heads, encoder_ffn_dim=inner, decoder_ffn_dim=inner + 24, forced_eos_token_id=None)
    cfg = config(vocab_size=vocab, d_model=hidden, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, attn_implementation="eager", **sizes, **more)
    model = head(cfg)
    if more.get("tie_word_embeddings") is False:
        # transformers 5 ties the head even if the config says otherwise. Untie it, as in checkpoints that store it separately.
        cfg.tie_word_embeddings, model.lm_head.weight = False, torch.nn.Parameter(model.lm_head.weight.clone())
    # Use larger weights than for other models. Otherwise, a model whose head is tied to the embedding table would only repeat the last
    # token.
    model = fill(model, TRANSLATOR_DEVIATION)
    tensors, written = {}, {}
    for lens_name in lens_names:
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, vocab, sum(lens))
        states = [model.get_encoder()(torch.from_numpy(own)[None]).last_hidden_state[0] for own in np.split(ids, np.cumsum(lens)[:-1])]
        tensors[f"{lens_name}.ids"] = ids.astype(np.int64)
        tensors[f"{lens_name}.lens"] = np.array(lens, dtype=np.int64)
        tensors[f"{lens_name}.rows"] = rows = rows_of(lens)
        tensors[f"{lens_name}.encoder_last_hidden_state"] = np.ascontiguousarray(torch.cat(states)[rows].numpy())
    settings = {"greedy": {}, "rules": RULES["rules"], "forced": dict(forced_bos_token_id=7), **(BEAMS if searches else {"beams": BEAMS["beams"]})}
    ends = [2]
    for kind, how in settings.items():
        for i, n in enumerate([5, 1, 40]):
            source = torch.from_numpy(np.random.default_rng(SEED + n).integers(5, vocab, n))
            n_new = 24 if kind in ("greedy", "rules") else 16
            o = model.generate(source[None], max_new_tokens=n_new, do_sample=False, eos_token_id=None if n_new == 24 else ends, bos_token_id=None, suppress_tokens=[1],
                               output_scores=True, return_dict_in_generate=True, **({"num_beams": 1} | how))
            tokens = o.sequences[0, 1:].numpy().astype(np.int64)
            at = [j for j, t in enumerate(tokens) if t in ends]
            put = lambda key, value: written.__setitem__(f"{kind}.{i}.{key}", value)
            put("prompt", source.numpy().astype(np.int64))
            put("tokens", tokens[:at[0] + 1] if at and n_new == 16 else tokens)
            put("ends", np.array(ends, dtype=np.int64))
            if kind in BEAMS:
                put("score", o.sequences_scores[:1].numpy())
            else:
                top = torch.stack(o.scores).squeeze(1).topk(2, -1).values
                gap = (top[:, 0] - top[:, 1])
                put("margin", gap[torch.isfinite(gap)].min().reshape(1).numpy())
        if kind == "rules":
            # Use tokens of the greedy search as end tokens, so that beams end at several lengths.
            ends = sorted({int(written[f"rules.{i}.tokens"][3 * i + 4]) for i in range(3)})
    for i, n in enumerate([5, 1, 40] if searches else []):
        source = torch.from_numpy(np.random.default_rng(SEED + n).integers(5, vocab, n))
        for kind, how in LEAST.items():
            o = model.generate(source[None], max_new_tokens=16, do_sample=False, eos_token_id=ends, bos_token_id=None, suppress_tokens=[1],
                               output_scores=True, return_dict_in_generate=True, **({"num_beams": 1} | how))
            store_least(written, kind, i, source, ends, o, o.sequences[0, 1:])
        state = model.get_encoder()(source[None]).last_hidden_state
        of_source = lambda n: tf.modeling_outputs.BaseModelOutput(last_hidden_state=state.expand(n, -1, -1))
        logits_of = lambda tokens: model(encoder_outputs=of_source(len(tokens)), decoder_input_ids=tokens).logits[:, -1]
        for kind, how in GROUPS.items():
            first = 7 if kind == "full" else None
            store_groups(written, kind, i, source, ends, search_groups(logits_of, [2], ends, 16, suppress_tokens=[1], forced_bos_token_id=first, **how))
    save_file(written, os.path.join(out, f"{name}.written.safetensors"))
    save_file(tensors, os.path.join(out, f"{name}.safetensors"))
    write_config(out, name, cfg)
    print(name, {k: v.shape for k, v in tensors.items()}, written["greedy.0.tokens"], written["beams.0.score"])


def bart_classifier(out, name, lens_names, hidden, heads, inner, layers=2, decoder_layers=3, vocab=503, **more):
    """Stores states and logits of BART as a classifier, whose decoder reads the same tokens as its encoder. Each sequence is computed
    separately, and ends with token 2."""
    cfg = tf.BartConfig(vocab_size=vocab, d_model=hidden, max_position_embeddings=512, encoder_layers=layers, decoder_layers=decoder_layers, encoder_attention_heads=heads,
                        decoder_attention_heads=heads, encoder_ffn_dim=inner, decoder_ffn_dim=inner + 24, num_labels=3, attn_implementation="eager", **more)
    heads_of = {"last_hidden_state": tf.BartModel, "sequence_logits": tf.BartForSequenceClassification, "token_logits": tf.BartForQuestionAnswering}
    tensors = {}
    for output, head in heads_of.items():
        cfg.num_labels = 2 if output == "token_logits" else 3
        model = fill(head(cfg))
        for lens_name in lens_names:
            lens = LENS[lens_name]
            ids = np.random.default_rng(SEED).integers(5, vocab, sum(lens))
            ids[np.cumsum(lens) - 1] = 2
            found = []
            for own in torch.from_numpy(ids).split(lens):
                o = model(input_ids=own[None])
                found.append({"last_hidden_state": lambda: o[0][0], "sequence_logits": lambda: o.logits,
                              "token_logits": lambda: torch.stack([o.start_logits[0], o.end_logits[0]], -1)}[output]())
            rows = rows_of(lens)
            tensors[f"{lens_name}.ids"], tensors[f"{lens_name}.lens"], tensors[f"{lens_name}.rows"] = ids.astype(np.int64), np.array(lens, dtype=np.int64), rows
            found = torch.cat(found)
            tensors[f"{lens_name}.{output}"] = np.ascontiguousarray((found if output == "sequence_logits" else found[rows]).numpy())
    save_file(tensors, os.path.join(out, f"{name}.safetensors"))
    cfg.num_labels = 3
    write_config(out, name, cfg, architectures=["BartForSequenceClassification"])
    print(name, {k: v.shape for k, v in tensors.items() if k.startswith("tiny")})


def nomic(out, name, lens_names, hidden, heads, inner, layers=2, vocab=503, theta=1000.0):
    """Stores states of NomicBERT, whose weights have different names in transformers than in published files."""
    cfg = tf.NomicBertConfig(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
                             rope_parameters=dict(rope_type="default", rope_theta=theta), attn_implementation="eager")
    model = tf.NomicBertModel(cfg, add_pooling_layer=False).eval()

    def put(published, *own):
        parts = [model.get_parameter(n) for n in own]
        mean = np.float32(1.0 if parts[0].dim() == 1 and published.endswith("weight") else 0.0)
        values = mean + np.float32(DEVIATION) * normal(published, sum(p.numel() for p in parts))
        for p, part in zip(parts, np.split(values, len(parts))):
            p.copy_(torch.from_numpy(part.reshape(p.shape)))

    put("embeddings.word_embeddings.weight", "embeddings.word_embeddings.weight")
    put("embeddings.token_type_embeddings.weight", "embeddings.token_type_embeddings.weight")
    for end in ("weight", "bias"):
        put(f"emb_ln.{end}", f"embeddings.LayerNorm.{end}")
    for i in range(layers):
        at = f"encoder.layers.{i}."
        put(at + "attn.Wqkv.weight", *(f"layers.{i}.self_attn.{x}_proj.weight" for x in "qkv"))
        for published, own in (("attn.out_proj", "self_attn.o_proj"), ("mlp.fc11", "mlp.up_proj"), ("mlp.fc12", "mlp.gate_proj"), ("mlp.fc2", "mlp.down_proj")):
            put(f"{at}{published}.weight", f"layers.{i}.{own}.weight")
        for published, own in (("norm1", "post_attention_layernorm"), ("norm2", "post_mlp_layernorm")):
            for end in ("weight", "bias"):
                put(f"{at}{published}.{end}", f"layers.{i}.{own}.{end}")
    tensors = {}
    for lens_name in lens_names:
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, vocab, sum(lens))
        o, mask = run(model, ids, lens)
        states(tensors, lens_name, ids, lens, o.last_hidden_state, mask)
    save_file(tensors, os.path.join(out, f"{name}.safetensors"))
    published = dict(model_type="nomic_bert", vocab_size=vocab, n_embd=hidden, n_head=heads, n_inner=inner, n_layer=layers, n_positions=8192,
                     type_vocab_size=2, layer_norm_epsilon=1e-12, rotary_emb_base=theta, rotary_emb_fraction=1.0, rotary_emb_interleaved=False,
                     rotary_emb_scale_base=None, activation_function="swiglu", qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False,
                     prenorm=False, parallel_block=False, causal=False, use_rms_norm=False, max_trained_positions=2048)
    with open(os.path.join(out, f"{name}.json"), "w") as f:
        f.write(compact_json.dumps(dict(sorted(published.items()))))


def written(out, name, tensors, published):
    save_file(tensors, os.path.join(out, f"{name}.safetensors"))
    with open(os.path.join(out, f"{name}.json"), "w") as f:
        f.write(compact_json.dumps(dict(sorted(published.items()))))
    print(name, {k: v.shape for k, v in tensors.items() if k.startswith("tiny")})


def drawn(published, *dims):
    mean = np.float32(1.0 if len(dims) == 1 and published.endswith("weight") else 0.0)
    values = mean + np.float32(DEVIATION) * normal(published, int(np.prod(dims)))
    return torch.from_numpy(values.reshape(dims))


def gte(out, name, lens_names, hidden, heads, inner, types=2, layers=2, vocab=503, theta=20000.0, scaling=None):
    """Stores states of GTE, whose weights have different names in transformers than in published files. The scaled rotary frequencies of
    the published code are computed here, because transformers does not scale them."""
    cfg = tf.GteConfig(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner, num_labels=3,
                       type_vocab_size=types, rope_parameters=dict(rope_type="default", rope_theta=theta), attn_implementation="eager")
    models = {"trunk": tf.GteModel(cfg, add_pooling_layer=True), "sequence_logits": tf.GteForSequenceClassification(cfg), "token_logits": tf.GteForTokenClassification(cfg)}
    for model in models.values():
        model.eval()
        trunk = getattr(model, "gte", model)
        put = lambda published, *own: [p.copy_(part) for p, part in zip(own, drawn(published, *[sum(p.shape[0] for p in own), *own[0].shape[1:]]).split([p.shape[0] for p in own]))]
        if hasattr(model, "classifier"):
            put("classifier.weight", model.classifier.weight), put("classifier.bias", model.classifier.bias)
        e = trunk.embeddings
        put("embeddings.word_embeddings.weight", e.word_embeddings.weight)
        if types:
            put("embeddings.token_type_embeddings.weight", e.token_type_embeddings.weight)
        both = lambda published, *modules: [put(f"{published}.{end}", *(getattr(m, end) for m in modules)) for end in ("weight", "bias")]
        both("embeddings.LayerNorm", e.LayerNorm)
        for i, layer in enumerate(trunk.layers):
            at, a = f"encoder.layer.{i}.", layer.self_attn
            both(at + "attention.qkv_proj", a.q_proj, a.k_proj, a.v_proj)
            both(at + "attention.o_proj", a.o_proj)
            put(at + "mlp.up_gate_proj.weight", layer.mlp.up_proj.weight, layer.mlp.gate_proj.weight)
            both(at + "mlp.down_proj", layer.mlp.down_proj)
            both(at + "attn_ln", layer.post_attention_layernorm)
            both(at + "mlp_ln", layer.post_mlp_layernorm)
        if trunk.pooler is not None:
            both("pooler.dense", trunk.pooler.dense)
        if scaling:
            # Compute the frequencies like NTKScalingRotaryEmbedding of Alibaba-NLP/new-impl.
            pairs, dim, factor, b = torch.arange(0, hidden // heads, 2).double(), hidden // heads, scaling["factor"], scaling.get("mixed_b")
            f = 1 / (theta * (factor if b is None else 1)) ** (pairs / dim)
            f = f / factor ** (2 / dim) if b is None else f / torch.exp(np.log(factor) / (dim / 2) ** b * (pairs / 2 + 1) ** b)
            trunk.rotary_emb.inv_freq.copy_(f.float())
    tensors = {}
    for lens_name in lens_names:
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, vocab, sum(lens))
        o, mask = run(models["trunk"], ids, lens)
        states(tensors, lens_name, ids, lens, o.last_hidden_state, mask)
        tensors[f"{lens_name}.sentence_embedding"] = torch.nn.functional.normalize(o.last_hidden_state[:, 0], dim=1).numpy()
        tensors[f"{lens_name}.pooler_output"] = o.pooler_output.numpy()
        tensors[f"{lens_name}.sequence_logits"] = run(models["sequence_logits"], ids, lens)[0].logits.numpy()
        tensors[f"{lens_name}.token_logits"] = run(models["token_logits"], ids, lens)[0].logits[mask][rows_of(lens)].numpy()
    written(out, name, tensors, dict(
        model_type="new", vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
        type_vocab_size=types, layer_norm_eps=1e-12, layer_norm_type="layer_norm", hidden_act="gelu", position_embedding_type="rope", rope_theta=theta,
        rope_scaling=scaling and dict(type="ntk", **scaling), pack_qkv=True, logn_attention_scale=False, logn_attention_clip1=False,
        max_position_embeddings=8192, unpad_inputs=False, use_memory_efficient_attention=False, id2label={str(i): f"LABEL_{i}" for i in range(3)}))


def jina_states(ids, drawn, hidden, heads, inner, feed_forward, later, layers, vocab):
    """Returns states of JinaBERT v2, which transformers does not support. They are computed by the equations of the code that is published
    with the model. `drawn` returns a tensor by its name in the first version of that code."""
    eps, f = 1e-12, torch.nn.functional
    both = lambda name, *dims: (drawn(f"{name}.weight", *dims), drawn(f"{name}.bias", dims[0]))
    linear = lambda x, name, n: f.linear(x, *both(name, n, x.shape[-1]))
    norm = lambda x, name: f.layer_norm(x, x.shape[-1:], *both(name, x.shape[-1]), eps)

    def slopes(n):
        power = 2 ** int(np.log2(n))
        first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
        return first if power == n else first + slopes(2 * power)[0::2][:n - power]

    n, head = len(ids), hidden // heads
    x = f.embedding(ids, drawn("embeddings.word_embeddings.weight", vocab, hidden)) + drawn("embeddings.token_type_embeddings.weight", 2, hidden)[0]
    x = norm(x, "embeddings.LayerNorm")
    distance = (torch.arange(n)[:, None] - torch.arange(n)[None]).abs()
    bias = -torch.tensor(slopes(heads))[:, None, None] * distance
    for i in range(layers):
        at = f"encoder.layer.{i}."
        q, k, v = (linear(x, f"{at}attention.self.{w}", hidden) for w in ("query", "key", "value"))
        if later:
            q, k = norm(q, at + "attention.self.layer_norm_q"), norm(k, at + "attention.self.layer_norm_k")
        q, k, v = (w.view(n, heads, head).transpose(0, 1) for w in (q, k, v))
        p = torch.softmax(q @ k.transpose(1, 2) / head ** 0.5 + bias, -1)
        projected = linear((p @ v).transpose(0, 1).reshape(n, hidden), at + "attention.output.dense", hidden)
        x = norm(projected + x, at + "attention.output.LayerNorm")
        halves = f.linear(x, drawn(at + ("mlp.up_gated_layer.weight" if later else "mlp.gated_layers.weight"), 2 * inner, hidden))
        gate, up = (halves[:, inner:], halves[:, :inner]) if later else (halves[:, :inner], halves[:, inner:])
        inside = (torch.relu if feed_forward == "reglu" else f.gelu)(gate) * up
        x = norm(linear(inside, at + "mlp.wo", hidden) + x, at + "mlp.layernorm")
    return x


def jina(out, name, lens_names, hidden, heads, inner, feed_forward="geglu", later=False, layers=2, vocab=503):
    eps = 1e-12
    model = lambda ids: jina_states(ids, drawn, hidden, heads, inner, feed_forward, later, layers, vocab)
    linear = lambda x, name, n: torch.nn.functional.linear(x, drawn(f"{name}.weight", n, x.shape[-1]), drawn(f"{name}.bias", n))
    tensors = {}
    for lens_name in lens_names:
        h, mask = one_by_one(tensors, lens_name, model, hidden, vocab)
        tensors[f"{lens_name}.pooler_output"] = torch.tanh(linear(h[:, 0], "pooler.dense", hidden)).numpy()
    where = "jinaai/jina-bert-v2-qk-post-norm" if later else "jinaai/jina-bert-implementation"
    published = dict(model_type="bert", position_embedding_type="alibi", feed_forward_type=feed_forward, vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers,
                     num_attention_heads=heads, intermediate_size=inner, type_vocab_size=2, layer_norm_eps=eps, max_position_embeddings=8192, hidden_act="gelu",
                     emb_pooler="mean", auto_map={"AutoModel": f"{where}--modeling_bert.JinaBertModel"})
    written(out, name, tensors, published)


def neobert(out, name, lens_names, hidden, heads, inner, layers=2, vocab=503):
    """Stores states and logits of NeoBERT, which transformers does not support. They are computed by the equations of its published
    code."""
    eps, f, head = 1e-5, torch.nn.functional, hidden // heads
    width = -(-(2 * inner // 3) // 8) * 8
    norm = lambda x, name: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * drawn(f"{name}.weight", hidden)
    linear = lambda x, name, n, bias=False: f.linear(x, drawn(f"{name}.weight", n, x.shape[-1]), drawn(f"{name}.bias", n) if bias else None)

    def model(ids):
        n = len(ids)
        angles = torch.arange(n).double()[:, None] * 10000.0 ** (-torch.arange(0, head, 2).double() / head)
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]

        def turned(x):
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

        x = f.embedding(ids, drawn("encoder.weight", vocab, hidden))
        for i in range(layers):
            at = f"transformer_encoder.{i}."
            q, k, v = linear(norm(x, at + "attention_norm"), at + "qkv", 3 * hidden).view(n, heads, 3 * head).split(head, -1)
            q, k, v = (w.transpose(0, 1) for w in (turned(q), turned(k), v))
            context = torch.softmax(q @ k.transpose(1, 2) / head ** 0.5, -1) @ v
            x = x + linear(context.transpose(0, 1).reshape(n, hidden), at + "wo", hidden)
            gate, up = linear(norm(x, at + "ffn_norm"), at + "ffn.w12", 2 * width).split(width, -1)
            x = x + linear(f.silu(gate) * up, at + "ffn.w3", hidden)
        return norm(x, "layer_norm")

    tensors = {}
    for lens_name in lens_names:
        h, mask = one_by_one(tensors, lens_name, model, hidden, vocab)
        logits = linear(h, "decoder", vocab, True)
        tensors[f"{lens_name}.mlm_logits"] = np.ascontiguousarray(logits[mask][rows_of(LENS[lens_name])][:, :64].numpy())
        tensors[f"{lens_name}.sequence_logits"] = linear(torch.tanh(linear(h[:, 0], "dense", hidden, True)), "classifier", 3, True).numpy()
    published = dict(model_type="neobert", architectures=["NeoBERTLMHead"], vocab_size=vocab, hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=layers,
                     intermediate_size=inner, norm_eps=eps, max_length=4096, pad_token_id=0, id2label={str(i): f"LABEL_{i}" for i in range(3)})
    written(out, name, tensors, published)


def clip_text(out, name, lens_names, hidden, heads, inner, layers=2, vocab=503, projection=36, nested=False, **more):
    cfg = tf.CLIPTextConfig(vocab_size=vocab, hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=layers, intermediate_size=inner,
                            max_position_embeddings=512, projection_dim=projection, eos_token_id=vocab - 1, attn_implementation="eager", **more)
    model = fill(tf.CLIPTextModelWithProjection(cfg))
    tensors = {}
    for lens_name in lens_names:
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, vocab - 1, sum(lens))
        ids[np.cumsum(lens) - 1] = vocab - 1
        o, mask = run(model, ids, lens)
        states(tensors, lens_name, ids, lens, o.last_hidden_state, mask)
        tensors[f"{lens_name}.text_embeds"] = o.text_embeds.numpy()
        tensors[f"{lens_name}.sentence_embedding"] = torch.nn.functional.normalize(o.text_embeds, dim=1).numpy()
        tensors[f"{lens_name}.pooler_output"] = run(model.text_model, ids, lens)[0].pooler_output.numpy()
    keep = {k: v for k, v in cfg.to_dict().items() if isinstance(v, (int, float, str, bool)) and k not in ("transformers_version", "dtype", "_attn_implementation")}
    written(out, name, tensors, dict(model_type="clip", projection_dim=projection, text_config=keep) if nested else keep)


def gemma(out, name, lens_names, hidden, heads, kv_heads, head, inner, layers, vocab=503, **more):
    cfg = tf.Gemma3TextConfig(vocab_size=vocab, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head, num_hidden_layers=layers,
                              intermediate_size=inner, max_position_embeddings=2048, attn_implementation="eager", **more)
    model = fill(tf.Gemma3TextModel(cfg))
    tensors = {}
    for lens_name in lens_names:
        # Run one sequence at a time. In a padded batch, transformers would combine the padding mask with the mask of the window by OR.
        one_by_one(tensors, lens_name, lambda own: model(input_ids=own[None]).last_hidden_state[0], hidden, vocab)
    save_file(tensors, os.path.join(out, f"{name}.safetensors"))
    keep = {k: v for k, v in cfg.to_dict().items() if isinstance(v, (int, float, str, bool, list, dict)) and k not in ("transformers_version", "dtype", "_attn_implementation", "id2label", "label2id", "architectures")}
    written(out, name, tensors, {k: v for k, v in keep.items() if k != "layer_types" or "layer_types" in more})


def bge_m3(out, name, lens_names, hidden, heads, inner, layers=2, vocab=503):
    """Stores dense, sparse and ColBERT outputs of BGE-M3, computed like in BAAI's FlagEmbedding."""
    cfg = tf.XLMRobertaConfig(vocab_size=vocab, hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=layers, intermediate_size=inner,
                              max_position_embeddings=514, type_vocab_size=1, attn_implementation="eager")
    model = fill(tf.XLMRobertaModel(cfg, add_pooling_layer=False))
    linear = lambda x, name, n: torch.nn.functional.linear(x, drawn(f"{name}.weight", n, hidden), drawn(f"{name}.bias", n))
    tensors = {}
    for lens_name in lens_names:
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, vocab, sum(lens))
        o, mask = run(model, ids, lens)
        rows = rows_of(lens)
        states(tensors, lens_name, ids, lens, o.last_hidden_state, mask)
        h = o.last_hidden_state[mask][rows]
        tensors[f"{lens_name}.sparse"] = torch.relu(linear(h, "sparse_linear", 1)).numpy()
        tensors[f"{lens_name}.colbert"] = torch.nn.functional.normalize(linear(h, "colbert_linear", hidden), dim=-1).numpy()
    save_file(tensors, os.path.join(out, f"{name}.safetensors"))
    write_config(out, name, cfg)


def deberta(out, name, lens_names, hidden, heads, inner, layers=2, vocab=503, first=False, **more):
    """Stores states and logits of DeBERTa, of version 1 if `first` is true and of version 2 otherwise."""
    more |= {} if first else dict(share_att_key=True, norm_rel_ebd="layer_norm")
    cfg = (tf.DebertaConfig if first else tf.DebertaV2Config)(vocab_size=vocab, hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=layers,
                                                              intermediate_size=inner, num_labels=3, relative_attention=True, attn_implementation="eager", **more)
    classes = (tf.DebertaModel, tf.DebertaForSequenceClassification, tf.DebertaForTokenClassification) if first else (
        tf.DebertaV2Model, tf.DebertaV2ForSequenceClassification, tf.DebertaV2ForTokenClassification)
    trunk, sequence, token = (fill(m(cfg)) for m in classes)
    tensors = {}
    for lens_name in lens_names:
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, vocab, sum(lens))
        o, mask = run(trunk, ids, lens)
        states(tensors, lens_name, ids, lens, o.last_hidden_state, mask)
        tensors[f"{lens_name}.pooler_output"] = sequence.pooler(o.last_hidden_state).numpy()
        tensors[f"{lens_name}.sequence_logits"] = run(sequence, ids, lens)[0].logits.numpy()
        tensors[f"{lens_name}.token_logits"] = run(token, ids, lens)[0].logits[mask][rows_of(lens)].numpy()
    kept = {k: v for k, v in cfg.to_dict().items() if isinstance(v, (int, float, str, bool)) and k not in ("transformers_version", "dtype", "_attn_implementation")}
    written(out, name, tensors, kept | dict(pos_att_type=more["pos_att_type"], id2label={str(i): f"LABEL_{i}" for i in range(3)}))


def own_encoder(out, name, lens_names):
    """Stores results of the model of `examples/own_encoder.ron` with its config.json. transformers computes it as a ModernBERT."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    rope = lambda theta: dict(rope_type="default", rope_theta=theta)
    cfg = tf.ModernBertConfig(vocab_size=503, hidden_size=48, num_attention_heads=3, num_hidden_layers=6, intermediate_size=100, layer_types=kinds, local_attention=48,
                              rope_parameters=dict(full_attention=rope(80000.0), sliding_attention=rope(5000.0)), hidden_activation="silu",
                              pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2, attn_implementation="eager")
    model = fill(tf.ModernBertModel(cfg))
    tensors = {}
    for lens_name in lens_names:
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, 503, sum(lens))
        o, mask = run(model, ids, lens)
        states(tensors, lens_name, ids, lens, o.last_hidden_state, mask)
    save_file(tensors, os.path.join(out, f"{name}.safetensors"))


def ranker(out, name, lens_names, hidden, heads, kv_heads, head, inner, layers=2, vocab=503, labels=1):
    """Stores results of a decoder that is used as an encoder: the normalized state of the last token, and logits computed from it."""
    cfg = tf.Qwen3Config(vocab_size=vocab, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head, num_hidden_layers=layers,
                         intermediate_size=inner, max_position_embeddings=2048, num_labels=labels, pad_token_id=0, tie_word_embeddings=True, attn_implementation="eager")
    trunk, head_of, writer = (fill(m(cfg)) for m in (tf.Qwen3Model, tf.Qwen3ForSequenceClassification, tf.Qwen3ForCausalLM))
    tensors = {}
    for lens_name in lens_names:
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, vocab, sum(lens))
        o, mask = run(trunk, ids, lens)
        states(tensors, lens_name, ids, lens, o.last_hidden_state, mask)
        last = o.last_hidden_state[torch.arange(len(lens)), torch.tensor(lens) - 1]
        tensors[f"{lens_name}.sentence_embedding"] = torch.nn.functional.normalize(last, dim=1).numpy()
        tensors[f"{lens_name}.sequence_logits"] = run(head_of, ids, lens)[0].logits.numpy()
        tensors[f"{lens_name}.next_token_logits"] = writer.lm_head(last).numpy()
    save_file(tensors, os.path.join(out, f"{name}.safetensors"))
    write_config(out, name, cfg, id2label={str(i): f"LABEL_{i}" for i in range(labels)})


def t5_encoder(out, name, lens_names, vocab=503, **sizes):
    """Stores states of T5's encoder without its decoder."""
    cfg = tf.T5Config(vocab_size=vocab, attn_implementation="eager", **sizes)
    model = fill(tf.T5EncoderModel(cfg))
    tensors = {}
    for lens_name in lens_names:
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, vocab, sum(lens))
        o, mask = run(model, ids, lens)
        states(tensors, lens_name, ids, lens, o.last_hidden_state, mask)
    save_file(tensors, os.path.join(out, f"{name}.safetensors"))
    write_config(out, name, cfg)


def long_texts(out, name, model, pool, **published):
    """Stores states of a narrow model for texts that are longer than in all other references. Each text is computed separately."""
    fill(model)
    tensors = {}
    for lens_name in ("tiny", "long"):
        lens = LENS[lens_name]
        ids = np.random.default_rng(SEED).integers(5, model.config.vocab_size, sum(lens))
        own = [model(input_ids=torch.from_numpy(i)[None]).last_hidden_state[0] for i in np.split(ids, np.cumsum(lens)[:-1])]
        rows, pooled = rows_of(lens), torch.stack([pool(h) for h in own])
        for key, value in {"ids": ids.astype(np.int64), "lens": np.array(lens, dtype=np.int64), "rows": rows, "last_hidden_state": torch.cat(own)[rows].numpy(),
                           "sentence_embedding": torch.nn.functional.normalize(pooled, dim=1).numpy()}.items():
            tensors[f"{lens_name}.{key}"] = np.ascontiguousarray(value)
    save_file(tensors, os.path.join(out, f"{name}.safetensors"))
    write_config(out, name, model.config, **published)


def states(tensors, lens_name, ids, lens, h, mask):
    """Adds the last states of some tokens, and the normalized mean of each sequence, to `tensors`."""
    rows = rows_of(lens)
    w = mask[..., None].float()
    embedding = torch.nn.functional.normalize((h * w).sum(1) / w.sum(1), dim=1)
    for key, value in {"ids": ids.astype(np.int64), "lens": np.array(lens, dtype=np.int64), "rows": rows,
                       "last_hidden_state": h[mask][rows].numpy(), "sentence_embedding": embedding.numpy()}.items():
        tensors[f"{lens_name}.{key}"] = np.ascontiguousarray(value)


def one_by_one(tensors, lens_name, model, hidden, vocab):
    """Computes the states of sequences one by one, and adds them to `tensors`. Returns the states as a padded batch, and its mask."""
    lens = LENS[lens_name]
    ids = np.random.default_rng(SEED).integers(5, vocab, sum(lens))
    mask = torch.arange(max(lens))[None] < torch.tensor(lens)[:, None]
    h = torch.zeros(*mask.shape, hidden)
    h[mask] = torch.cat([model(own) for own in torch.from_numpy(ids).split(lens)])
    states(tensors, lens_name, ids, lens, h, mask)
    return h, mask


def noise(seed, n):
    """Returns the `n` standard normal numbers that gemmule's `kernels::draw::noise` returns for a seed."""
    out = []
    for column in range(n):
        key, x = [seed & 0xFFFFFFFF, seed >> 32], [column // 2, 0, 0, 1 << 31]
        for _ in range(10):
            p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
            x = [(p1 >> 32) ^ x[1] ^ key[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ x[3] ^ key[1], p0 & 0xFFFFFFFF]
            key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
        radius, angle = np.sqrt(-2 * np.log(((x[0] >> 8) + 1) / 2**24)), 2 * np.pi * (x[1] >> 8) / 2**24
        out.append(radius * (np.sin(angle) if column % 2 else np.cos(angle)))
    return torch.tensor(out, dtype=torch.float32)


def vae(out, name, vocab=503, hidden=64, heads=4, inner=100, layers=2, latent=7, seed=(3 << 32) + 5):
    """Stores latent variables and generated tokens of a VAE with BART's encoder and decoder."""
    cfg = tf.BartConfig(vocab_size=vocab, max_position_embeddings=160, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
                        decoder_attention_heads=heads, encoder_ffn_dim=inner, decoder_ffn_dim=inner + 24, d_model=hidden, pad_token_id=1, eos_token_id=2,
                        decoder_start_token_id=2, forced_eos_token_id=None, attn_implementation="eager")
    model = fill(tf.BartForConditionalGeneration(cfg), TRANSLATOR_DEVIATION)

    def linear(own, n_out, n_in):
        make = lambda part, dims: torch.from_numpy((np.float32(TRANSLATOR_DEVIATION) * normal(f"latent.{own}.{part}", int(np.prod(dims)))).reshape(dims))
        return make("weight", (n_out, n_in)), make("bias", (n_out,))

    parts = {own: linear(own, *dims) for own, dims in {"mean": (latent, hidden), "log_variance": (latent, hidden), "out_proj": (hidden, latent)}.items()}
    apply = lambda own, x: torch.nn.functional.linear(x, *parts[own])
    written = {}
    for kind, how in {"greedy": {}, "beams": BEAMS["beams"]}.items():
        for i, n in enumerate([5, 1, 40]):
            source = torch.from_numpy(np.random.default_rng(SEED + n).integers(5, vocab, n))
            state = model.get_encoder()(source[None]).last_hidden_state.mean(1)
            mean, log_variance = apply("mean", state), apply("log_variance", state)
            drawn = mean + torch.exp(log_variance / 2) * noise(seed, latent)
            given = tf.modeling_outputs.BaseModelOutput(last_hidden_state=apply("out_proj", drawn)[:, None])
            o = model.generate(encoder_outputs=given, max_new_tokens=16, do_sample=False, eos_token_id=None, bos_token_id=None, suppress_tokens=[1],
                               output_scores=True, return_dict_in_generate=True, **({"num_beams": 1} | how))
            put = lambda key, value: written.__setitem__(f"{kind}.{i}.{key}", np.ascontiguousarray(value))
            put("prompt", source.numpy().astype(np.int64))
            put("tokens", o.sequences[0, 1:].numpy().astype(np.int64))
            put("seed", np.array([seed], dtype=np.int64))
            for key, value in (("latent_mean", mean), ("latent_log_variance", log_variance), ("latent", drawn)):
                put(key, value[0].numpy())
            if not how:
                top = torch.stack(o.scores).squeeze(1).topk(2, -1).values
                gap = top[:, 0] - top[:, 1]
                put("margin", gap[torch.isfinite(gap)].min().reshape(1).numpy())
    save_file(written, os.path.join(out, f"{name}.written.safetensors"))
    write_config(out, name, cfg, model_type="transformer_vae", latent_size=latent)


def minilm(out, folder):
    tok = tf.AutoTokenizer.from_pretrained(folder)
    model = tf.AutoModel.from_pretrained(folder, attn_implementation="eager").eval().float()
    enc = tok(SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt")
    o = model(**enc, output_hidden_states=True)
    mask = enc["attention_mask"].bool()
    w = mask[..., None].float()
    embedding = torch.nn.functional.normalize((o.last_hidden_state * w).sum(1) / w.sum(1), dim=1)
    rows = rows_of(mask.sum(1).tolist())
    tensors = {"ids": enc["input_ids"][mask].numpy(), "lens": mask.sum(1).numpy().astype(np.int64),
               "sentence_embedding": embedding.numpy(),
               # Store states after the embeddings and after each layer, at selected rows.
               **{f"layer.{i - 1}.hidden" if i else "hidden": np.ascontiguousarray(h[mask][rows].numpy()) for i, h in enumerate(o.hidden_states)},
               "rows": rows}
    save_file(tensors, os.path.join(out, "minilm.safetensors"))
    with open(os.path.join(out, "minilm_sentences.json"), "w") as f:
        f.write(compact_json.dumps(SENTENCES))
    print("minilm", tensors["sentence_embedding"].shape, tensors["lens"])


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    ap.add_argument("--minilm", metavar="DIR", help="a checkpoint of all-MiniLM-L6-v2")
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    torch.set_grad_enabled(False)
    for family in SMALL:
        small_encoder(a.out, family)
    for family in (family for family in FAMILIES if family not in SMALL):
        more = dict(layers=5, global_attn_every_n_layers=2, global_rope_theta=80000.0, local_rope_theta=5000.0, local_attention=30) if family == "modernbert" else {}
        random_model(a.out, f"{family}_h320a5", family, ["one_token", "tiny", "mixed"], hidden=320, heads=5, **more)
    random_model(a.out, "modernbert_head20", "modernbert", ["tiny", "mixed"], hidden=60, heads=3, inner=100, layers=4, local_attention=128, classifier_pooling="mean")
    random_model(a.out, "mpnet_head20", "mpnet", ["tiny", "mixed"], hidden=60, heads=3, inner=100, layers=2)
    nomic(a.out, "nomic_bert_h320a5", ["one_token", "tiny", "mixed"], hidden=320, heads=5, inner=1000)
    gte(a.out, "gte_h320a5", ["one_token", "tiny", "mixed"], hidden=320, heads=5, inner=1000, scaling=dict(factor=8.0))
    gte(a.out, "gte_head20", ["tiny", "mixed"], hidden=60, heads=3, inner=100, types=0, theta=500000.0, scaling=dict(factor=2.0, mixed_b=0.75))
    jina(a.out, "jina_bert_h320a5", ["one_token", "tiny", "mixed"], hidden=320, heads=5, inner=1000)
    jina(a.out, "jina_bert_later", ["tiny", "mixed"], hidden=72, heads=12, inner=100, feed_forward="reglu", later=True)
    clip_text(a.out, "clip_text_h320a5", ["one_token", "tiny", "mixed"], hidden=320, heads=5, inner=1000, nested=True)
    clip_text(a.out, "clip_text_head20", ["tiny"], hidden=60, heads=3, inner=100, hidden_act="gelu")
    gemma(a.out, "gemma3_text_h320a5", ["one_token", "tiny", "mixed"], hidden=320, heads=5, kv_heads=1, head=32, inner=1000, layers=4, sliding_window=61,
          use_bidirectional_attention=True, query_pre_attn_scalar=40, layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
          rope_parameters=dict(full_attention=dict(rope_type="linear", factor=4.0, rope_theta=300000.0), sliding_attention=dict(rope_type="default", rope_theta=5000.0)))
    gemma(a.out, "gemma3_text_causal", ["tiny", "mixed"], hidden=60, heads=4, kv_heads=2, head=256, inner=100, layers=3, sliding_window=24, sliding_window_pattern=2)
    deberta(a.out, "deberta_v2_h320a5", ["one_token", "tiny", "mixed"], hidden=320, heads=5, inner=1000, pos_att_type="p2c|c2p", position_buckets=48,
            max_position_embeddings=512, position_biased_input=False, type_vocab_size=0)
    deberta(a.out, "deberta_v2_head20", ["tiny", "mixed"], hidden=60, heads=3, inner=100, pos_att_type=["c2p", "p2c"], position_buckets=-1,
            max_position_embeddings=512, position_biased_input=True, type_vocab_size=2, embedding_size=36)
    deberta(a.out, "deberta_v2_near", ["tiny", "mixed"], hidden=60, heads=3, inner=100, pos_att_type=["c2p", "p2c"], position_buckets=15,
            max_position_embeddings=40, position_biased_input=False, type_vocab_size=0)
    deberta(a.out, "deberta_h320a5", ["one_token", "tiny", "mixed"], hidden=320, heads=5, inner=1000, first=True, pos_att_type="c2p|p2c",
            max_position_embeddings=512, position_biased_input=False, type_vocab_size=0)
    deberta(a.out, "deberta_head20", ["tiny"], hidden=60, heads=3, inner=100, first=True, pos_att_type=["p2c", "c2p"], max_position_embeddings=40, type_vocab_size=2)
    random_model(a.out, "roformer_narrow", "roformer", ["tiny"], hidden=60, heads=3, inner=100, layers=2, embedding_size=36)
    neobert(a.out, "neobert_h320a5", ["one_token", "tiny", "mixed"], hidden=320, heads=5, inner=1000)
    neobert(a.out, "neobert_head20", ["tiny"], hidden=60, heads=3, inner=101)
    narrow = dict(vocab_size=103, hidden_size=16, num_attention_heads=2, num_hidden_layers=4, intermediate_size=24, max_position_embeddings=8192, attn_implementation="eager")
    local = dict(local_attention=128, global_attn_every_n_layers=3)
    specials = dict(pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2)
    long_texts(a.out, "modernbert_long", tf.ModernBertModel(tf.ModernBertConfig(**narrow, **specials, **local)), lambda h: h.mean(0), **local)
    yarn = dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=2048)
    long_texts(a.out, "qwen3_long", tf.Qwen3Model(tf.Qwen3Config(**narrow, num_key_value_heads=1, head_dim=8, rope_parameters=yarn)), lambda h: h[-1])
    own_encoder(a.out, "own_encoder", ["one_token", "tiny", "mixed"])
    ranker(a.out, "qwen3_ranker", ["one_token", "tiny", "mixed"], hidden=96, heads=4, kv_heads=2, head=40, inner=200)
    bge_m3(a.out, "bge_m3_h60a3", ["tiny", "mixed"], hidden=60, heads=3, inner=100)
    for head, heads in ((32, 4), (80, 4), (96, 2), (128, 2)):
        random_model(a.out, f"bert_head{head}", "bert", ["tiny", "mixed"], hidden=head * heads, heads=heads, inner=512, layers=2)
    random_model(a.out, "bert_tanh_gelu", "bert", ["tiny"], hidden=64, heads=1, inner=96, layers=1, hidden_act="gelu_new")
    decoder(a.out, "gpt2_h320a5", "gpt2", ["one_token", "tiny", "mixed"], hidden=320, heads=5, inner=1000)
    untied = dict(activation_function="relu", tie_word_embeddings=False)
    # Head size 20, which a KV cache pads to a multiple of 8, and head size 24, which it does not pad.
    decoder(a.out, "gpt2_head20", "gpt2", ["tiny"], hidden=60, heads=3, inner=None, layers=2, more=untied)
    decoder(a.out, "gpt2_head24", "gpt2", [], hidden=72, heads=3, inner=None, layers=2, more=untied)
    decoder(a.out, "llama_h320a5", "llama", ["one_token", "tiny", "mixed"], hidden=320, heads=10, kv_heads=2, head=32, inner=1000)
    scaling = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    biased = dict(rope_parameters=scaling, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    decoder(a.out, "llama_head20", "llama", ["tiny"], hidden=60, heads=3, kv_heads=3, head=20, inner=100, layers=2, more=biased)
    decoder(a.out, "llama_head24", "llama", [], hidden=72, heads=3, kv_heads=3, head=24, inner=100, layers=2, more=biased)
    decoder(a.out, "gemma_head24", "gemma", ["tiny"], hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=2, more=dict(hidden_act="gelu"))
    decoder(a.out, "gemma3_writer", "gemma3_text", ["tiny", "mixed"], hidden=60, heads=3, kv_heads=1, head=24, inner=100,
            more=dict(sliding_window=5, sliding_window_pattern=2, query_pre_attn_scalar=20))
    # Soft caps that are small enough to change the scores and logits of random weights.
    decoder(a.out, "gemma2_head24", "gemma2", ["tiny"], hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=3,
            more=dict(sliding_window=5, query_pre_attn_scalar=20, attn_logit_softcapping=0.7, final_logit_softcapping=1.5))
    decoder(a.out, "sinks_head24", "dense_gpt_oss", ["one_token", "tiny", "mixed"], hidden=72, heads=6, kv_heads=2, head=24, inner=100, layers=4,
            more=dict(sliding_window=5, rope_parameters=dict(rope_type="default", rope_theta=10000.0)))
    decoder(a.out, "phi3_head24", "phi3", ["tiny"], hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=2, more=dict(sliding_window=5))
    decoder(a.out, "olmo2_head24", "olmo2", ["tiny"], hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=2)
    decoder(a.out, "starcoder2_head24", "starcoder2", ["tiny", "mixed"], hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=2, more=dict(sliding_window=5))
    decoder(a.out, "stablelm_head24", "stablelm", ["tiny"], hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=2, more=dict(use_qkv_bias=True))
    decoder(a.out, "stablelm_parallel", "stablelm", ["tiny"], hidden=80, heads=4, kv_heads=4, head=20, inner=100, layers=2,
            more=dict(use_parallel_residual=True, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)))
    decoder(a.out, "phi_head24", "phi", ["tiny"], hidden=72, heads=3, kv_heads=3, head=24, inner=100, layers=2)
    decoder(a.out, "phi3_part", "phi3", ["tiny"], hidden=96, heads=3, kv_heads=1, head=32, inner=100, layers=2,
            more=dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75)))
    # Models with a context that was extended from 128 to 512 tokens. Some sequences are not longer than the original context.
    longrope = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1 + i / 8 for i in range(12)], long_factor=[2.0 + i for i in range(12)])
    decoder(a.out, "phi3_longrope", "phi3", ["tiny"], hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=2,
            more=dict(original_max_position_embeddings=128, rope_parameters=longrope))
    long_context(a.out, "phi3_long_context", longrope, hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=2)
    decoder(a.out, "smollm3_head24", "smollm3", ["tiny"], hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=4)
    multipliers = dict(embedding_multiplier=6.0, attention_multiplier=0.3, residual_multiplier=0.25, logits_scaling=4.0)
    decoder(a.out, "granite_head24", "granite", ["tiny"], hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=2, more=multipliers)
    decoder(a.out, "gpt_neox_head24", "gpt_neox", ["tiny"], hidden=72, heads=3, kv_heads=3, head=24, inner=100, layers=2)
    decoder(a.out, "bloom_head12", "bloom", ["tiny", "mixed"], hidden=72, heads=6, kv_heads=6, head=12, inner=288, layers=2)
    decoder(a.out, "opt_head24", "opt", ["tiny"], hidden=72, heads=3, kv_heads=3, head=24, inner=100, layers=2)
    decoder(a.out, "opt_norms_after", "opt", ["tiny"], hidden=72, heads=3, kv_heads=3, head=24, inner=100, layers=2,
            more=dict(do_layer_norm_before=False, word_embed_proj_dim=40))
    decoder(a.out, "cohere_head24", "cohere", ["tiny"], hidden=72, heads=3, kv_heads=1, head=24, inner=100, layers=2,
            more=dict(attention_bias=True, logit_scale=0.5))
    # Command R+, whose head norms have a row of weights for each head. These weights are generated with mean 0, like all matrices.
    decoder(a.out, "cohere_norms", "cohere", ["tiny", "mixed"], hidden=60, heads=6, kv_heads=2, head=20, inner=100, layers=2,
            more=dict(use_qk_norm=True))
    decoder(a.out, "gptj_head24", "gptj", ["tiny"], hidden=72, heads=3, kv_heads=3, head=24, inner=100, layers=2, more=dict(rotary_dim=10))
    decoder(a.out, "falcon_head24", "falcon", ["tiny"], hidden=72, heads=3, kv_heads=3, head=24, inner=100, layers=2)
    decoder(a.out, "falcon_groups", "falcon", ["tiny"], hidden=96, heads=6, kv_heads=2, head=16, inner=100, layers=2,
            more=dict(new_decoder_architecture=True, bias=True))
    # Falcon-RW. transformers rounds slopes and positions to bf16, but the slopes of four heads and positions up to 256 are exact in bf16.
    falcon_rw = dict(alibi=True, multi_query=False, parallel_attn=False, bias=True)
    decoder(a.out, "falcon_rw", "falcon", ["tiny"], hidden=96, heads=4, kv_heads=4, head=24, inner=100, layers=2, more=falcon_rw)
    with exact_slopes():
        decoder(a.out, "falcon_rw_head12", "falcon", ["tiny", "mixed"], hidden=72, heads=6, kv_heads=6, head=12, inner=100, layers=2, more=falcon_rw)
        decoder(a.out, "falcon_alibi_groups", "falcon", ["tiny"], hidden=96, heads=6, kv_heads=2, head=16, inner=100, layers=2,
                more=dict(new_decoder_architecture=True, alibi=True))
    decoder(a.out, "falcon_heads", "falcon", ["tiny"], hidden=72, heads=3, kv_heads=3, head=24, inner=100, layers=2, more=dict(multi_query=False))
    decoder(a.out, "qwen2_head24", "qwen2", ["tiny", "mixed"], hidden=72, heads=3, kv_heads=1, head=24, inner=100,
            more=dict(use_sliding_window=True, sliding_window=5, max_window_layers=1))
    yarn = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
    decoder(a.out, "qwen3_h192a6", "qwen3", ["tiny", "mixed"], hidden=192, heads=6, kv_heads=2, head=64, inner=500, layers=2,
            more=dict(rope_parameters=yarn, tie_word_embeddings=True))
    for name, family, sizes in small_decoders():
        decoder(a.out, name, family, ["tiny"], vocab=203, searches=False, **sizes)
    translator(a.out, "marian_h64a4", "marian", ["one_token", "tiny"], scale_embedding=True, activation_function="swish")
    translator(a.out, "bart_h64a4", "bart", ["tiny"], scale_embedding=False, activation_function="gelu")
    translator(a.out, "mbart_h64a4", "mbart", ["tiny"], scale_embedding=True, activation_function="gelu")
    translator(a.out, "m2m_100_h64a4", "m2m_100", ["tiny"], scale_embedding=True, activation_function="relu")
    for family in ("blenderbot", "blenderbot_small"):
        translator(a.out, f"{family}_h60a3", family, ["tiny"], vocab=203, hidden=60, heads=3, searches=False, scale_embedding=True, activation_function="gelu")
    translator(a.out, "t5_h64a4", "t5", ["one_token", "tiny", "mixed"], d_kv=16)
    translator(a.out, "t5_h72a5", "t5", ["tiny"], hidden=72, heads=5, d_kv=24, inner=100, layers=3, feed_forward_proj="gated-gelu",
               tie_word_embeddings=False, relative_attention_num_buckets=12, relative_attention_max_distance=20)
    translator(a.out, "t5_h60a5", "t5", ["tiny"], hidden=60, heads=5, d_kv=12, inner=100)
    t5_encoder(a.out, "t5_head20", ["tiny", "mixed"], d_model=60, d_kv=20, num_heads=3, num_layers=2, d_ff=100, feed_forward_proj="gated-gelu")
    vae(a.out, "vae_h64a4")
    bart_classifier(a.out, "bart_classifier_h320a5", ["one_token", "tiny", "mixed"], hidden=320, heads=5, inner=1000)
    bart_classifier(a.out, "bart_classifier_scaled", ["tiny"], hidden=60, heads=3, inner=100, scale_embedding=True, activation_function="relu", decoder_start_token_id=9)
    if a.minilm:
        minilm(a.out, a.minilm)
