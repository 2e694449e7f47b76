(() => {
  "use strict";

  // One layer of a picture at a time.
  for (const select of document.querySelectorAll(".layers .choose select")) {
    select.addEventListener("change", () => {
      for (const layer of select.closest(".layers").querySelectorAll("[data-layer]")) layer.hidden = layer.dataset.layer !== select.value;
    });
  }

  // The points of a line, in the values of the axes: its coordinates are ten-thousandths of the field's range.
  function points(path, [x0, x1, y0, y1]) {
    const found = [...path.getAttribute("d").matchAll(/[ML](\d+) (\d+)/g)];
    return found.map(([, x, y]) => ({ at: x / 1e4, x: x0 + (x / 1e4) * (x1 - x0), y: y1 - (y / 1e4) * (y1 - y0) }));
  }

  const told = (value) => Number(value.toPrecision(4)).toString();

  // What the lines say under the pointer, whichever pictures there are: a live page draws them anew.
  let shown = null, tip = null, rule = null;
  function hide() {
    tip?.remove();
    rule?.remove();
    shown = tip = null;
  }
  document.addEventListener("pointerleave", hide);
  document.addEventListener("pointermove", (event) => {
    const field = event.target.closest?.(".field");
    if (field !== shown) hide();
    if (!field) return;
    shown = field;
    const range = field.dataset.range.split(" ").map(Number);
    field.lines ??= [...field.querySelectorAll("path[data-name]")].map((path) => ({ name: path.dataset.name, points: points(path, range) }));
    const box = field.getBoundingClientRect(), at = (event.clientX - box.left) / box.width;
    const near = field.lines.filter((line) => line.points.length).map(({ name, points }) =>
      ({ name, ...points.reduce((a, b) => (Math.abs(b.at - at) < Math.abs(a.at - at) ? b : a)) }));
    if (!near.length) return;
    const closest = near.reduce((a, b) => (Math.abs(b.at - at) < Math.abs(a.at - at) ? b : a));
    // Of a stack, each line is the top of those below it, and the next in the document is the one below.
    const own = (line, i) => line.y - ("stacked" in field.dataset && i + 1 < near.length ? near[i + 1].y : 0);
    const rows = near.map((line, i) => `${line.name}  ${told(own(line, i))}`);
    if (!tip) {
      [tip, rule] = ["tip", "rule"].map((name) => Object.assign(document.createElement("div"), { className: name }));
      field.append(rule, tip);
    }
    tip.textContent = [`${field.dataset.x} ${told(closest.x)}`, ...rows].join("\n");
    rule.style.left = `${100 * closest.at}%`;
    tip.style.left = closest.at < 0.5 ? `calc(${100 * closest.at}% + .5rem)` : "auto";
    tip.style.right = closest.at < 0.5 ? "auto" : `calc(${100 * (1 - closest.at)}% + .5rem)`;
  });

  // On paper everything is unfolded.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const details of folded) details.open = true;
  });
  addEventListener("afterprint", () => { for (const details of folded) details.open = false; });
})();
