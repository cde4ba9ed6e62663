// How a run trained: its state in words, alarms, curves, speed and settings; several runs on the same axes.

const CURVES = [
  ["Reward per turn", "turn/reward"],
  ["Won, episodes that ended", "episode/success"],
  ["Return, episodes that ended", "episode/return"],
  ["Turns per episode", "episode/turns"],
  ["Valid actions", "turn/valid_action_ratio"],
  ["Answers cut by a limit", "turn/length_stop_ratio"],
  ["Tokens per answer", "turn/response_tokens"],
  ["KL to the first policy", "actor/ref_kl"],
  ["KL of one update", "actor/ppo_kl"],
  ["Entropy", "actor/entropy"],
  ["Explained variance", "critic/explained_variance"],
  ["Value loss", "critic/value_loss"],
  ["Staleness, in updates", "turn/staleness"],
  ["Turns per second of playing", "rollout/turns_per_s"],
];
const CHANGES = ["actor/ref_kl", "actor/ppo_kl", "actor/entropy", "turn/response_tokens", "turn/valid_action_ratio", "critic/value_loss"];
const CURVE_NAMES = Object.fromEntries(CURVES.map(([title, key]) => [key, title]));

const pointsOf = (study, key) => (study.columns[key] || []).map((y, i) => ({ x: study.columns.update[i], y }));

/** What held-out results are shown: the measure of the runs' verdicts; before there is one, success if anything was won. */
function measureOf(peers) {
  const decided = ["success", "progression", "return"].find((name) => peers.some((peer) => peer.about.verdict?.measure === name));
  const isWon = peers.some((peer) => Object.entries(peer.columns).some(([key, ys]) => /^eval\/(.*\/)?success$/.test(key) && ys.some((x) => x)));
  return decided || (isWon ? "success" : "return");
}

const HELD_OUT = { success: "Held-out episodes won", progression: "Held-out progression", return: "Held-out return" };

/** The held-out result of each evaluation with two standard errors. */
function evaluations(study, peers = [study]) {
  const { columns } = study;
  const tasks = (what) => Object.keys(columns).filter((key) => key.startsWith("eval/") && key.endsWith(`/${what}`) && key !== `eval/${what}`);
  const keys = (what) => (columns[`eval/${what}`] ? [`eval/${what}`] : tasks(what));
  const what = [measureOf(peers), "success", "return"].find((name) => keys(name).length) || "success";
  const points = columns.update.map((x, i) => {
    const found = keys(what).filter((key) => columns[key][i] !== null);
    if (!found.length) return { x, y: null };
    const values = found.map((key) => columns[key][i]);
    const squares = found.map((key, k) => {
      const known = columns[`${key}_se`]?.[i];
      const n = columns[key.replace(new RegExp(`/${what}$`), "/episodes")]?.[i];
      const error = known ?? (what === "success" && n ? shareError(values[k], n) : found.length > 1 ? 0 : meanError(study, x, what) || 0);
      return error ** 2;
    });
    return { x, y: mean(values), isShare: what === "success", error: (2 * Math.sqrt(squares.reduce((a, b) => a + b, 0))) / found.length };
  });
  return { title: HELD_OUT[what] + (isGrouped() ? ", mean over seeds" : " ± standard error; bars show two"), points: points.filter((p) => p.y !== null) };
}

/** The standard error of a held-out mean, from the page's episodes; the metrics have only the mean. */
function meanError(study, update, what) {
  const run = page.head.runs.length > 1 ? study.run : 0;
  const rows = page.head.episodes.filter((row) => row.update === update && !row.fault && row.player !== TRAINING && (row.run || 0) === run && (!row.study || row.study === study.name));
  return standardError(rows.map((row) => row[what]).filter((x) => x !== null));
}

/** Show the episodes of an update: those that were kept of it, or of the nearest one. */
function openUpdate(update) {
  const kept = [...new Set(page.head.episodes.map((row) => row.update).filter((u) => u !== undefined))];
  if (!kept.length) return;
  const nearest = kept.reduce((best, u) => (Math.abs(u - update) < Math.abs(best - update) ? u : best));
  document.body.classList.remove("reading");
  setFilters({ ...state.filters, update: String(nearest) });
  announce(nearest === update ? `Episodes of update ${update}` : `No episode of update ${update} was kept; these are of update ${nearest}`);
}

function renderRun() {
  const { studies } = page.head;
  if (!studies.length) return [];
  if (studies.length > 1) return [runsTable(studies), settingsTable(studies), curves(studies), ...studies.map((s) => warnings(s, true))];
  return [runState(studies[0]), warnings(studies[0], false), curves(studies), speed(studies[0]), settingsTable(studies)];
}

const duration = (s) => (s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
const lastOf = (study, key) => pointsOf(study, key).findLast((p) => p.y !== null)?.y;

function stateWords(study) {
  const { about, columns } = study;
  const updates = columns.update.at(-1) ?? 0;
  const { planned } = study;
  const of = planned && planned !== updates ? ` of ${count(planned)}` : "";
  const age = Date.parse(page.head.written) / 1000 - about.written;
  const how = study.state ? visible(study.state) : page.head.follow ? "running" : age < 120 ? "running when this page was written" : `no end is recorded; the last row is ${duration(age)} older than this page`;
  const took = about.wall_time_s ?? Math.max(lastOf(study, "seconds") || 0, (page.head.follow ? Date.parse(page.head.written) / 1000 : about.written) - about.started);
  const turns = lastOf(study, "turns");
  const trained = pointsOf(study, "train/actor_trains").find((p) => p.y)?.x;
  const from = trained > 1 ? `the policy trains from update ${trained} on` : null;
  return [how, `${count(updates)}${of} updates`, from, turns ? `${count(turns)} turns` : null, `took ${duration(took)}`,
    `began ${new Date(1000 * about.started).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" })}`].filter(Boolean);
}

function runState(study) {
  const { verdict } = study.about;
  const said = verdict && verdict.sentence ? String(verdict.sentence) : null;
  return h("div", { class: "state" }, h("p", { class: "facts" }, runBadge(study), stateWords(study).map((word, i) => h("span", { class: i ? "" : "how" }, word))),
    said ? h("p", null, visible(said[0].toUpperCase() + said.slice(1)), ".") : null);
}

/** On a page about two runs of which one trained: which of them. */
const runBadge = (study) => (page.head.runs.length > 1 ? h("b", { class: `run run-${study.run}` }, "AB"[study.run]) : null);

/** The held-out episodes that failed, by update. */
function failures(study) {
  const isOwn = (row) => row.player !== TRAINING && row.update !== undefined && (page.head.runs.length < 2 || (row.run || 0) === study.run) && (!row.study || row.study === study.name);
  const own = page.head.episodes.filter(isOwn);
  return [...new Set(own.map((row) => row.update))].map((update) => own.filter((row) => row.update === update))
    .map((rows) => ({ update: rows[0].update, rows, failed: rows.filter((row) => outcome(row) === "failed") })).filter(({ failed }) => failed.length)
    .map(({ update, rows, failed }) => ({ update, sentence: `${count(failed.length)} of ${plural(rows.length, "held-out episode")} failed and count as 0; the first: ${(failed[0].fault || "no reason is recorded").trim().split("\n")[0]}` }));
}

const CAUSES = ["lr", "critic_lr", "kl_coef", "eps_clip", "rollout_batch_size", "global_batch_size", "gamma_step", "lambda_step"];

/** The greatest lasting fall of the held-out result, and what else changed between its two evaluations. */
function collapse(study) {
  const { points } = evaluations(study);
  const values = points.map((p) => p.y);
  const least = 0.15 * (Math.max(...values) - Math.min(...values));
  let found = null;
  for (let i = 0; i < points.length; i++) {
    for (const later of points.slice(i + 1)) {
      const fall = points[i].y - later.y;
      if (fall > Math.hypot(points[i].error, later.error) && fall > least && fall > (found?.fall || 0)) found = { from: points[i], to: later, fall };
    }
  }
  if (!found) return null;
  const high = found.from.y;
  const to = points.find((p) => p.x > found.from.x && high - p.y >= 0.8 * found.fall);
  const from = points.findLast((p) => p.x < to.x && high - p.y <= 0.2 * found.fall); // it was high until then
  const frozen = new Set(pointsOf(study, "train/actor_trains").filter((p) => p.y === 0).map((p) => p.x));
  const reasons = [];
  for (const [key, limit] of Object.entries(study.limits)) {
    const out = pointsOf(study, key).find((p) => p.x > from.x && p.x <= to.x && !frozen.has(p.x) && isOutside(p.y, limit));
    if (out) reasons.push([out.x, `${CURVE_NAMES[key] || key} left its healthy range in update ${out.x} (${short(out.y)})`]);
  }
  for (const key of CHANGES.filter((name) => !reasons.some(([, words]) => words.startsWith(CURVE_NAMES[name])))) {
    const inside = pointsOf(study, key).filter((p) => p.y !== null && p.x >= from.x && p.x <= to.x);
    const [a, b] = [inside[0]?.y, inside.at(-1)?.y];
    if (a > 0 && b > 0 && (b / a >= 2 || a / b >= 2)) reasons.push([to.x, `${CURVE_NAMES[key]} went from ${short(a)} to ${short(b)}`]);
  }
  const words = reasons.sort((a, b) => a[0] - b[0]).map(([, text]) => text);
  const changed = CAUSES.filter((key) => study.settings[key]).map((key) => `${key} is ${valueText(study.settings[key][0])}, by default ${valueText(study.settings[key][1])}`);
  return { update: to.x, sentence: `The held-out result fell from ${short(from.y)} at update ${from.x} to ${short(to.y)} at update ${to.x}. ${
    words.length ? `In between: ${words.join("; ")}.` : "No metric on this page changed much in between."}${changed.length ? ` Settings: ${changed.join("; ")}.` : ""}` };
}

function warnings(study, isNamed) {
  const fallen = collapse(study);
  const all = [...failures(study), ...(fallen ? [fallen] : []), ...study.alarms];
  const items = all.map((alarm) => h("li", null, h("button", { type: "button", class: "link", click: () => openUpdate(alarm.update) }, `update ${alarm.update}`), " ",
    visible(alarm.sentence)));
  const problems = [...(isNamed && study.state?.startsWith("stopped") ? [study.state] : []), ...study.problems].map((text) => h("li", { class: "muted" }, visible(text)));
  if (!items.length && !problems.length) {
    if (isNamed || !study.healthy) return null;
    return h("p", { class: "won" }, "No alarm: no watched metric left its healthy range for five updates in a row.");
  }
  const found = h("ul", { class: "alarms" }, items, problems);
  return isNamed ? h("details", { class: "more-settings" }, h("summary", null, `${study.name}: ${plural(items.length + problems.length, "warning")}`), found) : found;
}

const healthyWords = ([low, high]) => `healthy ${low === null ? `≤ ${short(high)}` : high === null ? `≥ ${short(low)}` : `${short(low)}–${short(high)}`}`;

const lines = { grouped: true, window: 1 };
const variantsOf = (studies) => [...new Set(studies.map((s) => s.variant))];
const isGrouped = () => lines.grouped && page.head.studies.length > variantsOf(page.head.studies).length && page.head.studies.length > 2;
const placeOf = (study) => (isGrouped() ? variantsOf(page.head.studies).indexOf(study.variant) : study.run);

/** Each point as the mean of the last points, as many as the window has. */
function smoothed(points, window) {
  const known = points.filter((p) => p.y !== null);
  return window < 2 ? points : known.map((p, i) => ({ ...p, y: mean(known.slice(Math.max(0, i + 1 - window), i + 1).map((q) => q.y)) }));
}

/** The mean over the seeds of a variant, where all of them have a value. */
function meanOf(seeds) {
  const counts = new Map();
  for (const p of seeds.flat().filter((q) => q.y !== null)) counts.set(p.x, [...(counts.get(p.x) || []), p]);
  return [...counts].filter(([, found]) => found.length === seeds.length).sort(([a], [b]) => a - b)
    .map(([x, found]) => ({ x, y: mean(found.map((p) => p.y)), isShare: found[0].isShare }));
}

/** One line per run, or a faint one per seed and their mean for each variant. */
function seriesOf(studies, pointsOfStudy) {
  const isNamed = page.head.studies.length > 1 || page.head.runs.length > 1;
  const line = (study) => ({ name: isNamed ? study.name : "", place: placeOf(study), points: pointsOfStudy(study) });
  if (!isGrouped()) return studies.map(line);
  return variantsOf(studies).flatMap((variant) => {
    const seeds = studies.filter((s) => s.variant === variant).map(line);
    const name = `${variant} (${plural(seeds.length, "seed")})`;
    return [...seeds.map((s) => ({ ...s, isFaint: true })), { name, place: seeds[0].place, points: meanOf(seeds.map((s) => s.points)) }];
  });
}

/** How the curves are drawn: the seeds of a variant together or apart, and smoothed or not. */
function curveControls() {
  const again = (event) => {
    renderOverview();
    $(event.target.id).focus();
  };
  const group = h("input", { type: "checkbox", id: "group-seeds", checked: lines.grouped, change: (event) => {
    lines.grouped = event.target.checked;
    again(event);
  } });
  const smooth = h("select", { id: "smooth", change: (event) => {
    lines.window = Number(event.target.value);
    again(event);
  } }, [1, 5, 10, 20].map((n) => h("option", { value: n }, n === 1 ? "none" : `mean of ${n} updates`)));
  smooth.value = lines.window;
  const hasSeeds = page.head.studies.length > 2 && variantsOf(page.head.studies).length < page.head.studies.length;
  return h("p", { class: "controls-of-curves muted" }, hasSeeds ? h("label", null, group, " Group the seeds of a variant") : null, h("label", { class: "more" }, "Smoothing ", smooth));
}

function curves(studies) {
  const isSeveral = studies.length > 1;
  const results = studies.map((study) => evaluations(study, studies));
  const marks = isSeveral ? [] : studies[0].alarms.map((alarm) => alarm.update);
  const updates = studies.flatMap((s) => s.columns.update);
  const span = [Math.min(...updates), Math.max(...updates)];
  const make = (title, key) => {
    const limit = studies[0].limits[key];
    const own = isSeveral ? [] : studies[0].alarms.filter((alarm) => alarm.metric === key).map((alarm) => alarm.update);
    return chart({ title, limit, span, note: limit && healthyWords(limit), choose: openUpdate, marks: own,
      series: seriesOf(studies.filter((s) => s.columns[key]), (s) => smoothed(pointsOf(s, key), lines.window)) });
  };
  const tops = [...new Set(results.map((r) => r.title))].map((title) => chart({ title, isWide: true, span, choose: openUpdate, marks,
    series: seriesOf(studies.filter((_, i) => results[i].title === title), (s) => results[studies.indexOf(s)].points) })).filter(Boolean);
  const charts = h("div", { class: "charts" }, CURVES.map(([title, key]) => make(title, key)));
  const shown = new Set(CURVES.map(([, key]) => key));
  const others = [...new Set(studies.flatMap((s) => Object.keys(s.columns)))].filter((key) => key !== "update" && !shown.has(key)).sort(collate);
  const more = h("select", { id: "more-curves", change: (event) => {
    const added = make(event.target.value, event.target.value);
    if (added) charts.append(added);
    event.target.value = "";
  } }, h("option", { value: "" }, "choose…"), others.map((key) => h("option", { value: key }, visible(key))));
  const help = page.head.episodes.some((row) => row.update !== undefined) ? "Click a point to list the episodes of its update." : "";
  return h("section", { class: "curves", "aria-label": "Curves" }, curveControls(), tops.length ? tops : h("p", { class: "muted" }, "Nothing has been evaluated yet."), charts,
    h("p", { class: "muted" }, help, others.length ? [h("label", { class: "more" }, " Any other metric: ", more)] : null));
}

/** Where the time goes, and what most slots wait for, over the last ten updates that were played. */
function speed(study) {
  const played = pointsOf(study, "rollout/turns").filter((p) => p.y !== null).slice(-10).map((p) => p.x);
  const recent = (key) => {
    const known = pointsOf(study, key).filter((p) => p.y !== null && played.includes(p.x)).map((p) => p.y);
    return known.length ? mean(known) : null;
  };
  const [play, train, turns] = ["perf/rollout_s", "perf/train_s", "rollout/turns"].map(recent);
  const [engine, env, requests] = ["rollout/engine_busy_share", "rollout/env_busy_share", "rollout/engine_concurrency"].map(recent);
  const [steps, held, host] = ["rollout/env_queue_depth", "rollout/slots_at_limit", "rollout/host_busy_share"].map((key) => recent(key) ?? 0);
  const waiting = Object.keys(study.columns).filter((key) => /^rollout\/engine\/\d+\/waiting$/.test(key)).map(recent).reduce((a, b) => a + (b ?? 0), 0);
  const words = [];
  if (play !== null && turns) {
    const share = train / (play + train);
    words.push(`In the last updates ${short(turns / (play + train))} turns per second, training included.`, `An update takes ${short(play + train)} s: ${percent(1 - share)} waiting for its turns, ${percent(share)} training and loading weights.`);
    if (share > 0.5) words.push("Training is the bottleneck.");
  }
  if (engine !== null) {
    words.push(`While a batch is played, the engine works ${percent(engine)} of the time, on ${short(requests)} requests at once, and the environments ${percent(env)}.`);
    if (waiting >= 1) words.push(`${short(waiting)} requests wait in the engines' queues on average.`);
    const most = Math.max(requests, steps, held);
    const where = most === requests ? "Most turns wait for the engine." : most === steps ? "Most turns wait for their environment." : "Most slots wait for new weights.";
    if (!(train > play)) words.push(host > 0.8 ? `A rollout process computes ${percent(host)} of the time, so it is the bottleneck.` : where);
  }
  return words.length ? h("p", { class: "speed" }, h("b", null, "Speed "), words.join(" ")) : null;
}

const valueText = (x) => (x === null || x === undefined ? "–" : typeof x === "string" ? visible(x) : JSON.stringify(x));

/** What was set: for one run against the defaults, for several where they differ from each other. */
function settingsTable(studies) {
  const keys = [...new Set(studies.flatMap((s) => Object.keys(s.settings)))];
  const usual = (key) => studies.find((s) => s.settings[key]).settings[key][1];
  const cell = (s, key) => (s.settings[key] ? valueText(s.settings[key][0]) : `${valueText(usual(key))} (default)`);
  const isSeveral = studies.length > 1;
  const columns = isGrouped() ? variantsOf(studies).map((variant) => studies.find((s) => s.variant === variant)) : studies;
  const shown = isSeveral ? keys.filter((key) => new Set(columns.map((s) => cell(s, key))).size > 1) : keys;
  const heads = ["Setting", ...(isSeveral ? columns.map((s) => (isGrouped() ? s.variant : s.name)) : ["Value", "Default"])];
  const row = (key) => h("tr", null, h("th", { scope: "row" }, visible(key)),
    isSeveral ? columns.map((s) => h("td", null, cell(s, key))) : studies[0].settings[key].map((x) => h("td", null, valueText(x))));
  const table = h("div", { class: "table" }, h("table", { class: "summary settings" }, h("thead", null, h("tr", null, heads.map((x) => h("th", { scope: "col" }, x)))), h("tbody", null, shown.map(row))));
  const title = isSeveral ? `Settings that differ (${shown.length})` : `Settings that differ from the defaults (${shown.length})`;
  const body = shown.length ? table : h("p", { class: "muted" }, isSeveral ? "The runs have the same settings." : "No settings are recorded.");
  return h("details", { class: "more-settings", open: isSeveral || Boolean(collapse(studies[0])) }, h("summary", null, title), body, isSeveral ? null : origin(studies[0].about));
}

function origin(about) {
  const known = ["command", "config", "seed", "slime_verlog", "python", "torch", "cpus"].filter((key) => about[key] !== undefined);
  return known.length ? h("dl", { class: "origin" }, known.map((key) => [h("dt", null, key.replace("_", "-")), h("dd", null, valueText(about[key]))])) : null;
}

function runsTable(studies) {
  const rows = studies.map((study) => {
    const { points } = evaluations(study, studies);
    const [a, b] = [points[0], points.at(-1)];
    const text = (p) => (p ? pointWords(p) : "–");
    return h("tr", null, h("th", { scope: "row" }, colourKey(placeOf(study)), runBadge(study), study.name), h("td", null, text(a)), h("td", null, text(b)),
      h("td", null, text(points.reduce((best, p) => (!best || p.y > best.y ? p : best), null))), h("td", null, String(study.alarms.length)), h("td", null, [stateWords(study)[0].split(":")[0], ...stateWords(study).slice(1, -1)].join(", ")));
  });
  const heads = ["Run", "First", "Last", "Best", "Alarms", "State"];
  return h("div", { class: "table" }, h("table", { class: "summary runs" }, h("thead", null, h("tr", null, heads.map((x) => h("th", { scope: "col" }, x)))), h("tbody", null, rows)));
}
