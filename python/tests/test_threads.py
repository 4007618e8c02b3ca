"""Several Python threads, signals, and processes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import checkpoint, minilm_folder


def test_threads_share_a_model(minilm, writer, translator):
    texts = [[f"{'word ' * (n % 37)}{n}" for n in range(at, at + 20)] for at in range(0, 160, 20)]
    alone = [minilm.encode(some) for some in texts]
    story = writer.generate("One", max_new_tokens=40)

    def work(at):
        if at % 3 == 0:
            return writer.generate("One", max_new_tokens=40) == story
        if at % 3 == 1:
            return translator.translate("7") == "seven"
        found = minilm.encode(texts[at % len(texts)])
        return np.allclose(found, alone[at % len(texts)], atol=2e-6)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(48)))


def test_threads_share_a_stream(writer):
    whole = writer.generate("One")
    stream = writer.generate("One", stream=True)
    lengths = []

    def read(_):
        lengths.extend(len(part) for part in stream)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    assert sum(lengths) == len(whole)


def test_other_threads_run_while_a_model_computes(minilm):
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.002):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    minilm.encode(["word " * 200] * 40)
    took = time.monotonic() - began
    done.set()
    thread.join()
    during = [at for at in ticks if began <= at <= began + took]
    gaps = np.diff([began, *during, began + took])
    assert len(during) >= 3 and gaps.max() < 0.5 * took, (took, len(during), gaps.max())


LONG = """
import sys
from gemmule import {kind}
model = {kind}({folder!r}, device="cpu")
print("loaded", flush=True)
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
    # The model can still be used.
    {again}
    print("well", flush=True)
    sys.exit(3)
print("done", flush=True)
"""
CALLS = {
    "encode": ("Embedder", "model.encode(['word ' * 200] * 20_000)", "assert model.encode('a').shape == (384,)"),
    "tokenize": (
        "Embedder",
        "model.encode(['word ' * 300] * 200_000)",
        "assert model.encode('a').shape == (384,)",
    ),
    "dlpack": (
        "Embedder",
        "model.encode(['word ' * 200] * 20_000, to='dlpack')",
        "assert model.encode('a', to='dlpack').shape == (384,)",
    ),
    "vectors": (
        "MultiVectorEncoder",
        "model.encode(['a letter ' * 20] * 400_000, is_query=False)",
        "assert model.encode('a').ndim == 2",
    ),
    "generate": (
        "Generator",
        "model.generate(['One'] * 20_000, max_new_tokens=200)",
        "assert model.generate('One', max_new_tokens=3)",
    ),
    "beams": (
        "Generator",
        "model.generate(['One'] * 5_000, num_beams=16, max_new_tokens=200)",
        "assert model.generate('One', max_new_tokens=3)",
    ),
    "stream": (
        "Generator",
        "[list(model.generate('One', stream=True)) for _ in range(10_000)]",
        "assert model.generate('One', max_new_tokens=3)",
    ),
    "translate": (
        "Translator",
        "model.translate(['7'] * 100_000)",
        "assert model.translate('7') == 'seven'",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_long_call_is_interrupted(name):
    kind, call, again = CALLS[name]
    folder = {
        "Embedder": minilm_folder(),
        "Generator": str(checkpoint("writer")),
        "MultiVectorEncoder": str(checkpoint("late-plain")),
        "Translator": str(checkpoint("translator")),
    }[kind]
    code = LONG.format(kind=kind, folder=folder, call=call, again=again)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "loaded\n"
        time.sleep(1.0)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - sent < 5
        assert process.stdout.readline() == "well\n"
        assert process.wait(timeout=20) == 3


def test_loading_is_interrupted(tmp_path):
    """A hub that accepts a connection and does not answer."""
    code = """
import signal
import sys
from gemmule import Embedder
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 1)
try:
    Embedder("some-org/some-model", device="cpu")
except KeyboardInterrupt:
    sys.exit(3)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        variables = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint, "no_proxy": "127.0.0.1"}
        variables.pop("HF_HUB_OFFLINE", None)
        began = time.monotonic()
        ran = subprocess.run([sys.executable, "-c", code], env=variables, timeout=60)
        assert ran.returncode == 3
        assert 1 <= time.monotonic() - began < 5


def test_a_process_ends_while_a_daemon_thread_computes():
    code = f"""
import threading
import time
from gemmule import Embedder
embedder = Embedder({minilm_folder()!r}, device="cpu")
texts = ["word " * 200] * 20_000
threading.Thread(target=embedder.encode, args=(texts,), daemon=True).start()
time.sleep(1)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30)
    assert (ran.returncode, ran.stderr) == (0, b"")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_gets_an_error_and_does_not_hang():
    code = f"""
import os
import warnings
from gemmule import ComputeError, Embedder, Generator, MultiVectorEncoder
warnings.simplefilter("ignore")
folder, writer = {str(checkpoint("st-mean"))!r}, Generator({str(checkpoint("writer"))!r}, device="cpu")
embedder = Embedder(folder, device="cpu")
encoder = MultiVectorEncoder({str(checkpoint("late-plain"))!r}, device="cpu")
vectors = encoder.encode("a")
stream = writer.generate("One", stream=True)
calls = [
    lambda: embedder.encode("a"), lambda: Embedder(folder), lambda: writer.generate("One"), lambda: next(stream),
    lambda: embedder.encode("a", to="dlpack"), lambda: encoder.encode("a"), lambda: encoder.similarity(vectors, vectors),
]
if os.fork() == 0:
    errors = 0
    for call in calls:
        try:
            call()
        except ComputeError as error:
            errors += "start processes with the method" in str(error)
    os._exit(errors)
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == len(calls), status
embedder.encode("a")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_process_that_forks_before_it_loads_a_model_may_use_one():
    code = f"""
import os
import gemmule
pid = os.fork()
assert gemmule.Embedder({str(checkpoint("st-mean"))!r}, device="cpu").encode("a").shape == (32,)
if pid:
    assert os.wait()[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
