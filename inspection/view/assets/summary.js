// The header's line about the filtered episodes, and the overview with one table row per setting and task.

function statistics(rows) {
  // The sample of training holds chosen parts of episodes, so it tells nothing about the share that is won.
  const sampled = rows.every((row) => row.player === TRAINING);
  const known = sampled ? [] : rows.map(wonOf).filter((x) => x !== null);
  const numbers = (key) => rows.map((row) => row[key]).filter((x) => x !== null && x !== undefined);
  const wins = [...seedMeans(sampled ? [] : rows, wonOf).values()];
  const returns = [...seedMeans(rows, (row) => row.return).values()];
  const win = mean(wins);
  return {
    n: rows.length,
    sampled: sampled && rows.length > 0,
    win,
    winError: wins.length < known.length ? standardError(wins) : shareError(win, known.length),
    return: mean(returns),
    returnError: standardError(returns),
    progression: sampled ? null : mean(numbers("progression")),
    turns: mean(numbers("turns")),
    valid: weightedValid(rows),
    failed: rows.filter((row) => outcome(row) === "failed").length,
  };
}

/** The share of valid actions among all turns, so that long episodes count more. */
function weightedValid(rows) {
  const known = rows.filter((row) => row.valid !== null && row.turns);
  const turns = known.reduce((sum, row) => sum + row.turns, 0);
  return turns ? known.reduce((sum, row) => sum + row.valid * row.turns, 0) / turns : null;
}

const withError = (value, error, digits = 1) =>
  value === null ? "–" : `${(100 * value).toFixed(digits)}${error === null ? "" : ` ± ${(100 * error).toFixed(digits)}`} %`;

const TRAINING = "training";

/** The rows that one number may describe: of an evaluation if there are any, and of the last update among them. */
function latest(rows) {
  const evaluated = rows.filter((row) => row.player !== TRAINING);
  const kept = evaluated.length ? evaluated : rows;
  const updates = new Set(kept.map((row) => row.update));
  if (updates.has(undefined) || !updates.size) return { rows: kept, update: null };
  const update = Math.max(...updates);
  return { rows: kept.filter((row) => row.update === update), update };
}

function renderStrip() {
  const both = page.shown.filter((entry) => entry.rows[0] && entry.rows[1]);
  const parts = page.head.runs.map((name, run) => {
    const { rows, update } = latest((both.length ? both : page.shown).map((entry) => entry.rows[run]).filter(Boolean));
    const s = statistics(rows);
    const label = page.head.runs.length > 1 ? h("b", { class: `run run-${run}` }, "AB"[run]) : null;
    if (page.head.studies.length > 1 && page.head.runs.length < 2) return h("span", { class: "facts" }, h("span", null, `${page.head.studies.length} runs`), h("span", null, plural(page.shown.length, "episode")));
    const facts = [...(update === null ? [] : [`update ${update}`]), plural(s.n, "episode"), ...(s.sampled ? ["a sample of training"] : [])];
    if (s.win !== null && s.failed < s.n && (s.win || !s.progression)) facts.push(`${withError(s.win, s.winError)} won`);
    else if (s.progression !== null && s.failed < s.n) facts.push(`${percent(s.progression, 1)} progression`);
    if (s.turns !== null) facts.push(`${s.turns.toFixed(1)} turns`);
    if (s.valid !== null) facts.push(`${percent(s.valid, 1)} valid`);
    return h("span", { class: "facts" }, label, ...facts.map((fact) => h("span", null, fact)), failedWords(s));
  });
  $("strip").replaceChildren(...parts);
}

const failedWords = (s) => (s.failed ? h("span", { class: "failed" }, `${count(s.failed)} of ${plural(s.n, "episode")} failed`) : null);

const COLUMNS = [
  ["Episodes", (s) => count(s.n)],
  ["Won ± standard error", (s) => (s.n && s.failed === s.n ? "–" : winCell(s))],
  ["Return", (s) => (s.return === null ? "–" : `${fixed(s.return)}${s.returnError === null ? "" : ` ± ${fixed(s.returnError)}`}`)],
  ["Progression", (s) => percent(s.progression, 1)],
  ["Turns", (s) => fixed(s.turns, 1)],
  ["Valid actions", (s) => h("span", { class: s.valid !== null && s.valid < 0.8 ? "warn" : "" }, percent(s.valid, 1))],
  ["Failed", (s) => h("span", { class: s.failed ? "failed" : "" }, count(s.failed))],
];

function winCell(s) {
  const bar = h("span", { class: "bar", "aria-hidden": "true" }, h("span"));
  bar.firstChild.style.width = `${100 * (s.win || 0)}%`;
  return h("span", { class: "win" }, bar, h("span", null, withError(s.win, s.winError)));
}

function groupEntries(entries) {
  const groups = new Map();
  for (const entry of entries) {
    const { task, setting, player, study } = firstRow(entry);
    const key = JSON.stringify([study, task, setting, player]);
    if (!groups.has(key)) groups.set(key, { task, setting, player, study, entries: [] });
    groups.get(key).entries.push(entry);
  }
  return [...groups.values()].sort((a, b) => collate(a.task, b.task) || collate(a.setting, b.setting));
}

const collate = (a, b) => String(a).localeCompare(String(b), "en", { numeric: true });

function renderOverview() {
  const isPair = page.head.runs.length > 1;
  const evaluated = page.shown.filter((entry) => firstRow(entry).player !== TRAINING);
  const groups = groupEntries(evaluated.length ? evaluated : page.shown);
  const names = ["task", "study", "setting", "player"].filter((key) => key === "task" || new Set(groups.map((g) => g[key])).size > 1);
  const heads = [...names.map((name) => (name === "study" ? "Run" : name[0].toUpperCase() + name.slice(1))), ...(isPair ? ["Run"] : []), ...COLUMNS.map(([name]) => name)];
  const body = groups.flatMap((group) => groupRows(group, names, isPair));
  const table = h("table", { class: "summary" },
    h("caption", { class: "hidden" }, "Results per task and setting"),
    h("thead", null, h("tr", null, heads.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", null, body));
  $("main").replaceChildren(h("section", { class: "overview", "aria-labelledby": "overview-title" },
    h("h2", { id: "overview-title" }, "Overview"),
    isPair ? pairLegend() : h("p", { class: "muted" }, page.head.runs[0]),
    ...renderRun().filter(Boolean),
    page.head.studies.length ? h("h3", null, "Episodes") : "",
    page.shown.length ? h("div", { class: "table" }, table) : h("p", null, emptyText()),
    h("p", { class: "muted" }, "Choose a task to filter the list by it, or an episode to read it. Press ? for the keyboard.")));
}

const emptyText = () => (page.entries.length ? "No episode matches the filters." : "There are no episodes yet.");

function pairLegend() {
  const lines = page.head.runs.map((name, run) => h("p", null, h("b", { class: `run run-${run}` }, "AB"[run]), " ", name));
  const pairs = page.shown.filter((entry) => entry.rows[0] && entry.rows[1]);
  if (!page.isPaired) lines.push(h("p", { class: "difference" }, "No task and seed in common, so no episodes are paired."));
  const { update } = latest(pairs.map(firstRow));
  const both = pairs.filter((entry) => entry.rows.every((row) => row.success !== null) && (update === null || firstRow(entry).update === update));
  if (!both.length) return h("div", { class: "muted" }, lines);
  const [before, after] = [0, 1].map((run) => seedMeans(both.map((entry) => entry.rows[run]), wonOf));
  const differences = [...before].map(([seed, won]) => after.get(seed) - won);
  const m = mean(differences);
  const points = `${m > 0 ? "+" : ""}${withError(m, standardError(differences))}`.replace("-", "−").replace(" %", " points");
  const alone = [1, -1].map((side) => differences.filter((d) => d * side > 0).length);
  const words = differences.length < both.length ? ["B won more often", "A"] : ["only B won", "only A"];
  const [a, b] = both[0].rows.map((row) => row.update);
  const when = update === null ? "" : a === b ? ` at update ${a}` : ` at update ${a} of A and ${b} of B`;
  const text = `Win rate${when}, B − A: ${points} (standard error), over ${plural(differences.length, "pair")} with the same task and seed: ${words[0]} ${count(alone[0])}, ${words[1]} ${count(alone[1])}`;
  return h("div", { class: "muted" }, lines, h("p", { class: "difference" }, text));
}

function groupRows(group, names, isPair) {
  const rowsOf = (run) => group.entries.map((entry) => entry.rows[run]).filter(Boolean);
  const first = page.head.runs.findIndex((_, run) => rowsOf(run).length);
  return page.head.runs.map((_, run) => {
    const s = statistics(rowsOf(run));
    if (isPair && !s.n) return "";
    const choose = () => setFilters({ ...state.filters, ...Object.fromEntries(names.map((name) => [name, group[name]])) });
    const cells = names.map((name, i) => (i ? h("td", null, group[name]) : h("th", { scope: "row" },
      run !== first ? group[name] : h("button", { type: "button", class: "link", click: choose }, group[name]))));
    const runCell = isPair ? [h("td", null, h("b", { class: `run run-${run}` }, "AB"[run]))] : [];
    return h("tr", { class: run !== first ? "second" : "" }, cells, runCell, COLUMNS.map(([, cell]) => h("td", { class: "n" }, cell(s))));
  });
}
