#!/usr/bin/env python3
"""Saves small translation models with random weights in the form of published models, and the texts that transformers generates.

`hf-marian` and `hf-m2m` have SentencePiece models and a vocab.json, but no tokenizer.json. Their generation_config.json is like those of
published models: beams, a word that is never generated, and forced tokens. `hf-t5` has the tokenizer.json that transformers converts
from `spiece.model`. `written.json` is like that of `train_translator.py`, but without margins. Instead, the seeds of the weights are
chosen so that the best and the second best token never have similar scores.

    pip install torch==2.15.0 transformers==5.23.0 sentencepiece==0.2.3 protobuf
    python3 scripts/translators.py tests/checkpoints

Nothing is downloaded.
"""
import json, os, shutil, sys, tempfile

os.environ |= {"HF_HUB_OFFLINE": "1"}
import torch, transformers as tf
from pieces import train, write

SOURCES = ["The river runs to the sea.", "Das Wetter ist schön", "a", "Who wrote the first letter, and where was it found after the war?",
           "东京 ﬁne  1,234", "El niño bebió agua"]
SIZES = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48,
             decoder_ffn_dim=56, max_position_embeddings=96, activation_function="swish", scale_embedding=False, dropout=0.0)


def filled(model, seed):
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        near = 1.0 if name.endswith(("norm.weight", "layer_norm.weight")) else 0.0
        torch.nn.init.normal_(weight, near, 0.05 if "bias" in name or near else 0.25 if "shared" in name or "T5" in type(model).__name__ else 0.6)
    return model.eval()


def save(path, model, **settings):
    model.generation_config = tf.GenerationConfig(**settings)
    model.save_pretrained(path)
    # Load the saved files again, as a user loads published files.
    own, model = tf.AutoTokenizer.from_pretrained(path), type(model).from_pretrained(path, attn_implementation="eager")
    results = []
    for source in SOURCES:
        ids = own(source, return_tensors="pt")["input_ids"]
        how = dict(max_length=None, max_new_tokens=30, output_scores=True, return_dict_in_generate=True)
        with torch.no_grad():
            greedy = model.generate(ids, num_beams=1, length_penalty=None, early_stopping=None, **how)
            beams = model.generate(ids, **how)
        top = torch.stack([s[0] for s in greedy.scores]).topk(2, -1).values
        gap = (top[:, 0] - top[:, 1])[torch.isfinite(top[:, 1])]
        assert gap.min() > 1e-3, (path, source, gap.min())
        cut = lambda row: row[: (row != model.generation_config.pad_token_id).nonzero().max() + 1].tolist()
        results.append({"source": source, "ids": ids[0].tolist(), "greedy": cut(greedy.sequences[0, 1:]), "beams": cut(beams.sequences[0, 1:]),
                        "score": beams.sequences_scores[0].item(), "text": own.decode(beams.sequences[0], skip_special_tokens=True)})
        print(os.path.basename(path), results[-1]["beams"], round(results[-1]["score"], 3), gap.min().item(), repr(results[-1]["text"]))
    write(results, path, "written.json")


def main(root):
    def folder(name):
        path = os.path.join(root, name)
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
        return path

    path = folder("hf-marian")
    source = train(f"{path}/source.spm", "unigram", 200, "few", 3)
    target = train(f"{path}/target.spm", "unigram", 160, "identity", 4)
    names = list(dict.fromkeys(["</s>", "<unk>", ">>fra<<", *target[3:], *source[3:], "<pad>"]))
    write({piece: i for i, piece in enumerate(names)}, path, "vocab.json")
    write({"source_lang": "en", "target_lang": "fra"}, path, "tokenizer_config.json")
    pad = len(names) - 1
    config = tf.MarianConfig(vocab_size=len(names), pad_token_id=pad, eos_token_id=0, decoder_start_token_id=pad, forced_eos_token_id=0, **SIZES)
    save(path, filled(tf.MarianMTModel(config), 5), bad_words_ids=[[pad]], decoder_start_token_id=pad, eos_token_id=0, forced_eos_token_id=0,
         max_length=512, num_beams=4, pad_token_id=pad, renormalize_logits=True, no_repeat_ngram_size=2)

    path = folder("hf-m2m")
    pieces = train(f"{path}/sentencepiece.bpe.model", "bpe", 200, "few", 3)
    names = ["<s>", "<pad>", "</s>", "<unk>", *pieces[3:]]
    write({piece: i for i, piece in enumerate(names)}, path, "vocab.json")
    codes = tf.models.m2m_100.tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"]
    write({"src_lang": "de", "tgt_lang": "en"}, path, "tokenizer_config.json")
    write({"additional_special_tokens": [f"__{code}__" for code in codes]}, path, "special_tokens_map.json")
    french = len(names) + codes.index("fr")
    config = tf.M2M100Config(vocab_size=len(names) + 108, pad_token_id=1, eos_token_id=2, bos_token_id=0, decoder_start_token_id=2, **SIZES)
    save(path, filled(tf.M2M100ForConditionalGeneration(config), 6), bos_token_id=0, decoder_start_token_id=2, early_stopping=True,
         eos_token_id=2, forced_bos_token_id=french, max_length=200, num_beams=5, pad_token_id=1)

    path = folder("hf-t5")
    with tempfile.TemporaryDirectory() as made:
        pieces = train(f"{made}/spiece.model", "unigram", 200, "few", 3, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
        write({"tokenizer_class": "T5Tokenizer", "extra_ids": 4, "legacy": False}, made, "tokenizer_config.json")
        tf.AutoTokenizer.from_pretrained(made).save_pretrained(path)
    config = tf.T5Config(vocab_size=len(pieces) + 4, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
                         tie_word_embeddings=False, dropout_rate=0.0, decoder_start_token_id=0)
    save(path, filled(tf.T5ForConditionalGeneration(config), 7), decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, num_beams=3,
         length_penalty=0.8, no_repeat_ngram_size=3)


main(sys.argv[1])
