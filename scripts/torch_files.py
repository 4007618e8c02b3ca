"""Writes PyTorch files for tests/models/torch.rs: some checkpoints of tests/checkpoints, saved with torch.save, and small state dicts.

    pip install torch==2.15.0 safetensors
    python3 scripts/torch_files.py

The results are in tests/torch. Nothing is downloaded.
"""

import pathlib
import sys
from collections import OrderedDict

import torch
from safetensors.torch import load_file

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
OUT = TESTS / "torch"


class Command:
    """A malicious object, whose pickle runs a command when Python loads it."""

    def __reduce__(self):
        import os

        return os.system, ("echo this must not run",)


def main() -> None:
    OUT.mkdir(exist_ok=True)
    save = lambda value, name: torch.save(value, OUT / name)
    checkpoints = TESTS / "checkpoints"
    save(OrderedDict(load_file(checkpoints / "st-electra/model.safetensors")), "st-electra.bin")
    for head in ["sparse_linear", "colbert_linear"]:
        save(load_file(checkpoints / f"st-m3/{head}.safetensors"), f"{head}.pt")

    # A state dict with every form in which a tensor is stored, among them several views of one storage, as with tied weights.
    base = torch.arange(12, dtype=torch.float32) / 8
    kinds = OrderedDict(
        table=base.view(3, 4),
        tied=base.view(3, 4),
        rows=base.view(3, 4)[1:],
        parameter=torch.nn.Parameter(base[:6].clone()),
        half=base.to(torch.float16),
        brain=base.to(torch.bfloat16),
        double=base.to(torch.float64),
        ids=torch.arange(3),
        flags=torch.tensor([True, False]),
        scalar=torch.tensor(2.5),
        empty=torch.zeros(0, 4),
    )
    kinds._metadata = OrderedDict({"": {"version": 1}})
    save(kinds, "kinds.bin")
    save({"w": base.view(3, 4).t()}, "transposed.bin")
    save({"w": base, "step": 3}, "with-step.bin")
    save({"w": Command()}, "command.bin")
    torch.save({"w": base}, OUT / "legacy.bin", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    sys.exit(main())
