"""Wrong arguments, folders and devices."""

import pathlib
import shutil

import numpy as np
import pytest
from conftest import checkpoint

import gemmule
from gemmule import ComputeError, Embedder, Engine, FileError, GemmuleError, Generator, InputError, Reranker, Translator

CLASSES = [Embedder, Engine, Generator, Reranker, Translator]


def test_exceptions_are_of_the_built_in_kinds():
    for error, built_in in [(InputError, ValueError), (FileError, OSError), (ComputeError, RuntimeError)]:
        assert issubclass(error, GemmuleError) and issubclass(error, built_in)
        assert error.__module__ == "gemmule"


@pytest.mark.parametrize(
    ("sentences", "error", "text"),
    [
        ([], InputError, "sentences is empty; expected at least one item"),
        (np.array([]), InputError, "sentences is empty"),
        (None, TypeError, "sentences is NoneType; expected str or a list of str"),
        (7, TypeError, "sentences is int; expected str or a list of str"),
        (b"text", TypeError, "sentences is bytes; expected str or a list of str"),
        ({"a": 1}, TypeError, "sentences is dict; expected str or a list of str"),
        (["a", 1], TypeError, r"sentences\[1\] is int; expected str"),
        (["a", None], TypeError, r"sentences\[1\] is NoneType; expected str"),
        (["a", ["b"]], TypeError, r"sentences\[1\] is list; expected str"),
        ("\ud800", InputError, "sentences has a lone surrogate"),
        (["a", "b\udfff"], InputError, r"sentences\[1\] has a lone surrogate"),
    ],
)
def test_texts_are_checked(minilm, sentences, error, text):
    with pytest.raises(error, match=text):
        minilm.encode(sentences)


def test_an_error_of_an_iterator_is_passed_on(minilm):
    def texts():
        yield "a"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        minilm.encode(texts())


def test_options_of_embeddings_are_checked(minilm):
    for options, error, text in [
        ({"truncate_dim": 0}, InputError, "truncate_dim is 0; expected 1 to 384"),
        ({"truncate_dim": 385}, InputError, "truncate_dim is 385; expected 1 to 384"),
        ({"batch_tokens": 0}, InputError, "batch_tokens is 0"),
        ({"prompt_name": "nothing"}, InputError, "there is no prompt `nothing`; the folder has document, query"),
        ({"prompt_name": "query", "prompt": "a"}, InputError, "prompt and prompt_name are both given"),
        ({"truncate_dim": -1}, OverflowError, "negative"),
        ({"show_progress_bar": True}, TypeError, "show_progress_bar"),
    ]:
        with pytest.raises(error, match=text):
            minilm.encode(["a"], **options)


def test_pairs_are_checked(reranker):
    for pairs, error, text in [
        ([], InputError, "pairs is empty"),
        ("ab", TypeError, "pairs is str; expected a list of pairs"),
        (["a", "b", "c"], InputError, "pairs has 3 items; expected a pair"),
        ([("a", "b"), ("a",)], InputError, r"pairs\[1\] has 1 items; expected a pair"),
        ([("a", 1)], TypeError, r"pairs\[0\]\[1\] is int; expected str"),
        ([("a", "b"), "cd"], TypeError, r"pairs\[1\] is str; expected a pair of str"),
    ]:
        with pytest.raises(error, match=text):
            reranker.predict(pairs)
    with pytest.raises(TypeError, match="query is int; expected str"):
        reranker.rank(1, ["a"])


@pytest.mark.parametrize("kind", CLASSES)
def test_models_are_checked(kind, tmp_path):
    with pytest.raises(FileError, match="there is no folder `.*nowhere`"):
        kind(tmp_path / "nowhere")
    with pytest.raises(FileError, match="there is no folder `/no/where`"):
        kind("/no/where")
    with pytest.raises(TypeError, match="model is int; expected the path of a folder, or a name on the Hugging Face hub"):
        kind(1)
    with pytest.raises(InputError, match="`tpu` is not a device; expected auto, cpu, cuda or cuda:N"):
        kind(tmp_path, device="tpu")
    with pytest.raises(InputError, match="`int4` is not a storage type"):
        kind(tmp_path, dtype="int4")
    with pytest.raises(InputError, match="`int2` is not a format"):
        kind(tmp_path, quantize="int2")
    with pytest.raises(InputError, match="threads is 0"):
        kind(tmp_path, threads=0)
    with pytest.raises(GemmuleError, match="config.json"):
        kind(tmp_path, device="cpu")


def test_damaged_files_are_errors(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("st-mean"), folder)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="model.safetensors` is not a complete safetensors file"):
        Embedder(folder, device="cpu")
    weights.unlink()
    with pytest.raises(FileError, match="model"):
        Embedder(folder, device="cpu")
    weights.write_bytes(data)
    (folder / "tokenizer.json").write_text('{"model": 7}')
    with pytest.raises(InputError, match="tokenizer.json` is not a tokenizer"):
        Embedder(folder, device="cpu")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileError, match="has no tokenizer.json"):
        Embedder(folder, device="cpu")
    # Token ids need no tokenizer.
    engine = Engine(folder, device="cpu")
    assert engine.run([[5, 6, 7]])["lengths"].tolist() == [3]
    with pytest.raises(FileError, match="has no tokenizer.json"):
        engine.run(["text"])
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="config.json` is not JSON"):
        Embedder(folder, device="cpu")


def test_weights_that_are_not_numbers_are_an_error(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("st-mean"), folder)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    values = np.full((len(data) - start) // 4, np.nan, np.float32)
    weights.write_bytes(bytes(data[:start]) + values.tobytes())
    with pytest.raises(ComputeError, match="NaN or infinite values"):
        Embedder(folder, device="cpu").encode("a")


def test_models_of_other_tasks_are_errors():
    with pytest.raises(InputError):
        Generator(checkpoint("st-mean"), device="cpu")
    with pytest.raises(InputError):
        Reranker(checkpoint("st-mean"), device="cpu")


def test_types_that_a_device_does_not_compute_are_errors():
    with pytest.raises(GemmuleError, match="f16"):
        Embedder(checkpoint("st-mean"), device="cpu", dtype="float16")
    assert Embedder(checkpoint("st-mean"), device="cpu", dtype="torch.float32").precision == "f32"


def test_a_path_may_be_a_str_or_a_path():
    folder = checkpoint("st-mean")
    assert isinstance(folder, pathlib.Path)
    one = Embedder(folder, device="cpu").encode("a")
    np.testing.assert_array_equal(Embedder(str(folder), device="cpu").encode("a"), one)


def test_a_name_on_the_hub_is_looked_up_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileError, match="some-org/some-model"):
        Embedder("some-org/some-model")
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub/models--some-org--some-model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(commit)
    shutil.copytree(checkpoint("st-mean"), cached / "snapshots" / commit)
    expected = Embedder(checkpoint("st-mean"), device="cpu").encode("a")
    for name in ("some-org/some-model", "some-org/some-model@main"):
        np.testing.assert_array_equal(Embedder(name, device="cpu").encode("a"), expected)


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert gemmule.__version__ == version("gemmule")
