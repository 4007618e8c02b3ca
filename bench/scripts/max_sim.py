"""Times the kernel `max_sim` against cuBLAS on a GPU. Needs cupy and torch.

    python bench/scripts/max_sim.py FOLDER [DTYPE …]

FOLDER contains the sources of the kernels, such as max_sim_f16_w128.cu. `gemmule::engine::emit` returns them for `MaxSim`.

Each line has two median times in microseconds: of the kernel, and of the product of all document vectors with the query vectors
(torch.matmul, which also writes the product). The launches use several buffers, which are larger than L2 in total. The scores of the kernel
are compared with scores from the product.
"""

import re
import statistics
import sys
from pathlib import Path

import cupy
import torch

# (number of documents, vectors per document, width of a vector, vectors of the query)
SHAPES = [
    (1000, 300, 128, 32), (10, 20, 128, 32), (10, 2000, 128, 32), (100, 300, 128, 32), (1000, 20, 128, 32), (10000, 20, 128, 32),
    (1000, 180, 96, 32), (1000, 300, 64, 32), (1000, 300, 128, 8), (1000, 300, 128, 64), (1000, 300, 128, 128), (1000, 300, 128, 512),
    (1000, 2000, 128, 32), (10000, 300, 128, 32), (100, 500, 768, 32), (100, 512, 1024, 32), (10, 2000, 1024, 32), (1000, 512, 1024, 64),
]
SMS = torch.cuda.get_device_properties(0).multi_processor_count


def launch_of(kernel, documents, tokens, longest, constants):
    """Returns the grid and the bytes of shared memory of a launch, like `MaxSim::launch`."""
    warps = constants["threads"] // 32
    team = 1
    while team < warps and 2 * constants["rows_at_once"] * team * documents < tokens:
        team *= 2
    per_cta = warps // team
    group = constants["rows_at_once"] * team
    piece = -(-max(tokens // (constants["ctas"] * SMS * per_cta), 2 * group) // group) * group
    chunk = constants["chunk"]
    row = -(-constants["width"] // chunk) * chunk * constants["bytes"]
    grid = (-(-documents // per_cta), min(max(-(-longest // piece), 1), 0xFFFF))
    return grid, constants["queries"] * row


def constants_of(source):
    """Reads the constants that determine a launch from the CUDA source of a kernel."""
    number = lambda name: int(re.search(rf"\b{name} = (\d+)", source)[1])
    threads = re.search(r"__launch_bounds__\((\d+),", source)[1]
    ctas = re.search(r"CTAS_PER_SM = .* \? (\d+) :", source)[1]
    return {
        "width": number("WIDTH"), "chunk": number("CHUNK"), "queries": number("QUERIES"), "rows_at_once": number("ROWS"),
        "threads": int(threads), "ctas": int(ctas), "bytes": 4 if "using T = float" in source else 2,
    }


def median_us(run, sets):
    """Returns the median time of a launch in microseconds. A CUDA graph of launches on all sets of buffers is replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(sets):
            run(i, stream)
        stream.synchronize()
        n = max(sets, 16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(n):
                run(i % sets, stream)
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(15):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / n)
    return statistics.median(times)


def main(folder, dtypes):
    print("dtype   documents  rows  width  query   kernel us   product us   ratio   GB/s")
    for dtype in dtypes:
        torch_type = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[dtype]
        for documents, rows, width, n_query in SHAPES:
            symbol = f"max_sim_{dtype}_w{width}"
            file = Path(folder) / f"{symbol}.cu"
            if not file.exists():
                continue
            source = file.read_text()
            constants = constants_of(source)
            module = cupy.RawModule(code=source, backend="nvrtc", options=("--std=c++17",))
            kernel = module.get_function(symbol)
            tokens = documents * rows
            vectors_bytes = tokens * width * constants["bytes"]
            sets = max(2, min(16, int(3e8 // vectors_bytes) + 1))
            make = lambda *shape: torch.nn.functional.normalize(torch.randn(*shape, device="cuda"), dim=-1).to(torch_type)
            query = make(n_query, width)
            vectors = [make(tokens, width) for _ in range(sets)]
            taken = torch.arange(tokens, dtype=torch.int32, device="cuda")
            ends = torch.arange(0, tokens + 1, rows, dtype=torch.int32, device="cuda")
            out = torch.full((documents,), float("nan"), device="cuda")
            largest = torch.full((documents, n_query), -1, dtype=torch.int32, device="cuda")
            arrived = torch.full((documents,), -1, dtype=torch.int32, device="cuda")
            grid, shared = launch_of(kernel, documents, tokens, rows, constants)
            if shared > 40 << 10:
                kernel.max_dynamic_shared_size_bytes = shared
            pointers = [t.data_ptr() for t in (taken, ends, out, largest, arrived)]
            counts = [cupy.uint32(n) for n in (tokens, documents, rows, n_query)]

            def score(i, stream):
                with cupy.cuda.ExternalStream(stream.cuda_stream):
                    kernel(grid, (constants["threads"],), (query.data_ptr(), vectors[i].data_ptr(), *pointers, *counts), shared_mem=shared)

            product = torch.empty(tokens, n_query, dtype=torch_type, device="cuda")

            def multiply(i, _):
                torch.matmul(vectors[i], query.T, out=product)

            stream = torch.cuda.current_stream()
            score(0, stream)
            torch.cuda.synchronize()
            scores = (vectors[0].float() @ query.T.float()).view(documents, rows, n_query).amax(1).sum(1)
            error = (out - scores).abs().max().item()
            assert error < 2e-2, (symbol, error)
            own, other = median_us(score, sets), median_us(multiply, sets)
            assert bool((largest == -1).all() and (arrived == -1).all())
            print(f"{dtype:5} {documents:11} {rows:5} {width:6} {n_query:6} {own:11.1f} {other:12.1f} {own / other:7.2f} {vectors_bytes / own / 1e3:6.0f}")
            del vectors, product


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or ["f16"])
