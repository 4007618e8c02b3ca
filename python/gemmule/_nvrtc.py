"""Finds NVRTC, which compiles kernels, in the wheel that `pip install gemmule[cuda]` installs."""

import os
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Optional


def folder() -> Optional[Path]:
    """Return the folder of libnvrtc.so in the wheel `nvidia-cuda-nvrtc`, if it is installed."""
    try:
        installed = files("nvidia-cuda-nvrtc") or []
    except PackageNotFoundError:
        return None
    for file in installed:
        if file.name.startswith("libnvrtc.so."):
            library = Path(str(file.locate())).resolve()
            if library.is_file():
                return library.parent
    return None


def choose() -> None:
    """Set GEMMULE_NVRTC to the wheel's folder, unless it is already set."""
    if not os.environ.get("GEMMULE_NVRTC") and (found := folder()):
        os.environ["GEMMULE_NVRTC"] = str(found)
