"""Render HTML pages from Jinja templates: one file that opens offline and executes nothing from the data.

The layout is in `templates/`. Every value that a template gets is text, and is escaped when it enters the page.
"""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from evener.core.base.units import format_seconds
from evener.report.draw.svg_charts import Figure, render_svg

HEADING = re.compile(r"<h2>(.*?)</h2>")  # of a section; what templates write into it is escaped
MIN_SECTIONS = 4  # of a page that needs a list of them


@dataclass(frozen=True)
class KeyFigure:
    """A key figure at the top of a page."""

    name: str
    value: str | None  # None: not measured
    note: str = ""


def render_document(template: str, *, title: str, figures: Mapping[str, Figure], **facts: object) -> str:
    """Render a whole page; each of `figures` is drawn where the template has its name."""
    drawn = {name: render_svg(figure, with_table=True) for name, figure in figures.items()}
    given = {"title": title, "figures": drawn, "style": read_asset("page.css"), "script": read_asset("page.js")}
    return with_contents(template_environment("evener.report.pages").get_template(template).render(**given, **facts))


def with_contents(page: str) -> str:
    """Return the page with a list of its sections below the header, if it has several.

    >>> with_contents("<header></header>" + "".join(f"<h2>{name}</h2>" for name in "abcd"))[:61]
    '<header></header><nav class="contents" aria-label="contents">'
    """
    titles = HEADING.findall(page)
    if len(titles) < MIN_SECTIONS or "</header>" not in page:
        return page
    links = " ".join(f'<a href="#section-{i}">{title}</a>' for i, title in enumerate(titles, 1))
    numbers = itertools.count(1)
    page = HEADING.sub(lambda found: f'<h2 id="section-{next(numbers)}">{found[1]}</h2>', page)
    return page.replace("</header>", f'</header><nav class="contents" aria-label="contents">{links}</nav>', 1)


@functools.cache
def template_environment(*packages: str) -> Environment:
    """Return the Jinja environment for the templates of these packages; the first one that has a template wins."""
    jinja = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,  # a missing name is a bug, not an empty string
        finalize=lambda value: "not measured" if value is None else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"seconds": format_seconds}
    return jinja


def read_asset(name: str) -> str:
    """Return the text of a file in `templates/`, such as the style or the script of all pages."""
    return (importlib.resources.files("evener.report.pages") / "templates" / name).read_text(encoding="utf-8")
