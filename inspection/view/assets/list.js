// The list of episodes: filters, order, and rows that exist only while they are in view.

const ROW_HEIGHT = 56;
const VALID = {
  "": "any",
  all: "100 %",
  most: "95 % and more",
  some: "below 95 %",
  few: "below 50 %",
};
const VALID_TEST = { all: (v) => v === 1, most: (v) => v >= 0.95, some: (v) => v < 0.95, few: (v) => v < 0.5 };
const SORTS = {
  "": "file order",
  "difference+": "only one won first",
  "return-": "highest return",
  "return+": "lowest return",
  "turns-": "longest",
  "turns+": "shortest",
  "valid+": "least valid",
  "progression+": "least progression",
  "seed+": "seed",
};

function outcomeOf(entry) {
  const [a, b] = entry.rows.map(outcome);
  return page.head.runs.length < 2 ? a : `A ${a}, B ${b}`;
}

function valuesOf(entry, key) {
  if (key === "outcome") return [outcomeOf(entry)];
  if (key === "update") return entry.rows.filter((row) => row && row.update !== undefined).map((row) => String(row.update));
  return entry.rows.filter(Boolean).map((row) => row[key]).filter((value) => value !== undefined);
}

/** Whether an entry passes the filters. */
function passes(entry) {
  for (const [key, wanted] of Object.entries(state.filters)) {
    if (key === "valid") {
      const test = VALID_TEST[wanted];
      if (test && !entry.rows.some((row) => row && row.valid !== null && test(row.valid))) return false;
    } else if (!valuesOf(entry, key).includes(wanted)) return false;
  }
  return true;
}

/** In a comparison: 0 if only B won, 1 if only A won, then pairs with the same result, then those without a partner. */
function differenceOf(entry) {
  const [a, b] = entry.rows.map(outcome);
  if (a === "missing" || b === "missing") return 3;
  return a === b || (a !== "won" && b !== "won") ? 2 : b === "won" ? 0 : 1;
}

function sorted(entries) {
  const key = state.sort.slice(0, -1);
  if (!SORTS[state.sort] || !key) return entries;
  const direction = state.sort.endsWith("+") ? 1 : -1;
  const value = (entry) => (key === "difference" ? differenceOf(entry) : firstRow(entry)[key]);
  const missing = (x) => (x === null || x === undefined ? 1 : 0);
  return [...entries].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    return direction * (typeof x === "number" && typeof y === "number" ? x - y : collate(x, y)) || a.number - b.number;
  });
}

/** Build the select boxes; a filter with a single value is left out. */
function renderFilters() {
  const boxes = FILTERS.map((key) => {
    const values = key === "valid" ? Object.keys(VALID).slice(1)
      : [...new Set(page.entries.flatMap((entry) => valuesOf(entry, key)))].filter((x) => x !== "").sort(collate);
    if (values.length < 2 && !state.filters[key]) return null;
    if (key === "setting" && !state.filters.setting && page.entries.every((entry) => firstRow(entry).setting === `update ${firstRow(entry).update}`)) return null;
    const label = { stop: "ended by", valid: "valid actions", study: "run" }[key] || key;
    const options = values.map((value) => h("option", { value }, key === "valid" ? VALID[value] : value));
    return selectBox(label, [h("option", { value: "" }, key === "valid" ? "any" : "all"), ...options], state.filters[key] || "",
      (value) => setFilters({ ...state.filters, [key]: value }), key);
  });
  const orders = Object.entries(SORTS).filter(([value]) => page.head.runs.length > 1 || value !== "difference+").map(([value, text]) => h("option", { value }, text));
  boxes.push(selectBox("order", orders, state.sort, (value) => {
    state.sort = value;
    applyFilters();
  }, "sort"));
  $("selects").replaceChildren(...boxes.filter(Boolean));
}

function selectBox(label, options, value, choose, key) {
  const box = h("select", { id: `select-${key}`, change: (event) => choose(event.target.value) }, options);
  box.value = value;
  return h("label", { class: value ? "set" : "" }, h("span", null, label), box);
}

function setFilters(filters) {
  state.filters = Object.fromEntries(Object.entries(filters).filter(([, value]) => value));
  renderFilters();
  applyFilters();
}

/** Recompute the entries shown, after a change of filters, order or search. */
function applyFilters() {
  const found = search.found();
  page.shown = sorted(page.entries.filter((entry) => (!found || found.has(entry.number)) && passes(entry)));
  writeAddress();
  renderCount();
  renderStrip();
  list.render();
  if (!state.episode) renderOverview();
}

function renderCount() {
  const all = page.entries.length;
  const isPart = page.shown.length !== all;
  const pairs = page.shown.filter((entry) => entry.rows[0] && entry.rows[1]).length;
  const known = page.isPaired && pairs < page.shown.length ? `, ${plural(pairs, "pair")}` : "";
  const word = page.isPaired && !known ? "pair" : "episode";
  const text = (isPart ? `${count(page.shown.length)} of ${plural(all, word)}` : plural(all, word)) + known;
  const clear = h("button", { type: "button", class: "link", click: clearAll }, "Clear");
  $("count").replaceChildren(text, search.progress(), isPart || state.q ? clear : "");
  if (isPart) announce(`${text} shown`);
}

function clearAll() {
  $("search").value = "";
  search.start("");
  setFilters({});
}

const list = {
  /** Draw the rows in view. */
  render() {
    const box = $("list");
    const rows = $("list-rows");
    rows.style.height = `${page.shown.length * ROW_HEIGHT}px`;
    const first = Math.max(0, Math.floor(box.scrollTop / ROW_HEIGHT) - 5);
    const last = Math.min(page.shown.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW_HEIGHT) + 5);
    rows.replaceChildren(...page.shown.slice(first, last).map((entry, i) => listRow(entry, first + i)));
    if (!page.shown.length) rows.append(h("p", { class: "empty" }, emptyText()));
    const selected = rows.querySelector("[aria-selected=true]");
    if (selected) box.setAttribute("aria-activedescendant", selected.id);
    else box.removeAttribute("aria-activedescendant");
  },

  /** Scroll so that the selected entry can be seen. */
  reveal() {
    const place = page.shown.findIndex((entry) => entry.number === state.episode);
    const box = $("list");
    const top = place * ROW_HEIGHT;
    if (place >= 0 && (top < box.scrollTop || top + ROW_HEIGHT > box.scrollTop + box.clientHeight)) {
      box.scrollTop = top - box.clientHeight / 2 + ROW_HEIGHT / 2;
    }
    list.render();
  },

  /** Open the next entry of the list (or the one before, for -1). */
  step(by) {
    const place = page.shown.findIndex((entry) => entry.number === state.episode);
    const next = place < 0 ? (by > 0 ? 0 : page.shown.length - 1) : place + by;
    if (page.shown[next]) openEpisode(page.shown[next].number, 1, true);
  },
};

const MARKS = { won: "✓", lost: "✗", failed: "!", played: "•", missing: "–" };

/** The progression of a lost episode that reached a part of its goal, as in games that are hardly ever won. */
const partOf = (row) => (row && outcome(row) === "lost" && row.progression > 0 && row.progression < 1 ? row.progression : null);

function mark(row) {
  const result = outcome(row);
  const part = partOf(row);
  if (part !== null) return h("span", { class: "mark part", title: `lost, progression ${percent(part)}` }, percent(part).replace(" ", "\u2009"));
  return h("span", { class: `mark ${result}`, title: result }, MARKS[result]);
}

/** The seed. The list shows only the last digits of a long one, to leave room; a text already says what it is. */
function seedText(seed, isLong = false) {
  if (seed === null || seed === undefined) return "";
  if (typeof seed === "string") return visible(seed);
  return isLong || seed < 1e7 ? `seed ${seed}` : `…${String(seed).slice(-4)}`;
}

/** The turns of an episode, and in how many of them the model wrote its notes. */
const turnsText = (row) => (row.notes ? `${plural(row.answers, "turn")}, ${count(row.notes)} of them notes` : plural(row.turns, "turn"));

function listRow(entry, place) {
  const row = firstRow(entry);
  const facts = typeof row.seed === "string" && row.player === TRAINING ? [] : [turnsText(row)];
  if (row.return !== null) facts.push(`return ${fixed(row.return)}`);
  if (row.valid !== null && row.valid < 1 && row.player !== TRAINING) facts.push(`${percent(row.valid)} valid`);
  const ended = { failed: "failed", terminated: "", time_limit: "time limit", max_turns: "turn limit" }[row.stop] ?? row.stop.replace("_", " ");
  if (ended) facts.push(ended);
  const label = `Episode ${entry.number}, ${row.task}, ${seedText(row.seed, true)}, ${outcomeOf(entry)}, ${facts.join(", ")}`;
  const detail = entry.rows.length > 1 ? `${entry.rows.map((r) => (r ? count(r.turns) : "–")).join(" and ")} turns` : facts.join(" · ");
  const element = h("div", {
    class: "row", role: "option", id: `entry-${entry.number}`, "aria-label": label, "aria-posinset": place + 1,
    "aria-setsize": page.shown.length, "aria-selected": String(entry.number === state.episode),
    click: () => openEpisode(entry.number, 1, true),
  }, h("span", { class: "marks" }, entry.rows.map(mark)),
  h("span", { class: "line-1" }, h("b", null, row.task), row.study ? h("i", null, row.study) : null, row.setting !== "-" ? h("i", null, row.setting) : null,
    h("span", null, `#${entry.number}`)),
  h("span", { class: "line-2" }, h("span", null, detail),
    h("span", { title: seedText(row.seed, true) }, seedText(row.seed))));
  element.style.top = `${place * ROW_HEIGHT}px`;
  return element;
}
