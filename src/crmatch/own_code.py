"""Code from outside the package: methods, data sets and networks in a file that the user names as `path/mine.py:Name`.

A spec stores such code as `mine.py:Name#1a2b3c4d`: the file's name and a checksum of its content. Reading a spec or a record
imports nothing: code is found only in files that were named in this process, on the command line or from Python.
Imports no torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from crmatch.atomic_files import checksum
from crmatch.errors import RequestError

_files: dict[str, Path] = {}  # "mine.py#1a2b3c4d" -> the file that was named
_objects: dict[str, Any] = {}  # "mine.py:Name#1a2b3c4d" -> the class or function


def is_reference(text: str) -> bool:
    """Whether `text` is written as `path/mine.py:Name`."""
    return re.fullmatch(r".+\.py:\w+", text) is not None


def short_name(reference: str) -> str:
    """`mine.py:Name` without the path of the file, and without a checksum."""
    return reference.rpartition("/")[2].partition("#")[0]


def code_checksum(code: str) -> str:
    """The checksum in `mine.py:Name#1a2b3c4d`."""
    return code.partition("#")[2]


def name_file(file: Path | str) -> str:
    """Allow code to be imported from `file` in this process; returns the checksum of its content."""
    path = Path(file).resolve()
    try:
        digest = checksum(path.read_bytes())[:8]
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {str(error.strerror).lower()}.\nName a Python file.") from error
    _files[f"{path.name}#{digest}"] = path
    return digest


def named_files() -> list[str]:
    """The files that were named in this process, so that other processes of the same command can name them, too."""
    return [str(path) for path in _files.values()]


def code_in_file(reference: str) -> str:
    """The code that `path/mine.py:Name` refers to, as a spec stores it; the user has named this file."""
    file, _, _ = reference.rpartition(":")
    return f"{short_name(reference)}#{name_file(file)}"


def code_of(value: Any, source: str | None = None) -> str:
    """The code of a class or function that exists already; `source` replaces the name of its file."""
    if known := [code for code, one in _objects.items() if one is value]:
        return known[0]
    name = value.__qualname__
    try:
        path = Path(inspect.getfile(value))
    except (TypeError, OSError):
        path = Path()
    if path.is_file():
        digest, source = name_file(path), source or path.name
    else:  # a notebook's cells are no file, but their source is known
        members = [value] if inspect.isfunction(value) else vars(value).values()
        functions = [getattr(member, "fget", member) for member in members]
        try:
            text = "".join(inspect.getsource(function) for function in functions if inspect.isfunction(function))
        except OSError as error:
            found = f"the source of {name} cannot be read, so runs of its versions could not be told apart"
            raise RequestError(f"{found}.\nDefine it in a file.") from error
        digest, source = checksum(text.encode())[:8], source or "notebook"
    code = f"{source}:{name}#{digest}"
    _objects[code] = value
    return code


def is_here(code: str) -> bool:
    """Whether `find` can return this code."""
    return code in _objects or _file_of(code) is not None


def find(code: str) -> Any:
    """The class or function that a spec stores as `code`, if its file was named in this process and has not changed."""
    if code in _objects:
        return _objects[code]
    path, name = _file_of(code), short_name(code).rpartition(":")[2]
    if path is None:
        file = short_name(code).rpartition(":")[0]
        changed = [key for key in _files if key.partition("#")[0] == file]
        if changed:
            found = f"{file} has changed: this run used the content {code_checksum(code)}, the file has {changed[0][-8:]}"
            raise RequestError(f"{found}.\nBring the old file back, or train again.")
        found = f"{short_name(code)} is not part of crmatch, and its file is not imported without being named"
        raise RequestError(f"{found}.\nName the file that this run was trained with: --code {file} (in Python: code={file!r})")
    module = _import(path, code_checksum(code))
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise RequestError(f"{path} has no {name}.\nIt defines: {', '.join(known) or 'nothing'}")
    _objects[code] = getattr(module, name)
    return _objects[code]


def reference_to(code: str) -> str:
    """`path/mine.py:Name` for a command line; without the path if the file was not named in this process."""
    path, name = _file_of(code), short_name(code)
    return f"{path}:{name.rpartition(':')[2]}" if path else name


def _file_of(code: str) -> Path | None:
    file, digest = short_name(code).rpartition(":")[0], code_checksum(code)
    return _files.get(f"{file}#{digest}")


def _import(path: Path, digest: str) -> Any:
    """The module in `path`, imported once for each content."""
    name = f"{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that the file can import its neighbors
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)  # a syntax error names its own file and line
        reason = f"{where}: {type(error).__name__}: {error}"
        raise RequestError(f"{reason}\nThe file cannot be imported; correct it first.") from error
    return module
