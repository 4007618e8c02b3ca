"""The examples for Ray Data and Spark. A test is skipped if its package is missing; `make test-python` does not install them."""

import importlib.util
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, minilm_folder

TEXTS = [f"Letter {n} was about {'bread ' * (n % 7)}and rain." for n in range(600)]


def run(tmp_path, minilm, command, **variables):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    table = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS})
    texts, vectors = tmp_path / "texts", tmp_path / "vectors"
    texts.mkdir()
    for nth, half in enumerate((table.slice(0, 300), table.slice(300))):
        parquet.write_table(half, texts / f"{nth}.parquet")
    ran = subprocess.run(
        [*command, minilm_folder(), str(texts), str(vectors)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows = sorted(parquet.read_table(vectors).to_pylist(), key=lambda row: row["id"])
    assert [row["text"] for row in rows] == TEXTS
    found = np.array([row["vector"] for row in rows], np.float32)
    np.testing.assert_allclose(found, minilm.encode(TEXTS, normalize_embeddings=True), atol=2e-6)


@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed")
def test_ray_data(tmp_path, minilm):
    # Hide GPUs, because their results are rounded to float16. Workers usually run at a low priority, and would starve on a busy machine.
    variables = {"CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    run(tmp_path, minilm, [sys.executable, ROOT / "examples/python/ray_data.py"], **variables)


@pytest.mark.skipif(not importlib.util.find_spec("pyspark"), reason="pyspark is not installed")
@pytest.mark.skipif(not shutil.which("java"), reason="Spark needs Java")
def test_spark(tmp_path, minilm):
    variables = {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell",
    }
    run(tmp_path, minilm, [sys.executable, ROOT / "examples/python/spark.py"], **variables)
