(() => {
  "use strict";

  // One layer of a picture at a time.
  for (const select of document.querySelectorAll(".layers .choose select")) {
    select.addEventListener("change", () => {
      for (const layer of select.closest(".layers").querySelectorAll("[data-layer]")) layer.hidden = layer.dataset.layer !== select.value;
    });
  }

  // The points of a line as recorded, and where they are across the field: what is beyond its edge is drawn at it.
  function points({ xs, ys }, [x0, x1]) {
    const [x, y] = [xs, ys].map((values) => (values ? values.split(" ").map(Number) : []));
    return x.map((value, i) => ({ at: x1 > x0 ? (value - x0) / (x1 - x0) : 0.5, x: value, y: y[i] }));
  }

  const told = (value) => (Number.isInteger(value) ? value : Number(value.toPrecision(4))).toString();

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
    field.lines ??= [...field.querySelectorAll("path[data-name]")].map((path) => ({ name: path.dataset.name, points: points(path.dataset, range) }));
    const box = field.getBoundingClientRect(), at = (event.clientX - box.left) / box.width;
    const near = field.lines.filter((line) => line.points.length).map(({ name, points }) =>
      ({ name, ...points.reduce((a, b) => (Math.abs(b.at - at) < Math.abs(a.at - at) ? b : a)) }));
    if (!near.length) return;
    const closest = near.reduce((a, b) => (Math.abs(b.at - at) < Math.abs(a.at - at) ? b : a));
    const rows = near.map((line) => `${line.name}  ${told(line.y)}`);
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
