"""Embeds the column `text` of Parquet files with Spark. Each task loads a model on its GPU or on its CPUs.

    pip install pyspark pandas pyarrow
    spark-submit spark.py sentence-transformers/all-MiniLM-L6-v2 texts.parquet vectors
"""

import sys
from collections.abc import Iterator

import pandas as pd
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.functions import pandas_udf
from pyspark.sql.types import ArrayType, FloatType

MODEL, TEXTS, VECTORS = sys.argv[1:]


@pandas_udf(ArrayType(FloatType()))
def embed(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
    """Loads the model once per partition."""
    from gemmule import Embedder

    task = TaskContext.get()
    gpu = task.resources().get("gpu")
    if gpu:
        embedder = Embedder(MODEL, device=f"cuda:{gpu.addresses[0]}")
    else:
        embedder = Embedder(MODEL, device="cpu", threads=task.cpus())
    for texts in batches:
        yield pd.Series(list(embedder.encode(texts, normalize_embeddings=True)))


spark = SparkSession.builder.appName("embed").getOrCreate()
texts = spark.read.parquet(TEXTS)
texts.withColumn("vector", embed(texts["text"])).write.parquet(VECTORS)
