from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from crmatch.atomic_files import read_json, write_file, write_json
from crmatch.errors import DataError


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = tmp_path / "file"
    write_file(path, b"before")

    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if failing == "write":
        monkeypatch.setattr("builtins.open", fail)
    else:
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises(DataError, match="No space left on device"):
        write_file(path, b"after")
    monkeypatch.undo()
    assert path.read_bytes() == b"before"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_json_comes_back_and_broken_json_is_a_data_error(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "file.json", {"a": [1, 2.5, None]})
    assert read_json(tmp_path / "new" / "file.json") == {"a": [1, 2.5, None]}
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("broken.json", "deep.json", "missing.json"):
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            read_json(tmp_path / name)
