"""Writes small tokenizers like those of published translation models (SentencePiece models with a vocab.json), and the ids of transformers.

Each folder under the output directory has the files of a transformers tokenizer that has no tokenizer.json, and an `expected.json`
of texts, their ids, and the decoded texts. The SentencePiece models are trained here on a few lines. Some pieces are then marked as
unused, which training never does.

    pip install transformers==5.23.0 sentencepiece==0.2.3 protobuf
    python3 scripts/pieces.py tests/tokenizers
    python3 scripts/pieces.py /tmp/more 3000 nmt_nfkc 7     # number of texts, normalization rules, seed

The tests use only a few of NFKC's normalization rules, so that the files stay small. Nothing is downloaded.
"""
import io, json, os, random, shutil, sys

os.environ |= {"HF_HUB_OFFLINE": "1"}
import sentencepiece as spm, transformers as tf
from sentencepiece import sentencepiece_model_pb2 as proto

import compact_json

LINES = """
A river runs from the hills to the sea, and boats carry grain along it in summer.
The train to the coast leaves at eight and arrives before noon unless it rains.
It rained all afternoon, so the picnic was moved indoors and nobody was sorry.
Who wrote the first letter, and where was it found after the war?
She sells fresh bread, cheese and apples at the market near the station.
About nine thousand people live there; a third of them work at the harbour.
Das Wetter ist schön, und die Züge fahren heute pünktlich über die Brücke.
Où est la gare ? Elle est près de l'hôtel, à gauche, derrière l'église.
El niño comió una manzana y bebió agua en la cocina. 東京は雨です。
""".strip().splitlines()

TEXTS = [
    "", " ", "a", "The river runs to the sea.", "  two  spaces   and an end  ", "tabs\tand\nlines\r\nhere", "schön über Züge",
    "scho\u0308n u\u0308ber", "ﬁne ﬂoat Ⅷ ½ ① ㎏", "ＦＵＬＬ ｗｉｄｔｈ　space", "no\u00a0break\u2003em\u200bzero", "東京は雨です。",
    "한국어 텍스트", "ภาษาไทย น้ำ", "हिन्दी", "👩‍👩‍👧 emoji 🙂🇩🇪", "a\u0301\u0302\u0303 stacked", "</s> special <unk> and <pad>",
    "x</s>y", "\u2581raw\u2581mark", "don't won't I'm we'll", "1,234.56 € – 7 % …", "ALL CAPS Mixed CaSe", "a" * 60, "ab " * 20,
    ">>fra<< the river", ">>xyz<< the river", ">>fra<<the <<river>>", " >>fra<< after", ">>fra", ">><<", "soft\u00adhyphen", "\ufeffmark",
    "\u0130stanbul I\u0307", "<s> <mask> text", "__en__ river __de__", "__xx__", "trailing\n", "\n\nleading", "\u0001control\u0007", "nul\u0000nul",
    "\u2028line\u2029para", "e\u0301t\u00e9", "[URL] and[URL]and [URL", "<ab> <abc> <abcd>", "</s>", "</s> </s>", "\ufffd", "\U0010ffff",
]

RULES = [("\u00a0", " "), ("\u3000", " "), ("\t", " "), ("\n", " "), ("\r", " "), ("\u2003", " "), ("\u200b", ""), ("\u00ad", ""), ("\u0001", ""),
         ("o\u0308", "ö"), ("u\u0308", "ü"), ("a\u0301", "á"), ("a\u0301\u0302", "ấ"), ("e\u0301", "é"), ("ﬁ", "fi"), ("ﬂ", "fl"), ("Ⅷ", "VIII"),
         ("½", "1 2"), ("①", "1"), ("㎏", "kg"), ("…", " ... "), ("İ", "i"), ("A", "a"), ("B", "b"), ("Ｆ", "F"), ("\u2028", " ")]


def train(path, kind, size, rule, seed, **more):
    rules = {"normalization_rule_name": rule}
    if rule == "few":
        table = path + ".tsv"
        with open(table, "w", encoding="utf-8") as file:
            file.writelines("{}\t{}\n".format(*(" ".join(f"{ord(c):X}" for c in part) for part in pair)) for pair in RULES)
        rules = {"normalization_rule_tsv": table}
    made = io.BytesIO()
    spm.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=made, vocab_size=size, model_type=kind, num_threads=1,
                                   minloglevel=2, hard_vocab_limit=kind != "unigram", **rules, **more)
    if rule == "few":
        os.remove(table)
    model = proto.ModelProto.FromString(made.getvalue())
    choose = random.Random(seed)
    for piece in model.pieces:
        if piece.type == piece.NORMAL and len(piece.piece) > 1 and choose.random() < 0.1:
            piece.type = piece.UNUSED
    model.normalizer_spec.ClearField("normalization_rule_tsv")
    for name in ("input", "model_prefix"):
        model.trainer_spec.ClearField(name)
    with open(path, "wb") as file:
        file.write(model.SerializeToString())
    return [piece.piece for piece in model.pieces]


def write(value, *path):
    with open(os.path.join(*path), "w", encoding="utf-8") as file:
        file.write(compact_json.dumps(value))


def texts(n, seed):
    """Returns the fixed texts, and `n` random texts of words, marks and characters of many scripts."""
    choose = random.Random(seed)
    words = " ".join(LINES).split() + TEXTS + [">>fra<<", "[URL]", "<ab>", "<abc>", "</s>", "<unk>", "__en__", "__de__", "\u2581", " ", "  "]
    ranges = [(0, 0x20), (0x20, 0x7f), (0x7f, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xe80), (0x1100, 0x1200),
              (0x1e00, 0x2100), (0x2000, 0x2070), (0x2100, 0x2600), (0x3000, 0x3400), (0x4e00, 0x4f00), (0xac00, 0xad00), (0xf900, 0xfb50),
              (0xfe00, 0xfff0), (0x1d400, 0x1d500), (0x1f300, 0x1f600), (0xe0000, 0xe0100)]

    def some():
        kind = choose.random()
        if kind < 0.4:
            return choose.choice(words)
        if kind < 0.6:
            return choose.choice(words)[: choose.randrange(1, 6)]
        if kind < 0.7:
            return choose.choice("abtehin ") * choose.randrange(1, 12)
        low, high = choose.choice(ranges)
        return "".join(chr(choose.randrange(low, high)) for _ in range(choose.randrange(1, 6)))

    made = ["".join(some() + choose.choice(["", "", " "]) for _ in range(choose.randrange(1, 12))) for _ in range(n)]
    return TEXTS + made


def expected(folder, tokenizer, all_texts):
    runs = []
    for text in all_texts:
        ids = tokenizer(text)["input_ids"]
        runs.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=True),
                     "whole": tokenizer.decode(ids)})
    write({"made_with": {"transformers": tf.__version__, "sentencepiece": spm.__version__}, "runs": runs}, folder, "expected.json")


def main(root, n="60", rule="few", seed="3"):
    seed = int(seed)
    given = texts(int(n), seed)

    def folder(name):
        path = os.path.join(root, name)
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
        return path

    own = {"user_defined_symbols": ["[URL]", "<ab>", "<abc>"]}
    pairs = [("pair", "unigram", {}), ("pair-defined", "unigram", own), ("pair-bpe", "bpe", {}),
             ("pair-spaces", "unigram", {"remove_extra_whitespaces": False, **own}),
             ("pair-bare", "unigram", {"add_dummy_prefix": False}), ("pair-both", "bpe", {"add_dummy_prefix": False, "remove_extra_whitespaces": False})]
    for name, kind, more in pairs:
        path = folder(name)
        source = train(f"{path}/source.spm", kind, 240, rule, seed, **more)
        target = train(f"{path}/target.spm", kind, 200, "identity", seed + 1)
        # Source and target share one vocabulary. It lacks a few pieces, which then become the unknown token, and has a piece that the
        # source model lacks.
        names = dict.fromkeys(["</s>", "<unk>", ">>fra<<", "한국어", *target, *source])
        for gone in ("<s>", "\u2581and", "er"):
            names.pop(gone, None)
        write({piece: i for i, piece in enumerate([*names, "<pad>"])}, path, "vocab.json")
        write({"source_lang": "en", "target_lang": "fra", "tokenizer_class": "MarianTokenizer"}, path, "tokenizer_config.json")
        expected(path, tf.MarianTokenizer.from_pretrained(path), given)

    # A tokenizer in the form that transformers saves, with tokens that a user added.
    path, first = folder("pair-saved"), os.path.join(root, "pair")
    tokenizer = tf.MarianTokenizer.from_pretrained(first, additional_special_tokens=[">>fra<<", "<mask>"])
    tokenizer.add_tokens(["<tag>"])
    tokenizer.save_pretrained(path)
    expected(path, tf.MarianTokenizer.from_pretrained(path), given + ["a <tag> b<mask>"])

    for name, kind, more in [("many", "bpe", own), ("many-unigram", "unigram", {})]:
        path = folder(name)
        pieces = train(f"{path}/sentencepiece.bpe.model", kind, 240, rule, seed, **more)
        # The ids of the vocabulary are not in the order of the pieces in the SentencePiece model.
        names = ["<s>", "<pad>", "</s>", "<unk>"] + pieces[3:][::-1]
        write({piece: i for i, piece in enumerate(names)}, path, "vocab.json")
        languages = list(tf.models.m2m_100.tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"])
        write({"src_lang": "de", "tgt_lang": "en", "tokenizer_class": "M2M100Tokenizer"}, path, "tokenizer_config.json")
        write({"additional_special_tokens": [f"__{code}__" for code in languages], "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>",
               "unk_token": "<unk>", "pad_token": "<pad>"}, path, "special_tokens_map.json")
        expected(path, tf.M2M100Tokenizer.from_pretrained(path), given)


if __name__ == "__main__":
    main(*sys.argv[1:])
