"""How do facts and figures become one file that opens offline and runs nothing that stood in the data?

`templates/` says what stands where. Whatever a template is given is text, and escaped where it enters the page.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from evener.core.units import seconds
from evener.report.chart import Figure, draw


@dataclass(frozen=True)
class Fact:
    """One of the large figures at the top of a page."""

    name: str
    value: str | None  # None: not measured
    remark: str = ""


def document(template: str, *, title: str, figures: Mapping[str, Figure], **facts: object) -> str:
    """The whole file, with each of `figures` drawn where the template has its name."""
    drawn = {name: draw(figure) for name, figure in figures.items()}
    given = {"title": title, "figures": drawn, "style": _file("page.css"), "script": _file("page.js")}
    return _environment().get_template(template).render(**given, **facts)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("evener.report"),
        autoescape=True,
        undefined=StrictUndefined,  # a name that nobody gave is a bug, and no empty place
        finalize=lambda value: "not measured" if value is None else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": seconds}
    return environment


def _file(name: str) -> str:
    return (importlib.resources.files("evener.report") / "templates" / name).read_text(encoding="utf-8")
