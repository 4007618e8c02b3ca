"""Times PyTorch's operators for comparison with `gemmule-bench kernels`. Kernels run on one GPU, in CUDA graphs.

The request is {"dtype": "f16", "problems": [...]}; `gemmule-bench kernels --problems` prints one.
peers.py describes how times are measured and returned.

    python3 bench/scripts/kernel_peers.py --request problems.json
"""
import peers


def softmax(p, dtype):
    import torch
    shape, compiled = (p["batch"] * p["heads"] * p["length"], p["length"]), compiled_once("softmax", lambda x: torch.softmax(x, -1))
    xs = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(peers.n_sets(2 * nbytes(dtype, *shape)))]
    yield "torch", lambda: [lambda x=x: torch.softmax(x, -1) for x in xs]
    yield "torch.compile", lambda: [lambda x=x: compiled(x) for x in xs]


def layernorm(p, dtype):
    import torch
    from torch.nn import functional as F
    norm = lambda x, gamma, beta: F.layer_norm(x, x.shape[-1:], gamma, beta, 1e-12)
    compiled = compiled_once("layernorm", norm)
    shape = (p["rows"], p["width"])
    gamma, beta = (torch.randn(shape[1], device="cuda", dtype=dtype) for _ in range(2))
    xs = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(peers.n_sets(2 * nbytes(dtype, *shape)))]
    yield "torch", lambda: [lambda x=x: norm(x, gamma, beta) for x in xs]
    yield "torch.compile", lambda: [lambda x=x: compiled(x, gamma, beta) for x in xs]


def bias_residual_layernorm(p, dtype):
    import torch
    from torch.nn import functional as F
    norm = lambda x, residual, bias, gamma, beta: F.layer_norm(x + bias + residual, x.shape[-1:], gamma, beta, 1e-12)
    compiled = compiled_once("bias_residual_layernorm", norm)
    shape = (p["rows"], p["width"])
    vectors = [torch.randn(shape[1], device="cuda", dtype=dtype) for _ in range(3)]
    xs = [[torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2)] for _ in range(peers.n_sets(3 * nbytes(dtype, *shape)))]
    yield "torch", lambda: [lambda x=x: norm(*x, *vectors) for x in xs]
    yield "torch.compile", lambda: [lambda x=x: compiled(*x, *vectors) for x in xs]


def cached_attention(p, dtype):
    """Attention to cached keys. Unlike in a cache of blocks, the keys of each head are contiguous."""
    import torch
    from torch.nn import functional as F
    from torch.nn.attention.bias import causal_lower_right
    if "window" in p or "e4m3" in p:
        return  # no kernel skips keys before the window, or reads a cache in E4M3
    batch, new, keys, heads, kv_heads, head = p["sequences"], p["new"], p["keys"], p["heads"], p["kv_heads"], p["head"]
    rows = lambda n, of: torch.randn(batch, n, of, head, device="cuda", dtype=dtype)
    n = peers.n_sets(2 * nbytes(dtype, batch, kv_heads, keys, head))
    xs = [(rows(heads, new), rows(kv_heads, keys), rows(kv_heads, keys)) for _ in range(n)]
    mask = None if new == 1 else causal_lower_right(new, keys)
    yield "torch", lambda: [lambda x=x: F.scaled_dot_product_attention(*x, attn_mask=mask, enable_gqa=kv_heads < heads) for x in xs]


def attention(p, dtype):
    import torch
    from torch.nn import functional as F
    lens, heads, kv_heads, head, causal = p["lens"], p["heads"], p["kv_heads"], p["head"], p["causal"]
    tokens, batch, longest = sum(lens), len(lens), max(lens)
    grouped = {"enable_gqa": True} if kv_heads < heads else {}

    def varlen():
        from torch.nn.attention.varlen import varlen_attn
        cu_lens = torch.tensor([0] + lens, device="cuda").cumsum(0).int()
        n = peers.n_sets(4 * nbytes(dtype, tokens, heads, head))
        qkv = [torch.randn(tokens, heads + 2 * kv_heads, head, device="cuda", dtype=dtype) for _ in range(n)]
        # Flash attention derives the number of query heads per key head from the numbers of heads. A window of -1 is unlimited.
        window = p.get("window", -1)
        mask = {"window_size": (window, 0 if causal else window)} if causal or window >= 0 else {}
        return [lambda x=x: varlen_attn(*x.split([heads, kv_heads, kv_heads], 1), cu_lens, cu_lens, longest, longest, **mask) for x in qkv]

    def padded(backend):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        mask = torch.zeros(batch, 1, 1, longest, device="cuda", dtype=torch.bool)
        for row, n in zip(mask, lens):
            row[..., :n] = True
        # If no token is padding, only causal attention needs a mask.
        padding = None if min(lens) == longest else mask.expand(batch, heads, longest, longest)
        n = peers.n_sets(4 * nbytes(dtype, batch, longest, heads, head))
        rows = lambda of: torch.randn(batch, of, longest, head, device="cuda", dtype=dtype)
        qkv = [(rows(heads), rows(kv_heads), rows(kv_heads)) for _ in range(n)]

        def call(x):
            with sdpa_kernel(getattr(SDPBackend, backend)):
                F.scaled_dot_product_attention(*x, attn_mask=padding, is_causal=causal, **grouped)
        return [lambda x=x: call(x) for x in qkv]

    yield "torch varlen", varlen
    if "window" in p:
        return  # the other kernels do not skip keys outside the window
    yield "cuDNN SDPA, padded", lambda: padded("CUDNN_ATTENTION")
    yield "efficient SDPA, padded", lambda: padded("EFFICIENT_ATTENTION")


def gemm_operands(p, dtype):
    import torch
    rows, n, k = p["rows"], p["n"], p["k"]
    n_sets = peers.n_sets(nbytes(dtype, rows, k) + nbytes(dtype, n, k) + nbytes(dtype, rows, n))
    one = lambda: (torch.randn(rows, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5)
    return [one() for _ in range(n_sets)], torch.randn(n, device="cuda", dtype=dtype)


def gemm(p, dtype):
    from torch.nn import functional as F
    xs, _ = gemm_operands(p, dtype)
    yield "cuBLAS", lambda: [lambda x=x, w=w: F.linear(x, w) for x, w in xs]


def gemm_bias_gelu(p, dtype):
    import torch
    from torch.nn import functional as F
    fused = lambda x, w, b: F.gelu(F.linear(x, w, b))
    compiled = compiled_once("gemm_bias_gelu", fused)
    xs, b = gemm_operands(p, dtype)
    yield "torch", lambda: [lambda x=x, w=w: fused(x, w, b) for x, w in xs]
    yield "torch.compile", lambda: [lambda x=x, w=w: compiled(x, w, b) for x, w in xs]
    yield "cuBLASLt, tanh GELU", lambda: [lambda x=x, w=w: torch._addmm_activation(b, x, w.t(), use_gelu=True) for x, w in xs]
    # The product alone does less work than the problem, which also has an epilogue.
    yield "cuBLAS, product only", lambda: [lambda x=x, w=w: F.linear(x, w) for x, w in xs]


def nbytes(dtype, *shape):
    total = dtype.itemsize
    for size in shape:
        total *= size
    return total


COMPILED = {}


def compiled_once(name, function):
    """Returns the compiled function, which is created once per name, so that shapes can share compiled code."""
    import torch
    return COMPILED.setdefault(name, torch.compile(function, dynamic=False))


OPERATORS = {f.__name__: f for f in (softmax, layernorm, bias_residual_layernorm, attention, cached_attention, gemm, gemm_bias_gelu)}

if __name__ == "__main__":
    request = peers.start(__doc__)
    dtype = peers.dtype_of(request)
    for item, problem in enumerate(request["problems"]):
        try:
            contenders = OPERATORS[problem["op"]](problem, dtype)
            for who, calls in contenders:
                peers.run(item, who, lambda: peers.rotated_us(calls()))
        except Exception as error:  # The operands do not fit, or this version of PyTorch lacks the operator.
            peers.answer(item=item, who="PyTorch", error=f"{type(error).__name__}: {str(error)[:300]}")
        peers.answer(done=item + 1)
