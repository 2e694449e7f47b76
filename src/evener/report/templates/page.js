(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const PAPER_WIDTH = 660;

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // The page's colours and typeface, whatever the theme; what the figure itself says wins.
  function dressed(layout) {
    const narrow = root.clientWidth < 576;
    const axis = { gridcolor: colour("--line"), linecolor: colour("--line"), zeroline: false, automargin: true,
                   title: { font: { size: 12 } } };
    const withTitle = (own) => ({ ...axis, ...own, title: { ...axis.title, text: own && own.title, standoff: 8 } });
    return {
      ...layout,
      xaxis: withTitle(layout.xaxis),
      yaxis: withTitle(layout.yaxis),
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 12.5, color: colour("--soft") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: narrow ? 40 : 52, r: 8, t: 8, b: 40 },
      annotations: (layout.annotations || []).map((note) => ({ ...note, bgcolor: colour("--panel"), borderpad: 2 })),
      showlegend: false,
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
      dragmode: narrow ? false : "zoom",
      width: root.classList.contains("on-paper") ? PAPER_WIDTH : undefined,
    };
  }

  function draw() {
    for (const [id, figure] of Object.entries(figures)) {
      Plotly.react(id, figure.data, dressed(figure.layout), { displayModeBar: false, responsive: true });
    }
  }

  for (const select of document.querySelectorAll("select[data-figure]")) {
    select.addEventListener("change", () => {
      const figure = figures[select.dataset.figure];
      for (const trace of figure.data) trace.visible = trace.meta === select.value;
      draw();
    });
  }

  let unfolded = [];
  addEventListener("beforeprint", () => {
    root.classList.add("on-paper");
    unfolded = [...document.querySelectorAll("details:not([open])")];
    for (const details of unfolded) details.open = true;
    draw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("on-paper");
    for (const details of unfolded) details.open = false;
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
