#!/usr/bin/env python3
"""Trains a tiny Marian model that translates numbers to English words, and saves it in the form of published checkpoints.

`4217` becomes `four thousand two hundred seventeen`, so anyone can check a translation. A token is a digit or a word.
`</s>` ends sources and targets, and `<pad>` precedes a target.

The folder contains the weights in f16, the tokenizer, and `written.json`. For each of SOURCES, this file has the tokens (`ids`), the
results of `generate` (`greedy` and `beams` with four beams, including `</s>`; `text` is the greedy result), the `score` of the best beam,
and the min distance between the best and the second best logit (`margin`). They are computed in f32 from the stored weights.

    pip install torch transformers
    python3 scripts/train_translator.py tests/checkpoints/translator

Training takes some minutes on one core. Nothing is downloaded. Two runs with the same versions on the same kind of machine write
the same bytes.
"""
import argparse, json, math, os, random
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, GenerationConfig, MarianConfig, MarianMTModel, PreTrainedTokenizerFast

import compact_json

STEPS, ROWS, RATE, POSITIONS = 2500, 64, 2e-3, 64
SOURCES = ["7", "42", "300", "1001", "4217", "90000", "123456", "870015", "999999"]
ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
        "eighteen nineteen").split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def words(n):
    if n < 20:
        return [ONES[n]]
    if n < 100:
        return [TENS[n // 10 - 2]] + (words(n % 10) if n % 10 else [])
    by, name = (100, "hundred") if n < 1000 else (1000, "thousand")
    return words(n // by) + [name] + (words(n % by) if n % by else [])


def number(rng):
    return rng.randrange(10 ** rng.choice([1, 2, 3, 4, 5, 6, 6]))


def tokenizer():
    vocab = ["<pad>", "</s>", "<unk>", *"0123456789", *ONES, *TENS, "hundred", "thousand"]
    tok = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\d"), "isolated")])
    tok.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=POSITIONS)


def batch(tok, rng):
    numbers = [number(rng) for _ in range(ROWS)]
    source = tok([str(n) for n in numbers], padding=True, return_tensors="pt")
    target = tok([" ".join(words(n)) for n in numbers], padding=True, return_tensors="pt")
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
    return dict(input_ids=source["input_ids"], attention_mask=source["attention_mask"], labels=labels)


def train(tok):
    config = MarianConfig(
        vocab_size=len(tok), d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=POSITIONS, activation_function="swish", scale_embedding=True,
        dropout=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=1, architectures=["MarianMTModel"])
    # Add these two keys, which published Marian configs have.
    config.static_position_embeddings, config.normalize_before = True, False
    model = MarianMTModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, step / 100) * (0.5 + 0.5 * math.cos(math.pi * min(1, step / STEPS))))
    rng = random.Random(1)
    for step in range(STEPS):
        loss = model(**batch(tok, rng)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            print(f"step {step}, loss {loss.item():.4f}", flush=True)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=1,
                                               bad_words_ids=[[0]], num_beams=4, renormalize_logits=True)
    return model.eval()


def written(model, tok):
    out = []
    for text in SOURCES:
        ids = tok(text, return_tensors="pt")["input_ids"]
        how = dict(max_new_tokens=30, do_sample=False, output_scores=True, return_dict_in_generate=True)
        greedy, beams = model.generate(ids, num_beams=1, **how), model.generate(ids, num_beams=4, **how)
        top = torch.stack(greedy.scores).squeeze(1).topk(2, -1).values
        tokens = [o.sequences[0, 1:].tolist() for o in (greedy, beams)]
        out.append(dict(source=text, ids=ids[0].tolist(), greedy=tokens[0], beams=tokens[1], score=beams.sequences_scores[0].item(),
                        text=tok.decode(tokens[0], skip_special_tokens=True), margin=(top[:, 0] - top[:, 1]).min().item()))
    return out


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    a = ap.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    tok = tokenizer()
    model = train(tok)
    model.half().save_pretrained(a.out)
    tok.save_pretrained(a.out)
    stored = MarianMTModel.from_pretrained(a.out, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        results = written(stored, AutoTokenizer.from_pretrained(a.out))
        rng = random.Random(2)
        right = 0
        for _ in range(200):
            n = number(rng)
            o = stored.generate(tok(str(n), return_tensors="pt")["input_ids"], num_beams=1, max_new_tokens=30)
            right += tok.decode(o[0], skip_special_tokens=True) == " ".join(words(n))
    with open(os.path.join(a.out, "written.json"), "w") as f:
        f.write(compact_json.dumps(results))
    for r in results:
        print(r["source"], "→", r["text"], round(r["score"], 4), round(r["margin"], 3))
    print(f"{right} of 200 right")
