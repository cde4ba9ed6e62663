// Curves over updates, as SVG: a healthy range, errors, several runs, and points that open the episodes of an update.

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(key, value);
  element.append(...children.flat(9).filter(Boolean));
  return element;
}

const EDGE = { left: 44, right: 12, top: 10, bottom: 20 };

/** A short text of a number: 0.0123, 4.5, 120. */
function short(x) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  const text = size >= 100 || Number.isInteger(x) ? String(Math.round(x)) : size >= 1 ? x.toFixed(size >= 10 ? 1 : 2) : size >= 1e-3 ? String(Number(x.toPrecision(2))) : x.toExponential(0);
  return text.replace("-", "−");
}

const isOutside = (y, limit) => Boolean(limit) && y !== null && ((limit[0] !== null && y < limit[0]) || (limit[1] !== null && y > limit[1]));

/** The ends of a point's error bar; those of a share stay within 0 and 1. */
const errorEnds = (p) => [p.y - (p.error || 0), p.y + (p.error || 0)].map((end) => (p.isShare ? Math.max(0, Math.min(1, end)) : end));

/** A point in words; shares have three decimals, as on the console. */
function pointWords(p) {
  const text = (x) => (p.isShare ? fixed(x, 3) : short(x));
  return `${text(p.y)}${p.error ? ` ± ${text(p.error / 2)}` : ""}`;
}

/** The smallest range of y that shows all points and their errors, and edges of the healthy range that are near. */
function rangeOf(points, limit) {
  const values = points.flatMap(errorEnds);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const near = (high - low || Math.abs(high) || 1) * 0.6;
  for (const edge of limit || []) if (edge !== null && edge > low - near && edge < high + near) [low, high] = [Math.min(low, edge), Math.max(high, edge)];
  const pad = (high - low || Math.abs(high) || 1) * 0.04;
  return [low - pad, high + pad];
}

/** Up to five round numbers inside the range. */
function ticksOf(low, high) {
  const raw = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw) * power;
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(Number((k * step).toPrecision(6)));
  return found;
}

/**
 * A chart of `series`, each { name, points: [{ x, y, error }] }, where y may be null. `limit` is the healthy range,
 * `marks` are updates with an alarm, `span` are the first and last update, and `choose` gets the update of a click.
 */
function chart({ title, series, limit, marks, choose, isWide, note, span, unit = "update" }) {
  const known = series.flatMap((s) => s.points.filter((p) => p.y !== null));
  if (!known.length) return null;
  const [width, height] = isWide && innerWidth > 760 ? [960, 210] : [340, 128];
  const [first, last] = span;
  const [low, high] = rangeOf(known, limit);
  const inner = { width: width - EDGE.left - EDGE.right, height: height - EDGE.top - EDGE.bottom };
  const x = (u) => EDGE.left + ((u - first) / (last - first || 1)) * inner.width;
  const y = (v) => EDGE.top + (1 - (v - low) / (high - low)) * inner.height;
  const pointer = svg("g", { class: "pointer" });
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "curve", role: "img", tabindex: 0, "aria-label": chartWords(title, series, unit) },
    limit ? band(limit, [low, high], y, width) : null, axes({ low, high, first, last, x, y, width, height, unit }),
    (marks || []).map((u) => svg("path", { class: "alarm-mark", d: `M${x(u)} ${EDGE.top}v${inner.height}` })),
    series.map((s, i) => line(s, s.place ?? i, x, y, limit)), pointer);
  const value = h("span", { class: "value" }, latestWords(series));
  listenToChart(drawing, { known, x, y, pointer, value, series, width, height: inner.height, unit, choose });
  return h("figure", { class: isWide ? "chart wide" : "chart" },
    h("figcaption", null, h("b", null, title), value, (series.length > 1 || series[0].name) && (isWide || unit !== "update") ? legend(series) : null, note ? h("span", { class: "muted small" }, note) : null), drawing);
}

/** Six colours; the lines of a seventh and later series are dashed in other ways. */
const colour = (place) => `${place % 6} dash-${Math.floor(place / 6) % 4}`;
const colourKey = (place) => h("span", { class: `key key-${colour(place)}` });

const legend = (series) => h("span", { class: "legend" }, series.filter((s) => !s.isFaint).map((s, i) => h("span", null, colourKey(s.place ?? i), s.name)));

function latestWords(series) {
  const latest = series.filter((s) => !s.isFaint).map((s) => s.points.findLast((p) => p.y !== null)).filter(Boolean);
  return latest.length === 1 ? pointWords(latest[0]) : "";
}

function chartWords(title, series, unit) {
  const parts = series.filter((s) => !s.isFaint).map((s) => {
    const known = s.points.filter((p) => p.y !== null);
    const [a, b] = [known[0], known.at(-1)];
    return a ? `${s.name ? `${s.name}: ` : ""}${pointWords(a)} at ${unit} ${a.x}, ${pointWords(b)} at ${unit} ${b.x}` : "";
  });
  return `${title}. ${parts.filter(Boolean).join("; ")}. Arrow keys move, Enter opens what is there.`;
}

function band(limit, [low, high], y, width) {
  const [from, to] = [Math.max(limit[0] ?? low, low), Math.min(limit[1] ?? high, high)];
  if (from >= to) return null;
  return svg("rect", { class: "healthy", x: EDGE.left, width: width - EDGE.left - EDGE.right, y: y(to), height: y(from) - y(to) });
}

function axes({ low, high, first, last, x, y, width, height, unit }) {
  const label = (text, at, up, anchor) => {
    const element = svg("text", { x: at, y: up, "text-anchor": anchor });
    element.textContent = text;
    return element;
  };
  const rows = ticksOf(low, high).map((v) => [
    svg("path", { class: "grid", d: `M${EDGE.left} ${y(v)}H${width - EDGE.right}` }), label(String(v).replace("-", "−"), EDGE.left - 6, y(v) + 4, "end")]);
  return svg("g", { class: "axes" }, rows, label(`${unit} ${first}`, x(first), height - 4, "start"), last > first ? label(String(last), x(last), height - 4, "end") : null);
}

function line(s, i, x, y, limit) {
  const known = s.points.filter((p) => p.y !== null);
  const path = known.map((p, k) => `${k ? "L" : "M"}${x(p.x).toFixed(1)} ${y(p.y).toFixed(1)}`).join("");
  const errors = known.filter((p) => p.error && !s.isFaint).map((p) => svg("path", { class: "error", d: `M${x(p.x)} ${errorEnds(p).map(y).join("V")}` }));
  const isDotted = known.length <= 60 && !s.isFaint;
  const dots = known.filter((p) => isDotted || isOutside(p.y, limit)).map((p) =>
    svg("circle", { class: isOutside(p.y, limit) ? "dot-out" : "dot-in", cx: x(p.x).toFixed(1), cy: y(p.y).toFixed(1), r: 2.2 }));
  return svg("g", { class: `series series-${colour(i)}${s.isFaint ? " faint" : ""}` }, errors, svg("path", { class: "path", d: path }), dots);
}

/** The pointer and the arrow keys show the value of the nearest update; a click or Enter opens its episodes. */
function listenToChart(drawing, { known, x, y, pointer, value, series, width, height, unit, choose }) {
  const updates = [...new Set(known.map((p) => p.x))].sort((a, b) => a - b);
  let current = updates.length;
  const show = () => {
    const u = updates[current];
    const here = series.filter((s) => !s.isFaint).map((s) => [s, s.points.find((p) => p.x === u && p.y !== null)]).filter(([, p]) => p);
    pointer.replaceChildren(svg("path", { d: `M${x(u)} ${EDGE.top}v${height}` }), ...here.map(([, p]) => svg("circle", { cx: x(p.x), cy: y(p.y), r: 4 })));
    value.textContent = `${unit} ${u}: ${here.map(([s, p]) => `${s.name ? `${s.name} ` : ""}${pointWords(p)}`).join(", ")}`;
  };
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    current = updates.reduce((best, u, i) => (Math.abs(x(u) - at) < Math.abs(x(updates[best]) - at) ? i : best), 0);
    show();
  };
  drawing.addEventListener("pointermove", nearest);
  drawing.addEventListener("pointerleave", () => {
    pointer.replaceChildren();
    value.textContent = latestWords(series);
  });
  drawing.addEventListener("click", (event) => {
    nearest(event);
    choose?.(updates[current]);
  });
  drawing.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter" && updates[current] !== undefined) choose?.(updates[current]);
    if (!by) return;
    current = Math.max(0, Math.min(updates.length - 1, current + by));
    show();
    announce(value.textContent);
    event.preventDefault();
    event.stopPropagation();
  });
}
