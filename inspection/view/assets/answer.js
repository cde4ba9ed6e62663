// An answer: reasoning apart from the action, or its tokens coloured by a value.

/** Split an answer as the environments do: `<think>` blocks, then the text after the last ACTION marker. */
function splitAnswer(response) {
  const parts = [];
  let rest = response;
  const end = response.lastIndexOf("</think>");
  if (end >= 0) {
    parts.push({ kind: "reasoning", text: response.slice(0, end).replace(/^\s*<think>/, "") });
    rest = response.slice(end + "</think>".length);
  }
  for (const marker of ["ACTION:", "action:", "Action", "<tool_call>"]) {
    const at = rest.lastIndexOf(marker);
    if (at < 0) continue;
    parts.push({ kind: "reasoning", text: rest.slice(0, at).replace(/^\s*THINK:/, "") });
    const isCall = marker === "<tool_call>";
    parts.push({ kind: "action", text: rest.slice(isCall ? at : at + marker.length).replace(/^:/, "") });
    return parts.filter((part) => part.text.trim());
  }
  parts.push({ kind: parts.length ? "action" : "text", text: rest });
  return parts.filter((part) => part.text.trim());
}

const PART_NAMES = { reasoning: "Reasoning", action: "Action", text: null };

function answerBlocks(response) {
  const parts = splitAnswer(response);
  if (!parts.length) return [h("p", { class: "muted" }, "The answer is empty.")];
  return parts.map((part) => h("div", { class: `part ${part.kind}` },
    PART_NAMES[part.kind] ? h("span", { class: part.kind === "action" ? "label" : "hidden" }, PART_NAMES[part.kind]) : null, textBlock(part.text.trim())));
}

// Tokens ---------------------------------------------------------------------------------------------------------

const COLOUR_NAMES = {
  loss_mask: "loss mask",
  log_probs: "log-probability",
  rollout_log_probs: "log-probability in the engine",
  ref_log_probs: "log-probability under the reference",
  values: "value",
  advantages: "advantage as trained on",
  returns: "return",
  kl: "KL",
  entropy: "entropy",
};
const ONE_SIDED = new Set(["log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "entropy"]);
const colourName = (key) => COLOUR_NAMES[key] || key.replaceAll("_", " ");

function tokenColumns(episodes) {
  const keys = new Set();
  for (const episode of episodes) for (const turn of episode.turns) for (const key of Object.keys(turn.tokens || {})) keys.add(key);
  keys.delete("text");
  return [...keys];
}

/** The value that gets the full colour: the 98th percentile of the magnitudes. */
function colourLimit(episodes, key) {
  const sizes = [];
  for (const episode of episodes) for (const turn of episode.turns) for (const x of (turn.tokens || {})[key] || []) if (x !== null) sizes.push(Math.abs(x));
  sizes.sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.98 * sizes.length))] || 1 : 1;
}

const BLUE = "59 125 216";
const ORANGE = "222 122 24";

/** The background of a token; blue for values above zero, orange below, stronger the further away. */
function tokenColour(key, value, limit) {
  if (value === null || value === undefined) return "transparent";
  if (key === "loss_mask") return value ? `rgb(${BLUE} / 0.28)` : "transparent";
  const share = Math.min(1, Math.abs(value) / limit);
  return `rgb(${value < 0 ? ORANGE : BLUE} / ${(0.62 * share).toFixed(3)})`;
}

function describeToken(tokens, i) {
  const values = Object.keys(tokens).filter((key) => key !== "text").map((key) => `${colourName(key)} ${tokens[key][i] ?? "–"}`);
  return `“${visible(tokens.text[i])}”: ${values.join(", ")}`.replace(/-(?=[\d.])/g, "−");
}

/**
 * The answer's tokens, coloured; the value shows on hover, and with the arrow keys once the block has the focus. `choose`
 * gets the number of a token that was chosen.
 */
function tokenBlock(tokens, key, limit, choose) {
  const masked = (i) => key === "loss_mask" && !tokens.loss_mask[i];
  const spans = tokens.text.map((text, i) => {
    const span = h("span", { class: masked(i) ? "token off" : "token", "data-i": i, tabindex: -1 }, visible(text));
    span.style.backgroundColor = tokenColour(key, (tokens[key] || [])[i], limit);
    return span;
  });
  const tell = (event) => {
    const span = event.target.closest(".token");
    if (!span) return;
    const text = describeToken(tokens, Number(span.dataset.i));
    span.title = text;
    $("token-value")?.replaceChildren(text);
    if (event.type === "mouseover") return;
    announce(text);
    choose(Number(span.dataset.i));
  };
  return h("div", { class: "text tokens", role: "group", tabindex: 0, "aria-label": `Tokens by ${colourName(key)}; arrow keys move`,
    mouseover: tell, focusin: tell, click: tell, keydown: (event) => moveToken(event, spans) }, spans);
}

function moveToken(event, spans) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const next = spans[spans.indexOf(event.target) + by];
  if (next) next.focus();
  event.preventDefault();
  event.stopPropagation();
}

/** The choice of the colour, and what the colours mean. */
function colourLegend(episodes, change) {
  const columns = tokenColumns(episodes);
  if (!columns.length) return page.entries.some((entry) => firstRow(entry).player === TRAINING) ? trainingHint() : null;
  if (!columns.includes(page.colour)) page.colour = page.colour === null && columns.includes("advantages") ? "advantages" : "";
  const box = h("select", { id: "colour", change: (event) => change(event.target.value) },
    h("option", { value: "" }, "nothing"), columns.map((key) => h("option", { value: key }, colourName(key))));
  box.value = page.colour;
  return h("div", { class: "colours" }, h("label", null, h("span", null, "Colour tokens by"), box),
    page.colour ? colourScale(episodes, page.colour) : null, h("p", { id: "token-value", class: "muted" }, page.colour ? "Click a token to see what made its advantage." : ""), h("div", { id: "credit" }));
}

/** Open a training episode of the update that is nearest to this episode's. */
function openSample() {
  const { update } = firstRow(page.entries.find((entry) => entry.number === state.episode));
  const kept = page.head.episodes.filter((row) => row.player === TRAINING).map((row) => row.update);
  const nearest = kept.reduce((best, u) => (Math.abs(u - update) < Math.abs(best - update) ? u : best));
  setFilters({ player: TRAINING, update: String(nearest) });
  if (page.shown.length) openEpisode(page.shown[0].number, 1, true); // a search may hide them all
}

const trainingHint = () => h("p", { class: "muted small" }, "Values and advantages are recorded for ",
  h("button", { type: "button", class: "link", click: openSample }, "the sample of training"), ", not for held-out episodes.");

function colourScale(episodes, key) {
  if (key === "loss_mask") {
    return h("p", { class: "scale" }, h("span", { class: "swatch trained" }, "trained on"), h("span", { class: "swatch off" }, "not trained on"));
  }
  const limit = colourLimit(episodes, key);
  const bar = h("span", { class: `gradient ${ONE_SIDED.has(key) ? "one" : "two"} ${key === "entropy" ? "up" : ""}`, "aria-hidden": "true" });
  const ends = ONE_SIDED.has(key) ? (key === "entropy" ? [0, limit] : [-limit, 0]) : [-limit, limit];
  const text = (x) => String(Number(x.toPrecision(3))).replace("-", "−");
  return h("p", { class: "scale" }, h("span", null, text(ends[0])), bar, h("span", null, text(ends[1])));
}
