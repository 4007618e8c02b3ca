"""Model folders and reference results of other implementations. The Rust tests use them, too."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from gemmule import Embedder, Generator, Reranker, Translator

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = ROOT / "tests/checkpoints"


def checkpoint(name):
    """A small model folder, made by `scripts/folders.py`, `train_writer.py` or `train_translator.py`."""
    return CHECKPOINTS / name


def runs(name):
    """Inputs and results of sentence-transformers."""
    return json.loads((checkpoint(name) / "expected.json").read_text())["runs"]


def written(name, file="written.json"):
    """Prompts or source texts, and the results of transformers."""
    return json.loads((checkpoint(name) / file).read_text())


def tensors(file):
    """Reads a safetensors file."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    types = {"F32": np.float32, "I64": np.int64}
    return {
        name: np.frombuffer(data[start + at["data_offsets"][0] : start + at["data_offsets"][1]], types[at["dtype"]]).reshape(
            at["shape"]
        )
        for name, at in json.loads(data[8:start]).items()
    }


def minilm_folder():
    """The folder of all-MiniLM-L6-v2, which `make setup` installs."""
    folder = os.environ.get("GEMMULE_CHECKPOINT_MINILM")
    if not folder or not (Path(folder) / "model.safetensors").is_file():
        pytest.fail(f"GEMMULE_CHECKPOINT_MINILM is {folder!r}; run `make test-python`, which sets it")
    return folder


@pytest.fixture(scope="session")
def minilm():
    return Embedder(minilm_folder(), device="cpu")


@pytest.fixture(scope="session")
def reranker():
    return Reranker(checkpoint("ce-one"), device="cpu")


@pytest.fixture(scope="session")
def writer():
    return Generator(checkpoint("writer"), device="cpu")


@pytest.fixture(scope="session")
def translator():
    return Translator(checkpoint("translator"), device="cpu")
