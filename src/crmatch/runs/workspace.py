"""Where runs and data are kept. Imports no torch until data is loaded."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from crmatch.data.settings import Setting, default_data_dir, parse_setting
from crmatch.errors import RequestError
from crmatch.runs.directory import RunDirectory, run_directory
from crmatch.spec.recipes import setting_of

if TYPE_CHECKING:
    from crmatch.data.images import DataSet
    from crmatch.data.splits import Split
    from crmatch.spec.run_spec import RunSpec


@dataclass(frozen=True)
class Workspace:
    """The directory of all runs and the directory of all data.

    Attributes:
        out: runs are kept below it.
        data_dir: holds packed sets (`<name>.npz`) and the cache of decoded pictures (`folders/`).
        name: of the run that is trained here; None: a run is named after its method and what differs from its recipe.
    """

    out: Path = Path("runs")
    data_dir: Path = field(default_factory=default_data_dir)
    name: str | None = None

    @classmethod
    def at(cls, out: Path | str = "runs", data_dir: Path | None = None) -> Workspace:
        """A workspace with the default data directory if none is given."""
        return cls(Path(out), data_dir or default_data_dir())

    def named(self, name: str | None) -> Workspace:
        """This workspace for a run of that name."""
        if name is not None and not re.fullmatch(r"[\w][\w.,=+-]*", name):
            raise RequestError(f"--name {name!r} is not a file name.\nUse letters, digits and . , = + - _, for example round2.")
        return dataclasses.replace(self, name=name)

    def setting(self, text: str, labels_file: Path | None = None) -> Setting:
        """The setting or folder that `text` names."""
        return parse_setting(text, self.data_dir, labels_file)

    def setting_of(self, spec: RunSpec) -> Setting:
        """The setting that `spec` was made for."""
        return setting_of(spec, self.data_dir)

    def run_directory(self, spec: RunSpec) -> RunDirectory:
        """The directory of the run of `spec`."""
        return run_directory(self.out, spec, self.setting_of(spec), self.name)

    def load(self, spec: RunSpec) -> tuple[DataSet, Split]:
        """The images of a run, and which of them are labeled."""
        from crmatch.runs.experiment import load_run_data

        return load_run_data(spec, self.setting_of(spec), self.data_dir)

    @property
    def features(self) -> Path:
        """Where features of frozen backbones are kept: in the data directory, or in the default one if that is read-only."""
        return (self.data_dir if os.access(self.data_dir, os.W_OK) else default_data_dir()) / "features"

    def options(self) -> list[str]:
        """The command-line options that ask for this workspace."""
        out = ["--out", str(self.out)] if self.out != Path("runs") else []
        data_dir = ["--data-dir", str(self.data_dir)] if self.data_dir != default_data_dir() else []
        return out + data_dir
