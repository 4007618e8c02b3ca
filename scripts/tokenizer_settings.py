"""Writes small tokenizers, and the results of transformers' AutoTokenizer with different settings in tokenizer_config.json.

Each folder under the output directory has a tokenizer of one class. Its `expected.json` has a case for each key and value of
tokenizer_config.json, with the token ids of texts and of a pair, the segment ids of the pair, and the decoded texts. The results are null
if transformers raises an error. The first case of a folder sets no key. `foreign` contains the results after parts of tokenizer.json are
replaced, which shows whether the class uses these parts or its own.

`tests/models/tokenizer_settings.rs` compares gemmule with these results: gemmule must apply or refuse a key that changes a result, and no
other key may change a result.

`arguments.json` has the token ids of SentenceTransformer with different settings in sentence_bert_config.json.

    pip install torch transformers sentence-transformers
    python3 scripts/tokenizer_settings.py tests/tokenizer_settings

Nothing is downloaded. Two runs with the same versions write the same bytes.
"""
import json, os, shutil, sys

import folders as base
import transformers as tf

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
LANGUAGES = {"mbart": ["en_XX", "de_DE"], "nllb": ["eng_Latn", "deu_Latn"]}
TEXTS = ["The Coast leaves", " Café, Ü 文 a", "Rain</s>of[SEP]snow <s>a", "it 's new .", "\n a  b"]
PAIR = ("Who wrote", "The river")
# The keys that tokenizer classes read, and other keys that occur in published files, with the values to test.
KEYS = {
    "do_lower_case": [True, False], "strip_accents": [True, False], "tokenize_chinese_chars": [True, False], "keep_accents": [True, False],
    "add_prefix_space": [True, False], "split_special_tokens": [True], "add_bos_token": [True, False], "add_eos_token": [True, False],
    "clean_up_tokenization_spaces": [True, False], "src_lang": ["de_DE", "deu_Latn"], "tgt_lang": ["de_DE", "deu_Latn"],
    "legacy_behaviour": [True, False], "legacy": [True, False], "split_by_punct": [True, False], "do_basic_tokenize": [False],
    "never_split": [["river"]], "trim_offsets": [False], "remove_space": [False], "cls_token": ["a"], "sep_token": ["a"], "bos_token": ["a"],
    "eos_token": ["a"], "mask_token": ["new"], "pad_token": ["new"], "unk_token": ["[OTHER]"], "additional_special_tokens": [["new"]],
    "extra_special_tokens": [["new"], {"x": "new"}], "own_token": ["new"], "padding_side": ["left"], "errors": ["ignore"],
    "added_tokens_decoder": [[{"content": "new", "special": False, "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}]],
    "use_default_system_prompt": [True], "model_input_names": [["input_ids", "attention_mask"]], "spaces_between_special_tokens": [True],
}


def unigram(first, last=()):
    pieces = ["▁" + w for w in ("a", "b", "the", "The", "Coast", "leaves", "river", "of", "it", "new")] + list(ALPHABET) + list("TCWRÜé▁'.,")
    return [(t, 0.0) for t in first] + [(p, -float(i % 7) - 1) for i, p in enumerate(pieces)] + [(t, 0.0) for t in last]


def spaced_bpe(first, bytes_too=False):
    tokens = list(first) + ["▁"] + list(ALPHABET) + list("TCWR'.,") + ["▁a", "▁of", "of"]
    if bytes_too:
        tokens += [f"<0x{i:02X}>" for i in range(256)]
    return {t: i for i, t in enumerate(tokens)}, [("o", "f"), ("▁", "a"), ("▁", "of")]


def byte_bpe(first):
    tokens = list(first) + sorted(base.pre_tokenizers.ByteLevel.alphabet()) + ["of", "Ġa"]
    return {t: i for i, t in enumerate(tokens)}, [("o", "f"), ("Ġ", "a")]


def suffixed_bpe(first):
    tokens = list(first) + list(ALPHABET + ".',") + [c + "</w>" for c in ALPHABET + ".',"] + ["of</w>"]
    return {t: i for i, t in enumerate(tokens)}, [("o", "f</w>")]


def wordpiece(first):
    tokens = list(first) + list(ALPHABET + "TCWRÜüé文.',") + ["##" + c for c in ALPHABET + "üé"] + ["the", "river", "of", "new"]
    return {t: i for i, t in enumerate(dict.fromkeys(tokens))}


def tokenizers():
    bert = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    fairseq = ["<s>", "<pad>", "</s>", "<unk>"]
    yield "bert", "bert", tf.BertTokenizer(vocab=wordpiece(bert))
    yield "mpnet", "mpnet", tf.MPNetTokenizer(vocab=wordpiece(["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]))
    yield "modernbert", "modernbert", tf.BertTokenizer(vocab=wordpiece(bert))
    yield "albert", "albert", tf.AlbertTokenizer(vocab=unigram(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]))
    yield "deberta", "deberta-v2", tf.DebertaV2Tokenizer(vocab=unigram(["[PAD]", "[CLS]", "[SEP]", "[UNK]"], ["[MASK]"]))
    yield "xlm-roberta", "xlm-roberta", tf.XLMRobertaTokenizer(vocab=unigram(fairseq, ["<mask>"]))
    yield "camembert", "camembert", tf.CamembertTokenizer(vocab=unigram(["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"], ["<mask>"]))
    yield "t5", "t5", tf.T5Tokenizer(vocab=unigram(["<pad>", "</s>", "<unk>"]), extra_ids=0)
    yield "mbart", "mbart", tf.MBartTokenizer(vocab=unigram(fairseq, LANGUAGES["mbart"] + ["<mask>"]))
    yield "mbart50", "mbart", tf.MBart50Tokenizer(vocab=unigram(fairseq, LANGUAGES["mbart"] + ["<mask>"]))
    vocab, merges = spaced_bpe(fairseq)
    yield "nllb", "m2m_100", tf.NllbTokenizer(vocab=vocab, merges=merges, extra_special_tokens=LANGUAGES["nllb"])
    vocab, merges = spaced_bpe(["<unk>", "<s>", "</s>"], bytes_too=True)
    yield "llama", "llama", tf.LlamaTokenizer(vocab=vocab, merges=merges)
    vocab, merges = spaced_bpe(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], bytes_too=True)
    yield "gemma", "gemma3_text", tf.GemmaTokenizer(vocab=vocab, merges=merges)
    vocab, merges = byte_bpe(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    yield "roberta", "roberta", tf.RobertaTokenizer(vocab=vocab, merges=merges)
    yield "bart", "bart", tf.BartTokenizer(vocab=vocab, merges=merges)
    vocab, merges = byte_bpe(["<|endoftext|>", "<s>"])
    yield "gpt2", "gpt2", tf.GPT2Tokenizer(vocab=vocab, merges=merges)
    yield "gpt-neox", "gpt_neox", tf.GPTNeoXTokenizer(vocab=vocab, merges=merges, bos_token="<s>", pad_token="<s>")
    yield "qwen2", "qwen3", tf.Qwen2Tokenizer(vocab=vocab, merges=merges)
    yield "codegen", "phi", tf.CodeGenTokenizer(vocab=vocab, merges=merges)
    vocab, merges = byte_bpe(["__start__", "__end__", "__unk__", "__null__", "<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    yield "blenderbot", "blenderbot", tf.BlenderbotTokenizer(vocab=vocab, merges=merges)
    vocab, merges = byte_bpe(bert)
    yield "deberta-v1", "deberta", tf.DebertaTokenizer(vocab=vocab, merges=merges)
    vocab, merges = byte_bpe(["<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"])
    yield "cohere", "cohere", tf.CohereTokenizer(vocab=vocab, merges=merges)
    yield "xglm", "xglm", tf.XGLMTokenizer(vocab=unigram(fairseq))
    yield "rembert", "rembert", tf.RemBertTokenizer(vocab=unigram(["<pad>", "</s>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]))
    yield "pegasus", "pegasus", tf.PegasusTokenizer(vocab=unigram(["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk>"]))
    vocab, merges = suffixed_bpe(["<unk>"])
    yield "openai-gpt", "openai-gpt", tf.OpenAIGPTTokenizer(vocab=vocab, merges=merges)
    vocab, merges = byte_bpe(["<|endoftext|>", "<s>"])
    backend = tf.GPT2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    yield "generic", "gpt2", tf.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|endoftext|>")
    alphabet = sorted(base.pre_tokenizers.ByteLevel.alphabet())
    vocab = ["<|startoftext|>", "<|endoftext|>"] + alphabet + [c + "</w>" for c in alphabet]
    yield "clip", "clip", tf.CLIPTokenizer(vocab={t: i for i, t in enumerate(vocab)}, merges=[])


# Parts of tokenizer.json that no tokenizer class creates. Each entry replaces the parts of the same name.
FOREIGN = [
    {"normalizer": {"type": "Replace", "pattern": {"String": "o"}, "content": "a"}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"String": "e"}, "behavior": "Removed", "invert": False}},
    {"decoder": {"type": "Replace", "pattern": {"String": "a"}, "content": "o"}},
    {"normalizer": None, "pre_tokenizer": None},
    {"post_processor": None},
    {"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
                        "pair": [{"Sequence": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}}},
]


def with_foreign_parts(folder):
    """Returns the results of a folder with each entry of `FOREIGN`."""
    own, found = base.read(folder, "tokenizer.json"), []
    for parts in FOREIGN:
        base.write(own | parts, folder, "tokenizer.json")
        found.append({"changes": parts, "results": results(folder)})
    base.write(own, folder, "tokenizer.json")
    return found


def prepended(folder):
    """Changes tokenizer.json to the form in which Llama tokenizers were published: normalizers instead of the pre-tokenizer Metaspace."""
    tokenizer = base.read(folder, "tokenizer.json")
    space = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    tokenizer |= {"normalizer": {"type": "Sequence", "normalizers": space}, "pre_tokenizer": None}
    base.write(tokenizer, folder, "tokenizer.json")


def ended(folder):
    """Adds a template that appends an end token to tokenizer.json, as in OLMo. The class GPTNeoXTokenizer does not apply it."""
    tokenizer = base.read(folder, "tokenizer.json")
    end = "<|endoftext|>"
    parts = lambda name: [{"Sequence": {"id": name, "type_id": 0}}, {"SpecialToken": {"id": end, "type_id": 0}}]
    special = {end: {"id": end, "ids": [0], "tokens": [end]}}
    template = {"type": "TemplateProcessing", "single": parts("A"), "pair": parts("A") + parts("B"), "special_tokens": special}
    base.write(tokenizer | {"post_processor": template}, folder, "tokenizer.json")


def results(folder):
    try:
        tok = tf.AutoTokenizer.from_pretrained(folder)
        ids = [tok(text)["input_ids"] for text in TEXTS]
        pair = tok(*PAIR)
        # Do not compare decoded texts of CLIP. Its decoding is special code in transformers, and only embedding models use this tokenizer.
        decoded = None if isinstance(tok, tf.CLIPTokenizer) else [tok.decode(row) for row in ids]
        types = pair.get("token_type_ids")
        return {"ids": ids, "pair": pair["input_ids"], "types": types, "decoded": decoded}
    except Exception:  # A class may raise any exception for values that it does not support.
        return None


# Settings of sentence_bert_config.json that may affect tokens. The first entry changes nothing.
ARGUMENTS = [
    {}, {"max_seq_length": 8}, {"do_lower_case": True},
    {"tokenizer_args": {"model_max_length": 9}}, {"processor_kwargs": {"model_max_length": 9}}, {"tokenizer_args": {"do_lower_case": False}},
    {"tokenizer_args": {"strip_accents": False, "use_fast": True}}, {"tokenizer_args": {"truncation_side": "left"}},
    {"tokenizer_args": {"padding_side": "left"}}, {"tokenizer_args": {"add_bos_token": True}}, {"tokenizer_args": {"surprise": 1}},
    {"processing_kwargs": {"text": {"max_length": 7}}}, {"processing_kwargs": {"common": {"max_length": 6}}},
    {"processing_kwargs": {"text": {"max_length": 7}, "common": {"max_length": 6}}}, {"processing_kwargs": {"text": {"padding": "longest"}}},
    {"processing_kwargs": {"text": {"truncation": True}}}, {"processing_kwargs": {"text": {"add_special_tokens": False}}},
    {"processing_kwargs": {"text": {"truncation": False}}}, {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}},
    {"processing_kwargs": {"words": {}}}, {"model_args": {"attn_implementation": "eager"}}, {"model_kwargs": {"torch_dtype": "float32"}},
    {"config_args": {"hidden_dropout_prob": 0.5}}, {"unpad_inputs": False}, {"query_length": None}, {"transformer_task": "feature-extraction"},
    {"transformer_task": "surprise"}, {"surprise": 1},
]
LONG = ["Über the SEA, and boats carry grain along it in summer, where the train leaves at eight.", "Café"]


def arguments(file, folder):
    """Stores in `file` the token ids of SentenceTransformer for copies of a folder with different settings in sentence_bert_config.json."""
    cases = []
    for changes in ARGUMENTS:
        with base.tempfile.TemporaryDirectory() as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            # Set a small `max_seq_length`. Without it, the default limit of versions before 5.4 would hide the effects of other settings.
            base.write({"max_seq_length": 16} | changes, copy, "sentence_bert_config.json")
            try:
                model = base.SentenceTransformer(copy, device="cpu")
                ids, _ = base.ids_and_types(model.preprocess(LONG))
                cases.append({"changes": changes, "ids": ids})
            except Exception:
                cases.append({"changes": changes, "ids": None})
    with open(file, "w") as f:
        rows = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
        f.write(f'{{"texts": {json.dumps(LONG, ensure_ascii=False)}, "cases": [\n{rows}\n]}}\n')


def main(out):
    shutil.rmtree(out, ignore_errors=True)
    made = list(tokenizers()) + [("llama-prepended", "llama", None)]
    for name, model_type, tok in made:
        folder = os.path.join(out, name)
        if tok is None:
            shutil.copytree(os.path.join(out, "llama"), folder)
            prepended(folder)
        else:
            tok.save_pretrained(folder)
        if name == "gpt-neox":
            ended(folder)
        config = base.read(folder, "tokenizer_config.json")
        kept = {k: v for k, v in config.items() if k in ("tokenizer_class", "extra_special_tokens") or k.endswith("_token")}
        base.write({"model_type": model_type}, folder, "config.json")
        cases = []
        for key, value in [(None, None)] + [(k, v) for k, values in KEYS.items() for v in values]:
            if tok is None and key not in (None, "add_prefix_space", "legacy"):
                continue
            if key == "added_tokens_decoder":  # Also include the added tokens of tokenizer.json, as in published files.
                saved = base.read(folder, "tokenizer.json")["added_tokens"]
                value = {str(t.pop("id")): t for t in saved} | {str(900 + i): t for i, t in enumerate(value)}
            changes = {} if key is None else {key: value}
            base.write(kept | changes, folder, "tokenizer_config.json")
            cases.append({"changes": changes} | {"results": results(folder)})
        base.write(kept, folder, "tokenizer_config.json")
        foreign = with_foreign_parts(folder)
        # To keep the file small, replace the results of a case by a word if they equal the results of the first case.
        for case in cases[1:] + foreign:
            if case["results"] == cases[0]["results"]:
                case["results"] = "unchanged"
        with open(os.path.join(folder, "expected.json"), "w") as f:
            rows, others = (",\n".join(json.dumps(case, ensure_ascii=False) for case in all) for all in (cases, foreign))
            f.write(f'{{"texts": {json.dumps(TEXTS, ensure_ascii=False)}, "pair": {json.dumps(PAIR)}, "cases": [\n{rows}\n], "foreign": [\n{others}\n]}}\n')


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    tf.logging.set_verbosity(50)
    main(sys.argv[1])
    arguments(os.path.join(sys.argv[1], "arguments.json"), os.path.join(os.path.dirname(__file__), "../tests/checkpoints/st-mean"))
