#!/usr/bin/env python3
"""Trains a tiny GPT-2 that writes very short stories, and saves it in the form of published checkpoints.

The stories come from the tables below: somebody goes somewhere, meets an animal, helps it or plays with it, and
goes home. A reader can judge a continuation: the name, the pronoun and the animal must stay the same to the end.
A token is a character; `<|end|>` separates stories.

The folder contains the weights in f16, the tokenizer, and `written.json`. For each of PROMPTS, this file has the tokens (`ids`), the
continuation by `generate` (`greedy`: up to 60 tokens, including `<|end|>` if generated; `text`: the same without `<|end|>`), the min
distance between the best and the second best logit (`margin`), and the `log_probability` of each prompt token given the preceding
ones, which is 0 for the first token. They are computed in f32 from the stored weights.

    pip install torch transformers
    python3 scripts/train_writer.py tests/checkpoints/writer

Training takes about ten minutes on one core. Nothing is downloaded. Two runs with the same versions on the same kind
of machine write the same bytes.
"""
import argparse, json, math, os, random, time
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END, POSITIONS, STEPS, ROWS, RATE = "<|end|>", 256, 4000, 8, 3e-3
PROMPTS = [
    "One", "Anna went to the pond.", "One cold morning Ben walked to the f", "Lily was bored, so",
    "Jack went to the beach. He saw a little seal on the sand.\nIt was",
    "Mia went to the farm. There she met a white lamb.\nIt was lost, so she helped it find its mother. "
    "\"Thank you, Mia!\" said the lamb. Then she",
]

SHE, HE = "Anna/Lily/Mia/Rosa/Emma/Zoe/Kate/Nina/Grace/Ida", "Tom/Ben/Jack/Sam/Max/Rob/Oscar/Paul/David/Hugo"
DAYS = "sunny day/cold morning/warm evening/rainy day/quiet morning"
PLACES = {  # what is seen there, and who lives there
    "pond": ("by the water/on a stone", "frog/duck/turtle"), "forest": ("under a tree/near the path", "fox/owl/rabbit"),
    "park": ("on the grass/under a bench", "dog/squirrel/duck"), "farm": ("behind the barn/near the gate", "lamb/hen/dog"),
    "beach": ("on the sand/by the water", "seal/crab/turtle"), "hill": ("on a rock/near the path", "goat/lamb/fox"),
    "garden": ("near the roses/under a bush", "cat/hedgehog/rabbit"),
}
ANIMALS = {  # the animal's character, its food, and what happens to it
    "frog": ("green/tiny", "a berry", "hungry/cold/stuck"), "duck": ("brown/little", "some bread", "hungry/lost/play"),
    "turtle": ("small/green", "a leaf", "stuck/hungry/lost"), "fox": ("red/young", "some meat", "stuck/afraid/hungry"),
    "owl": ("gray/young", "some meat", "lost/afraid/cold"), "rabbit": ("white/little", "a carrot", "afraid/hungry/play"),
    "dog": ("brown/big", "a bone", "play/hungry/lost"), "squirrel": ("red/little", "a nut", "hungry/play/afraid"),
    "lamb": ("white/young", "some grass", "lost/cold/play"), "hen": ("big/brown", "some seeds", "hungry/afraid/cold"),
    "seal": ("little/gray", "a fish", "cold/hungry/lost"), "crab": ("red/small", "some bread", "stuck/hungry/afraid"),
    "cat": ("black/young", "some milk", "play/cold/hungry"), "hedgehog": ("small/brown", "an apple", "cold/hungry/lost"),
    "goat": ("white/big", "some grass", "hungry/stuck/play"),
}
OPENINGS = "{name} went to the {place}./One {day} {name} walked to the {place}./{name} was bored, so {he} ran to the {place}."
MEETINGS = "{He} saw a {like} {animal} {where}./There {he} met a {like} {animal}."
EVENTS = {
    "hungry": "It was hungry, so {name} gave it {food}.",
    "cold": "It was cold, so {name} put {his} {cloth} around it.",
    "stuck": "It was stuck in the mud, so {name} pulled it out.",
    "lost": "It was lost, so {he} helped it find its mother.",
    "afraid": "It was afraid, so {name} sat next to it and sang a song.",
    "play": "It wanted to play, so {name} threw a {toy}, and it ran after the {toy}.",
}
THANKS = "\"Thank you, {name}!\" said the {animal}./The {animal} was happy, and {name} smiled./Soon the {animal} felt better."
ENDINGS = ("Then {he} went home and told {his} {kin} about the {animal}./When it got dark, {he} went home and dreamed of the {animal}./"
           "\"Goodbye, {animal}!\" said {name}, and {he} ran home for dinner.")


def story(rng):
    def pick(items, fall=0.5):
        """Returns a random item. The first item is the most frequent, so that greedy search has a clear choice."""
        items = items.split("/")
        return rng.choices(items, [fall**i for i in range(len(items))])[0]

    names, he, his = rng.choices([(SHE, "she", "her"), (HE, "he", "his")], [3, 2])[0]
    name, place = pick(names, 0.75), pick("/".join(PLACES), 0.8)
    spots, residents = PLACES[place]
    animal = pick(residents)
    likes, food, happens = ANIMALS[animal]
    form = f"{pick(OPENINGS)} {pick(MEETINGS)}\n{EVENTS[pick(happens)]} {pick(THANKS)} {pick(ENDINGS)}"
    return form.format(name=name, he=he, He=he.capitalize(), his=his, place=place, animal=animal, food=food, where=pick(spots),
                       like=pick(likes), day=pick(DAYS, 0.7), cloth=pick("scarf/coat"), toy=pick("ball/stick"), kin=pick("mother/father/brother"))


def character_tokenizer(texts):
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate([END] + sorted(set("".join(texts))))}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, model_max_length=POSITIONS,
                                   clean_up_tokenization_spaces=False)


def batch(rng, tokenizer, n):
    """Returns token ids of `n` texts of three stories. About half of the texts start with `<|end|>`, like after an earlier story."""
    texts = [END * rng.randrange(2) + END.join(story(rng) for _ in range(3)) for _ in range(n)]
    return torch.tensor(tokenizer(texts, truncation=True)["input_ids"])


def train(model, tokenizer):
    for block in model.transformer.h:
        block.mlp.act = torch.nn.GELU(approximate="tanh")  # the same function as gelu_new, computed in one pass
    decays = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": decays[0], "weight_decay": 0.05}, {"params": decays[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / 200, 0.01 + 0.99 * (1 + math.cos(math.pi * i / STEPS)) / 2))
    rng, start = random.Random(2), time.time()
    for step in range(1, STEPS + 1):
        ids = batch(rng, tokenizer, ROWS)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.time() - start:.0f} s", flush=True)


@torch.no_grad()
def write(model, tokenizer, prompt):
    ids = tokenizer(prompt)["input_ids"]
    assert tokenizer.decode(ids) == prompt
    tokens = torch.tensor([ids])
    o = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=60,
                       pad_token_id=tokenizer.eos_token_id, output_logits=True, return_dict_in_generate=True)
    best, greedy = torch.cat(o.logits).topk(2, -1).values, o.sequences[0, len(ids):].tolist()
    scores = torch.log_softmax(model(tokens).logits[0, :-1].double(), -1)[torch.arange(len(ids) - 1), tokens[0, 1:]]
    return {"prompt": prompt, "ids": ids, "greedy": greedy, "text": tokenizer.decode(greedy, skip_special_tokens=True),
            "margin": round((best[:, 0] - best[:, 1]).min().item(), 6), "log_probability": [0.0] + [round(x, 6) for x in scores.tolist()]}


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    out = ap.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(1)
    tokenizer = character_tokenizer(story(random.Random(i)) for i in range(2000))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_positions=POSITIONS, n_embd=96, n_layer=4, n_head=3, resid_pdrop=0.0,
                                       embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    print(f"{model.num_parameters()} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, max_new_tokens=200)
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    model = GPT2LMHeadModel.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = batch(random.Random(3), tokenizer, 64)
    print(f"loss on stories of another seed: {model(input_ids=ids, labels=ids).loss.item():.4f}")
    written = [write(model, tokenizer, prompt) for prompt in PROMPTS]
    with open(os.path.join(out, "written.json"), "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(w) for w in written) + "\n]\n")
    for w in written:
        print(f"margin {w['margin']}: {w['prompt']!r} -> {w['text']!r}")
