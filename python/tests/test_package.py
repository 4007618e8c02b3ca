"""The stubs, the examples, and the search for NVRTC."""

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, checkpoint, minilm_folder

import gemmule

PACKAGE = Path(gemmule.__file__).parent


def stubs():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def test_the_stubs_describe_the_classes():
    assert (PACKAGE / "py.typed").is_file()
    described = stubs()
    public = {name for name in gemmule.__all__ if inspect.isclass(getattr(gemmule, name))}
    assert public == {name for name in described if not name.startswith("_")}
    for name in public:
        kind = getattr(gemmule, name)
        if issubclass(kind, Exception):
            continue
        methods = {}
        for node in described[name].body:
            if isinstance(node, ast.FunctionDef):
                methods.setdefault(node.name, []).append(node)
        own = {member for member in vars(kind) if not member.startswith("_")}
        assert own == {method for method in methods if not method.startswith("__")}, name
        for method, overloads in methods.items():
            has_text = any(ast.get_docstring(one) for one in overloads)
            assert has_text or method in ("__iter__", "__next__"), f"{name}.{method}"
            if method in own and callable(getattr(kind, method)):
                found = set(inspect.signature(getattr(kind, method)).parameters) - {"self"}
                args = [arg for one in overloads for arg in one.args.args + one.args.kwonlyargs]
                args += [one.args.kwarg for one in overloads if one.args.kwarg]
                assert found == {arg.arg for arg in args} - {"self"}, f"{name}.{method}"
                assert getattr(kind, method).__doc__, f"{name}.{method}"


def run(*args, **variables):
    ran = subprocess.run(
        [sys.executable, *map(str, args)], env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_examples_run():
    embedded = run(ROOT / "examples/python/embed.py", minilm_folder())
    cosines = [float(line.split()[0]) for line in embedded.splitlines()]
    assert cosines[0] == 1 and cosines[1] > 0.6 > 0.3 > cosines[2]
    text = run(ROOT / "examples/python/generate.py", checkpoint("writer"), "One")
    assert text.startswith("One sunny day")


def test_nvrtc_of_the_wheel_is_found(tmp_path):
    """A folder on the path with the layout of the installed wheel `nvidia-cuda-nvrtc`."""
    library = tmp_path / "nvidia/cu13/lib/libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    info = tmp_path / "nvidia_cuda_nvrtc-13.0.88.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cuda-nvrtc\nVersion: 13.0.88\n")
    (info / "RECORD").write_text("nvidia/cu13/include/nvrtc.h,,\nnvidia/cu13/lib/libnvrtc.so.13,,\n")
    show = "import gemmule, os; print(os.environ.get('GEMMULE_NVRTC'))"
    found = run("-c", show, PYTHONPATH=str(tmp_path), GEMMULE_NVRTC="")
    assert found.strip() == str(library.parent.resolve())
    assert run("-c", show, PYTHONPATH=str(tmp_path), GEMMULE_NVRTC="/mine").strip() == "/mine"
    library.unlink()
    assert run("-c", show, PYTHONPATH=str(tmp_path), GEMMULE_NVRTC="").strip() == ""


def test_nothing_is_printed():
    code = f"from gemmule import Embedder; Embedder({minilm_folder()!r}, device='cpu').encode('a ' * 3000)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


@pytest.mark.parametrize("kind", ["Embedder", "Engine", "Generator", "Reranker", "Translator"])
def test_classes_belong_to_the_package(kind):
    assert getattr(gemmule, kind).__module__ == "gemmule"


def test_the_command_is_installed():
    command = Path(sys.executable).with_name("gemmule")
    for start in [[command], [sys.executable, "-m", "gemmule"]]:
        ran = subprocess.run([*start, "--version"], capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stdout) == (0, f"gemmule {gemmule.__version__}\n")
        ran = subprocess.run([*start, "run", "--no-such-option"], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 2 and "--no-such-option" in ran.stderr
    args = ["run", "--weights", checkpoint("st-mean"), "--text", "a test", "--device", "cpu", "--json"]
    found = json.loads(run("-m", "gemmule", *args))["outputs"]
    vector = gemmule.Embedder(str(checkpoint("st-mean")), device="cpu").encode("a test")
    assert "sentence_embedding" in json.dumps(found) and str(vector.shape[0]) in json.dumps(found)
