"""How do text, tables and figures become one file that opens offline and runs nothing that stood in the data?"""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from evener.report.figures import Figure

# The page may fetch nothing: what it needs is inside it.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


class Html(str):
    """Text that is HTML already. All other text is escaped where it enters the page."""


def html(value: object) -> Html:
    """A value as HTML; None is what it is when nobody measured it."""
    if isinstance(value, Html):
        return value
    return Html(escape("not measured" if value is None else str(value)))


def tag(name: str, *children: object, **attributes: str) -> Html:
    """An element. `class_` is the attribute class, `data_figure` is data-figure.

    >>> tag("p", "1 < 2", tag("b", "!"), class_="soft")
    '<p class="soft">1 &lt; 2<b>!</b></p>'
    """
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{joined(children)}</{name}>")


def joined(parts: Iterable[object]) -> Html:
    """Parts one after another."""
    return Html("".join(map(html, parts)))


def section(title: str, *children: object) -> Html:
    """A chapter of the page."""
    return tag("section", tag("h2", title), *children)


def panel(*children: object) -> Html:
    """A framed area."""
    return tag("div", *children, class_="panel")


def plot(name: str) -> Html:
    """The place of the figure of that name."""
    return tag("div", id=name, class_="plot")


def legend(figure: Figure) -> Html:
    """What the colours of a figure mean. As text beside it, it wraps on a telephone and is read aloud."""
    entries = []
    for trace in figure["data"]:
        style = trace.get("line", {}) | trace.get("marker", {})
        kind = "swatch dashed" if trace.get("line", {}).get("dash") else "swatch"
        entries.append(tag("li", tag("span", "", class_=kind, style=f"color:{style['color']}"), trace["name"]))
    return tag("ul", *entries, class_="legend")


def share_bar(share: float) -> Html:
    """A bar as long as a share of 1."""
    return tag("div", tag("span", "", style=f"width:{share:.1%}"), class_="bar")


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: Sequence[int] = ()) -> Html:
    """A table; `numbers` are the columns that are aligned to the right."""

    def cells(kind: str, row: Sequence[object]) -> Html:
        return joined(
            tag(kind, cell, class_="number") if column in numbers else tag(kind, cell)
            for column, cell in enumerate(row)
        )

    body = tag("tbody", *(tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", tag("thead", tag("tr", cells("th", head))), body), class_="scroll")


def fact_table(facts: Mapping[str, object]) -> Html:
    """Names and what they are."""
    return tag("table", *(tag("tr", tag("td", name), tag("td", fact)) for name, fact in facts.items()), class_="fact")


def facts(figures: Mapping[str, tuple[object, object]]) -> Html:
    """The row of large figures: name, value, and a remark below it."""
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", _shown(value), tag("small", remark) if remark else ""))
            for name, (value, remark) in figures.items()
        ),
        class_="facts",
    )


def _shown(value: object) -> Html:
    return tag("span", value, class_="missing") if value is None else html(value)


def document(title: str, body: Html, figures: Mapping[str, Figure]) -> str:
    """The whole file. `figures` are drawn into the places that `plot` made."""
    ours = importlib.resources.files("evener.report")
    style, script = ((ours / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{escape(title)}</title><style>{style}</style></head>",
        f"<body><main>{body}</main>",
        f'<script type="application/json" id="figures">{data}</script>',
        f"<script>{_plotly_js()}</script>",
        f"<script>{script}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _plotly_js() -> str:
    """The library as the plotly package bundles it; importing the package itself would take longer than the page."""
    spec = importlib.util.find_spec("plotly")
    assert spec is not None, "plotly is a dependency of evener"
    assert spec.submodule_search_locations is not None
    bundle = Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    return bundle.read_text(encoding="utf-8").replace("</script", "<\\/script")
