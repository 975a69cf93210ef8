"""A hook of mkdocs: adds the page cli.md, made from the commands themselves."""

import re
from typing import Any

import typer
from mkdocs.structure.files import File
from typer.cli import get_docs_for_click

from crmatch.cli.app import app
from crmatch.cli.help import arrange


def on_files(files: Any, config: Any) -> None:
    """Add the page."""
    command = typer.main.get_command(app)
    arrange(command)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="crmatch", title="Commands")
    text = re.sub(r"^Examples:\n((?:crmatch .*\n)+)", r"**Examples**:\n\n```\n\1```\n", text, flags=re.MULTILINE)
    files.append(File.generated(config, "cli.md", content=text))
