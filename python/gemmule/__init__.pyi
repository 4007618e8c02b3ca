from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Literal, TypedDict, final, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import NotRequired, Self, Unpack

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

__version__: str

_Floats = NDArray[np.float32]
_Pair = tuple[str, str] | list[str]
_Texts = list[str] | tuple[str, ...] | NDArray[np.str_]

class GemmuleError(Exception):
    """Base class of all exceptions of gemmule."""

class InputError(GemmuleError, ValueError):
    """An argument, or the contents of a model's files, cannot be used."""

class FileError(GemmuleError, OSError):
    """A file or a model is missing or cannot be read, or the Hugging Face hub cannot be reached."""

class ComputeError(GemmuleError, RuntimeError):
    """A device, memory or a computation failed."""

class _Ranked(TypedDict):
    corpus_id: int
    score: float
    text: NotRequired[str]

class _Options(TypedDict, total=False):
    """Generation options. An option that is None or left out has the value of the folder's generation_config.json."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    num_beams: int | None
    num_beam_groups: int | None
    diversity_penalty: float | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    forced_bos_token: str | None
    stop_strings: str | list[str] | None

@final
class Embedder:
    """Embeds texts, like `SentenceTransformer`.

    Several threads may use one object at once.
    """

    def __new__(
        cls,
        model: str | PathLike[str],
        *,
        device: str | None = None,
        dtype: str | None = None,
        quantize: Literal["fp8", "int8", "int4"] | None = None,
        dequantize: bool = False,
        threads: int | None = None,
        truncate_dim: int | None = None,
        task: str | None = None,
    ) -> Self:
        """Load a model.

        Args:
            model: A folder, or a name on the Hugging Face hub: "ORG/NAME" or "ORG/NAME@REVISION".
            device: "cpu", "cuda" or "cuda:N". None is the first supported CUDA device, or the CPU if there is none.
            dtype: "float32", "float16" or "bfloat16". None is float16 on CUDA and float32 on the CPU.
            quantize: Store the weights of linear layers as 8-bit floating point ("fp8"), or as 8-bit or 4-bit integers ("int8", "int4").
            dequantize: Dequantize all weights of a quantized checkpoint to `dtype`. By default, CUDA devices keep the
                published values if kernels support their format. The CPU always dequantizes them.
            threads: Number of CPU threads. None is the number of CPUs that the process may use.
            truncate_dim: Number of values of each vector to keep. None keeps all.
            task: Task whose adapter is added to the weights, such as "retrieval.query" of jina-embeddings-v3. In a model with a Router of
                sentence-transformers, the task whose route becomes the default route. By default, no adapter is added, and the
                folder determines the default route.

        Raises:
            InputError: An argument or the contents of the folder cannot be used.
            FileError: The folder or the model does not exist, or cannot be read.
            ComputeError: The device or memory fails.
        """

    @overload
    def encode(
        self,
        sentences: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_tokens: int | None = None,
        normalize_embeddings: bool = False,
        normalize: bool = False,
        truncate_dim: int | None = None,
        to: Literal["numpy"] = "numpy",
        task: str | None = None,
    ) -> _Floats:
        """Embed texts.

        Args:
            sentences: A text, or a list of texts. Texts longer than `max_seq_length` are truncated.
            prompt_name: Name of a prompt of the model's folder, which is put before each text.
            prompt: Text that is put before each text. Without `prompt` and `prompt_name`, the folder's default prompt is used.
            batch_tokens: Maximum number of tokens that are computed at once. A longer text forms a separate batch. None is
                16,384 on CUDA and 2,048 on the CPU.
            normalize_embeddings: Scale each vector to length 1. Not supported with `to="dlpack"`.
            normalize: Synonym of `normalize_embeddings`.
            truncate_dim: Number of values of each vector to keep. Vectors are truncated before they are normalized.
            to: "numpy" returns a float32 array. "dlpack" returns a `DeviceArray`, which stays on the device in the model's storage
                type. Its values are not checked for NaN.
            task: Task that chooses the route of a Router, such as "query" or "document". None selects the Router's default route. A model
                without a Router accepts only the task whose adapter was added to its weights.

        Returns:
            An array of shape [n, d], or of shape [d] for a single str.
        """

    @overload
    def encode(
        self,
        sentences: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_tokens: int | None = None,
        normalize_embeddings: bool = False,
        normalize: bool = False,
        truncate_dim: int | None = None,
        to: Literal["dlpack"],
        task: str | None = None,
    ) -> DeviceArray: ...
    @overload
    def encode_query(
        self,
        sentences: str | Iterable[str],
        *,
        batch_tokens: int | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        to: Literal["numpy"] = "numpy",
    ) -> _Floats:
        """Embed queries: `encode` with the task `query` and the prompt `query`, if the model's folder defines them.

        Returns:
            An array of shape [n, d], or of shape [d] for a single str.
        """

    @overload
    def encode_query(
        self,
        sentences: str | Iterable[str],
        *,
        batch_tokens: int | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        to: Literal["dlpack"],
    ) -> DeviceArray: ...
    @overload
    def encode_document(
        self,
        sentences: str | Iterable[str],
        *,
        batch_tokens: int | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        to: Literal["numpy"] = "numpy",
    ) -> _Floats:
        """Embed documents: `encode` with the task `document` and the first of the prompts `document`, `passage` and `corpus` that the folder
        defines.

        Returns:
            An array of shape [n, d], or of shape [d] for a single str.
        """

    @overload
    def encode_document(
        self,
        sentences: str | Iterable[str],
        *,
        batch_tokens: int | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        to: Literal["dlpack"],
    ) -> DeviceArray: ...
    @property
    def prompt_names(self) -> list[str]:
        """Names of the prompts that the model's folder defines, sorted."""

    @property
    def max_seq_length(self) -> int | None:
        """Maximum number of tokens of a text, including special tokens; None if there is no limit."""

    @property
    def device(self) -> str:
        """Description of the device that the model runs on."""

    @property
    def precision(self) -> str:
        """Precision of products in linear layers: "f32", "f16", "bf16", "fp8", "int8" or "int4"."""

@final
class DeviceArray:
    """An array in the memory of the device that computed it.

    `torch.from_dlpack(array)`, `cupy.from_dlpack(array)` and, for an array on the CPU, `numpy.from_dlpack(array)` read it
    without a copy. The memory is freed when the array and all views of it are gone. The values are complete, so there is no need to
    synchronize streams.
    """

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule that shares the memory of the array.

        Raises:
            BufferError: The consumer requests a copy or another device.
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device in DLPack's numbering: (1, 0) for the CPU, (2, n) for CUDA device n."""

    def __repr__(self) -> str:
        """Return the shape, the type and the device as text."""

    def numpy(self) -> _Floats:
        """Copy the values to a float32 numpy array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the array."""

    @property
    def dtype(self) -> str:
        """Type of the values: "float32" on the CPU; on CUDA, the model's storage type "float16", "bfloat16" or "float32"."""

    @property
    def device(self) -> str:
        """Device that holds the values: "cpu" or "cuda:N"."""

@final
class MultiVectorEncoder:
    """Computes a vector for each token of a text, for late interaction.

    Supported models are folders of PyLate and of stanford-nlp's ColBERT, and BGE-M3. Methods are named as in `MultiVectorEncoder` of
    sentence-transformers. `is_query` is the argument of PyLate's `ColBERT.encode`. Several threads may use one object at once.
    """

    def __new__(
        cls,
        model: str | PathLike[str],
        *,
        device: str | None = None,
        dtype: str | None = None,
        quantize: Literal["fp8", "int8", "int4"] | None = None,
        dequantize: bool = False,
        threads: int | None = None,
    ) -> Self:
        """Load a model. The arguments are those of `Embedder`."""

    @overload
    def encode(
        self,
        sentences: str,
        *,
        is_query: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_tokens: int | None = None,
    ) -> _Floats:
        """Compute the token vectors of queries or of documents.

        Args:
            sentences: A text, or a list of texts. Texts longer than `query_length` or `document_length` are truncated.
            is_query: Whether the texts are queries. The folder determines how queries are padded, and which tokens of documents have
                no vector.
            prompt_name: Name of a prompt of the model's folder, which is put before each text.
            prompt: Text that is put before each text. Without `prompt` and `prompt_name`, the folder's default prompt is used.
            batch_tokens: See `Embedder.encode`.

        Returns:
            A list of float32 arrays of shape [tokens, d], or one array for a single str. Each vector has length 1.
        """

    @overload
    def encode(
        self,
        sentences: _Texts,
        *,
        is_query: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_tokens: int | None = None,
    ) -> list[_Floats]: ...
    @overload
    def encode_query(self, sentences: str, *, batch_tokens: int | None = None) -> _Floats:
        """Compute the token vectors of queries: `encode` with the prompt `query`, if the model's folder defines it.

        Returns:
            A list of float32 arrays of shape [tokens, d], or one array for a single str.
        """

    @overload
    def encode_query(self, sentences: _Texts, *, batch_tokens: int | None = None) -> list[_Floats]: ...
    @overload
    def encode_document(self, sentences: str, *, batch_tokens: int | None = None) -> _Floats:
        """Compute the token vectors of documents: `encode` with `is_query=False` and the first of the prompts `document`,
        `passage` and `corpus` that the folder defines.

        Returns:
            A list of float32 arrays of shape [tokens, d], or one array for a single str.
        """

    @overload
    def encode_document(self, sentences: _Texts, *, batch_tokens: int | None = None) -> list[_Floats]: ...
    def similarity(self, queries: _Floats | Iterable[_Floats], documents: _Floats | Iterable[_Floats]) -> _Floats:
        """Score documents for queries (MaxSim).

        Each vector of a query contributes its maximum product with a vector of the document. The score is the sum of these
        products. For BGE-M3, it is their mean, as in FlagEmbedding.

        Args:
            queries: Arrays of shape [tokens, d], or a single array of this shape.
            documents: Arrays of shape [tokens, d], or a single array of this shape.

        Returns:
            A float32 array of shape [queries, documents]. A GPU computes it if copying the arrays to it is estimated to be faster.
        """

    def rank(
        self,
        query: str,
        documents: Iterable[str],
        top_k: int | None = None,
        return_documents: bool = False,
        *,
        batch_tokens: int | None = None,
    ) -> list[_Ranked]:
        """Rank documents for a query, best first, with the prompts of `encode_query` and `encode_document`.

        On a GPU, the vectors of documents stay on the device, where their scores are computed.

        Returns:
            The best `top_k` documents, or all: dicts with `corpus_id` (the index of the document), `score` and, with
            `return_documents`, `text`.
        """

    @property
    def prompt_names(self) -> list[str]:
        """Names of the prompts that the model's folder defines, sorted."""

    @property
    def query_length(self) -> int | None:
        """Maximum number of tokens of a query, including special tokens; None if there is no limit."""

    @property
    def document_length(self) -> int | None:
        """Maximum number of tokens of a document, including special tokens; None if there is no limit."""

    @property
    def device(self) -> str:
        """Description of the device that the model runs on."""

    @property
    def precision(self) -> str:
        """Precision of products in linear layers: "f32", "f16", "bf16", "fp8", "int8" or "int4"."""

@final
class Reranker:
    """Scores pairs of a query and a document, like `CrossEncoder`, or with a late-interaction model.

    Several threads may use one object at once.
    """

    def __new__(
        cls,
        model: str | PathLike[str],
        *,
        device: str | None = None,
        dtype: str | None = None,
        quantize: Literal["fp8", "int8", "int4"] | None = None,
        dequantize: bool = False,
        threads: int | None = None,
    ) -> Self:
        """Load a model. The arguments are those of `Embedder`."""

    def predict(
        self,
        pairs: _Pair | Iterable[_Pair],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_tokens: int | None = None,
    ) -> _Floats:
        """Score pairs of a query and a document.

        Args:
            pairs: A pair, or a list of pairs. If a pair is too long, the longer text is truncated first.
            prompt_name: Name of a prompt of the model's folder, which is put before each query.
            prompt: Text that is put before each query.
            batch_tokens: See `Embedder.encode`.

        Returns:
            A float32 array of shape [n], or [n, labels] for a model with several labels. For a single pair, the first dimension is
            dropped. A score is the logit after the folder's activation, which by default is a sigmoid if there is one label.
            `MultiVectorEncoder.similarity` describes the scores of late-interaction models.
        """

    def rank(
        self,
        query: str,
        documents: Iterable[str],
        top_k: int | None = None,
        return_documents: bool = False,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_tokens: int | None = None,
    ) -> list[_Ranked]:
        """Rank documents for a query, best first.

        Returns:
            The best `top_k` documents, or all: dicts with `corpus_id` (the index of the document), `score` and, with
            `return_documents`, `text`.
        """

    @property
    def max_seq_length(self) -> int | None:
        """Maximum number of tokens of a pair, including special tokens; None if there is no limit."""

    @property
    def device(self) -> str:
        """Description of the device that the model runs on."""

    @property
    def precision(self) -> str:
        """Precision of products in linear layers: "f32", "f16", "bf16", "fp8", "int8" or "int4"."""

@final
class Generator:
    """Generates text: after a prompt, or as a reply in a conversation.

    Several threads may use one object at once.
    """

    def __new__(
        cls,
        model: str | PathLike[str],
        *,
        device: str | None = None,
        dtype: str | None = None,
        quantize: Literal["fp8", "int8", "int4"] | None = None,
        dequantize: bool = False,
        kv_dtype: Literal["auto", "fp8"] | None = None,
        max_context: int | None = None,
        threads: int | None = None,
    ) -> Self:
        """Load a model.

        Args:
            kv_dtype: Format of the KV cache. "fp8" stores keys and values in 8-bit floating point (E4M3). "auto" and None select
                the type of the activations.
            max_context: Maximum number of tokens of a prompt and its continuation. None selects the number of positions of the model. With
                LongRoPE (Phi-3 with 128k tokens), None selects the original number of positions, and a larger number selects the
                rotary positions for long contexts, for all prompts.
            model, device, dtype, quantize, dequantize, threads: See `Embedder`.
        """

    @overload
    def generate(
        self, prompts: str, *, stream: Literal[False] = False, **options: Unpack[_Options]
    ) -> str:
        """Continue prompts. The prompt is not part of the result.

        Args:
            prompts: A prompt, or a list of prompts. Memory limits how many are computed at once.
            stream: Return an iterator over the parts of the text of a single prompt.
            max_new_tokens: Maximum number of new tokens. The default limit is the number of positions of the model.
            min_new_tokens: Minimum number of new tokens.
            do_sample: Sample instead of taking the most probable token. The next four options imply `do_sample`.
            temperature, top_k, top_p, min_p: Sampling parameters.
            seed: Random seed for sampling, 0 by default. The same seed produces the same text.
            num_beams: Number of beams; 1 disables beam search.
            num_beam_groups, diversity_penalty: Parameters of diverse beam search, in which groups of beams avoid each other's tokens.
            length_penalty, early_stopping: Beam search parameters.
            repetition_penalty: Values above 1 make tokens that already occurred less probable.
            no_repeat_ngram_size: Length of token sequences that must not occur twice.
            forced_bos_token: The first new token, as written in the folder's files.
            stop_strings: Strings that end the generation. The result does not contain them.

        Returns:
            A str for a str, a list of str for a list, or an iterator of str.
        """

    @overload
    def generate(
        self, prompts: _Texts, *, stream: Literal[False] = False, **options: Unpack[_Options]
    ) -> list[str]: ...
    @overload
    def generate(
        self, prompts: str, *, stream: Literal[True], **options: Unpack[_Options]
    ) -> TextStream: ...
    @overload
    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        stream: Literal[False] = False,
        tools: Iterable[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[_Options],
    ) -> str:
        """Reply to a conversation that is formatted with the model's chat template.

        Args:
            messages: Dicts with `role` ("system", "user", "assistant", …) and `content`.
            stream: Return an iterator over the parts of the reply.
            tools: Tools that the model may call, as JSON dicts.
            chat_template_kwargs: Additional variables for the template, such as {"enable_thinking": False}.
            options: See `generate`.

        Returns:
            The reply, or an iterator over its parts.
        """

    @overload
    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        stream: Literal[True],
        tools: Iterable[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[_Options],
    ) -> TextStream: ...
    @property
    def device(self) -> str:
        """Description of the device that the model runs on."""

    @property
    def kv_dtype(self) -> str:
        """Format of the KV cache: "f32", "f16", "bf16" or "e4m3"."""

    @property
    def precision(self) -> str:
        """Precision of products in linear layers: "f32", "f16", "bf16", "fp8", "int8" or "int4"."""

@final
class TextStream:
    """Iterator over the parts of a generated text. Concatenated, they are the text that `generate` returns."""

    def __iter__(self) -> TextStream: ...
    def __next__(self) -> str: ...
    def close(self) -> None:
        """End the generation and free its memory. Deleting the iterator has the same effect."""

@final
class Translator:
    """Translates texts.

    Several threads may use one object at once.
    """

    def __new__(
        cls,
        model: str | PathLike[str],
        *,
        device: str | None = None,
        dtype: str | None = None,
        quantize: Literal["fp8", "int8", "int4"] | None = None,
        dequantize: bool = False,
        kv_dtype: Literal["auto", "fp8"] | None = None,
        threads: int | None = None,
    ) -> Self:
        """Load a model.

        Args:
            kv_dtype: Format of the KV cache. "fp8" stores keys and values in 8-bit floating point (E4M3). "auto" and None select
                the type of the activations.
            model, device, dtype, quantize, dequantize, threads: See `Embedder`.
        """

    @overload
    def translate(
        self, texts: str, *, source_lang: str | None = None, target_lang: str | None = None, **options: Unpack[_Options]
    ) -> str:
        """Translate texts.

        Args:
            texts: A text, or a list of texts.
            max_new_tokens: Maximum number of new tokens. The default is twice the number of tokens of the text, plus 16, limited by
                the folder's maximum.
            source_lang: Language of the texts, as named by the model's tokenizer, such as "de" or "deu_Latn". None selects the
                default of the model's folder.
            target_lang: Language of the translations, in the same format.
            options: See `Generator.generate`.

        Returns:
            A str for a str, and a list of str for a list. A blank text has an empty translation.
        """

    @overload
    def translate(
        self, texts: _Texts, *, source_lang: str | None = None, target_lang: str | None = None, **options: Unpack[_Options]
    ) -> list[str]: ...
    @property
    def device(self) -> str:
        """Description of the device that the model runs on."""

    @property
    def kv_dtype(self) -> str:
        """Format of the KV cache: "f32", "f16", "bf16" or "e4m3"."""

    @property
    def precision(self) -> str:
        """Precision of products in linear layers: "f32", "f16", "bf16", "fp8", "int8" or "int4"."""

@final
class Engine:
    """Runs a model and returns its outputs by name.

    Several threads may use one object at once.
    """

    def __new__(
        cls,
        model: str | PathLike[str],
        *,
        outputs: list[str] | None = None,
        device: str | None = None,
        dtype: str | None = None,
        quantize: Literal["fp8", "int8", "int4"] | None = None,
        dequantize: bool = False,
        max_context: int | None = None,
        threads: int | None = None,
    ) -> Self:
        """Load a model.

        Args:
            outputs: Names of the outputs to compute. None selects the default outputs of the model's folder.
            max_context: Maximum number of tokens of an input; see `Generator`.

        The other arguments are those of `Embedder`.
        """

    @overload
    def run(
        self,
        inputs: Iterable[str] | Iterable[_Pair] | Iterable[Iterable[int]],
        *,
        outputs: list[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        to: Literal["numpy"] = "numpy",
    ) -> dict[str, NDArray[Any]]:
        """Run inputs as one batch.

        Args:
            inputs: Texts, pairs of texts, or lists of token ids.
            outputs: Names of the outputs to return. None returns all that the engine computes.
            prompt_name: Name of a prompt of the model's folder, which is put before each text.
            prompt: Text that is put before each text.
            to: "numpy" returns float32 arrays. "dlpack" returns a `DeviceArray` for each output, which stays on the device in the
                model's storage type. Its values are not checked for NaN.

        Returns:
            The outputs by name: arrays of shape [batch, width], or [tokens, width] with the tokens of all inputs one
            after another, without padding. `lengths` is an int64 numpy array of shape [batch] with the number of tokens of each
            input.
        """

    @overload
    def run(
        self,
        inputs: Iterable[str] | Iterable[_Pair] | Iterable[Iterable[int]],
        *,
        outputs: list[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        to: Literal["dlpack"],
    ) -> dict[str, DeviceArray | NDArray[np.int64]]: ...
    def tokenize(
        self,
        inputs: Iterable[str] | Iterable[_Pair],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> list[list[int]]:
        """Return the token ids of texts or pairs of texts, with special tokens."""

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs that the engine computes."""

    @property
    def device(self) -> str:
        """Description of the device that the model runs on."""

    @property
    def precision(self) -> str:
        """Precision of products in linear layers: "f32", "f16", "bf16", "fp8", "int8" or "int4"."""
