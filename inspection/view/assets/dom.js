// Elements and texts. Text is only ever inserted as text; this page never turns a string into HTML.

const $ = (id) => document.getElementById(id);

/** An element with attributes, listeners (values that are functions) and children, which may be nested lists. */
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key, value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const ICONS = {
  larger: "M3 3h5v2H5v3H3zM13 13H8v-2h3V8h2z",
  first: "M4 3h2v10H4zM13 3v10L7 8z",
  last: "M10 3h2v10h-2zM3 3v10l6-5z",
  play: "M4 2.5v11l9-5.5z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  up: "M8 4l5 6-1.2 1L8 6.4 4.2 11 3 10z",
  down: "M8 12L3 6l1.2-1L8 9.6 11.8 5 13 6z",
  back: "M10.5 2.5L12 4 8 8l4 4-1.5 1.5L5 8z",
  system: "M8 1.5a6.5 6.5 0 1 1 0 13zM8 1.5a6.5 6.5 0 1 0 0 13v-1.3A5.2 5.2 0 1 1 8 2.8z",
  light: "M8 4.6a3.4 3.4 0 1 1 0 6.8 3.4 3.4 0 0 1 0-6.8zM7.4 1h1.2v2H7.4zM7.4 13h1.2v2H7.4zM1 7.4h2v1.2H1zM13 7.4h2v1.2h-2zM2.6 3.4l.8-.8 1.5 1.5-.8.8zM11.1 11.9l.8-.8 1.5 1.5-.8.8zM12.6 2.6l.8.8-1.5 1.5-.8-.8zM4.1 11.1l.8.8-1.5 1.5-.8-.8z",
  dark: "M6.2 1.8A6.4 6.4 0 1 0 14.2 10 5.6 5.6 0 0 1 6.2 1.8z",
};

/** A small drawing, since fonts lack many symbols. */
function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  for (const [key, value] of Object.entries({ viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" })) svg.setAttribute(key, value);
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

const count = (n) => n.toLocaleString("en");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const percent = (x, digits = 0) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(digits)} %`);
const fixed = (x, digits = 2) => (x === null || x === undefined ? "–" : (Number(x.toFixed(digits)) || 0).toFixed(digits).replace("-", "−"));
const signed = (x) => (x > 0 ? `+${fixed(x)}` : fixed(x));

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f]/g;
const INVISIBLE = /[\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** The text with control characters as pictures (␛) and invisible ones by number, since both can hide or reorder text. */
function visible(text) {
  return text
    .replace(/\r\n/g, "\n")
    .replace(CONTROL, (c) => (c === "\u007f" ? "\u2421" : String.fromCharCode(0x2400 + c.charCodeAt(0))))
    .replace(INVISIBLE, (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

const CLIPPED = 20000;

/** A block of text; a very long one is cut, with a button for the rest. */
function textBlock(text, className) {
  const shown = visible(text.slice(0, CLIPPED));
  const block = h("div", { class: `text ${className || ""}` }, shown);
  if (text.length <= CLIPPED) return block;
  const more = h("button", { type: "button", class: "link", click: () => {
    block.textContent = visible(text);
    more.remove();
  } }, `Show all ${count(text.length)} characters`);
  return h("div", null, block, more);
}

function announce(text) {
  $("live").textContent = text;
}

const mean = (values) => (values.length ? values.reduce((sum, x) => sum + x, 0) / values.length : null);

/** The standard error of a share of n: binomial, as on the console; null for fewer than two. */
const shareError = (p, n) => (p === null || n < 2 ? null : Math.sqrt((p * (1 - p)) / n));

/** The mean of a number over the repeats of each task and seed, which are not independent; null counts as missing. */
function seedMeans(rows, numberOf) {
  const found = new Map();
  rows.forEach((row, i) => {
    const key = JSON.stringify([row.task, row.seed ?? { i }]);
    const number = numberOf(row) ?? null;
    if (number !== null) found.set(key, [...(found.get(key) || []), number]);
  });
  return new Map([...found].map(([key, numbers]) => [key, mean(numbers)]));
}

const wonOf = (row) => (row.success === null ? null : row.success ? 1 : 0);

/** The standard error of a mean; null for fewer than two values. */
function standardError(values) {
  if (values.length < 2) return null;
  const m = mean(values);
  return Math.sqrt(values.reduce((sum, x) => sum + (x - m) ** 2, 0) / (values.length - 1) / values.length);
}
