"""How do facts and figures become one file that opens offline and runs nothing that stood in the data?

`templates/` says what stands where. Whatever a template is given is text, and escaped where it enters the page.
"""

from __future__ import annotations

import functools
import importlib.resources
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from evener.core.units import seconds
from evener.report.figures import Figure, legend


@dataclass(frozen=True)
class Fact:
    """One of the large figures at the top of a page."""

    name: str
    value: str | None  # None: not measured
    remark: str = ""


def document(template: str, *, title: str, figures: Mapping[str, Figure], **facts: object) -> str:
    """The whole file. The script draws each of `figures` into the place that the template's `plot` made for it."""
    given = {"title": title, "figures": figures, "style": _file("page.css"), "script": _file("page.js")}
    return _environment().get_template(template).render(**given, **facts, plotly=_plotly_js())


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
    environment.filters |= {"seconds": seconds, "legend": legend}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _file(name: str) -> str:
    return (importlib.resources.files("evener.report") / "templates" / name).read_text(encoding="utf-8")


def _plotly_js() -> str:
    """The library as the plotly package bundles it; importing the package itself would take longer than the page."""
    spec = importlib.util.find_spec("plotly")
    assert spec is not None, "plotly is a dependency of evener"
    assert spec.submodule_search_locations is not None
    bundle = Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    return bundle.read_text(encoding="utf-8").replace("</script", "<\\/script")
