"""Sentences a second on the CPU: PyTorch beside gemmule, in one run, on the same cores.

PyTorch runs the padded batch with its mask through Hugging Face transformers with their defaults;
gemmule runs the packed tokens. Both get token ids and give the last hidden state, in f32. The runs
alternate, so that a busy machine slows both.

    pip install torch transformers
    python3 scripts/cpu_peer.py target/release/gemmule CHECKPOINT_DIR [--rounds 5]
"""
import argparse, json, os, statistics, subprocess, tempfile, time
import torch, transformers

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("gemmule")
ap.add_argument("checkpoint")
ap.add_argument("--rounds", type=int, default=5)
ap.add_argument("--runs", type=int, default=15)
a = ap.parse_args()

here = os.path.dirname(os.path.abspath(__file__))
workloads = os.path.join(here, "..", "benches", "workloads.json")
sets = {s["name"]: s for s in json.load(open(workloads))["encoder"]}
lens = sets["cpu_b32_5to60"]["lens"]
torch.set_grad_enabled(False)
model = transformers.AutoModel.from_pretrained(a.checkpoint).eval().float()
ids = torch.randint(1000, 20000, (len(lens), max(lens)), generator=torch.Generator().manual_seed(1))
mask = torch.zeros_like(ids)
for i, n in enumerate(lens):
    mask[i, :n] = 1


def peer():
    times = []
    for i in range(3 + a.runs):
        t = time.perf_counter()
        model(input_ids=ids, attention_mask=mask).last_hidden_state
        if i >= 3:
            times.append((time.perf_counter() - t) * 1e3)
    return statistics.median(times)


def ours():
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run([a.gemmule, "bench", "encoder", "bert", "--weights", a.checkpoint, "--device", "cpu", "--workloads", workloads,
                        "--sets", "cpu_b32_5to60", "--warm-up", "3", "--runs", str(a.runs), "--json", out.name], check=True, stdout=subprocess.DEVNULL)
        return json.load(open(out.name))[0]["ms"]


rows = [(peer(), ours()) for _ in range(a.rounds)]
p, g = (statistics.median(column) for column in zip(*rows))
print(f"{len(lens)} sentences, {sum(lens)} tokens ({len(lens) * max(lens)} padded), {torch.get_num_threads()} threads, f32, median of {a.rounds} rounds")
print(f"torch {torch.__version__}: {p:.1f} ms, {len(lens) / p * 1e3:.0f} sentences/s")
print(f"gemmule: {g:.1f} ms, {len(lens) / g * 1e3:.0f} sentences/s; ratio {p / g:.2f} (rounds: {', '.join(f'{x / y:.2f}' for x, y in rows)})")
