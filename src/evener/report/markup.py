"""How do facts and figures become one file that opens offline and runs nothing that stood in the data?

`templates/` says what stands where. Whatever a template is given is text, and escaped where it enters the page.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

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
    drawn = {name: draw(figure, in_figures=True) for name, figure in figures.items()}
    given = {"title": title, "figures": drawn, "style": page_file("page.css"), "script": page_file("page.js")}
    return environment("evener.report").get_template(template).render(**given, **facts)


@functools.cache
def environment(*packages: str) -> Environment:
    """What renders the templates of these packages, of which the first has whatever it has a template for."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,  # a name that nobody gave is a bug, and no empty place
        finalize=lambda value: "not measured" if value is None else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"seconds": seconds}
    return made


def page_file(name: str) -> str:
    """The style or the script of all pages."""
    return (importlib.resources.files("evener.report") / "templates" / name).read_text(encoding="utf-8")
