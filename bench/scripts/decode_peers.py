"""Times other implementations of generation for comparison with `gemmule bench generate`: whole generations, and decode steps.

Weights are random, and one device is used. Tasks:

  writer      GPT-2's sizes; tokens are sampled with top-k and top-p
  translator  Transformer base, six and six layers of width 512; beam search

All contenders generate exactly --new tokens after --prompt-tokens tokens, which are the source for a translator. Contenders:

  eager     a decode step in PyTorch, with caches of fixed size; the next token is selected on the device
  compiled  the same step with torch.compile; on a GPU, the steps replay one CUDA graph, without waiting for the host
  generate  transformers' `generate` with default settings
  ct2       CTranslate2, if it is installed

    python3 bench/scripts/decode_peers.py --tasks writer,translator --batches 1,32,128 --json FILE
    python3 bench/scripts/decode_peers.py --tiny --device cpu --new 8          # tests the script
    python3 bench/scripts/decode_peers.py --tasks translator --lengths 16,64,128 --batches 1,8,32 --contenders generate,compiled --classes --json FILE

`whole_ms` is the median time of --runs generations, including the prompt or source. `step_ms` is the time without the prompt or source,
divided by the number of steps. With --classes, the times of GPU kernels are added up by class: GEMMs, attention, copies and gathers (such
as those that reorder caches), and others. The name of a kernel determines its class. The file has one object for each task, contender,
number of sequences and length, with the same keys as the file of `gemmule bench generate --json`.
"""
import argparse, itertools, json, statistics, sys, tempfile, time

import torch, torch.nn.functional as F
from torch import nn

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
WORDS = {"tasks": "writer,translator", "contenders": "eager,compiled,generate,ct2", "batches": "1,32,128", "json": None,
         "device": "cuda" if torch.cuda.is_available() else "cpu", "lengths": None}
NUMBERS = {"prompt-tokens": 32, "new": None, "beams": 4, "top-k": 50, "runs": 5}
HELP = {"new": "number of new tokens; default: 128 for writers, 64 for translators", "lengths": "N,…: N prompt tokens and N new tokens, instead of --prompt-tokens and --new"}
for name, usual in (WORDS | NUMBERS).items():
    ap.add_argument(f"--{name}", default=usual, type=int if name in NUMBERS else str, help=HELP.get(name))
ap.add_argument("--top-p", type=float, default=0.9)
ap.add_argument("--classes", action="store_true")
ap.add_argument("--tiny", action="store_true", help="models with two layers of width 32, to test the script")
args = ap.parse_args()
CUDA = args.device.startswith("cuda")
DTYPE = torch.float16 if CUDA else torch.float32
torch.set_grad_enabled(False); torch.manual_seed(1)

SIZES = {"writer": dict(vocab=50257, width=768, heads=12, inner=3072, layers=12), "translator": dict(vocab=32000, width=512, heads=8, inner=2048, layers=6)}


def sizes(task):
    return dict(vocab=97, width=32, heads=2, inner=64, layers=2) if args.tiny else SIZES[task]


class Attention(nn.Module):
    def __init__(self, width, heads, memory=False):
        super().__init__()
        self.heads, self.norm, self.out = heads, nn.LayerNorm(width), nn.Linear(width, width)
        self.into = nn.Linear(width, width if memory else 3 * width)

    def forward(self, x, keys, values, at, mask):
        q, *new = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.into(self.norm(x)).split(x.shape[-1], -1))
        for cache, part in zip((keys, values), new):
            cache.index_copy_(2, at, part)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Pre-norm layers. With `memory`, they also attend to the keys and values of an encoder."""

    def __init__(self, of, causal, memory):
        super().__init__()
        width, self.of, self.causal = of["width"], of, causal
        self.words, self.places = nn.Embedding(of["vocab"], width), nn.Embedding(1024, width)
        make = lambda: nn.ModuleDict(dict(own=Attention(width, of["heads"]), norm=nn.LayerNorm(width), up=nn.Linear(width, of["inner"]),
                                          down=nn.Linear(of["inner"], width), **({"read": Attention(width, of["heads"], True)} if memory else {})))
        self.layers, self.norm = nn.ModuleList(make() for _ in range(of["layers"])), nn.LayerNorm(width)

    def forward(self, ids, at, cache, memory=None):
        x = self.words(ids) + self.places(at)
        seen = torch.arange(cache[0][0].shape[-2], device=x.device) <= at[:, None] if self.causal else None
        for i, layer in enumerate(self.layers):
            x = layer["own"](x, *cache[i], at, seen)
            if memory is not None:
                x = layer["read"](x, *memory[i], at, None)
            x = x + layer["down"](F.gelu(layer["up"](layer["norm"](x)), approximate="tanh"))
        return self.norm(x)

    def cache(self, rows, n):
        """Keys and values of each layer, in separate tensors: torch.compile would copy a shared tensor at each write."""
        of = self.of
        new = lambda: torch.zeros(rows, of["heads"], n, of["width"] // of["heads"], device=args.device, dtype=DTYPE)
        return [(new(), new()) for _ in range(of["layers"])]


def draw(logits):
    best, ids = logits.float().topk(min(args.top_k or logits.shape[-1], logits.shape[-1]))
    share = best.softmax(-1)
    share = share.masked_fill(share.cumsum(-1) - share > args.top_p, 0)
    return ids.gather(-1, (share / torch.empty_like(share).exponential_()).argmax(-1, keepdim=True))[:, 0]


class Torch:
    """A generation in PyTorch. Each step selects its tokens on the device."""

    def __init__(self, task, batch, n, new, compiled):
        of, self.batch, self.n, self.new = sizes(task), batch, n, new
        self.beams, self.is_translator = (args.beams, True) if task == "translator" else (1, False)
        rows = batch * self.beams
        self.net = Stack(of, True, self.is_translator).to(args.device, DTYPE).eval()
        self.prompt = torch.randint(3, of["vocab"], (batch, n), device=args.device)
        self.start, self.memory = 0 if self.is_translator else n, None
        self.keys = self.net.cache(rows, self.start + new)
        if self.is_translator:
            self.encoder = Stack(of, False, False).to(args.device, DTYPE).eval()
            self.of_source, self.memory = self.encoder.cache(batch, n), self.net.cache(rows, n)
            # A single product that computes the keys and values of all cross-attention layers from the encoder's states.
            self.into = nn.Linear(of["width"], of["layers"] * 2 * of["width"]).to(args.device, DTYPE)
        self.ids, self.at = torch.zeros(rows, 1, dtype=torch.long, device=args.device), torch.zeros(1, dtype=torch.long, device=args.device)
        self.scores = torch.zeros(batch, self.beams, device=args.device)
        self.written = torch.zeros(rows, self.start + new, dtype=torch.long, device=args.device)
        self.graph, self.choose = None, torch.compile(self.next, dynamic=False) if compiled else self.next
        if compiled and CUDA:
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    self.at.fill_(self.start); self.step()
            torch.cuda.synchronize(); self.at.fill_(self.start)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()

    def next(self):
        x = self.net(self.ids, self.at, self.keys, self.memory)
        logits = F.linear(x[:, -1], self.net.words.weight)
        if self.beams == 1:
            return draw(logits), None, None
        vocab = logits.shape[-1]
        sums = (logits.float().log_softmax(-1).view(self.batch, self.beams, vocab) + self.scores[..., None]).flatten(1)
        # Select 2 * beams candidates, like a beam search that sets finished candidates aside. Here, no candidate ends.
        best, ids = (part[:, : self.beams] for part in sums.topk(2 * self.beams))
        parents = ids // vocab + self.beams * torch.arange(self.batch, device=ids.device)[:, None]
        return (ids % vocab).flatten(), parents.flatten(), best

    def step(self):
        ids, parents, scores = self.choose()
        if parents is not None:
            self.scores.copy_(scores)
            for part in itertools.chain(*self.keys):
                part.copy_(part.index_select(0, parents))
            self.written.copy_(self.written.index_select(0, parents))
        self.ids.copy_(ids[:, None])
        self.written.index_copy_(1, self.at, self.ids)
        self.at += 1

    def begin(self):
        self.at.fill_(self.start); self.scores.zero_()
        everywhere = torch.arange(self.n, device=args.device)
        if self.is_translator:
            states, of = self.into(self.encoder(self.prompt, everywhere, self.of_source)), self.net.of
            states = states.view(self.batch, self.n, of["layers"] * 2, of["heads"], -1).permute(2, 0, 3, 1, 4)
            for part, new in zip(itertools.chain(*self.memory), states):
                part.copy_(new.repeat_interleave(self.beams, 0))
        else:
            self.net(self.prompt, everywhere, self.keys); self.ids.copy_(self.prompt[:, -1:])

    def __call__(self):
        self.begin()
        for _ in range(self.new):
            self.graph.replay() if self.graph else self.step()
        return self.written


def published(task):
    """Returns a transformers model with random weights, and its generation arguments."""
    import transformers as tf
    of = sizes(task)
    if task == "writer":
        config = dict(vocab_size=of["vocab"], n_embd=of["width"], n_head=of["heads"], n_layer=of["layers"], n_inner=of["inner"], bos_token_id=1, eos_token_id=1)
        return tf.GPT2LMHeadModel(tf.GPT2Config(**config)), dict(do_sample=True, top_k=args.top_k, top_p=args.top_p)
    both = {f"{side}_{key}": of[name] for side in ("encoder", "decoder") for key, name in (("layers", "layers"), ("attention_heads", "heads"), ("ffn_dim", "inner"))}
    pad = of["vocab"] - 1
    config = tf.MarianConfig(vocab_size=of["vocab"], d_model=of["width"], max_position_embeddings=1024, pad_token_id=pad, eos_token_id=1, decoder_start_token_id=pad,
                             forced_eos_token_id=None, activation_function="relu", **both)
    return tf.MarianMTModel(config), dict(num_beams=args.beams, do_sample=False)


def generate(task, batch, n, new):
    (model, how), pad = published(task), sizes(task)["vocab"] - 1
    model.to(args.device, DTYPE).eval()
    ids = torch.randint(3, pad, (batch, n), device=args.device)
    return lambda: model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, pad_token_id=pad, **how)


def ct2(task, batch, n, new):
    import ctranslate2, transformers as tf
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer, models
    words = ["<unk>", "</s>", *(f"w{i}" for i in range(2, sizes(task)["vocab"] - 1)), "<pad>"]
    with tempfile.TemporaryDirectory() as folder:
        published(task)[0].save_pretrained(folder)
        own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        tf.PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", eos_token="</s>", bos_token="</s>", pad_token="<pad>").save_pretrained(folder)
        made = TransformersConverter(folder, load_as_float16=CUDA).convert(f"{folder}/made")
        open_as = dict(device="cuda" if CUDA else "cpu", compute_type="float16" if CUDA else "float32")
        model = (ctranslate2.Generator if task == "writer" else ctranslate2.Translator)(made, **open_as)
    ids = torch.randint(3, len(words) - 1, (batch, n)).tolist()
    texts = [[words[i] for i in row] for row in ids]
    if task == "writer":
        return lambda: model.generate_batch(texts, sampling_topk=args.top_k, sampling_topp=args.top_p, min_length=new, max_length=new, include_prompt_in_result=False)
    return lambda: model.translate_batch(texts, beam_size=args.beams, min_decoding_length=new, max_decoding_length=new)


CONTENDERS = {"eager": lambda *of: Torch(*of, False), "compiled": lambda *of: Torch(*of, True), "generate": generate, "ct2": ct2}
# Classes of kernels, each with substrings of kernel names. A kernel belongs to the first class with a substring that occurs in its name.
CLASSES = (("GEMM", ("gemm", "gemv", "cutlass", "xmma", "nvjet", "cublas", "splitkreduce")), ("attention", ("flash", "fmha", "attention", "softmax_warp")),
           ("copies", ("index", "gather", "scatter", "copy", "memcpy", "cat")), ("other", ("",)))


def ms_of(call):
    """Returns the median milliseconds of a call, until it has completed on the device."""
    times, wait = [], torch.cuda.synchronize if CUDA else lambda: None
    for i in range(args.runs + 1):
        wait(); began = time.perf_counter(); call(); wait()
        times.append((time.perf_counter() - began) * 1e3)
    # The first call allocates memory and raises the clocks, so it is not counted.
    return statistics.median(times[1:])


def classes_of(call):
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call(); torch.cuda.synchronize()
    sums = dict.fromkeys((name for name, _ in CLASSES), 0.0)
    for event in found.key_averages():
        sums[next(name for name, words in CLASSES if any(word in event.key.lower() for word in words))] += event.self_device_time_total / 1e3
    return sums


def measure(task, contender, batch, n, new):
    row = dict(task=task, contender=contender, batch=batch, prompt_tokens=n, new=new)
    row |= dict(beams=args.beams) if task == "translator" else dict(top_k=args.top_k, top_p=args.top_p)
    try:
        call = CONTENDERS[contender](task, batch, n, new)
        row["whole_ms"] = ms_of(call)
        # The part of the call before the timed steps. For a contender that only runs whole generations, it is a generation of one token.
        before = call.begin if isinstance(call, Torch) else CONTENDERS[contender](task, batch, n, 1)
        steps = new if isinstance(call, Torch) else new - 1
        row["step_ms"] = (row["whole_ms"] - ms_of(before)) / steps
        if args.classes and CUDA:
            row["classes"] = classes_of(call)
    except Exception as problem:
        row["error"] = f"{type(problem).__name__}: {str(problem)[:300]}"
    return row


def main():
    rows = []
    for task in args.tasks.split(","):
        usual = (args.prompt_tokens, args.new or (128 if task == "writer" else 64))
        lengths = [(int(l), int(l)) for l in args.lengths.split(",")] if args.lengths else [usual]
        if min(new for _, new in lengths) < 2:
            sys.exit("there is no step to time; expected at least two new tokens")
        for (n, new), contender, batch in itertools.product(lengths, args.contenders.split(","), map(int, args.batches.split(","))):
            torch._dynamo.reset()
            rows.append(measure(task, contender, batch, n, new))
            print(json.dumps(rows[-1]), flush=True)
            if args.json:
                with open(args.json, "w") as file:
                    json.dump({"torch": torch.__version__, "device": torch.cuda.get_device_name() if CUDA else "cpu", "rows": rows}, file, indent=1)


main()
