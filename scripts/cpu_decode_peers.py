"""Compares greedy decoding of GPT-2 124M on a CPU, in tokens per second for one sequence: gemmule, ONNX Runtime, CTranslate2 and PyTorch.

Weights are random with a fixed seed, because the time does not depend on them. The prompt has 32 tokens, and 48 new tokens follow. The time
of a step is the time of all new tokens except the first, divided by their number. Each contender runs in a separate process. The processes
alternate round by round, and the script shows the median of the rounds.

The time to the first result and the peak memory are those of a process that loads the model and generates two tokens twice, the minimum of
`gemmule bench generate`. ONNX Runtime's graph is built with the `onnx` package from ONNX Runtime's fused operators (Attention with a past,
SkipLayerNormalization, FastGelu), like the graphs of its GPT-2 optimizer.

    pip install onnx==1.23.2 onnxruntime==1.32.0 ctranslate2==4.8.5 torch transformers
    taskset -c 0,1 python3 scripts/cpu_decode_peers.py target/release/gemmule [--rounds 10]
"""
import argparse, json, os, statistics, subprocess, sys, tempfile, time

import numpy as np

from cpu_peers import able, spawned

LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS = 12, 768, 12, 50257, 1024
PROMPT, NEW = 32, 48


def graph(weights, file):
    """Writes an ONNX graph of a decode step of GPT-2. Its inputs are ids [1, n], and the keys and values of earlier tokens. Its outputs are
    the logits of the last token, and all keys and values."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants = [], {}

    def const(name, value):
        constants.setdefault(name, numpy_helper.from_array(np.array(value, order="C"), name))
        return name

    def op(kind, inputs, outputs=1, name=None, domain="", **attributes):
        outs = [name or f"{kind}_{len(nodes)}"] if outputs == 1 else outputs
        nodes.append(helper.make_node(kind, inputs, outs, name=f"node_{len(nodes)}", domain=domain, **attributes))
        return outs[0]

    def weight(name):
        return const(name, weights[name])

    ms = "com.microsoft"
    ids = op("Gather", [weight("wte.weight"), "ids"])
    x = op("Add", [ids, op("Gather", [weight("wpe.weight"), "positions"])])
    normal = op("LayerNormalization", [x, weight("h.0.ln_1.weight"), weight("h.0.ln_1.bias")], axis=-1, epsilon=1e-5)
    presents = []
    for i in range(LAYERS):
        h = f"h.{i}."
        attended, present = f"attended_{i}", f"present_{i}"
        op("Attention", [normal, weight(h + "attn.c_attn.weight"), weight(h + "attn.c_attn.bias"), "", f"past_{i}"], [attended, present], domain=ms, num_heads=HEADS, unidirectional=1)
        presents.append(present)
        out = op("MatMul", [attended, weight(h + "attn.c_proj.weight")])
        normal, sums = f"normal_{i}", f"sum_{i}"
        op("SkipLayerNormalization", [x, out, weight(h + "ln_2.weight"), weight(h + "ln_2.bias"), weight(h + "attn.c_proj.bias")], [normal, "", "", sums], domain=ms, epsilon=1e-5)
        x = sums
        inner = op("FastGelu", [op("MatMul", [normal, weight(h + "mlp.c_fc.weight")]), weight(h + "mlp.c_fc.bias")], domain=ms)
        out = op("MatMul", [inner, weight(h + "mlp.c_proj.weight")])
        behind = f"h.{i + 1}.ln_1" if i + 1 < LAYERS else "ln_f"
        normal, sums = f"next_{i}", f"next_sum_{i}"
        op("SkipLayerNormalization", [x, out, weight(behind + ".weight"), weight(behind + ".bias"), weight(h + "mlp.c_proj.bias")], [normal, "", "", sums], domain=ms, epsilon=1e-5)
        x = sums
    last = op("Gather", [normal, const("last", np.array(-1, np.int64))], axis=1)
    op("MatMul", [last, const("head", weights["wte.weight"].T)], name="logits")
    past = lambda name, length: helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 1, HEADS, length, WIDTH // HEADS])
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, [1, "n"]) for n in ("ids", "positions")]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, VOCABULARY])]
    made = helper.make_graph(nodes, "gpt2", inputs + [past(f"past_{i}", "before") for i in range(LAYERS)], outputs + [past(p, "after") for p in presents], list(constants.values()))
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(ms, 1)], ir_version=8), file)


def prepare(folder):
    import torch, transformers

    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    hf = os.path.join(folder, "hf")
    model.save_pretrained(hf)
    # CTranslate2's converter requires a vocabulary.
    json.dump({f"t{i}" if i != 50256 else "<|endoftext|>": i for i in range(VOCABULARY)}, open(os.path.join(hf, "vocab.json"), "w"))
    open(os.path.join(hf, "merges.txt"), "w").write("#version: 0.2\n")
    json.dump({"model_max_length": POSITIONS, "tokenizer_class": "GPT2Tokenizer"}, open(os.path.join(hf, "tokenizer_config.json"), "w"))
    weights = {k.removeprefix("transformer."): v.float().numpy() for k, v in model.state_dict().items()}
    graph(weights, os.path.join(folder, "f32.onnx"))
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(os.path.join(folder, "f32.onnx"), os.path.join(folder, "int8.onnx"), per_channel=True, weight_type=QuantType.QInt8, extra_options={"DefaultTensorType": 1})
    import ctranslate2

    ctranslate2.converters.TransformersConverter(hf).convert(os.path.join(folder, "ct2"), force=True)


def onnx_steps(a, file):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = a.threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(os.path.join(a.folder, file), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]

    def generate(new):
        ids, positions, out = np.arange(1000, 1000 + PROMPT)[None], np.arange(PROMPT)[None], []
        past = {f"past_{i}": np.zeros((2, 1, HEADS, 0, WIDTH // HEADS), np.float32) for i in range(LAYERS)}
        for step in range(new):
            logits, *presents = session.run(names, {"ids": ids, "positions": positions, **past})
            past = {f"past_{i}": p for i, p in enumerate(presents)}
            ids, positions = logits.argmax(-1)[None], np.array([[PROMPT + step]])
            out.append(int(ids[0, 0]))
        return out

    return generate


def ct2_steps(a, kind):
    import ctranslate2

    generator = ctranslate2.Generator(os.path.join(a.folder, "ct2"), compute_type=kind, intra_threads=a.threads)
    prompt = [f"t{i}" for i in range(1000, 1000 + PROMPT)]

    def generate(new):
        result = generator.generate_batch([prompt], max_length=new, min_length=new, sampling_topk=1, include_prompt_in_result=False)
        return result[0].sequences_ids[0]

    return generate


def torch_steps(a):
    import torch, transformers

    torch.set_num_threads(a.threads)
    model = transformers.GPT2LMHeadModel.from_pretrained(os.path.join(a.folder, "hf")).eval()
    prompt = torch.arange(1000, 1000 + PROMPT)[None]

    @torch.inference_mode()
    def generate(new):
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)
        return out[0, PROMPT:].tolist()

    return generate


PEERS = {
    "ONNX Runtime": lambda a: onnx_steps(a, "f32.onnx"),
    "CTranslate2": lambda a: ct2_steps(a, "float32"),
    "PyTorch": torch_steps,
    "ONNX Runtime int8": lambda a: onnx_steps(a, "int8.onnx"),
    "CTranslate2 int8": lambda a: ct2_steps(a, "int8"),
}
OURS = {"gemmule": [], "gemmule bf16": ["--dtype", "bf16"], "gemmule int8": ["--quantize", "int8"]}


def child(a):
    if a.child == "prepare":
        return prepare(a.folder)
    generate = PEERS[a.child](a)
    if a.first:
        generate(2)
        generate(2)
        return
    tokens, times = generate(NEW), []
    for _ in range(3):
        began = time.perf_counter()
        generate(1)
        first = time.perf_counter()
        generate(NEW)
        times.append((time.perf_counter() - first - (first - began)) / (NEW - 1) * 1e3)
    json.dump({"ms": statistics.median(times), "tokens": tokens}, open(a.out, "w"))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("gemmule")
    ap.add_argument("--rounds", type=int, default=10)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--only", help="contenders, with commas", default=",".join([*OURS, *PEERS]))
    for hidden in ("child", "folder", "out"):
        ap.add_argument("--" + hidden, help=argparse.SUPPRESS)
    ap.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.child:
        return child(a)
    only, rounds, tokens = a.only.split(","), [], {}
    with tempfile.TemporaryDirectory() as folder:
        out, hf = os.path.join(folder, "out.json"), os.path.join(folder, "hf")
        again = [sys.executable, __file__, a.gemmule, "--threads", str(a.threads), "--folder", folder, "--out", out, "--child"]
        ours = lambda name, new: [a.gemmule, "bench", "generate", "--weights", hf, "--device", "cpu", "--threads", str(a.threads), "--batch", "1", "--prompt-tokens", str(PROMPT), "--new", str(new), "--greedy", "--json", out, *OURS[name]]
        # Prepare the files in a separate process, because the reported peak memory of a child process is at least that of its parent.
        spawned([*again, "prepare"])
        able_ours = able([n for n in only if n in OURS], lambda name: ours(name, 2))
        only = [n for n in only if n not in OURS or n in able_ours]
        for _ in range(a.rounds):
            times = {}
            for name in only:
                if name in OURS:
                    spawned(ours(name, NEW))
                    times[name] = json.load(open(out))[0]["step_ms"]
                else:
                    spawned([*again, name])
                    result = json.load(open(out))
                    times[name], tokens[name] = result["ms"], result["tokens"]
            rounds.append(times)
        first = {}
        for name in only:
            runs = [spawned(ours(name, 2) if name in OURS else [*again, name, "--first"]) for _ in range(3)]
            first[name] = (min(t for t, _ in runs), max(m for _, m in runs))
    for name, of in tokens.items():
        same = next((i for i, (x, y) in enumerate(zip(of, tokens.get("PyTorch", of))) if x != y), NEW)
        print(f"{name}: the first {same} of {NEW} tokens are PyTorch's")
    for name in only:
        ms = statistics.median(r[name] for r in rounds)
        ratio = f", {statistics.median(r[name] / r['gemmule'] for r in rounds):.2f} of gemmule's f32" if "gemmule" in only else ""
        print(f"{name:20} {ms:7.2f} ms a step, {1e3 / ms:6.1f} tokens/s{ratio}; first result {first[name][0]:.2f} s, peak memory {first[name][1] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
