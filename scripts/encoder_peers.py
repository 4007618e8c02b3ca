"""Time PyTorch on a BERT encoder beside `gemmule bench encoder`: token ids in, last hidden state out.

Random weights, f16, one GPU; the median of CUDA-event times after a warm-up, in milliseconds.
  compile  Hugging Face BertModel under torch.compile with CUDA graphs, on the padded batch and its mask
  packed   the same layers written on packed tokens with PyTorch's varlen attention, compiled, in a CUDA graph
  floor    the four GEMMs of every layer on the valid tokens through cuBLAS, in a CUDA graph, and nothing else

    python3 scripts/encoder_peers.py --workloads benches/workloads.json --sets b16_m128 [--json OUT]
"""
import argparse, json, statistics, sys
import torch
from torch import nn
from torch.nn import functional as F

SIZES = {"base": (12, 768, 12, 3072), "large": (24, 1024, 16, 4096), "minilm": (6, 384, 12, 1536)}

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("--model", choices=SIZES, default="base")
ap.add_argument("--workloads", required=True)
ap.add_argument("--sets", default="b16_m128")
ap.add_argument("--variants", default="compile,packed,floor")
ap.add_argument("--runs", type=int, default=60)
ap.add_argument("--json")
args = ap.parse_args()
LAYERS, HIDDEN, HEADS, INNER = SIZES[args.model]
torch.set_grad_enabled(False)
torch.manual_seed(1)
torch.set_default_device("cuda")


def median_ms(run, warm_up=8):
    times = []
    for i in range(warm_up + args.runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(); run(); end.record(); end.synchronize()
        if i >= warm_up:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def as_graph(run):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN, 1e-12), nn.LayerNorm(HIDDEN, 1e-12)

    def forward(self, x, cu_lens, longest: int):
        from torch.nn.attention.varlen import varlen_attn
        q, k, v = self.qkv(x).view(-1, 3, HEADS, HIDDEN // HEADS).unbind(1)
        a = varlen_attn(q, k, v, cu_lens, cu_lens, longest, longest).reshape(-1, HIDDEN)
        x = self.norm1(self.out(a) + x)
        return self.norm2(self.down(F.gelu(self.up(x))) + x)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(30522, HIDDEN), nn.Embedding(1024, HIDDEN), nn.Embedding(2, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, 1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids, positions, cu_lens, longest: int):
        x = self.norm(self.words(ids) + self.places(positions) + self.kinds.weight[0])
        for layer in self.layers:
            x = layer(x, cu_lens, longest)
        return x


def variant(name, lens):
    longest, tokens = max(lens), sum(lens)
    padded = torch.randint(0, 30522, (len(lens), longest))
    mask = torch.zeros_like(padded)
    for row, n in zip(mask, lens):
        row[:n] = 1
    torch._dynamo.reset()
    if name == "compile":
        from transformers import BertConfig, BertModel
        config = BertConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=INNER,
                            max_position_embeddings=1024, attn_implementation="sdpa")
        model = torch.compile(BertModel(config, add_pooling_layer=False).cuda().half().eval(), mode="reduce-overhead", dynamic=False)
        attention = mask if tokens < padded.numel() else None
        return median_ms(lambda: model(input_ids=padded, attention_mask=attention).last_hidden_state)
    if name == "packed":
        model = torch.compile(Packed().half().eval(), dynamic=False)
        ids, positions = padded[mask.bool()], torch.cat([torch.arange(n) for n in lens])
        cu_lens = torch.tensor([0] + lens).cumsum(0).int()
        return median_ms(as_graph(lambda: model(ids, positions, cu_lens, longest)))
    if name == "floor":
        half = dict(dtype=torch.float16)
        x, y = torch.randn(tokens, HIDDEN, **half), torch.randn(tokens, INNER, **half)
        shapes = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        weights = [[torch.randn(*shape, **half) for shape in shapes] for _ in range(LAYERS)]

        def gemms():
            for layer in weights:
                for w in layer:
                    F.linear(y if w.shape[1] == INNER else x, w)
        return median_ms(as_graph(gemms))
    sys.exit(f"no variant `{name}`: expected compile, packed or floor")


rows = []
sets = {s["name"]: s["lens"] for s in json.load(open(args.workloads))["encoder"]}
for name in args.sets.split(","):
    row = {"set": name, "tokens": sum(sets[name])}
    for v in args.variants.split(","):
        row[v] = round(variant(v, sets[name]), 4)
    print(json.dumps(row), flush=True)
    rows.append(row)
if args.json:
    json.dump(rows, open(args.json, "w"), indent=1)
