"""Times PyTorch on an encoder for comparison with `gemmule-bench encoder`, from token ids to the last hidden state.

Weights are random, and one GPU is used. Times are medians of CUDA-event times, measured after a pause and a warm-up. The sizes come from
a published config.json. The contenders, also called peers:

  compile  the Hugging Face model with torch.compile and CUDA graphs, on the padded batch and its mask
  packed   BERT's layers on packed tokens with PyTorch's varlen attention, compiled, in a CUDA graph
  floor    only our program's GEMMs on the valid tokens, with cuBLAS, in a CUDA graph

The request is {"dtype", "config", "contenders", "runs", "warm_up", "weights": [[outputs, inputs]], "sets": [{"name", "lens"}]}. peers.py
describes the format of the answers.

    python3 bench/scripts/encoder_peers.py --request FILE
"""
import statistics
import time

import peers

# Seconds to pause before each measurement, like the default of `gemmule bench encoder --rest-ms`.
REST_S = 0.5


def median_us(call, request):
    import torch
    times = []
    # Pause before the measurement, because the clock of a GPU drops under sustained load.
    torch.cuda.synchronize(); time.sleep(REST_S)
    for i in range(request["warm_up"] + request["runs"]):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(); call(); end.record(); end.synchronize()
        if i >= request["warm_up"]:
            times.append(begin.elapsed_time(end))
    return statistics.median(times) * 1e3


def sizes(config):
    """Returns the numbers of layers, the width, the heads and the inner width. Published configs name these in two ways."""
    names = (("num_hidden_layers", "n_layers"), ("hidden_size", "dim"), ("num_attention_heads", "n_heads"), ("intermediate_size", "hidden_dim"))
    found = [next((config[n] for n in pair if n in config), None) for pair in names]
    if None in found:
        raise ValueError(f"the config has none of {' or '.join(names[found.index(None)])}")
    return found


def padded(lens, vocabulary):
    import torch
    ids = torch.randint(min(5, vocabulary - 1), vocabulary, (len(lens), max(lens)), device="cuda")
    mask = torch.zeros_like(ids)
    for row, n in zip(mask, lens):
        row[:n] = 1
    return ids, mask


def compile(request, lens):
    import torch
    from transformers import AutoConfig, AutoModel
    config = dict(request["config"])
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    config._attn_implementation = "sdpa"
    model = AutoModel.from_config(config).cuda().to(peers.dtype_of(request)).eval()
    model = torch.compile(model, mode="reduce-overhead", dynamic=False)
    ids, mask = padded(lens, config.vocab_size)
    mask = mask if sum(lens) < ids.numel() else None
    return lambda: model(input_ids=ids, attention_mask=mask).last_hidden_state


def packed(request, lens):
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.attention.varlen import varlen_attn
    n_layers, width, heads, inner = sizes(request["config"])
    vocabulary = request["config"]["vocab_size"]

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
            self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)

        def forward(self, x, cu_lens, longest: int):
            q, k, v = self.qkv(x).view(-1, 3, heads, width // heads).unbind(1)
            a = varlen_attn(q, k, v, cu_lens, cu_lens, longest, longest).reshape(-1, width)
            x = self.norm1(self.out(a) + x)
            return self.norm2(self.down(F.gelu(self.up(x))) + x)

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(max(512, max(lens)), width)
            self.kinds, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, 1e-12)
            self.layers = nn.ModuleList(Layer() for _ in range(n_layers))

        def forward(self, ids, positions, cu_lens, longest: int):
            x = self.norm(self.words(ids) + self.places(positions) + self.kinds.weight[0])
            for layer in self.layers:
                x = layer(x, cu_lens, longest)
            return x

    model = torch.compile(Packed().cuda().to(peers.dtype_of(request)).eval(), dynamic=False)
    ids, mask = padded(lens, vocabulary)
    ids, positions = ids[mask.bool()], torch.cat([torch.arange(n, device="cuda") for n in lens])
    cu_lens = torch.tensor([0] + lens, device="cuda").cumsum(0).int()
    graph, _ = peers.graph_of([lambda: model(ids, positions, cu_lens, max(lens))])
    return graph.replay


def floor(request, lens):
    import torch
    from torch.nn import functional as F
    shapes, of = request["weights"], dict(dtype=peers.dtype_of(request), device="cuda")
    xs = {n: torch.randn(sum(lens), n, **of) for _, n in shapes}
    weights = [torch.randn(*shape, **of) / shape[1]**0.5 for shape in shapes]

    def gemms():
        for weight in weights:
            F.linear(xs[weight.shape[1]], weight)
    graph, _ = peers.graph_of([gemms])
    return graph.replay


CONTENDERS = {f.__name__: f for f in (compile, packed, floor)}

if __name__ == "__main__":
    request = peers.start(__doc__)
    import torch
    for item, set_of_lens in enumerate(request["sets"]):
        for who in request["contenders"]:
            def measure():
                torch._dynamo.reset()
                return median_us(CONTENDERS[who](request, set_of_lens["lens"]), request)
            peers.run(item, who, measure)
        peers.answer(done=item + 1)
