"""Embeds sentences and prints the cosine of each with the first.

    python embed.py sentence-transformers/all-MiniLM-L6-v2
"""

import sys

from gemmule import Embedder

SENTENCES = ["It rained all day.", "The rain did not stop.", "The train leaves at eight."]

embedder = Embedder(sys.argv[1])
vectors = embedder.encode(SENTENCES, normalize_embeddings=True)
for cosine, sentence in zip(vectors @ vectors[0], SENTENCES):
    print(f"{cosine:.3f}  {sentence}")
