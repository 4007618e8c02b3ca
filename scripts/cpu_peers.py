"""Compares the time from token ids to normalized embeddings on a CPU: gemmule, ONNX Runtime, OpenVINO, CTranslate2 and PyTorch.

Each contender runs in a separate process, so that its thread pool does not spin while another contender is measured. The processes
alternate round by round. In each round, a process measures all workloads in turn, after a pause. The time of a workload is the median over
the rounds of each round's median.

In a first round, each peer determines its best setting for each workload: two threads, or two workers with one thread each, and the number
of sentences per batch. Peers receive the sentences sorted by length, and gemmule in their original order. All contenders receive token ids
and return unit vectors.

ONNX Runtime's graph is built from the safetensors with the `onnx` package, and fused by ONNX Runtime's own optimizer. OpenVINO receives
the graph before fusion. CTranslate2 converts the checkpoint folder. PyTorch runs transformers. For int8, ONNX Runtime uses dynamic
quantization per channel, CTranslate2 `int8`, and gemmule `--quantize int8`.

    pip install onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 ctranslate2==4.8.5 torch transformers
    taskset -c 0,1 python3 scripts/cpu_peers.py target/release/gemmule CHECKPOINT_DIR [--rounds 10] [--json FILE]
"""
import argparse, json, os, resource, statistics, subprocess, sys, tempfile, time

import numpy as np

LENS_32 = [60, 5, 14, 24, 49, 20, 36, 6, 51, 7, 11, 25, 37, 26, 58, 8, 38, 49, 35, 28, 43, 5, 39, 53, 55, 13, 38, 5, 36, 51, 54, 58]
WORKS = {"1 of 12": [12], "1 of 128": [128], "32 of 5 to 60": LENS_32, "8 of 256 to 512": [487, 260, 342, 512, 301, 395, 448, 279]}
BATCHES = [1, 4, 8, 16, 32]


def sentences(lens):
    r = np.random.default_rng(7)
    return [r.integers(1000, 20000, n).tolist() for n in lens]


def padded(rows):
    longest = max(map(len, rows))
    ids, mask = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), np.int64)
    for i, row in enumerate(rows):
        ids[i, :len(row)], mask[i, :len(row)] = row, 1
    return ids, mask


def unit(x):
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def graph(checkpoint, file):
    """Writes BERT, mean pooling and normalization as an ONNX graph without fused operators, in the pattern that exporters write and
    optimizers recognize."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from safetensors.numpy import load_file

    config = json.load(open(os.path.join(checkpoint, "config.json")))
    weights = {k.removeprefix("bert."): v.astype(np.float32) for k, v in load_file(os.path.join(checkpoint, "model.safetensors")).items() if v.dtype != np.int64}
    width, heads, layers, eps = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"], config["layer_norm_eps"]
    nodes, constants = [], {}

    def const(name, value):
        constants.setdefault(name, numpy_helper.from_array(np.array(value, order="C"), name))
        return name

    def op(kind, *inputs, name=None, **attributes):
        out = name or f"{kind}_{len(nodes)}"
        nodes.append(helper.make_node(kind, list(inputs), [out], name=f"node_{len(nodes)}", **attributes))
        return out

    def linear(x, name):
        product = op("MatMul", x, const(name + ".weight_t", weights[name + ".weight"].T))
        return op("Add", product, const(name + ".bias", weights[name + ".bias"]))

    def norm(x, name):
        return op("LayerNormalization", x, const(name + ".weight", weights[name + ".weight"]), const(name + ".bias", weights[name + ".bias"]), axis=-1, epsilon=eps)

    e = "embeddings."
    words = op("Gather", const("words", weights[e + "word_embeddings.weight"]), "input_ids", axis=0)
    kinds = op("Gather", const("kinds", weights[e + "token_type_embeddings.weight"]), "token_type_ids", axis=0)
    length = op("Gather", op("Shape", "input_ids"), const("one_index", np.array(1, np.int64)), axis=0)
    places = op("Slice", const("position_ids", np.arange(config["max_position_embeddings"], dtype=np.int64)[None]), const("start", np.array([0], np.int64)), op("Unsqueeze", length, const("axis0", np.array([0], np.int64))), const("axis1", np.array([1], np.int64)), const("step", np.array([1], np.int64)))
    places = op("Gather", const("places", weights[e + "position_embeddings.weight"]), places, axis=0)
    x = norm(op("Add", op("Add", words, kinds), places), e + "LayerNorm")
    mask = op("Unsqueeze", op("Unsqueeze", "attention_mask", const("axis1", np.array([1], np.int64))), const("axis2", np.array([2], np.int64)))
    mask = op("Mul", op("Sub", const("one", np.array(1, np.float32)), op("Cast", mask, to=TensorProto.FLOAT)), const("low", np.array(-10000, np.float32)))
    split = const("split", np.array([0, 0, heads, width // heads], np.int64))
    merge = const("merge", np.array([0, 0, width], np.int64))
    for i in range(layers):
        p = f"encoder.layer.{i}."
        q, k, v = (op("Reshape", linear(x, f"{p}attention.self.{n}"), split) for n in ("query", "key", "value"))
        q, v, k = op("Transpose", q, perm=[0, 2, 1, 3]), op("Transpose", v, perm=[0, 2, 1, 3]), op("Transpose", k, perm=[0, 2, 3, 1])
        scores = op("Div", op("MatMul", q, k), const("root", np.array((width // heads) ** 0.5, np.float32)))
        context = op("MatMul", op("Softmax", op("Add", scores, mask), axis=3), v)
        context = op("Reshape", op("Transpose", context, perm=[0, 2, 1, 3]), merge)
        x = norm(op("Add", linear(context, p + "attention.output.dense"), x), p + "attention.output.LayerNorm")
        h = linear(x, p + "intermediate.dense")
        erf = op("Add", op("Erf", op("Div", h, const("root2", np.array(2**0.5, np.float32)))), const("one", np.array(1, np.float32)))
        h = op("Mul", op("Mul", h, erf), const("half", np.array(0.5, np.float32)))
        x = norm(op("Add", linear(h, p + "output.dense"), x), p + "output.LayerNorm")
    keep = op("Cast", op("Unsqueeze", "attention_mask", const("last", np.array([2], np.int64))), to=TensorProto.FLOAT)
    axis1 = const("axis1", np.array([1], np.int64))
    mean = op("Div", op("ReduceSum", op("Mul", x, keep), axis1, keepdims=0), op("ReduceSum", keep, axis1, keepdims=0))
    length = op("Sqrt", op("ReduceSum", op("Mul", mean, mean), axis1, keepdims=1))
    op("Div", mean, length, name="embedding")
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "length"]) for n in ("input_ids", "attention_mask", "token_type_ids")]
    made = helper.make_graph(nodes, "bert", inputs, [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", width])], list(constants.values()))
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, file)


def prepare(checkpoint, folder):
    """Writes the files from which the peers load the model."""
    plain = os.path.join(folder, "plain.onnx")
    graph(checkpoint, plain)
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    config = json.load(open(os.path.join(checkpoint, "config.json")))
    fused = optimizer.optimize_model(plain, model_type="bert", num_heads=config["num_attention_heads"], hidden_size=config["hidden_size"], optimization_options=FusionOptions("bert"))
    counts = {k: v for k, v in fused.get_fused_operator_statistics().items() if v}
    layers = config["num_hidden_layers"]
    assert counts.get("Attention") == layers, f"ONNX Runtime fused {counts}"
    print(f"ONNX Runtime's optimizer fused {counts}")
    fused.save_model_to_file(os.path.join(folder, "fused.onnx"))
    quantize_dynamic(os.path.join(folder, "fused.onnx"), os.path.join(folder, "int8.onnx"), per_channel=True, weight_type=QuantType.QInt8, extra_options={"DefaultTensorType": 1})
    import ctranslate2

    ctranslate2.converters.TransformersConverter(checkpoint).convert(os.path.join(folder, "ct2"), force=True)


class Onnx:
    def __init__(self, folder, threads, file):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(os.path.join(folder, file), options, providers=["CPUExecutionProvider"])

    def __call__(self, rows):
        ids, mask = padded(rows)
        return self.session.run(None, {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})[0]


class OpenVino:
    def __init__(self, folder, threads):
        import openvino

        core = openvino.Core()
        self.compiled = core.compile_model(core.read_model(os.path.join(folder, "plain.onnx")), "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"})
        self.request = self.compiled.create_infer_request()

    def __call__(self, rows):
        ids, mask = padded(rows)
        return self.request.infer({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})[0].copy()


class CTranslate2:
    def __init__(self, folder, threads, kind):
        import ctranslate2

        self.storage = ctranslate2.StorageView
        self.encoder = ctranslate2.Encoder(os.path.join(folder, "ct2"), compute_type=kind, intra_threads=threads)

    def __call__(self, rows):
        out = np.array(self.encoder.forward_batch(rows).last_hidden_state)
        return unit(np.stack([out[i, :len(row)].mean(0) for i, row in enumerate(rows)]))


class Torch:
    def __init__(self, checkpoint, threads):
        import torch, transformers

        torch.set_num_threads(threads)
        self.torch, self.model = torch, transformers.AutoModel.from_pretrained(checkpoint).eval().float()

    def __call__(self, rows):
        ids, mask = map(self.torch.from_numpy, padded(rows))
        with self.torch.inference_mode():
            out = self.model(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
        return unit((out.sum(1) / mask.sum(1, keepdim=True)).numpy())


PEERS = {
    "ONNX Runtime": lambda a, n: Onnx(a.folder, n, "fused.onnx"),
    "OpenVINO": lambda a, n: OpenVino(a.folder, n),
    "CTranslate2": lambda a, n: CTranslate2(a.folder, n, "float32"),
    "PyTorch": lambda a, n: Torch(a.checkpoint, n),
    "ONNX Runtime int8": lambda a, n: Onnx(a.folder, n, "int8.onnx"),
    "CTranslate2 int8": lambda a, n: CTranslate2(a.folder, n, "int8"),
}


def timed(run, seconds=0.5):
    for _ in range(3):
        run()
    times, began = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < seconds:
        t = time.perf_counter()
        run()
        times.append((time.perf_counter() - t) * 1e3)
    return statistics.median(times)


def run_of(peer, rows, setting):
    """Returns a function that embeds all rows with a setting (the number of workers and the batch size), and returns vectors in the order
    of the rows."""
    workers, size = setting
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    batches = [order[i:i + size] for i in range(0, len(rows), size)]

    def run():
        out = [None] * len(rows)

        def share(worker):
            for batch in batches[worker::workers]:
                for i, vector in zip(batch, peer[worker]([rows[i] for i in batch])):
                    out[i] = vector

        if workers == 1:
            share(0)
        else:
            list(POOL.map(share, range(workers)))
        return np.stack(out)

    return run


def child(a):
    """Runs in a child process: prepares the files, or measures all workloads of one contender or the time to its first result. The files
    are prepared in a separate process, because the reported peak memory of a child process is at least that of its parent."""
    if a.child == "prepare":
        return prepare(a.checkpoint, a.folder)
    peers = {1: [PEERS[a.child](a, a.threads)]}
    if a.first:
        peers[1][0](sentences([12]))
        return
    settings = json.loads(a.settings) if a.settings else None
    if a.threads > 1 and (settings is None or any(w > 1 for w, _ in settings.values())):
        peers[a.threads] = [PEERS[a.child](a, 1) for _ in range(a.threads)]
    global POOL
    from concurrent.futures import ThreadPoolExecutor

    POOL = ThreadPoolExecutor(a.threads)
    result = {}
    for work, lens in WORKS.items():
        rows = sentences(lens)
        if settings:
            options = [tuple(settings[work])]
        else:
            options = [(w, n) for w in peers for n in BATCHES if n * w < 2 * len(rows) and (w == 1 or n * w <= len(rows))]
        best = min((timed(run_of(peers[o[0]], rows, o), 0.1 if len(options) > 1 else 0.5), o) for o in options)
        vectors = run_of(peers[best[1][0]], rows, best[1])()
        result[work] = {"ms": best[0], "setting": best[1], "vectors": vectors.tolist() if not settings else None}
    json.dump(result, open(a.out, "w"))


def spawned(command):
    """Runs a command. Returns the seconds that it takes, and its peak memory in bytes."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{error.decode()}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024


def able(names, command):
    """Returns the contenders in `names` that can run on this CPU, which may lack their instructions."""
    lacking = []
    for name in names:
        tried = subprocess.run(command(name), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if tried.returncode and "has no instructions" in tried.stderr:
            print(f"{name}: left out, as this CPU has no instructions for it")
            lacking.append(name)
    return [name for name in names if name not in lacking]


def keep(file, **found):
    """Writes the results to `file`. It is called after each round, so that an interrupted run keeps its completed rounds."""
    if file:
        with open(file, "w") as out:
            json.dump(found, out, indent=1)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("gemmule")
    ap.add_argument("checkpoint")
    ap.add_argument("--rounds", type=int, default=10)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--only", help="contenders, with commas", default=",".join(["gemmule", "gemmule bf16", "gemmule int8", *PEERS]))
    ap.add_argument("--json", help="write every round's times here, and the settings")
    ap.add_argument("--settings-of", nargs="+", default=[], metavar="FILE", help="take peers' settings from what --json wrote before, and find those of the others")
    for hidden in ("child", "folder", "out", "settings"):
        ap.add_argument("--" + hidden, help=argparse.SUPPRESS)
    ap.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.child:
        return child(a)
    only = a.only.split(",")
    ours = {"gemmule": [], "gemmule bf16": ["--dtype", "bf16"], "gemmule int8": ["--quantize", "int8"]}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, a.gemmule, a.checkpoint, "--child", "prepare", "--folder", folder], check=True)
        out = os.path.join(folder, "out.json")
        json.dump({"encoder": [{"name": k, "lens": v} for k, v in WORKS.items()]}, open(os.path.join(folder, "sets.json"), "w"))

        def ours_command(name, more):
            return [a.gemmule, "bench", "encoder", "--weights", a.checkpoint, "--output", "sentence_embedding", "--device", "cpu", "--threads", str(a.threads), "--workloads", os.path.join(folder, "sets.json"), *ours[name], *more]

        def peer_command(name, more):
            return [sys.executable, __file__, a.gemmule, a.checkpoint, "--threads", str(a.threads), "--child", name, "--folder", folder, *more]

        one = ["--sets", "1 of 12", "--warm-up", "0", "--runs", "1", "--rest-ms", "0"]
        able_ours = able([n for n in only if n in ours], lambda name: ours_command(name, one))
        only = [n for n in only if n not in ours or n in able_ours]
        settings, vectors = {}, {}
        for file in a.settings_of:
            settings |= json.load(open(file))["settings"]
        for name in [n for n in PEERS if n in only and n not in settings]:
            spawned(peer_command(name, ["--out", out]))
            found = json.load(open(out))
            settings[name] = {work: row["setting"] for work, row in found.items()}
            vectors[name] = {work: np.array(row["vectors"]) for work, row in found.items()}
            print(f"{name}: workers and batch by work: {settings[name]}")
        rounds = []
        for _ in range(a.rounds):
            times = {}
            for name in only:
                if name in ours:
                    spawned(ours_command(name, ["--warm-up", "3", "--runs", "9", "--json", out]))
                    times[name] = {row["set"]: row["ms"] for row in json.load(open(out))}
                else:
                    spawned(peer_command(name, ["--out", out, "--settings", json.dumps(settings[name])]))
                    times[name] = {work: row["ms"] for work, row in json.load(open(out)).items()}
            rounds.append(times)
            keep(a.json, rounds=rounds, settings=settings)
        first = {}
        for name in only:
            runs = [spawned(ours_command(name, one) if name in ours else peer_command(name, ["--first"])) for _ in range(3)]
            first[name] = (min(t for t, _ in runs), max(m for _, m in runs))
    keep(a.json, rounds=rounds, settings=settings, first=first)
    if "PyTorch" in vectors:
        for name, of in vectors.items():
            least = min(float((of[w] * vectors["PyTorch"][w]).sum(-1).min()) for w in WORKS)
            print(f"{name}: least cosine to PyTorch's vectors {least:.4f}")
    print(f"{'':20}" + "".join(f"{w:>22}" for w in WORKS) + f"{'first result':>14}{'peak memory':>13}")
    for name in only:
        cells = ""
        for work in WORKS:
            ms = statistics.median(r[name][work] for r in rounds)
            ratio = f" ({statistics.median(r[name][work] / r['gemmule'][work] for r in rounds):.2f})" if "gemmule" in only else ""
            cells += f"{ms:.2f} ms{ratio}".rjust(22)
        print(f"{name:20}{cells}{first[name][0]:>12.2f} s{first[name][1] / 2**20:>9.0f} MiB")


if __name__ == "__main__":
    main()
