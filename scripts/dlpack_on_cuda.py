"""Checks on a GPU that PyTorch reads the arrays of gemmule's Python package through DLPack, without a copy.

    pip install torch target/wheels/gemmule-*.whl
    python scripts/dlpack_on_cuda.py tests/checkpoints/st-cls

`GEMMULE_NVRTC` must name a folder with NVRTC, unless the CUDA toolkit or `nvidia-cuda-nvrtc` is installed.
"""

import sys
import threading

import numpy as np
import torch

from gemmule import Embedder, Engine

TEXTS = [f"Letter {n} was about {'bread ' * (n % 40)}and rain." for n in range(500)]


def close(found, expected, what):
    found = found.float().cpu().numpy()
    far = np.abs(found - expected).max()
    # Results of batches with different shapes are rounded differently. In bf16, each layer adds a difference of up to 2⁻⁸ of a value.
    assert found.shape == expected.shape and far < 2e-2 * max(1, np.abs(expected).max()), f"{what}: {far}"
    print(f"{what}: ok, {found.shape}, at most {far:.1e} from numpy")


def main(folder):
    for dtype in ("float16", "bfloat16", "float32"):
        embedder = Embedder(folder, device="cuda", dtype=dtype)
        expected = embedder.encode(TEXTS)
        array = embedder.encode(TEXTS, to="dlpack")
        tensor = torch.from_dlpack(array)
        assert str(tensor.dtype) == f"torch.{array.dtype}" == f"torch.{dtype}", tensor.dtype
        assert str(tensor.device) == array.device == "cuda:0", tensor.device
        assert array.__dlpack_device__() == (2, 0)
        again = torch.from_dlpack(array)
        assert tensor.data_ptr() == again.data_ptr(), "the memory is copied"
        close(tensor, expected, f"vectors in {dtype}")
        np.testing.assert_array_equal(array.numpy(), tensor.float().cpu().numpy())
        # With several batches, the rows are put back in the order of the texts. They are also truncated to 7 dimensions.
        small = torch.from_dlpack(embedder.encode(TEXTS, to="dlpack", batch_tokens=200, truncate_dim=7))
        close(small, expected[:, :7], f"vectors of many batches in {dtype}")
        one = torch.from_dlpack(embedder.encode(TEXTS[3], to="dlpack"))
        close(one, expected[3], f"a single vector in {dtype}")
        normal = torch.nn.functional.normalize(tensor.float(), dim=-1)
        close(normal, embedder.encode(TEXTS, normalize_embeddings=True), f"normalized in {dtype}")

    # The tensor must stay valid after the array and the embedder are deleted, and after later runs.
    before = tensor.clone()
    del array, again
    for _ in range(20):
        embedder.encode(TEXTS[::-1], to="dlpack")
    del embedder
    torch.cuda.synchronize()
    assert torch.equal(tensor, before)
    print("the memory lives as long as the tensor: ok")

    # Read outputs on streams other than the default stream, and from several threads.
    engine = Engine(folder, device="cuda")
    names = engine.output_names
    expected = engine.run(TEXTS[:64])

    def work(failures):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                outputs = engine.run(TEXTS[:64], to="dlpack")
                for name in names:
                    tensor = torch.from_dlpack(outputs[name])
                    # The GPU is still running this work when the memory is released.
                    doubled = tensor.float() * 2
                    del tensor, outputs[name]
                    if np.abs(doubled.cpu().numpy() / 2 - expected[name]).max() > 5e-2:
                        failures.append(name)

    failures = []
    threads = [threading.Thread(target=work, args=(failures,)) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures
    print(f"outputs {', '.join(names)} of an engine on four streams: ok")

    # The memory of deleted arrays must be freed.
    free = None
    for nth in range(200):
        outputs = engine.run(TEXTS, to="dlpack")
        tensors = [torch.from_dlpack(outputs[name]) for name in names]
        del outputs, tensors
        if nth == 20:
            free = torch.cuda.mem_get_info()[0]
    lost = free - torch.cuda.mem_get_info()[0]
    assert lost < 64 << 20, f"{lost} bytes are lost"
    print("memory is freed: ok")


main(*sys.argv[1:])
