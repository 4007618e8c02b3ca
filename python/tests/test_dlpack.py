"""Arrays that stay on their device, which is the CPU here. `scripts/dlpack_on_cuda.py` checks a GPU with torch."""

import gc

import numpy as np
import pytest
from conftest import checkpoint, runs

from gemmule import DeviceArray, Embedder, Engine, InputError

TEXTS = ["Bread was late.", "The road by the river", "a", "word " * 300, "A painter wrote it."]


@pytest.fixture(scope="module")
def embedder():
    return Embedder(checkpoint("st-cls"), device="cpu")


def test_vectors_are_shared_without_a_copy(embedder):
    expected = embedder.encode(TEXTS)
    array = embedder.encode(TEXTS, to="dlpack", batch_tokens=40)
    assert isinstance(array, DeviceArray)
    assert (array.shape, array.dtype, array.device) == (expected.shape, "float32", "cpu")
    assert array.__dlpack_device__() == (1, 0)
    assert repr(array) == f"DeviceArray(shape={expected.shape}, dtype=float32, device=cpu)"
    views = [np.from_dlpack(array) for _ in range(2)]
    assert views[0].ctypes.data == views[1].ctypes.data
    copy = array.numpy()
    assert copy.ctypes.data != views[0].ctypes.data
    for found in (*views, copy):
        np.testing.assert_allclose(found, expected, atol=2e-6)
    # The views keep the memory alive.
    del array
    gc.collect()
    noise = [np.full(expected.shape, 7, np.float32) for _ in range(20)]
    np.testing.assert_array_equal(views[0], copy)
    del noise
    one = embedder.encode(TEXTS[0], to="dlpack")
    assert one.shape == expected.shape[1:]
    np.testing.assert_allclose(np.from_dlpack(one), expected[0], atol=2e-6)


def test_vectors_are_truncated(embedder):
    expected = embedder.encode(TEXTS, truncate_dim=5)
    array = embedder.encode(TEXTS, truncate_dim=5, to="dlpack", batch_tokens=30)
    assert array.shape == (len(TEXTS), 5)
    np.testing.assert_allclose(np.from_dlpack(array), expected, atol=2e-6)
    with pytest.raises(InputError, match="truncate_dim is 33; expected 1 to 32"):
        embedder.encode(TEXTS, truncate_dim=33, to="dlpack")


def test_queries_and_documents_have_their_prompts():
    embedder = Embedder(checkpoint("st-mean"), device="cpu")
    for encode in (embedder.encode_query, embedder.encode_document):
        np.testing.assert_array_equal(np.from_dlpack(encode(TEXTS[0], to="dlpack")), encode(TEXTS[0]))


def test_both_structures_of_dlpack_are_offered(embedder):
    array = embedder.encode(TEXTS, to="dlpack")
    assert '"dltensor"' in repr(array.__dlpack__())
    assert '"dltensor_versioned"' in repr(array.__dlpack__(stream=None, max_version=(1, 1), copy=False))
    assert '"dltensor"' in repr(array.__dlpack__(max_version=(0, 8), dl_device=(1, 0)))
    for options, text in [({"dl_device": (2, 0)}, "on the device"), ({"copy": True}, "shared, and not copied")]:
        with pytest.raises(BufferError, match=text):
            array.__dlpack__(**options)

    class Old:
        """A producer with the protocol before DLPack 1.0."""

        def __dlpack__(self, **_):
            return array.__dlpack__()

        def __dlpack_device__(self):
            return array.__dlpack_device__()

    np.testing.assert_array_equal(np.from_dlpack(Old()), array.numpy())


def test_arguments_are_checked(embedder):
    with pytest.raises(InputError, match='to is `torch`; expected "numpy", or "dlpack"'):
        embedder.encode(TEXTS, to="torch")
    with pytest.raises(InputError, match="normalize_embeddings is computed on the host"):
        embedder.encode(TEXTS, to="dlpack", normalize_embeddings=True)


def test_outputs_of_an_engine_are_shared():
    names = ["last_hidden_state", "sentence_embedding"]
    engine = Engine(checkpoint("st-mean"), outputs=names, device="cpu")
    texts = runs("st-mean")[0]["texts"]
    expected, shared = engine.run(texts), engine.run(texts, to="dlpack")
    assert list(shared) == list(expected)
    np.testing.assert_array_equal(shared["lengths"], expected["lengths"])
    # Later runs use other memory.
    engine.run(texts[::-1], to="dlpack")
    for name in names:
        array = shared[name]
        assert isinstance(array, DeviceArray) and array.shape == expected[name].shape
        np.testing.assert_array_equal(np.from_dlpack(array), expected[name])
    assert list(engine.run(texts, to="dlpack", outputs=names[1:])) == [names[1], "lengths"]
    with pytest.raises(InputError, match="the run has no output `logits`; it has last_hidden_state, sentence_embedding"):
        engine.run(texts, to="dlpack", outputs=["logits"])


def test_memory_is_freed_with_the_last_view():
    engine = Engine(checkpoint("st-mean"), outputs=["last_hidden_state"], device="cpu")
    with open("/proc/self/statm") as statm:

        def resident():
            statm.seek(0)
            return int(statm.read().split()[1]) * 4096

        ids = [[5] * 60] * 400
        n_bytes = 400 * 60 * 32 * 4
        for nth in range(100):
            array = engine.run(ids, to="dlpack")["last_hidden_state"]
            # One capsule that is never consumed, and one that numpy consumes.
            array.__dlpack__(max_version=(1, 0))
            assert np.from_dlpack(array).nbytes == n_bytes
            if nth == 20:
                before = resident()
        assert resident() - before < 20 * n_bytes
