from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import checkpoint, runs

from gemmule import Engine, InputError

OUTPUTS = ["last_hidden_state", "sentence_embedding"]


@pytest.fixture(scope="module")
def engine():
    return Engine(checkpoint("st-mean"), outputs=OUTPUTS, device="cpu")


def test_outputs_are_returned_by_name(engine):
    run = runs("st-mean")[0]
    outputs = engine.run(run["texts"])
    assert list(outputs) == [*OUTPUTS, "lengths"]
    assert engine.output_names == OUTPUTS
    lengths = outputs["lengths"]
    assert lengths.dtype == np.int64 and lengths.tolist() == [len(ids) for ids in run["ids"]]
    hidden = outputs["last_hidden_state"]
    assert hidden.shape == (lengths.sum(), 32) and hidden.dtype == np.float32
    expected = np.array(run["values"], np.float32).reshape(run["shape"])
    np.testing.assert_allclose(outputs["sentence_embedding"], expected, atol=1e-5)
    # The tokens of a text are contiguous.
    parts = np.split(hidden, np.cumsum(lengths)[:-1])
    means = np.stack([part.mean(axis=0) for part in parts])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(means, expected, atol=1e-5)


def test_token_ids_are_run_as_texts(engine):
    run = runs("st-mean")[0]
    ids = engine.tokenize(run["texts"])
    assert ids == run["ids"]
    for given in (ids, [np.array(one) for one in ids]):
        outputs = engine.run(given, outputs=["sentence_embedding"])
        assert list(outputs) == ["sentence_embedding", "lengths"]
        expected = engine.run(run["texts"])["sentence_embedding"]
        np.testing.assert_array_equal(outputs["sentence_embedding"], expected)


def test_pairs_have_segments():
    engine = Engine(checkpoint("ce-nli"), device="cpu")
    run = runs("ce-nli")[0]
    logits = engine.run([tuple(pair) for pair in run["pairs"]])["sequence_logits"]
    np.testing.assert_allclose(logits.ravel(), run["logits"], atol=1e-5)


def test_inputs_are_checked(engine):
    for inputs, error, text in [
        ([], InputError, "inputs is empty"),
        ("text", TypeError, "inputs is str; expected a list"),
        ([1], TypeError, r"inputs\[0\] is int; expected str"),
        ([[]], InputError, r"inputs\[0\] is empty"),
        ([[1, -1]], InputError, r"inputs\[0\]\[1\] is -1 \(int\); expected a token id"),
        ([[1, "a"]], InputError, r"inputs\[0\]\[1\] is 'a' \(str\); expected a token id"),
        ([[1, 10**6]], InputError, "the token id 1000000 is outside the table"),
        ([("a", "b", "c")], InputError, r"inputs\[0\] has 3 items; expected a pair"),
        ([[5] * 100_000], InputError, "100000 tokens, but the model has"),
    ]:
        with pytest.raises(error, match=text):
            engine.run(inputs)
    with pytest.raises(InputError, match="the run has no output `logits`; it has last_hidden_state, sentence_embedding"):
        engine.run(["a"], outputs=["logits"])
    with pytest.raises(InputError, match="nothing"):
        Engine(checkpoint("st-mean"), outputs=["nothing"], device="cpu")


def test_threads_share_an_engine(engine):
    texts = [["a b c"] * (n % 5 + 1) + ["The road by the river"] for n in range(40)]
    alone = [engine.run(some) for some in texts]
    with ThreadPoolExecutor(6) as pool:
        for found, expected in zip(pool.map(engine.run, texts), alone):
            for name in expected:
                np.testing.assert_array_equal(found[name], expected[name])
