"""Writes small checkpoint folders of late-interaction models (ColBERT), with the results of PyLate for them.

Each folder has random weights that are exact in f16, and an `expected.json`: token ids, which of them are attended to, the vectors of
`ColBERT.encode`, and MaxSim scores of `colbert_scores` for each query with each document.

    pip install pylate==1.6.0          # With sentence-transformers 5.3: newer versions lack the modules that PyLate imports.
    python3 scripts/late_interaction.py tests/checkpoints [FOLDER]

Nothing is downloaded. Two runs with the same versions write the same bytes.

How PyLate reads a folder (1.6.0):

* `modules.json` has a Transformer and Dense modules, which are applied to the token vectors. Rows are then scaled to length 1.
* Surrounding white space of texts is removed. Texts are truncated to `query_length` or `document_length`, minus one for the prefix,
  which is then inserted as the second token. An empty prefix is not inserted. The defaults are `[Q] `, `[D] `, 32 and 180.
* With `do_query_expansion` (the default), a query is padded to `query_length` with the mask token, or with the end-of-sequence token if
  there is no mask token. The padding has vectors. Tokens attend to the padding only with `attend_to_expansion_tokens`. Without it, the
  padding does not attend to itself, either.
* Tokens of `skiplist_words` (by default ASCII punctuation) are removed from documents after encoding. For a word that is not a token, the
  unknown token is removed.
* A checkpoint of stanford-nlp (`HF_ColBERT`) has `linear.weight` in addition to the weights of BERT, and its settings are in
  `artifact.metadata`. They name the tokens of the prefixes, by default `[unused0]` and `[unused1]`.
"""
import json, os, sys, tempfile, zlib

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import numpy as np, pylate, safetensors.torch, sentence_transformers as st, torch, transformers as tf
from pylate.models import ColBERT, Dense
from pylate.scores import colbert_scores
from sentence_transformers.models import Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

QUERIES = ["Who found the letter?", "bread", "How many people live in the town by the river, and how many of them work at the harbour?"]
DOCUMENTS = [
    "The letter was found in a box, under the floor.",
    "She sells bread: fresh, and warm!",
    " Rain. ",
    "About nine thousand people live there; a third of them work at the harbour, and the others in the hills, at the market or at sea.",
]
HIDDEN, WIDTH, POSITIONS = 32, 16, 64
MADE_WITH = {"torch": torch.__version__.split("+")[0], "transformers": tf.__version__, "sentence_transformers": st.__version__, "pylate": pylate.__version__}


def bert_tokenizer(*more, **settings):
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    words = sorted({w for text in QUERIES + DOCUMENTS for w, _ in split(text.lower()) if len(w) != 5})
    letters = sorted({c for text in QUERIES + DOCUMENTS for c in text.lower() if c.isalnum()})
    pieces = ["[PAD]", *more, "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"!,.;?", *letters, *("##" + c for c in letters), *words]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    return tf.BertTokenizer(vocab=vocab, model_max_length=POSITIONS, **settings)


def byte_tokenizer():
    pieces = ["<s>", "<pad>", "</s>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "a"), ("r", "e"), ("i", "n"), ("e", "t"), ("Ġ", "w"), ("Ġ", "f"), ("o", "u")]
    pieces += ["".join(m) for m in merges]
    tok = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return tf.PreTrainedTokenizerFast(tokenizer_object=tok, cls_token="<s>", sep_token="</s>", pad_token="<pad>", mask_token="<mask>", model_max_length=128)


def sizes(tok, **more):
    base = dict(vocab_size=len(tok), hidden_size=HIDDEN, num_attention_heads=2, num_hidden_layers=2, intermediate_size=48, max_position_embeddings=POSITIONS)
    return base | more


def draw(model, name):
    """Fills a model with random values that are exact in f16."""
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    for key, p in model.named_parameters():
        norm = p.dim() == 1 and key.endswith("weight")
        p.copy_(((1.0 if norm else 0.0) + (0.1 if p.dim() == 1 else 0.3) * torch.randn(p.shape, generator=random)).half().float())
    return model.eval()


def read(*path):
    with open(os.path.join(*path)) as f:
        return json.load(f)


def write(value, *path):
    with open(os.path.join(*path), "w") as f:
        json.dump(value, f, indent=1, ensure_ascii=False)


def halved(path):
    tensors = safetensors.torch.load_file(path)
    assert all(t.dtype != torch.float32 or torch.equal(t, t.half().float()) for t in tensors.values())
    safetensors.torch.save_file({k: t.half() if t.dtype == torch.float32 else t for k, t in tensors.items()}, path, {"format": "pt"})


def saved(folder, tok, model, *denses, **settings):
    """Saves a folder like `ColBERT.save_pretrained`, with weights in f16."""
    name = os.path.basename(folder)
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        tok.save_pretrained(temporary)
        colbert = ColBERT(modules=[Transformer(temporary), *denses], device="cpu", **settings)
    draw(colbert, name)
    colbert.save_pretrained(folder, create_model_card=False)
    for path, _, files in os.walk(folder):
        for file in files:
            if file.endswith(".safetensors"):
                halved(os.path.join(path, file))


def dense(inputs, outputs, **more):
    return Dense(inputs, outputs, **{"bias": False, "activation_function": torch.nn.Identity()} | more)


def record(folder, **how):
    model = ColBERT(folder, device="cpu", **how)
    model.eval().float()
    sides = {}
    for side, texts in (("queries", QUERIES), ("documents", DOCUMENTS)):
        is_query = side == "queries"
        runs = []
        vectors = []
        for text in texts:
            prompt = model.prompts.get(model.default_prompt_name) or ""
            features = model.tokenize([prompt + text], is_query=is_query)
            ids, mask = features["input_ids"][0].tolist(), features["attention_mask"][0].tolist()
            n = sum(mask)
            assert mask == [1] * n + [0] * (len(ids) - n)
            rows = model.encode(text, is_query=is_query, show_progress_bar=False)
            assert np.isfinite(rows).all()
            vectors.append(torch.tensor(rows))
            run = {"text": text, "ids": ids, "attended": n, "rows": rows.shape[0], "width": rows.shape[1]}
            runs.append((run, rows))
        sides[side] = runs, vectors
    # Score one document at a time. PyLate pads several documents to one length, and the padding has products of 0, which may be the max.
    scores = [[float(colbert_scores(q[None], d[None])[0, 0]) for d in sides["documents"][1]] for q in sides["queries"][1]]
    lines = ["{", f'"made_with": {json.dumps(MADE_WITH)},']
    for side, (runs, _) in sides.items():
        lines.append(f'"{side}": [')
        for i, (run, rows) in enumerate(runs):
            values = ",".join(f"{x:.7g}" for x in rows.ravel().tolist())
            fields = json.dumps(run, ensure_ascii=False)[:-1]
            lines.append(f'{fields},\n  "values": [{values}]}}' + ("," if i + 1 < len(runs) else ""))
        lines.append("],")
    lines += [f'"scores": {json.dumps([[round(s, 6) for s in row] for row in scores])}', "}"]
    with open(os.path.join(folder, "expected.json"), "w") as f:
        f.write("\n".join(lines) + "\n")
    return model


def late_bert(folder):
    """Writes a folder with the default settings of PyLate, except for lengths. Queries are expanded, and no token attends to the
    expansion."""
    tok = bert_tokenizer()
    saved(folder, tok, tf.BertModel(tf.BertConfig(**sizes(tok)), add_pooling_layer=False), dense(HIDDEN, WIDTH), query_length=14, document_length=24)
    record(folder)


def late_modernbert(folder):
    """Writes a folder like GTE-ModernColBERT, but with several Dense modules, one of which has a residual. Attention windows are shorter
    than queries."""
    tok = byte_tokenizer()
    config = tf.ModernBertConfig(**sizes(tok, num_hidden_layers=3, max_position_embeddings=128, local_attention=8, global_attn_every_n_layers=3,
                                         pad_token_id=1, bos_token_id=0, eos_token_id=2, cls_token_id=0, sep_token_id=2))
    stack = [dense(HIDDEN, 24, activation_function=torch.nn.Tanh(), bias=True), dense(24, WIDTH, use_residual=True)]
    saved(folder, tok, tf.ModernBertModel(config), *stack, query_length=32, document_length=64, skiplist_words=[",", ".", "Ġthe"])
    record(folder)


def late_attend(folder):
    """Writes a folder in which tokens attend to the expansion, queries have no prefix, and texts have a prompt."""
    tok = bert_tokenizer()
    config = tf.DistilBertConfig(vocab_size=len(tok), dim=HIDDEN, n_heads=2, n_layers=2, hidden_dim=48, max_position_embeddings=POSITIONS)
    saved(folder, tok, tf.DistilBertModel(config), dense(HIDDEN, WIDTH), query_prefix="", document_prefix="about", query_length=16, document_length=20,
          attend_to_expansion_tokens=True, skiplist_words=["the", "no such token"], prompts={"query": "", "short": "live: "}, default_prompt_name="short")
    record(folder)


def late_plain(folder):
    """Writes a folder in which queries are not expanded."""
    tok = bert_tokenizer()
    saved(folder, tok, tf.BertModel(tf.BertConfig(**sizes(tok)), add_pooling_layer=False), dense(HIDDEN, WIDTH), query_length=12, document_length=64,
          do_query_expansion=False, skiplist_words=[])
    record(folder)


def late_stanford(folder):
    """Writes a folder like the published ColBERTv2."""
    tok = bert_tokenizer("[unused0]", "[unused1]")
    model = draw(tf.BertModel(tf.BertConfig(**sizes(tok)), add_pooling_layer=False), "late-stanford")
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    write(read(folder, "config.json") | {"architectures": ["HF_ColBERT"]}, folder, "config.json")
    linear = draw(torch.nn.Linear(HIDDEN, WIDTH, bias=False), "late-stanford linear").weight
    path = os.path.join(folder, "model.safetensors")
    tensors = {f"bert.{k}": t for k, t in safetensors.torch.load_file(path).items()} | {"linear.weight": linear.detach()}
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    halved(path)
    metadata = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_token": "[Q]", "doc_token": "[D]", "ncells": None,
                "attend_to_mask_tokens": False, "interaction": "colbert", "dim": WIDTH, "doc_maxlen": 24, "mask_punctuation": True,
                "query_maxlen": 14, "similarity": "cosine", "bsize": 32, "lr": 1e-05}
    write(metadata, folder, "artifact.metadata")
    record(folder)


FOLDERS = {f.__name__.replace("_", "-"): f for f in (late_bert, late_modernbert, late_attend, late_plain, late_stanford)}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    where, only = sys.argv[1], sys.argv[2:] or list(FOLDERS)
    for name in only:
        FOLDERS[name](os.path.join(where, name))
