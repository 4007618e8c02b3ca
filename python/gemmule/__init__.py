"""Embeddings, reranking, text generation and translation with transformers from Hugging Face, on CUDA devices and CPUs.

    >>> from gemmule import Embedder
    >>> Embedder("BAAI/bge-small-en-v1.5").encode(["It rained.", "The rain came down."]).shape
    (2, 384)
"""

from . import _nvrtc
from ._errors import ComputeError, FileError, GemmuleError, InputError

# Select NVRTC before a device is used.
_nvrtc.choose()

from ._gemmule import (  # noqa: E402
    DeviceArray,
    Embedder,
    Engine,
    Generator,
    MultiVectorEncoder,
    Reranker,
    TextStream,
    Translator,
    __version__,
)

__all__ = [
    "ComputeError",
    "DeviceArray",
    "Embedder",
    "Engine",
    "FileError",
    "GemmuleError",
    "Generator",
    "InputError",
    "MultiVectorEncoder",
    "Reranker",
    "TextStream",
    "Translator",
    "__version__",
]
