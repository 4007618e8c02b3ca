"""Exceptions of gemmule. Each is a subclass of `GemmuleError` and of a built-in exception."""


class GemmuleError(Exception):
    """Base class of all exceptions of gemmule."""


class InputError(GemmuleError, ValueError):
    """An argument, or the contents of a model's files, cannot be used."""


class FileError(GemmuleError, OSError):
    """A file or a model is missing or cannot be read, or the Hugging Face hub cannot be reached."""


class ComputeError(GemmuleError, RuntimeError):
    """A device, memory or a computation failed."""


for _class in (GemmuleError, InputError, FileError, ComputeError):
    _class.__module__ = "gemmule"
del _class
