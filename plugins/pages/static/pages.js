// Two conveniences; every page is complete without them.

// Inside Airflow's UI the pages take its theme, whatever the browser prefers.
function followTheme() {
  try {
    const outer = window.parent.document.documentElement;
    if (window.parent === window) return;
    const apply = () => {
      document.documentElement.dataset.theme = outer.classList.contains("dark") ? "dark" : "light";
    };
    new MutationObserver(apply).observe(outer, { attributes: true, attributeFilter: ["class"] });
    apply();
  } catch {
    // Embedded by another site's page: the browser's preference stays.
  }
}

// The values under the pointer, below each chart.
function readOut(figure) {
  const svg = figure.querySelector("svg[data-points]");
  if (!svg) return;
  const points = JSON.parse(svg.dataset.points);
  const cursor = svg.querySelector(".cursor");
  const output = figure.querySelector(".readout");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const share = Math.min(1, Math.max(0, (x - points.left) / (points.right - points.left)));
    const iteration = Math.round(points.first + share * (points.last - points.first));
    const at = points.left + ((iteration - points.first) / (points.last - points.first)) * (points.right - points.left);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.style.visibility = "visible";
    const said = points.series.map((line) => `${line.name} ${line.values[iteration] ?? "–"}`);
    output.textContent = `iteration ${iteration}: ${said.join(", ")}`;
  });
  svg.addEventListener("pointerleave", () => {
    cursor.style.visibility = "hidden";
    output.textContent = "";
  });
}

// The script may run before the page is there whole: the theme is taken at once, charts when they are there.
followTheme();
const readOutAll = () => document.querySelectorAll("figure.plot").forEach(readOut);
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", readOutAll);
else readOutAll();
