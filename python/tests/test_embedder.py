import json

import numpy as np
import pytest
from conftest import CHECKPOINTS, ROOT, checkpoint, runs, tensors

from gemmule import Embedder, Engine, Generator, InputError, MultiVectorEncoder, Reranker, Translator

SENTENCES = json.loads((ROOT / "tests/references/minilm_sentences.json").read_text())
EXPECTED = tensors(ROOT / "tests/references/minilm.safetensors")["sentence_embedding"]


def lengths(vectors):
    return np.linalg.norm(vectors.astype(np.float64), axis=-1)


def test_vectors_are_those_of_transformers(minilm):
    vectors = minilm.encode(SENTENCES)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(SENTENCES), 384)
    assert vectors.flags.c_contiguous and vectors.flags.writeable
    np.testing.assert_allclose(vectors, EXPECTED, atol=2e-6)


def test_a_single_text_has_no_first_dimension(minilm):
    vector = minilm.encode(SENTENCES[0])
    assert vector.shape == (384,)
    np.testing.assert_allclose(vector, EXPECTED[0], atol=2e-6)
    assert minilm.encode([SENTENCES[0]]).shape == (1, 384)


FOLDERS = sorted(folder.name for folder in CHECKPOINTS.glob("st-*"))


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_and_prompts_are_read_as_by_sentence_transformers(name):
    embeddings = [run for run in runs(name) if run["output"] == "sentence_embedding"]
    if not embeddings:
        with pytest.raises(InputError, match=r'computes the output `sparse`, .* use Engine\(model, outputs=\["sparse"\]\)'):
            Embedder(checkpoint(name), device="cpu")
        return
    embedder = Embedder(checkpoint(name), device="cpu")
    for run in embeddings:
        if name == "st-adapters":
            embedder = Embedder(checkpoint(name), device="cpu", task=run["task"])
        vectors = embedder.encode(run["texts"], prompt_name=run.get("prompt_name"), prompt=run.get("prompt"), task=run.get("task"))
        expected = np.array(run["values"], np.float32).reshape(run["shape"])
        np.testing.assert_allclose(vectors, expected, atol=1e-5, err_msg=str(run["texts"]))


def test_queries_and_documents_have_their_routes():
    embedder = Embedder(checkpoint("st-asym"), device="cpu")
    for method, task in ((embedder.encode_query, "query"), (embedder.encode_document, "document")):
        (run,) = [run for run in runs("st-asym") if run.get("task") == run["prompt_name"] == task]
        expected = np.array(run["values"], np.float32).reshape(run["shape"])
        np.testing.assert_allclose(method(run["texts"]), expected, atol=1e-5)
    with pytest.raises(InputError, match='has no route for the task "other"'):
        embedder.encode("a text", task="other")
    with pytest.raises(InputError, match=r'has no adapter; use Embedder\(model, task="separation"\)'):
        Embedder(checkpoint("st-adapters"), device="cpu").encode("a text", task="separation")
    with pytest.raises(InputError, match="computes all tasks in the same way"):
        Embedder(checkpoint("st-mean"), device="cpu").encode("a text", task="query")


def test_queries_and_documents_have_their_prompts():
    embedder = Embedder(checkpoint("st-mean"), device="cpu")
    assert embedder.prompt_names == ["document", "query"]
    text = "Who found the letter?"
    query, document = embedder.encode_query(text), embedder.encode_document(text)
    np.testing.assert_array_equal(query, embedder.encode(text, prompt_name="query"))
    np.testing.assert_array_equal(document, embedder.encode(text, prompt="text: "))
    assert not np.allclose(query, document, atol=1e-3)
    without = Embedder(checkpoint("st-cls"), device="cpu")
    assert without.prompt_names == []
    np.testing.assert_array_equal(without.encode_query(text), without.encode(text))


def test_folders_of_other_classes_are_named():
    with pytest.raises(InputError, match="vector for each token, .* use MultiVectorEncoder"):
        Embedder(checkpoint("late-bert"), device="cpu")
    with pytest.raises(InputError, match="scores pairs, .* use Reranker"):
        Embedder(checkpoint("ce-qwen"), device="cpu")


def test_a_default_prompt_is_used():
    embedder = Embedder(checkpoint("st-default-prompt"), device="cpu")
    default = embedder.encode("a")
    np.testing.assert_array_equal(embedder.encode("a", prompt="find: "), default)
    assert not np.allclose(embedder.encode("a", prompt=""), default, atol=1e-3)


def test_vectors_are_normalized_after_they_are_truncated():
    embedder = Embedder(checkpoint("st-cls"), device="cpu")
    texts = ["Bread was late.", "The road by the river"]
    plain = embedder.encode(texts)
    assert not np.allclose(lengths(plain), 1, atol=1e-3)
    normal = embedder.encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(lengths(normal), 1, atol=1e-6)
    np.testing.assert_allclose(normal, plain / lengths(plain)[:, None], atol=1e-6)
    np.testing.assert_array_equal(embedder.encode(texts, normalize=True), normal)
    short = embedder.encode(texts, truncate_dim=5)
    np.testing.assert_array_equal(short, plain[:, :5])
    both = embedder.encode(texts, truncate_dim=5, normalize_embeddings=True)
    np.testing.assert_allclose(both, short / lengths(short)[:, None], atol=1e-6)
    shorter = Embedder(checkpoint("st-cls"), device="cpu", truncate_dim=3)
    np.testing.assert_array_equal(shorter.encode(texts), plain[:, :3])


def test_results_do_not_depend_on_the_batch(minilm):
    texts = ["word " * n for n in (1, 300, 7, 31, 2, 64, 130, 33, 5, 257, 16, 3)] + ["", "é", "日本語", "a" * 700]
    alone = np.stack([minilm.encode(text) for text in texts])
    for batch_tokens in (None, 1, 100, 513):
        np.testing.assert_allclose(minilm.encode(texts, batch_tokens=batch_tokens), alone, atol=2e-6)
    np.testing.assert_allclose(minilm.encode(texts[::-1])[::-1], alone, atol=2e-6)
    assert minilm.max_seq_length == 256


def test_iterables_and_arrays_of_texts_are_accepted(minilm):
    expected = minilm.encode(SENTENCES[:3])
    for given in (tuple(SENTENCES[:3]), np.array(SENTENCES[:3]), iter(SENTENCES[:3])):
        np.testing.assert_array_equal(minilm.encode(given), expected)


@pytest.mark.parametrize(("precision", "tolerance"), [("int8", 0.05), ("fp8", 0.1), ("int4", 0.3)])
def test_other_precisions_are_close(minilm, precision, tolerance):
    quantized = Embedder(checkpoint("st-mean"), device="cpu", quantize=precision)
    assert (quantized.precision, minilm.precision) == (precision, "f32")
    run = runs("st-mean")[0]
    vectors = quantized.encode(run["texts"])
    expected = np.array(run["values"], np.float32).reshape(run["shape"])
    assert not np.array_equal(vectors, expected)
    np.testing.assert_allclose(vectors, expected, atol=tolerance)


def test_the_device_and_threads_are_chosen():
    embedder = Embedder(checkpoint("st-mean"), device="cpu", dtype="float32", threads=3)
    assert embedder.device == "CPU, 3 threads"


def test_dequantized_weights_of_a_quantized_checkpoint_are_those_of_the_cpu():
    folder = ROOT / "tests/quantized/models/llama-int8-head"
    ids = [[3, 5, 7, 11, 2]]
    usual = Engine(folder, device="cpu").run(ids)
    dequantized = Engine(folder, device="cpu", dequantize=True)
    assert dequantized.precision == "f32"
    for name, values in dequantized.run(ids).items():
        np.testing.assert_array_equal(values, usual[name])
    for kind in (Embedder, Engine, Generator, MultiVectorEncoder, Reranker, Translator):
        with pytest.raises(InputError, match="quantize and dequantize are both given; expected one of them"):
            kind(folder, device="cpu", quantize="int8", dequantize=True)
