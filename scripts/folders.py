"""Writes small checkpoint folders in the form in which models are published, with the results of Python libraries for them.

Each folder under the output directory contains a model with random weights in the form in which transformers
or sentence-transformers publishes models, and an `expected.json` of runs: inputs, token ids, and the results
of `SentenceTransformer.encode`, `CrossEncoder.predict` or the model itself. Weights are exact in f16
and stored in f16. Results are computed in f32 from the same values.

    pip install torch transformers sentence-transformers model2vec
    python3 scripts/folders.py tests/checkpoints [FOLDER]

Nothing is downloaded. Two runs with the same versions write the same bytes.

How sentence-transformers reads a folder (6.2.0, unless stated otherwise):

* Texts are tokenized unchanged (before 5.4, without surrounding spaces) and truncated to `max_seq_length`
  of sentence_bert_config.json, which includes special tokens and the prompt. If that key is missing, as in every
  folder saved since 5.4, the limit is the smaller of tokenizer_config.json's `model_max_length` and
  config.json's `max_position_embeddings`. Truncation and padding saved inside tokenizer.json have no
  effect, because both are set for each call.
* A prompt is put before the text, and both are tokenized together. An explicit prompt, even "", takes
  precedence over a prompt name, and a prompt name takes precedence over `default_prompt_name`. "query" and
  "document" are always valid names; their prompts are empty if the folder does not define them. Any other unknown name is an error.
* `include_prompt: false` removes the first n positions from the pooling mask (not from attention),
  where n is the number of tokens of the prompt tokenized alone, without its last special token. As a result,
  [CLS] is excluded with the prompt, and the final [SEP] stays. Without a prompt nothing is excluded, not even
  [CLS]. CLS pooling then selects the first token after the prompt (up to 5.4, always the first token).
* If several pooling booleans are true, the results are concatenated in the order cls, max, mean, mean_sqrt_len, weightedmean,
  lasttoken, whatever the order of the keys. In new folders, `pooling_mode` may be a list. Its order is used.
* `lasttoken` selects the last token that is not padding, which is [SEP]. `weightedmean` weights position i
  (from 0, including [CLS]) by i + 1.
* A pair is truncated with "longest_first" to the same limit (a cross encoder without modules.json has no
  sentence_bert_config.json): tokens are removed one at a time from the end of the longer text.
* If `modality_config` of sentence_bert_config.json has `message`, a text becomes a message with the role user, the texts of a pair
  have the roles query and document, and a prompt becomes a preceding message with the role system. The chat template formats
  them, without `add_generation_prompt` unless `processing_kwargs` sets it. No special token is added. Truncated texts still end
  with the end of the template.
* The activation of a cross encoder is `activation_fn` of config_sentence_transformers.json if there is a
  modules.json, or else `sentence_transformers.activation_fn` of config.json, or else its
  `sbert_ce_default_activation_function`, or else sigmoid for one label and none for several.
"""
import itertools, json, math, os, shutil, sys, tempfile, zlib
from collections import Counter

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import numpy as np, safetensors.torch, torch, transformers as tf
import sentence_transformers as st

import compact_json
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling, StaticEmbedding, WeightedLayerPooling
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from model2vec import StaticModel
from tokenizers import Tokenizer, pre_tokenizers

CORPUS = """
A river runs from the hills to the sea, and boats carry grain along it in summer.
The train to the coast leaves at eight and arrives before noon unless it rains.
It rained all afternoon, so the picnic was moved indoors and nobody was sorry.
Who wrote the first letter, and where was it found after the war?
The letter was found in a box under the floor of an old house by the river.
She sells fresh bread, cheese and apples at the market near the station.
Prices at the market rose in spring, when snow closed the mountain road.
How many people live in the town, and how many of them work at the harbour?
About nine thousand people live there; a third of them work at the harbour.
The museum keeps maps, coins and ships' bells from three hundred years of trade.
A map of the harbour shows where the deep water is and where the sand begins.
Nothing is known about the painter except her name and the year 1824.
Light from the window falls on the table, the bread and the open letter.
The doctor said that rest, water and warm food would be enough.
find: a text about bread. text: one can find bread at the market. about: letters.
""".strip().split("\n")
TEXTS = ["The train to the coast leaves at eight.", "Who found the letter?", "Rain closed the road by the river, so bread was late."]
SHORT = ["The train leaves at eight.", "Who found the letter?", "Rain"]  # For outputs with a row for every token.
LONG = [
    "The museum by the harbour keeps maps, coins and bells, and in summer the boats carry people from the town "
    "along the river to the sea and back before the evening train leaves for the hills, unless snow or rain has "
    "closed the road, in which case nobody travels, and the market sells its apples to the station instead.",
    "Nothing is known about the painter except that she wrote a letter in the spring of 1824 from the old house.",
]
PAIRS = [
    ["How many people live in the town?", "About nine thousand people live there."],
    ["How many people live in the town?", "The train leaves at eight."],
    ["Who wrote the letter?", "It was found in a box under the floor of an old house."],
]
LONG_PAIR = [LONG[1], LONG[0]]  # Truncation removes tokens of both texts.
LONG_SECOND = ["Where is the deep water?", LONG[0]]  # Truncation removes tokens of the second text only.
HUGE = int(1e30)  # The value that transformers writes for a tokenizer without a limit.
HIDDEN, POSITIONS = 32, 64
MADE_WITH = {"torch": torch.__version__.split("+")[0], "transformers": tf.__version__, "sentence_transformers": st.__version__}


# Tokenizers. The trainers of the library `tokenizers` produce a different vocabulary on each run, so vocabularies are computed here.


def merged(words, count, join=lambda a, b: a + b):
    """Returns the first `count` merges of byte pair encoding. Each merges the most frequent pair; ties go to the pair that is first by
    name."""
    words = [(list(w), n) for w, n in sorted(Counter(words).items())]
    merges = []
    while len(merges) < count:
        pairs = Counter()
        for w, n in words:
            for pair in zip(w, w[1:]):
                pairs[pair] += n
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        for w, _ in words:
            for i in range(len(w) - 2, -1, -1):
                if (w[i], w[i + 1]) == best:
                    w[i : i + 2] = [join(*best)]
    return merges


def bert_tokenizer(**more):
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    words = [tuple([w[0]] + ["##" + c for c in w[1:]]) for line in CORPUS for w, _ in split(line.lower())]
    join = lambda a, b: a + b.removeprefix("##")
    pieces = sorted({c for w in words for c in w}) + [join(*m) for m in merged(words, 130, join)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + pieces))}
    return tf.BertTokenizer(vocab=vocab, **{"model_max_length": POSITIONS} | more)


def mpnet_tokenizer():
    vocab = bert_tokenizer().get_vocab()
    pieces = [p for p in sorted(vocab, key=vocab.get) if not p.startswith("[")]
    vocab = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "[UNK]"] + pieces + ["<mask>"])}
    return tf.MPNetTokenizer(vocab=vocab, model_max_length=POSITIONS)


def t5_tokenizer():
    first = [(t, 0.0) for t in ("<pad>", "</s>", "<unk>")]
    return tf.T5Tokenizer(vocab=first + unigram(), extra_ids=0, model_max_length=POSITIONS)


def unigram(lower=False):
    """Returns the pieces of a unigram tokenizer with their scores, without special tokens."""
    words = ["▁" + w for line in CORPUS for w in (line.lower() if lower else line).split()]
    pieces = sorted({c for w in words for c in w}) + ["".join(m) for m in merged(words, 140)]
    counts = {piece: sum(w.count(piece) for w in words) for piece in pieces}
    return [(piece, round(math.log(n / sum(counts.values())), 4)) for piece, n in counts.items()]


def xlmr_tokenizer(**more):
    first = [(t, 0.0) for t in ("<s>", "<pad>", "</s>", "<unk>")]
    return tf.XLMRobertaTokenizer(vocab=first + unigram() + [("<mask>", 0.0)], **{"model_max_length": POSITIONS} | more)


def camembert_tokenizer():
    first = [("<s>NOTUSED", 0.0), ("<pad>", 0.0), ("</s>NOTUSED", 0.0), ("<unk>", 0.0), ("<unk>NOTUSED", -100.0), ("<s>", 0.0), ("</s>", 0.0)]
    return tf.CamembertTokenizer(vocab=first + unigram() + [("<mask>", 0.0)], model_max_length=POSITIONS)


def albert_tokenizer():
    first = [(t, 0.0) for t in ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")]
    # transformers 5 returns segment ids of pairs only if `model_input_names` has them. Earlier versions always returned them, and published
    # models were trained with them.
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return tf.AlbertTokenizer(vocab=first + unigram(lower=True), model_max_length=POSITIONS, model_input_names=inputs)


def roberta_tokenizer():
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    merges = merged([w for line in CORPUS for w, _ in split(line)], 80)
    pieces = ["<s>", "<pad>", "</s>", "<unk>"] + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(m) for m in merges] + ["<mask>"]
    return tf.RobertaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, model_max_length=POSITIONS)


# Models.


def sizes(tok, **more):
    base = dict(vocab_size=len(tok), hidden_size=HIDDEN, num_attention_heads=2, num_hidden_layers=2, intermediate_size=48, max_position_embeddings=POSITIONS)
    return base | more


def bert(tok, **more):
    return tf.BertConfig(**sizes(tok, **more))


def electra(tok, **more):
    return tf.ElectraConfig(**sizes(tok, embedding_size=16) | more)


def albert(tok, **more):
    return tf.AlbertConfig(**sizes(tok, embedding_size=16, **more))


def distilbert(tok, **more):
    return tf.DistilBertConfig(vocab_size=len(tok), dim=HIDDEN, n_heads=2, n_layers=2, hidden_dim=48, max_position_embeddings=POSITIONS, **more)


def robertas(config, tok, **more):
    """Returns the config of a RoBERTa-like model, which has two more positions than the max number of tokens, and one segment type."""
    return config(**sizes(tok, max_position_embeddings=POSITIONS + 2, type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1,
                          bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id, **more))


def draw(model, name):
    """Fills a model with random values that are exact in f16, and converts it to f16."""
    # Use smaller values in deep models. Otherwise the states of all tokens would become the same.
    deviation = 0.3 if sum("query.weight" in k for k, _ in model.named_parameters()) < 4 else 0.15
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    for key, p in model.named_parameters():
        norm = p.dim() == 1 and key.endswith("weight")
        p.copy_((1.0 if norm else 0.0) + (0.1 if p.dim() == 1 else deviation) * torch.randn(p.shape, generator=random))
    return model.half().eval()


def save(folder, tok, model):
    draw(model, os.path.basename(folder)).save_pretrained(folder)
    tok.save_pretrained(folder)


# Helpers that change saved files.


def read(*path):
    with open(os.path.join(*path)) as f:
        return json.load(f)


def write(value, *path):
    with open(os.path.join(*path), "w") as f:
        f.write(compact_json.dumps(value))


def retensor(folder, change):
    path = os.path.join(folder, "model.safetensors")
    with safetensors.safe_open(path, "pt") as f:
        tensors = {k: f.get_tensor(k) for k in f.keys()}
    safetensors.torch.save_file(change(tensors), path, {"format": "pt"})


# Runs.


def plain(tensor):
    return np.asarray(tensor.detach() if isinstance(tensor, torch.Tensor) else tensor, dtype=np.float32)


def check(values):
    assert np.isfinite(values).all()
    rows = values.reshape(len(values), -1)
    least = min((np.abs(a - b).max() for a, b in itertools.combinations(rows, 2)), default=1.0)
    assert least > (0.01 if rows.shape[1] > 1 else 1e-5), f"two rows are the same within {least}"


def record(folder, runs):
    """Writes expected.json, with the numbers of each array on one line, so that the file is readable."""
    dump = lambda v: json.dumps(v, ensure_ascii=False)
    array = lambda v: "[" + ",".join(f"{x:.9g}" for x in v.ravel().tolist()) + "]" if isinstance(v, np.ndarray) else dump(v)
    lines = ["{", f'"made_with": {dump(MADE_WITH)},', '"runs": [']
    for i, run in enumerate(runs):
        fields = ",\n".join(f"  {dump(k)}: {array(v)}" for k, v in run.items())
        lines.append("{\n" + fields + "\n}" + ("," if i + 1 < len(runs) else ""))
    with open(os.path.join(folder, "expected.json"), "w") as f:
        f.write("\n".join(lines + ["]", "}"]) + "\n")


def ids_and_types(features):
    mask = features["attention_mask"].bool()
    types = features["token_type_ids"] if "token_type_ids" in features else torch.zeros_like(features["input_ids"])
    cut = lambda t: [row[m].tolist() for row, m in zip(t, mask)]
    return cut(features["input_ids"]), cut(types)


def check_ids(folder, limit, inputs, ids, types=None):
    """Checks that tokenizer.json alone, with truncation to `limit`, gives the same ids as Python's tokenizer."""
    tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    tok.no_padding()
    tok.enable_truncation(limit, strategy="longest_first")
    encoded = [tok.encode(*([x] if isinstance(x, str) else x)) for x in inputs]
    assert [e.ids for e in encoded] == ids, (folder, encoded[0].tokens)
    assert types is None or [e.type_ids for e in encoded] == types, folder


def encode(folder, runs):
    """Runs SentenceTransformer.encode for a list of (texts, keyword arguments), and records the results."""
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    assert all(p.dtype == torch.float32 for p in model.parameters())
    out = []
    for texts, how in runs:
        values = plain(model.encode(texts, **how))
        prompt = model._resolve_prompt(how.get("prompt"), how.get("prompt_name"))
        ids, _ = ids_and_types(model.preprocess(texts, prompt=prompt))
        check(values)
        check_ids(folder, model.max_seq_length, [(prompt or "") + t for t in texts], ids)
        out.append({"texts": texts, "prompt_name": how.get("prompt_name"), "prompt": how.get("prompt"),
                    "output": "sentence_embedding", "shape": list(values.shape), "values": values, "ids": ids})
    record(folder, out)
    return model


def predict(folder, runs=(({}, PAIRS), ({}, [LONG_PAIR, LONG_SECOND]))):
    """Runs CrossEncoder.predict, and records the scores and the logits before the activation."""
    model = CrossEncoder(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    assert all(p.dtype == torch.float32 for p in model.parameters())
    out = []
    for how, pairs in runs:
        values = plain(model.predict(pairs, **how))
        logits = plain(model.predict(pairs, activation_fn=torch.nn.Identity(), **how))
        prompt = model._resolve_prompt(None, how.get("prompt_name"))
        ids, types = ids_and_types(model.preprocess(pairs, prompt=prompt))
        check(values)
        check(logits)
        check_ids(folder, model.max_seq_length, [((prompt or "") + a, b) for a, b in pairs], ids, types)
        out.append({"pairs": pairs, "prompt_name": how.get("prompt_name"), "output": "scores", "shape": list(values.shape),
                    "values": values, "logits": logits, "ids": ids, "types": types})
    record(folder, out)
    return model


LATER = [("attention.output.LayerNorm", "layer_norm_1"), ("mlp.wo", "mlp.down_layer"), ("mlp.layernorm", "layer_norm_2")]


def jina(folder, later):
    """Writes a folder like the published JinaBERT, in one of its two versions. The results are computed by the equations in
    `reference.py`."""
    import reference

    tok = bert_tokenizer()
    n, tensors, random = dict(hidden=HIDDEN, heads=2, inner=48, layers=2), {}, torch.Generator().manual_seed(zlib.crc32(os.path.basename(folder).encode()))

    def drawn(name, *dims):
        for one, other in LATER if later else []:
            name = name.replace(one, other)
        if name not in tensors:
            norm = len(dims) == 1 and name.endswith("weight")
            tensors[name] = ((1.0 if norm else 0.0) + (0.1 if len(dims) == 1 else 0.3) * torch.randn(dims, generator=random)).half()
        return tensors[name].float()

    def states(text):
        ids = tok(text)["input_ids"]
        return ids, reference.jina_states(torch.tensor(ids), drawn, feed_forward="geglu", later=later, vocab=len(tok), **n)

    runs = [states(text) for text in SHORT]
    values = plain(torch.cat([h for _, h in runs]))
    tok.save_pretrained(folder)
    safetensors.torch.save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    where = "jinaai/jina-bert-v2-qk-post-norm" if later else "jinaai/jina-bert-implementation"
    write({"architectures": ["JinaBertForMaskedLM"], "model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu", "vocab_size": len(tok),
           "hidden_size": HIDDEN, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
           "max_position_embeddings": POSITIONS, "hidden_act": "gelu", "emb_pooler": "mean", "auto_map": {"AutoModel": f"{where}--modeling_bert.JinaBertModel"}},
          folder, "config.json")
    check(values)
    record(folder, [{"texts": SHORT, "output": "last_hidden_state", "shape": list(values.shape), "values": values, "ids": [ids for ids, _ in runs]}])


ADAPTERS = {"retrieval.query": "find: ", "retrieval.passage": "text: ", "separation": "", "text-matching": ""}


def st_adapters(folder):
    """Writes a folder like the published jina-embeddings-v3: XLM-RoBERTa with rotary embeddings, for each task an adapter of every weight,
    and a class whose code is on the hub. The results are computed here from the model's published description: an adapter adds `B A` to the
    weight of a linear layer, and `A B` to an embedding table."""
    tok, rank, alpha, n_layers, inner, heads = xlmr_tokenizer(), 4, 2, 2, 48, 2
    random = torch.Generator().manual_seed(zlib.crc32(os.path.basename(folder).encode()))
    draw_values = lambda *dims, deviation=0.3: (deviation * torch.randn(dims, generator=random)).half()
    tensors = {}

    def adapted(name, rows, columns, table=False):
        tensors[f"roberta.{name}.parametrizations.weight.original"] = draw_values(rows, columns)
        a, b = ((rows, rank), (rank, columns)) if table else ((rank, columns), (rows, rank))
        for part, dims in (("A", a), ("B", b)):
            tensors[f"roberta.{name}.parametrizations.weight.0.lora_{part}"] = draw_values(len(ADAPTERS), *dims)
        if not table:
            tensors[f"roberta.{name}.bias"] = draw_values(rows, deviation=0.1)

    def norm(name):
        tensors[f"roberta.{name}.weight"] = (1 + draw_values(HIDDEN, deviation=0.1)).half()
        tensors[f"roberta.{name}.bias"] = draw_values(HIDDEN, deviation=0.1)

    adapted("embeddings.word_embeddings", len(tok), HIDDEN, table=True)
    adapted("embeddings.token_type_embeddings", 1, HIDDEN, table=True)
    norm("emb_ln")
    for i in range(n_layers):
        adapted(f"encoder.layers.{i}.mixer.Wqkv", 3 * HIDDEN, HIDDEN)
        adapted(f"encoder.layers.{i}.mixer.out_proj", HIDDEN, HIDDEN)
        adapted(f"encoder.layers.{i}.mlp.fc1", inner, HIDDEN)
        adapted(f"encoder.layers.{i}.mlp.fc2", HIDDEN, inner)
        norm(f"encoder.layers.{i}.norm1")
        norm(f"encoder.layers.{i}.norm2")
    adapted("pooler.dense", HIDDEN, HIDDEN)

    def states(ids, task):
        def weight(name):
            part = lambda ending: tensors[f"roberta.{name}.parametrizations.weight.{ending}"].float()
            whole, a, b = part("original"), part("0.lora_A"), part("0.lora_B")
            if task is None:
                return whole
            at = list(ADAPTERS).index(task)
            product = b[at] @ a[at] if a.shape[1] == rank and a.shape[2] == whole.shape[1] else a[at] @ b[at]
            return whole + product * (alpha / rank)

        of = lambda name: tensors[f"roberta.{name}"].float()
        linear = lambda name, x: x @ weight(name).T + of(f"{name}.bias")
        normed = lambda name, x: torch.nn.functional.layer_norm(x, (HIDDEN,), of(f"{name}.weight"), of(f"{name}.bias"), 1e-5)
        width = HIDDEN // heads
        angles = torch.arange(len(ids))[:, None] / 20000 ** (torch.arange(0, width, 2) / width)[None]

        def turned(x):  # [tokens, heads, width]
            first, second = x.chunk(2, dim=-1)
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        x = normed("emb_ln", weight("embeddings.word_embeddings")[ids] + weight("embeddings.token_type_embeddings")[0])
        for i in range(n_layers):
            layer = f"encoder.layers.{i}"
            q, k, v = linear(f"{layer}.mixer.Wqkv", x).reshape(len(ids), 3, heads, width).unbind(1)
            attended = torch.einsum("qhw,khw->hqk", turned(q), turned(k)) / width**0.5
            context = torch.einsum("hqk,khw->qhw", attended.softmax(-1), v).reshape(len(ids), HIDDEN)
            x = normed(f"{layer}.norm1", linear(f"{layer}.mixer.out_proj", context) + x)
            hidden = torch.nn.functional.gelu(linear(f"{layer}.mlp.fc1", x))
            x = normed(f"{layer}.norm2", linear(f"{layer}.mlp.fc2", hidden) + x)
        return x

    os.makedirs(os.path.join(folder, "1_Pooling"))
    tok.save_pretrained(folder)
    safetensors.torch.save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    where = "jinaai/xlm-roberta-flash-implementation--"
    write({"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": 20000.0, "vocab_size": len(tok),
           "hidden_size": HIDDEN, "num_attention_heads": heads, "num_hidden_layers": n_layers, "intermediate_size": inner, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
           "max_position_embeddings": POSITIONS + 2, "hidden_act": "gelu", "emb_pooler": "mean", "pad_token_id": 1, "use_flash_attn": True, "load_trained_adapters": True,
           "lora_adaptations": list(ADAPTERS), "lora_rank": rank, "lora_alpha": alpha, "lora_dropout_p": 0.0, "lora_main_params_trainable": False,
           "task_instructions": ADAPTERS, "truncate_dim": None,
           "auto_map": {"AutoConfig": f"{where}configuration_xlm_roberta.XLMRobertaFlashConfig", "AutoModel": f"{where}modeling_lora.XLMRobertaLoRA"}}, folder, "config.json")
    write([{"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer", "kwargs": ["task"]},
           {"idx": 1, "name": "pooler", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
           {"idx": 2, "name": "normalizer", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}], folder, "modules.json")
    write({"word_embedding_dimension": HIDDEN, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False,
           "pooling_mode_mean_sqrt_len_tokens": False}, folder, "1_Pooling/config.json")
    write({"__version__": {"sentence_transformers": "3.1.0"}, "prompts": ADAPTERS, "default_prompt_name": None, "similarity_fn_name": "cosine"},
          folder, "config_sentence_transformers.json")
    runs = []
    for task in (None, "retrieval.query", "text-matching"):
        ids = [tok((ADAPTERS[task] if task else "") + text)["input_ids"] for text in TEXTS]
        values = torch.stack([states(torch.tensor(one), task).mean(0) for one in ids])
        values = plain(torch.nn.functional.normalize(values, dim=-1))
        check(values)
        runs.append({"texts": TEXTS, "task": task, "output": "sentence_embedding", "shape": list(values.shape), "values": values, "ids": ids})
    assert min(np.abs(a["values"] - b["values"]).max() for a, b in itertools.combinations(runs, 2)) > 0.01
    record(folder, runs)


OUTPUTS = {
    "last_hidden_state": lambda o: o.last_hidden_state[0],
    "pooler_output": lambda o: o.pooler_output,
    "sequence_logits": lambda o: o.logits,
    "token_logits": lambda o: o.logits[0],
    "mlm_logits": lambda o: o.logits[0, :, :64],
    "discriminator_logits": lambda o: o.logits[0, :, None],
}


def run(folder, *runs):
    """Runs a model with transformers, once for each pair (class, output) of `runs`, and records the results. The first class also runs on a
    pair of texts. Every sequence runs separately, so there is no padding."""
    tok = tf.AutoTokenizer.from_pretrained(folder)
    out = []
    for cls, output in runs:
        model, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        # The folder of a model with a head may lack a pooler. If only the trunk is loaded from the folder, transformers creates a pooler
        # with random weights, which no result uses.
        missing = [k for k in info["missing_keys"] if output == "pooler_output" or not k.startswith("pooler.")]
        assert not missing, (folder, info)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        for key, inputs in (("texts", SHORT), ("pairs", PAIRS[1:2]))[:1 if out else 2]:
            features = [tok(*([x] if key == "texts" else x), return_tensors="pt") for x in inputs]
            ids, types = zip(*((i[0], t[0]) for i, t in map(ids_and_types, features)))
            values = np.concatenate([plain(OUTPUTS[output](model.eval()(**f))) for f in features])
            check(values)
            # Do not compare segment ids of DistilBERT and DeBERTa. They use none, although the template in tokenizer.json produces some.
            check_ids(folder, POSITIONS, inputs, list(ids), None if model.config.model_type in ("distilbert", "deberta-v2") else list(types))
            more = {"columns": 64} if output == "mlm_logits" else {}
            out.append({key: inputs, "ids": ids, "types": types, "output": output} | more | {"shape": list(values.shape), "values": values})
    record(folder, out)


# Folders of sentence-transformers.


def sentence(folder, tok, model, *modules, limit=24, **more):
    """Saves a folder in the form of the installed version of sentence-transformers, in which `model_max_length` of tokenizer_config.json
    limits the tokens."""
    with tempfile.TemporaryDirectory() as temporary:
        path = os.path.join(temporary, os.path.basename(folder))
        save(path, tok, model)
        trunk = Transformer(path, model_kwargs={"dtype": torch.float16})
    for i, module in enumerate(modules):
        draw(module, f"{os.path.basename(folder)}.{i + 1}")
    whole = SentenceTransformer(modules=[trunk, *modules], device="cpu", **more)
    whole.max_seq_length = limit
    whole.save(folder, create_model_card=False)
    shutil.rmtree(os.path.join(folder, ".cache"), ignore_errors=True)


def older(folder, limit=16, version="2.2.2", **config):
    """Converts a folder to the form of sentence-transformers before 5.4, which most published folders have."""
    tokenizer = read(folder, "tokenizer_config.json")
    write(tokenizer | {"model_max_length": POSITIONS}, folder, "tokenizer_config.json")
    write({"max_seq_length": limit, "do_lower_case": False}, folder, "sentence_bert_config.json")
    versions = {"sentence_transformers": version, "transformers": "4.34.0", "pytorch": "2.1.0"}
    write({"__version__": versions} | config, folder, "config_sentence_transformers.json")
    modules = read(folder, "modules.json")
    for m in modules:
        kind = m["type"].split(".")[-1]
        m["type"] = f"sentence_transformers.models.{kind}"
        if kind == "Normalize":  # This module had no files, and git does not store empty folders.
            shutil.rmtree(os.path.join(folder, m["path"]))
        if kind == "Pooling":
            new = read(folder, m["path"], "config.json")
            modes = new["pooling_mode"] if isinstance(new["pooling_mode"], list) else [new["pooling_mode"]]
            old = {"word_embedding_dimension": new["embedding_dimension"]}
            old |= {f"pooling_mode_{k}": v in modes for k, v in {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens"}.items()}
            if config:  # These keys were introduced together with the prompts.
                old |= {"pooling_mode_weightedmean_tokens": "weightedmean" in modes, "pooling_mode_lasttoken": "lasttoken" in modes, "include_prompt": new["include_prompt"]}
            write(old, folder, m["path"], "config.json")
    write(modules, folder, "modules.json")


SIMPLE = [(TEXTS + ["Café by the SEA: 1824?", ""], {}), (["Rain"], {}), (LONG, {})]
PROMPTS = {"query": "find: ", "document": "text: "}


def st_mean(folder):
    tok = bert_tokenizer()
    sentence(folder, tok, tf.BertModel(bert(tok)), Pooling(HIDDEN, "mean"), Normalize())
    older(folder, version="3.0.1", prompts=PROMPTS, default_prompt_name=None, similarity_fn_name=None)
    # Add a buffer that older versions of transformers saved.
    retensor(folder, lambda t: t | {"embeddings.position_ids": torch.arange(POSITIONS)[None]})
    encode(folder, SIMPLE + [(TEXTS, {"prompt_name": "query"}), (TEXTS[:2] + LONG[:1], {"prompt_name": "document"}), (TEXTS, {"prompt": "about: "})])
    chunked(folder)


CHUNKS = ["The train.", "It rained.", "Who?"]


def chunked(folder):
    """Writes chunks.json, the vectors of late chunking. One run computes the states of all chunks. A vector is the mean over a chunk's
    tokens, to which the special tokens at the start and the end of the sequence belong."""
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    tok, parts = model.tokenizer, [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in CHUNKS]
    ids = [tok.cls_token_id] + sum(parts, []) + [tok.sep_token_id]
    states = model[0].model(torch.tensor([ids])).last_hidden_state[0]
    ends = list(itertools.accumulate(map(len, parts), initial=1))
    ends[0], ends[-1] = 0, len(ids)
    values = torch.stack([states[a:b].mean(0) for a, b in itertools.pairwise(ends)])
    values = plain(torch.nn.functional.normalize(values, dim=-1))
    check(values)
    apart = model.encode(CHUNKS)
    assert np.abs(values - apart).max() > 0.01 and len(ids) <= model.max_seq_length
    row = lambda values: "[" + ",".join(f"{x:.9g}" for x in values.tolist()) + "]"
    with open(os.path.join(folder, "chunks.json"), "w") as f:
        f.write(f'{{"texts": {json.dumps(CHUNKS)},\n"ids": {ids},\n"ends": {ends},\n"rows": [\n' + ",\n".join(map(row, values)) + "\n]}\n")


def st_default_prompt(folder):
    tok = bert_tokenizer()
    sentence(folder, tok, tf.BertModel(bert(tok)), Pooling(HIDDEN, "mean", include_prompt=False), Normalize())
    older(folder, version="3.0.1", prompts=PROMPTS, default_prompt_name="query", similarity_fn_name="cosine")
    model = encode(folder, SIMPLE + [(TEXTS, {"prompt_name": "document"}), (TEXTS, {"prompt": ""}), (TEXTS + LONG, {"prompt": "letters about bread: "})])
    # Check that sentence-transformers excludes the prompt and [CLS] from the mean, by computing the mean here for the first text.
    features = model.preprocess(TEXTS[:1], prompt="find: ")
    skip = len(model.tokenizer("find: ")["input_ids"]) - 1
    assert features["prompt_length"] == skip, features
    hidden = model[0].model(features["input_ids"]).last_hidden_state[0]
    by_hand = torch.nn.functional.normalize(hidden[skip:].mean(0), dim=0)
    assert np.abs(plain(by_hand) - model.encode(TEXTS)[0]).max() < 1e-5


def st_instructor(folder):
    """Writes a folder with several concatenated poolings that exclude the prompt. If a text has no prompt, nothing is excluded."""
    tok = roberta_tokenizer()
    pooling = Pooling(HIDDEN, ["cls", "max", "mean_sqrt_len_tokens", "lasttoken"], include_prompt=False)
    sentence(folder, tok, tf.RobertaModel(robertas(tf.RobertaConfig, tok)), pooling, Normalize(), prompts=PROMPTS)
    encode(folder, [(TEXTS, {}), (TEXTS, {"prompt_name": "query"}), (TEXTS + LONG, {"prompt": "letters about bread: "})])


def st_cls(folder):
    tok = bert_tokenizer()
    sentence(folder, tok, tf.BertModel(bert(tok)), Pooling(HIDDEN, "cls"))
    older(folder, limit=32)  # The oldest form: no prompts, and four pooling keys.
    # Add settings of truncation and padding. Many published tokenizer.json files contain the settings of the tokenizer's last call,
    # which have no effect.
    tokenizer = read(folder, "tokenizer.json")
    tokenizer["truncation"] = {"direction": "Right", "max_length": 20, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {"strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    write(tokenizer, folder, "tokenizer.json")
    # "query" is always a valid name of a prompt. Its prompt is empty in this folder.
    encode(folder, SIMPLE + [(TEXTS, {"prompt_name": "query"})])


def st_max(folder):
    tok = bert_tokenizer()
    sentence(folder, tok, tf.BertModel(bert(tok)), Pooling(HIDDEN, "max"), Normalize(), prompts=PROMPTS)
    encode(folder, SIMPLE + [(TEXTS, {"prompt_name": "document"})])


def st_last(folder):
    tok = bert_tokenizer()
    sentence(folder, tok, tf.BertModel(bert(tok)), Pooling(HIDDEN, "lasttoken"))
    encode(folder, SIMPLE)


def st_joined(folder):
    tok = bert_tokenizer()
    sentence(folder, tok, tf.BertModel(bert(tok)), Pooling(HIDDEN, ["cls", "mean", "max"]), Normalize())
    older(folder)
    model = encode(folder, SIMPLE)
    assert model[1].pooling_mode == ("cls", "max", "mean")


def st_joined_list(folder):
    tok = bert_tokenizer()
    sentence(folder, tok, tf.BertModel(bert(tok)), Pooling(HIDDEN, ["mean", "cls"]), Normalize())
    model = encode(folder, SIMPLE)
    assert model[1].pooling_mode == ("mean", "cls")


def st_dense(folder):
    tok = bert_tokenizer()
    first = Dense(HIDDEN, 24, bias=True, activation_function=torch.nn.Tanh())
    second = Dense(24, 16, bias=False, activation_function=torch.nn.Identity())
    sentence(folder, tok, tf.BertModel(bert(tok)), Pooling(HIDDEN, "mean"), first, second, Normalize())
    older(folder)
    # Convert the first Dense module to the form before version 5.4. The second module keeps the current form.
    config = read(folder, "2_Dense", "config.json")
    write({k: config[k] for k in ("in_features", "out_features", "bias", "activation_function")}, folder, "2_Dense", "config.json")
    encode(folder, SIMPLE)


def st_residual(folder):
    """Writes a folder whose Dense modules add their input to their result. The second module first multiplies the input by a separate
    matrix."""
    tok = bert_tokenizer()
    first = Dense(HIDDEN, HIDDEN, bias=True, activation_function=torch.nn.Tanh(), use_residual=True)
    second = Dense(HIDDEN, 24, bias=False, activation_function=torch.nn.Identity(), use_residual=True)
    pooling = Pooling(HIDDEN, ["weightedmean", "mean_sqrt_len_tokens"])
    half = Dense(2 * HIDDEN, HIDDEN, bias=False, activation_function=torch.nn.Identity())
    sentence(folder, tok, tf.BertModel(bert(tok)), pooling, half, first, second, LayerNorm(24), Normalize())
    encode(folder, SIMPLE)


def st_layers(folder):
    """Writes a folder that pools the mean of the states of the first and the second layer."""
    tok = bert_tokenizer()
    layers = WeightedLayerPooling(HIDDEN, num_hidden_layers=2, layer_start=1)
    sentence(folder, tok, tf.BertModel(bert(tok, output_hidden_states=True)), layers, Pooling(HIDDEN, "mean"), Normalize())
    weights = os.path.join(folder, "1_WeightedLayerPooling")
    retensor(weights, lambda t: {"layer_weights": torch.tensor([0.5, 1.75])})
    encode(folder, SIMPLE)


def st_sqrt(folder):
    tok = bert_tokenizer()
    sentence(folder, tok, tf.BertModel(bert(tok)), Pooling(HIDDEN, "mean_sqrt_len_tokens"))
    older(folder)
    encode(folder, SIMPLE)


def st_weighted(folder):
    tok = bert_tokenizer()
    sentence(folder, tok, tf.BertModel(bert(tok)), Pooling(HIDDEN, "weightedmean"))
    older(folder, version="3.0.1", prompts={}, default_prompt_name=None, similarity_fn_name=None)
    encode(folder, SIMPLE)


def st_xlmr(folder):
    tok = xlmr_tokenizer()
    sentence(folder, tok, tf.XLMRobertaModel(robertas(tf.XLMRobertaConfig, tok)), Pooling(HIDDEN, "cls"), Normalize())
    older(folder, limit=POSITIONS)
    encode(folder, SIMPLE)


def st_distil(folder):
    tok = bert_tokenizer(model_input_names=["input_ids", "attention_mask"])
    sentence(folder, tok, tf.DistilBertModel(distilbert(tok)), Pooling(HIDDEN, "mean"), Normalize())
    encode(folder, SIMPLE)


def st_albert(folder):
    tok = albert_tokenizer()
    config = albert(tok, num_hidden_groups=2, inner_group_num=2)
    config.num_hidden_layers = 4
    sentence(folder, tok, tf.AlbertModel(config), Pooling(HIDDEN, "mean"))
    older(folder)
    encode(folder, SIMPLE)


def st_electra(folder):
    tok = bert_tokenizer()
    sentence(folder, tok, tf.ElectraModel(electra(tok)), Pooling(HIDDEN, "mean"), limit=POSITIONS)
    encode(folder, SIMPLE)


def st_mpnet(folder):
    """Writes a folder like the published all-mpnet-base-v2."""
    tok = mpnet_tokenizer()
    config = tf.MPNetConfig(**sizes(tok, max_position_embeddings=POSITIONS + 2, pad_token_id=1, bos_token_id=0, eos_token_id=2))
    sentence(folder, tok, tf.MPNetModel(config), Pooling(HIDDEN, "mean"), Normalize())
    older(folder)
    encode(folder, SIMPLE)


def st_nomic(folder):
    """Writes a NomicBERT in the form in which transformers saves it: config.json has transformers' keys, and the weights have their
    published names."""
    tok = bert_tokenizer()
    config = tf.NomicBertConfig(**sizes(tok, rope_parameters={"rope_type": "default", "rope_theta": 500.0}))
    sentence(folder, tok, tf.NomicBertModel(config, add_pooling_layer=False), Pooling(HIDDEN, "mean"), Normalize(), prompts=PROMPTS)
    encode(folder, SIMPLE + [(TEXTS, {"prompt_name": "query"})])


def st_modernbert(folder):
    tok = bert_tokenizer(model_input_names=["input_ids", "attention_mask"])
    config = tf.ModernBertConfig(**sizes(tok, num_hidden_layers=3, global_attn_every_n_layers=2, local_attention=12, global_rope_theta=80000.0, local_rope_theta=5000.0,
                                         pad_token_id=0, bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3))
    # A window of 12 tokens extends 6 tokens to either side.
    sentence(folder, tok, tf.ModernBertModel(config), Pooling(HIDDEN, "mean"), Normalize())
    encode(folder, SIMPLE)


def st_t5(folder):
    """Writes a folder like the published sentence-t5 and GTR: an encoder, and a projection after the mean."""
    tok = t5_tokenizer()
    config = tf.T5Config(vocab_size=len(tok), d_model=HIDDEN, d_kv=16, num_heads=2, num_layers=2, d_ff=48, relative_attention_num_buckets=8, relative_attention_max_distance=20)
    dense = Dense(HIDDEN, 48, bias=False, activation_function=torch.nn.Identity())
    sentence(folder, tok, tf.T5EncoderModel(config), Pooling(HIDDEN, "mean"), dense, Normalize())
    older(folder)
    encode(folder, SIMPLE)


def st_qwen(folder):
    """Writes a folder like the published Qwen3-Embedding: pooling of the last token, which the tokenizer adds, and instructions for
    queries."""
    tok = roberta_tokenizer()
    config = tf.Qwen3Config(**sizes(tok, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    sentence(folder, tok, tf.Qwen3Model(config), Pooling(HIDDEN, "lasttoken"), Normalize(), prompts=PROMPTS)
    encode(folder, SIMPLE + [(TEXTS, {"prompt_name": "query"})])


def st_gemma(folder):
    """Writes a folder like the published EmbeddingGemma: two projections after the mean."""
    tok = roberta_tokenizer()
    config = tf.Gemma3TextConfig(**sizes(tok, num_hidden_layers=3, num_key_value_heads=1, head_dim=16, sliding_window=12, use_bidirectional_attention=True,
                                         query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"]))
    dense = lambda i, o: Dense(i, o, bias=False, activation_function=torch.nn.Identity())
    sentence(folder, tok, tf.Gemma3TextModel(config), Pooling(HIDDEN, "mean"), dense(HIDDEN, 48), dense(48, HIDDEN), Normalize(), prompts=PROMPTS)
    # A window of 12 tokens extends 6 tokens to either side, and longer texts are truncated to 24 tokens.
    encode(folder, SIMPLE + [(TEXTS, {"prompt_name": "document"})])


def st_m3(folder):
    """Writes a folder like the published BGE-M3. The weights of its sparse and ColBERT outputs, which are published as PyTorch files, are
    in safetensors files here."""
    tok = xlmr_tokenizer()
    sentence(folder, tok, tf.XLMRobertaModel(robertas(tf.XLMRobertaConfig, tok)), Pooling(HIDDEN, "cls"), Normalize())
    older(folder, limit=POSITIONS)
    layers = {"sparse_linear": torch.nn.Linear(HIDDEN, 1), "colbert_linear": torch.nn.Linear(HIDDEN, HIDDEN)}
    for name, layer in layers.items():
        draw(layer, name)
        safetensors.torch.save_file(dict(layer.state_dict()), os.path.join(folder, f"{name}.safetensors"))
        layer.float()
    model = encode(folder, SIMPLE[:1])
    runs = read(folder, "expected.json")["runs"]
    runs = [run | {"values": np.array(run["values"], dtype=np.float32)} for run in runs]
    ids = [model.tokenizer(text)["input_ids"] for text in SHORT]
    h = torch.cat([model[0].model(torch.tensor([i])).last_hidden_state[0] for i in ids])
    outputs = {"sparse": torch.relu(layers["sparse_linear"](h)), "colbert": torch.nn.functional.normalize(layers["colbert_linear"](h), dim=-1)}
    for output, values in outputs.items():
        runs.append({"texts": SHORT, "output": output, "shape": list(values.shape), "values": plain(values), "ids": ids})
    record(folder, runs)


def fill_mask(temporary, folder, tok):
    """Saves a masked language model in a temporary folder, for the first module of a SPLADE model."""
    path = os.path.join(temporary, os.path.basename(folder))
    save(path, tok, tf.BertForMaskedLM(bert(tok)))
    return Transformer(path, transformer_task="fill-mask", model_kwargs={"dtype": torch.float16})


def st_splade(folder):
    tok = bert_tokenizer()
    with tempfile.TemporaryDirectory() as temporary:
        SparseEncoder(modules=[fill_mask(temporary, folder, tok), SpladePooling("max")], device="cpu").save(folder, create_model_card=False)
    model = SparseEncoder(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    runs = []
    for texts in (TEXTS, LONG):
        values = plain(model.encode(texts, convert_to_sparse_tensor=False))
        ids, _ = ids_and_types(model.preprocess(texts))
        check(values)
        check_ids(folder, model.max_seq_length, texts, ids)
        runs.append({"texts": texts, "output": "sparse", "shape": list(values.shape), "values": values, "ids": ids})
    record(folder, runs)


def static_runs(folder, runs):
    """Runs a model of static embeddings, and records the results. It tokenizes with tokenizer.json alone and adds no special tokens."""
    model = SentenceTransformer(folder, device="cpu").float()
    out = []
    for texts, how in runs:
        values = plain(model.encode(texts, **how))
        features = model.preprocess(texts, prompt=model._resolve_prompt(how.get("prompt"), how.get("prompt_name")))
        ids = [part.tolist() for part in torch.tensor_split(features["input_ids"], features["offsets"][1:])]
        check(values)
        out.append({"texts": texts, "prompt_name": how.get("prompt_name"), "prompt": how.get("prompt"), "output": "sentence_embedding",
                    "shape": list(values.shape), "values": values, "ids": ids})
    record(folder, out)


STATIC = [(TEXTS + ["Café by the SEA: 1824?"], {}), (["Rain"], {}), (LONG, {})]


def st_static(folder):
    """Writes a model of static embeddings as saved by sentence-transformers before 5.4, with prompts. Texts are not truncated."""
    tok = bert_tokenizer()
    module = StaticEmbedding(tok._tokenizer, embedding_dim=HIDDEN)
    draw(module, os.path.basename(folder))
    SentenceTransformer(modules=[module, Normalize()], device="cpu", prompts=PROMPTS).save(folder, create_model_card=False)
    os.mkdir(os.path.join(folder, "0_StaticEmbedding"))
    for name in ("model.safetensors", "tokenizer.json"):
        os.rename(os.path.join(folder, name), os.path.join(folder, "0_StaticEmbedding", name))
    shutil.rmtree(os.path.join(folder, "1_Normalize"))
    modules = [("0_StaticEmbedding", "StaticEmbedding"), ("1_Normalize", "Normalize")]
    write([dict(idx=i, name=str(i), path=path, type=f"sentence_transformers.models.{kind}") for i, (path, kind) in enumerate(modules)], folder, "modules.json")
    static_runs(folder, STATIC + [(TEXTS, {"prompt_name": "query"})])


def st_potion(folder):
    """Writes a model of static embeddings as quantized by model2vec: the table has fewer rows than there are tokens, each token has a
    factor, and tokenizer.json truncates texts."""
    tok = bert_tokenizer()
    n, random = len(tok), np.random.default_rng(zlib.crc32(os.path.basename(folder).encode()))
    rows = random.normal(size=(90, 20)).astype(np.float16)
    model = StaticModel(rows, tok._tokenizer, config={"model_type": "model2vec", "hidden_dim": 20}, normalize=False, weights=random.uniform(0.2, 2, n),
                        token_mapping=random.integers(0, len(rows), n), max_length=32)
    model.save_pretrained(folder)
    for name in ("README.md", "config_sentence_transformers.json"):
        if os.path.exists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))
    static_runs(folder, STATIC)


def st_router(folder):
    """Writes a folder like published inference-free SPLADE models. Its Router has a SPLADE model for documents, the default route, and a
    table of token weights for queries."""
    tok = bert_tokenizer()
    with tempfile.TemporaryDirectory() as temporary:
        queries = SparseStaticEmbedding(tokenizer=tok, weight=torch.linspace(0, 2, len(tok)))
        router = Router.for_query_document(query_modules=[queries], document_modules=[fill_mask(temporary, folder, tok), SpladePooling("max", activation_function="log1p_relu")])
        SparseEncoder(modules=[router], device="cpu").save(folder, create_model_card=False)
    model = SparseEncoder(folder, device="cpu", model_kwargs={"dtype": torch.float32}).float()
    runs = []
    for texts, how in ((TEXTS, {}), (LONG, {"prompt_name": "document"})):
        values = plain((model.encode_document if how else model.encode)(texts, convert_to_sparse_tensor=False))
        ids, _ = ids_and_types(model.preprocess(texts, task="document"))
        check(values)
        runs.append({"texts": texts, "output": "sparse", "shape": list(values.shape), "values": values, "ids": ids} | how)
    texts = QUERIES + LONG
    values = plain(model.encode_query(texts, convert_to_sparse_tensor=False))
    ids, _ = ids_and_types(model.preprocess(texts, task="query"))
    check(values)
    runs.append({"texts": texts, "task": "query", "output": "sparse", "shape": list(values.shape), "values": values, "ids": ids})
    record(folder, runs)


QUERIES = ["the letter, the river and the letter", "rain"]


def routed_runs(folder, tasks):
    """Runs the routes of a Router, and records the results. Each entry of `tasks` is a task, its texts, and the name of a prompt."""
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32}).float()
    runs = []
    for task, texts, name in tasks:
        values = plain(model.encode(texts, task=task, prompt_name=name))
        features = model.preprocess(texts, task=task, prompt=model._resolve_prompt(None, name))
        if "offsets" in features:
            ids = [part.tolist() for part in torch.tensor_split(features["input_ids"], features["offsets"][1:])]
        else:
            ids, _ = ids_and_types(features)
        check(values)
        runs.append({"texts": texts, "task": task, "prompt_name": name, "output": "sentence_embedding", "shape": list(values.shape), "values": values, "ids": ids})
    record(folder, runs)


def st_asym(folder):
    """Writes a folder whose Router has a table of static embeddings for queries and a transformer for documents. Both share the last
    module."""
    tok = bert_tokenizer()
    with tempfile.TemporaryDirectory() as temporary:
        path = os.path.join(temporary, os.path.basename(folder))
        save(path, tok, tf.BertModel(bert(tok)))
        queries = StaticEmbedding(tok._tokenizer, embedding_dim=HIDDEN)
        draw(queries, os.path.basename(folder))
        documents = [Transformer(path, model_kwargs={"dtype": torch.float16}), Pooling(HIDDEN, "mean")]
        router = Router.for_query_document(query_modules=[queries], document_modules=documents)
        SentenceTransformer(modules=[router, Normalize()], device="cpu", prompts=PROMPTS).save(folder, create_model_card=False)
    routed_runs(folder, [(None, TEXTS, None), ("document", LONG, "document"), ("query", QUERIES, None), ("query", QUERIES, "query")])


def st_routes(folder):
    """Writes a folder with a Router after a transformer, which all routes share. The Router has rules for tasks and kinds of inputs."""
    tok = bert_tokenizer()
    with tempfile.TemporaryDirectory() as temporary:
        path = os.path.join(temporary, os.path.basename(folder))
        save(path, tok, tf.BertModel(bert(tok)))
        short, long, norm = Dense(HIDDEN, 12, activation_function=torch.nn.Identity()), Dense(HIDDEN, 12), LayerNorm(12)
        for at, module in enumerate((short, long, norm)):
            draw(module, f"{os.path.basename(folder)}{at}")
        rules = {("query", "text"): "short", ("document", None): "long", (None, ("image", "text")): "other"}
        router = Router({"short": [short], "long": [long, norm], "other": [norm]}, default_route="long", route_mappings=rules)
        modules = [Transformer(path, model_kwargs={"dtype": torch.float16}), Pooling(HIDDEN, "cls"), router, Normalize()]
        SentenceTransformer(modules=modules, device="cpu").save(folder, create_model_card=False)
    routed_runs(folder, [(None, TEXTS, None), ("document", LONG, None), ("query", TEXTS, None)])


# Late interaction with sentence-transformers. scripts/late_interaction.py writes folders of PyLate.


ASKED = ["Who found the letter?", "bread", "How many people live in the town, and how many work at the harbour?"]
READ = ["The letter was found in a box, under the floor of an old house.", " Rain. ", LONG[0]]


def multi_vector(folder, modules, **settings):
    """Saves a folder with `MultiVectorEncoder`, and records the vectors of each text, run separately, and the scores of all pairs of a
    query and a document."""
    MultiVectorEncoder(modules=modules, device="cpu", **settings).save(folder, create_model_card=False)
    model = MultiVectorEncoder(folder, device="cpu", model_kwargs={"dtype": torch.float32}).float()
    lines, rows = ["{", f'"made_with": {json.dumps(MADE_WITH)},'], []
    for side, task, texts, encode in (("queries", "query", ASKED, model.encode_query), ("documents", "document", READ, model.encode_document)):
        lines.append(f'"{side}": [')
        vectors = []
        for i, text in enumerate(texts):
            features = model.preprocess([text], prompt=model.prompts.get(task) or None, task=task)
            ids, mask = features["input_ids"][0].tolist(), features["attention_mask"][0].tolist()
            values = plain(encode([text], convert_to_numpy=True)[0])
            assert mask == [1] * sum(mask) + [0] * (len(ids) - sum(mask)) and np.isfinite(values).all() and np.allclose(np.linalg.norm(values, axis=1), 1, atol=1e-5)
            vectors.append(values)
            run = json.dumps({"text": text, "ids": ids, "attended": sum(mask), "rows": values.shape[0], "width": values.shape[1]})[:-1]
            numbers = ",".join(f"{x:.7g}" for x in values.ravel().tolist())
            lines.append(f'{run},\n  "values": [{numbers}]}}' + ("," if i + 1 < len(texts) else ""))
        lines.append("],")
        rows.append(vectors)
    # Score one document at a time, so there is no padding.
    scores = [[round(float(model.similarity([q], [d])[0][0]), 6) for d in rows[1]] for q in rows[0]]
    with open(os.path.join(folder, "expected.json"), "w") as f:
        f.write("\n".join(lines + [f'"scores": {json.dumps(scores)}', "}"]) + "\n")


def multi_vector_modules(temporary, folder, width, **settings):
    tok = bert_tokenizer()
    path = os.path.join(temporary, os.path.basename(folder))
    save(path, tok, tf.BertModel(bert(tok)))
    dense = Dense(HIDDEN, width, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings")
    draw(dense, os.path.basename(folder))
    return [Transformer(path, model_kwargs={"dtype": torch.float16}, **settings), dense, Normalize(module_input_name="token_embeddings")]


def late_multi(folder):
    """Writes a folder like ColBERT: queries are padded to a fixed length, and no token attends to the padding."""
    with tempfile.TemporaryDirectory() as temporary:
        settings = dict(query_expansion={"strategy": "fixed", "attend": False, "length": 20}, document_length=30)
        modules = multi_vector_modules(temporary, folder, 16, **settings)
        multi_vector(folder, [*modules, MultiVectorMask(skiplist_words=[",", ".", "no such word"])], prompts={"query": "find: ", "document": "text: "})


def late_min(folder):
    """Writes a folder in which only short queries are padded, words are skipped in queries and documents, and a score is a mean."""
    with tempfile.TemporaryDirectory() as temporary:
        settings = dict(query_expansion={"strategy": "min", "attend": True, "length": 12, "token": "[SEP]"})
        modules = multi_vector_modules(temporary, folder, 12, **settings)
        mask = MultiVectorMask(skiplist_words=["?", "."], skiplist_tasks=["query", "document"])
        multi_vector(folder, [*modules[:2], mask, modules[2]], similarity_fn_name="meanmaxsim")


# Cross encoders.


RANKING = """{%- set instruct = messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("find") -%}
<s>{{ instruct }}{% for m in messages if m.role == "user" %} text: {{ m.content }}{% endfor %}
{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}</s>
about: {{ ending }}
"""


def ce_qwen(folder):
    """Writes a folder like Qwen3-Reranker in its form for sentence-transformers: a chat template formats a pair, and the score is computed
    from the logits of two tokens after it."""
    tok = roberta_tokenizer()
    tok.model_max_length = 120
    config = tf.Qwen3Config(**sizes(tok, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    config.max_position_embeddings = 128
    tok.chat_template = RANKING
    with tempfile.TemporaryDirectory() as temporary:
        path = os.path.join(temporary, os.path.basename(folder))
        save(path, tok, tf.Qwen3ForCausalLM(config))
        trunk = Transformer(path, transformer_task="text-generation", model_kwargs={"dtype": torch.float16}, processing_kwargs={"chat_template": {"ending": "letters"}})
        CrossEncoder(modules=[trunk, LogitScore(30, 31)], device="cpu", prompts={"query": "one can find"}).save(folder, create_model_card=False)
    rank_by_template(folder, 120, "</s>\nabout: letters", ((None, PAIRS), ("query", PAIRS), (None, [LONG_PAIR, LONG_SECOND]), (None, TEXTS)))


def rank_by_template(folder, limit, ending, inputs_of_runs):
    """Runs a cross encoder whose pairs are formatted with a chat template, and records the results. A run has the name of a prompt, and
    pairs or texts."""
    model = CrossEncoder(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    assert all(p.dtype == torch.float32 for p in model.parameters()) and model.max_seq_length == limit
    runs = []
    for name, inputs in inputs_of_runs:
        features = model.preprocess(inputs, prompt=model._resolve_prompt(None, name))
        ids, _ = ids_and_types(features)
        logits = plain(model(features)["scores"])
        assert all(model.tokenizer.decode(i).endswith(ending) for i in ids) and (inputs[0] is not LONG_PAIR or {len(i) for i in ids} == {limit})
        run = {"prompt_name": name, "ids": ids}
        if isinstance(inputs[0], str):
            run |= {"texts": inputs, "output": "sequence_logits", "shape": list(logits.shape), "values": logits}
        else:
            values = plain(model.predict(inputs, prompt_name=name))
            run |= {"pairs": inputs, "output": "scores", "shape": list(values.shape), "values": values, "logits": logits}
        check(run["values"])
        runs.append(run)
    record(folder, runs)


def ce_mxbai(folder):
    """Writes a folder like mxbai-rerank-v2, which is published as a Qwen2 that generates text. The files of `examples/mxbai_rerank` are
    added."""
    tok = roberta_tokenizer()
    tok.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tok.model_max_length = 480
    config = tf.Qwen2Config(**sizes(tok, num_key_value_heads=1, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    config.max_position_embeddings = 512
    save(folder, tok, tf.Qwen2ForCausalLM(config))
    shutil.copytree(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../examples/mxbai_rerank"), folder, dirs_exist_ok=True)
    own = "config_sentence_transformers.json"
    write(read(folder, own) | {"prompts": {"instruction": "only books"}}, folder, own)
    rank_by_template(folder, 480, "Relevance:<|im_end|>\n<|im_start|>assistant\n", ((None, PAIRS), ("instruction", PAIRS)))


def ce_one(folder):
    tok = xlmr_tokenizer()
    save(folder, tok, tf.XLMRobertaForSequenceClassification(robertas(tf.XLMRobertaConfig, tok, num_labels=1)))
    assert isinstance(predict(folder).activation_fn, torch.nn.Sigmoid)


def ce_jina(folder):
    """Writes a folder like the published jina-reranker-v2: XLM-RoBERTa with the tensor names of Jina AI's code, and a config.json without
    `model_type`."""
    tok = xlmr_tokenizer()
    save(folder, tok, tf.XLMRobertaForSequenceClassification(robertas(tf.XLMRobertaConfig, tok, num_labels=1)))
    predict(folder)
    config, path = read(folder, "config.json"), os.path.join(folder, "model.safetensors")
    where = "modeling_xlm_roberta.XLMRoberta"
    keys = ["architectures", "attention_probs_dropout_prob", "bos_token_id", "classifier_dropout", "eos_token_id", "hidden_act", "hidden_dropout_prob", "hidden_size",
            "id2label", "initializer_range", "intermediate_size", "label2id", "layer_norm_eps", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
            "pad_token_id", "type_vocab_size", "use_cache", "vocab_size"]
    write({key: config[key] for key in keys if key in config}
          | {"auto_map": {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig", "AutoModel": f"{where}Model",
                          "AutoModelForSequenceClassification": f"{where}ForSequenceClassification"},
             "emb_pooler": None, "num_labels": 1, "output_past": True, "position_embedding_type": "absolute", "use_flash_attn": True}, folder, "config.json")
    tensors = {}
    for name, tensor in safetensors.torch.load_file(path).items():
        for old, new in JINA:
            name = name.replace(old, new)
        tensors[name] = tensor
    for i in range(config["num_hidden_layers"]):
        for part in ("weight", "bias"):
            mixer = f"roberta.encoder.layers.{i}.mixer"
            tensors[f"{mixer}.Wqkv.{part}"] = torch.cat([tensors.pop(f"{mixer}.self.{name}.{part}") for name in ("query", "key", "value")])
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


JINA = [("embeddings.LayerNorm", "emb_ln"), ("encoder.layer.", "encoder.layers."), ("attention.output.dense", "mixer.out_proj"), ("attention.output.LayerNorm", "norm1"),
        ("intermediate.dense", "mlp.fc1"), (".output.dense", ".mlp.fc2"), (".output.LayerNorm", ".norm2"), ("attention.self", "mixer.self")]


def ce_identity(folder):
    # The tokenizer has no limit of tokens, so the model's number of positions is the limit.
    tok = bert_tokenizer(model_max_length=HUGE)
    save(folder, tok, tf.BertForSequenceClassification(bert(tok, num_labels=1)))
    config = read(folder, "config.json")
    write(config | {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, folder, "config.json")
    model = predict(folder)
    assert isinstance(model.activation_fn, torch.nn.Identity) and model.max_seq_length == POSITIONS


def ce_nli(folder):
    tok = bert_tokenizer()
    labels = ["contradiction", "entailment", "neutral"]
    config = bert(tok, id2label=dict(enumerate(labels)), label2id={l: i for i, l in enumerate(labels)})
    save(folder, tok, tf.BertForSequenceClassification(config))
    assert isinstance(predict(folder).activation_fn, torch.nn.Identity)


def ce_new(folder):
    """Saves a cross encoder in the form of sentence-transformers 4.0 to 5.3."""
    tok = bert_tokenizer(model_max_length=40)
    save(folder, tok, tf.BertForSequenceClassification(bert(tok, num_labels=1)))
    config = read(folder, "config.json")
    own = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.1.0"}
    write(config | {"sentence_transformers": own}, folder, "config.json")
    assert isinstance(predict(folder).activation_fn, torch.nn.Identity)


def ce_modules(folder):
    """Saves a cross encoder in the form of the installed version of sentence-transformers, with a modules.json like a sentence encoder."""
    tok = bert_tokenizer()
    with tempfile.TemporaryDirectory() as temporary:
        path = os.path.join(temporary, os.path.basename(folder))
        save(path, tok, tf.BertForSequenceClassification(bert(tok, num_labels=1)))
        model = CrossEncoder(path, device="cpu", model_kwargs={"dtype": torch.float16}, activation_fn=torch.nn.Tanh(), prompts={"query": "find: "})
    model.save(folder, create_model_card=False)
    model = predict(folder, (({}, PAIRS), ({}, [LONG_PAIR, LONG_SECOND]), ({"prompt_name": "query"}, PAIRS)))
    assert isinstance(model.activation_fn, torch.nn.Tanh)


def ce_electra(folder):
    tok = bert_tokenizer()
    save(folder, tok, tf.ElectraForSequenceClassification(electra(tok, num_labels=1)))
    predict(folder)


# Folders in the form that transformers saves.


def hf_gamma(folder):
    tok = bert_tokenizer()
    save(folder, tok, tf.BertForPreTraining(bert(tok)))
    rename = lambda k: k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    retensor(folder, lambda t: {rename(k): v for k, v in t.items() if ".decoder." not in k})
    keys = """attention_probs_dropout_prob hidden_act hidden_dropout_prob hidden_size initializer_range intermediate_size layer_norm_eps
        max_position_embeddings model_type num_attention_heads num_hidden_layers pad_token_id type_vocab_size use_cache vocab_size""".split()
    config = tf.BertConfig.from_pretrained(folder).to_dict()
    short = {k: config.get(k, True) for k in keys} | {"architectures": ["BertForMaskedLM"], "gradient_checkpointing": False,
                                                    "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0"}
    write(dict(sorted(short.items())), folder, "config.json")
    run(folder, (tf.BertModel, "last_hidden_state"), (tf.BertModel, "pooler_output"), (tf.BertForMaskedLM, "mlm_logits"))


def hf_untied(folder):
    tok = bert_tokenizer()
    save(folder, tok, tf.BertForMaskedLM(bert(tok, tie_word_embeddings=False)))
    # The model adds decoder.bias to the logits. Older versions of transformers also saved its value as cls.predictions.bias, which the
    # installed version does not read. Add this tensor.
    retensor(folder, lambda t: t | {"cls.predictions.bias": t["cls.predictions.decoder.bias"].clone()})
    run(folder, (tf.BertForMaskedLM, "mlm_logits"))


def hf_camembert(folder):
    tok = camembert_tokenizer()
    save(folder, tok, tf.CamembertModel(robertas(tf.CamembertConfig, tok)))
    run(folder, (tf.CamembertModel, "last_hidden_state"), (tf.CamembertModel, "pooler_output"))


def hf_xlmr_token(folder):
    tok = xlmr_tokenizer()
    save(folder, tok, tf.XLMRobertaForTokenClassification(robertas(tf.XLMRobertaConfig, tok, num_labels=3)))
    run(folder, (tf.XLMRobertaForTokenClassification, "token_logits"), (tf.XLMRobertaModel, "last_hidden_state"))


def hf_roberta_mlm(folder):
    tok = roberta_tokenizer()
    save(folder, tok, tf.RobertaForMaskedLM(robertas(tf.RobertaConfig, tok)))
    run(folder, (tf.RobertaModel, "last_hidden_state"), (tf.RobertaForMaskedLM, "mlm_logits"))


def hf_electra_disc(folder):
    tok = bert_tokenizer()
    save(folder, tok, tf.ElectraForPreTraining(electra(tok, embedding_size=HIDDEN)))
    run(folder, (tf.ElectraForPreTraining, "discriminator_logits"), (tf.ElectraModel, "last_hidden_state"))


def hf_electra_small(folder):
    tok = bert_tokenizer()
    save(folder, tok, tf.ElectraModel(electra(tok)))
    run(folder, (tf.ElectraModel, "last_hidden_state"))


def hf_electra_token(folder):
    tok = bert_tokenizer()
    save(folder, tok, tf.ElectraForTokenClassification(electra(tok, num_labels=3)))
    run(folder, (tf.ElectraForTokenClassification, "token_logits"))


def hf_electra_mlm(folder):
    tok = bert_tokenizer()
    save(folder, tok, tf.ElectraForMaskedLM(electra(tok)))
    run(folder, (tf.ElectraForMaskedLM, "mlm_logits"))


def hf_albert_groups(folder):
    tok = albert_tokenizer()
    config = albert(tok, num_hidden_groups=3, inner_group_num=2)
    config.num_hidden_layers = 6
    save(folder, tok, tf.AlbertModel(config))
    run(folder, (tf.AlbertModel, "last_hidden_state"), (tf.AlbertModel, "pooler_output"))


def hf_distil_seq(folder):
    tok = bert_tokenizer(model_input_names=["input_ids", "attention_mask"])
    save(folder, tok, tf.DistilBertForSequenceClassification(distilbert(tok, num_labels=3)))
    run(folder, (tf.DistilBertForSequenceClassification, "sequence_logits"), (tf.DistilBertModel, "last_hidden_state"))


def hf_jina(folder):
    jina(folder, later=False)


def hf_jina_later(folder):
    jina(folder, later=True)


def hf_gte(folder):
    tok = bert_tokenizer()
    save(folder, tok, tf.GteForSequenceClassification(tf.GteConfig(**sizes(tok, type_vocab_size=2, num_labels=3))))
    run(folder, (tf.GteForSequenceClassification, "sequence_logits"), (tf.GteModel, "last_hidden_state"))


def hf_deberta(folder):
    tok = bert_tokenizer(model_input_names=["input_ids", "attention_mask"])
    config = tf.DebertaV2Config(**sizes(tok, relative_attention=True, share_att_key=True, norm_rel_ebd="layer_norm", pos_att_type=["p2c", "c2p"],
                                        position_buckets=8, position_biased_input=False, type_vocab_size=0, num_labels=3))
    save(folder, tok, tf.DebertaV2ForSequenceClassification(config))
    run(folder, (tf.DebertaV2ForSequenceClassification, "sequence_logits"), (tf.DebertaV2Model, "last_hidden_state"))


def hf_deberta_first(folder):
    """Writes a DeBERTa of version 1, with the tokenizer of GPT-2 and segment ids for pairs."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    merges = merged([w for line in CORPUS for w, _ in split(line)], 80)
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"] + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(m) for m in merges] + ["[MASK]"]
    tok = tf.DebertaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, model_max_length=POSITIONS)
    config = tf.DebertaConfig(**sizes(tok, relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False, type_vocab_size=2, num_labels=3))
    save(folder, tok, tf.DebertaForSequenceClassification(config))
    run(folder, (tf.DebertaForSequenceClassification, "sequence_logits"), (tf.DebertaModel, "last_hidden_state"))


def hf_clip(folder):
    """Writes a complete CLIP model. gemmule does not read its image tower."""
    tok = roberta_tokenizer()
    text = sizes(tok, eos_token_id=tok.eos_token_id, bos_token_id=tok.bos_token_id, pad_token_id=1)
    image = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, image_size=8, patch_size=4)
    save(folder, tok, tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=image, projection_dim=24)))
    model = tf.CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [tok(text)["input_ids"] for text in SHORT]
    states = [model.text_model(torch.tensor([i])) for i in ids]
    # transformers pools the state of the end token. If config.json gives it the id 2, as in old checkpoints, transformers uses the token
    # with the largest id instead, which is the actual end token of these checkpoints.
    embeds = lambda states: model.text_projection(torch.cat([o.pooler_output for o in states]))
    runs = [("text_embeds", embeds(states)), ("last_hidden_state", torch.cat([o.last_hidden_state[0] for o in states]))]
    check(plain(runs[0][1]))  # Not checked for `last_hidden_state`: first tokens are equal, because they attend only to themselves.
    out = [{"texts": SHORT, "output": o, "shape": list(v.shape), "values": plain(v), "ids": ids} for o, v in runs]
    # Add sequences of ids that contain the largest id several times, as if texts were padded with the end token.
    highest = len(tok) - 1
    padded = [[0, 17, 30, highest, highest, highest], [0, 40, highest], [highest, 9, 30, highest]]
    values = embeds([model.text_model(torch.tensor([i])) for i in padded])
    out.append({"output": "text_embeds", "shape": list(values.shape), "values": plain(values), "ids": padded})
    record(folder, out)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    total = 0
    for name, make in list(globals().items()):
        if name.startswith(("st_", "ce_", "hf_", "late_")) and sys.argv[2:] in ([], [name.replace("_", "-")]):
            folder = os.path.join(sys.argv[1], name.replace("_", "-"))
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            files = [os.path.join(at, f) for at, _, names in os.walk(folder) for f in names]
            size = sum(map(os.path.getsize, files))
            total += size
            print(f"{os.path.basename(folder):18} {size:7} bytes, {len(read(folder, 'expected.json').get('runs', []))} runs")
    print(f"{total} bytes, {MADE_WITH}")
