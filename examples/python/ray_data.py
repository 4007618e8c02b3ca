"""Embeds the column `text` of Parquet files with Ray Data. Each GPU of the cluster has an actor; without GPUs, two actors share the CPUs.

    pip install 'ray[data]'
    python ray_data.py sentence-transformers/all-MiniLM-L6-v2 texts.parquet vectors
"""

import sys

import ray

from gemmule import Embedder

MODEL, TEXTS, VECTORS = sys.argv[1:]


class Embed:
    """Loads the model once, and embeds the batches that the actor receives."""

    def __init__(self, threads):
        # Ray makes only one GPU visible to an actor.
        self.embedder = Embedder(MODEL, threads=threads)

    def __call__(self, batch):
        batch["vector"] = self.embedder.encode(batch["text"], normalize_embeddings=True)
        return batch


ray.init()
n_gpus, n_cpus = (int(ray.cluster_resources().get(kind, 0)) for kind in ("GPU", "CPU"))
if n_gpus:
    workers, resources, threads = n_gpus, {"num_gpus": 1}, None
else:
    # Leave one CPU for reading and writing.
    workers, share = 2, max(0.25, (n_cpus - 1) / 2)
    resources, threads = {"num_cpus": share}, max(1, int(share))
pool = ray.data.ActorPoolStrategy(size=workers)
texts = ray.data.read_parquet(TEXTS)
vectors = texts.map_batches(Embed, fn_constructor_args=(threads,), batch_size=512, compute=pool, **resources)
vectors.write_parquet(VECTORS)
