"""The templates of all pages."""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("crmatch.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def render(template: str, **values: Any) -> bytes:
    """The page that a template in `templates/` makes of the values, in UTF-8; names that are not UTF-8 are shown with "?"."""
    return _environment().get_template(template).render(**values).encode(errors="replace")
