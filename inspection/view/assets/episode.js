// The open episode (in a comparison, both of them): loads it, builds its turns, and moves between turns.

const FILLED_AT_ONCE = 24;
const FILLED_PER_PAUSE = 12;
let opening = 0;
let turnRows = [];
let isScrolledByUs = 0;

/** Open an episode by its number; `isStep` adds it to the browser's history. */
async function openEpisode(number, turn = 1, isStep = false) {
  const entry = page.entries[number - 1];
  if (!entry) return showOverview();
  const mine = ++opening;
  [state.episode, state.turn] = [number, turn];
  writeAddress(isStep);
  document.body.classList.add("reading");
  list.reveal();
  const rows = entry.rows.map((row, run) => ({ row, run })).filter(({ row }) => row);
  let loaded;
  try {
    loaded = await Promise.all(rows.map(({ row }) => loadEpisode(row)));
    for (const episode of loaded) episode.frames = await loadWorld(episode);
  } catch (error) {
    $("main").replaceChildren(h("p", { class: "loading" }, `This episode cannot be read: ${error}`));
    return;
  }
  if (mine !== opening) return;
  page.episodes = loaded;
  render(entry, loaded, mine);
  announce(`Episode ${number}, ${firstRow(entry).task}, ${outcomeOf(entry)}, ${plural(loaded[0].turns.length, "turn")}`);
}

function render(entry, episodes, mine) {
  stage.open(episodes);
  setLimits();
  const longest = Math.max(...episodes.map((e) => e.turns.length));
  turnRows = Array.from({ length: longest }, (_, i) => h("div", { class: "turn-row" }, episodes.map((episode) =>
    h("article", { class: "turn", "aria-label": `Turn ${i + 1}` }))));
  const ends = h("div", { class: "turn-row last" }, episodes.map(endBlock));
  turnRows.push(ends);
  turnRows[divergence(episodes) - 1]?.classList.add("parting");
  const body = h("div", { class: episodes.length > 1 ? "turns two" : "turns" }, turnRows);
  $("main").replaceChildren(episodeHead(entry, episodes), body);
  $("main").scrollTop = 0;
  measureHead();
  const target = firstMatch(episodes) || state.turn;
  fillInOrder(episodes, Math.min(target, longest) - 1, mine);
  selectTurn(target);
  markMatches();
}

/** The height that stays above the turns, which links to turns leave free. */
function measureHead() {
  const head = document.querySelector(".episode-head");
  const height = head && getComputedStyle(head).position === "sticky" ? head.offsetHeight : 8;
  $("main").style.setProperty("--head", `${height}px`);
}

/** With a search, the first turn that shows the text, unless the address names a turn. */
function firstMatch(episodes) {
  if (!search.query() || state.turn > 1) return 0;
  const places = episodes.map((episode) => episode.turns.findIndex((turn) => search.inTurn(turn))).filter((i) => i >= 0);
  return places.length ? Math.min(...places) + 1 : 0;
}

function setLimits() {
  const limit = page.colour ? colourLimit(page.episodes, page.colour) : 1;
  for (const episode of page.episodes) episode.limit = limit;
}

function episodeHead(entry, episodes) {
  const { task, seed, setting, player } = firstRow(entry);
  const words = [setting !== "-" ? setting : null, player || null, seedText(seed, true), originText(entry)].filter(Boolean);
  const facts = episodes.map(({ row }) => h("p", { class: "facts" },
    page.head.runs.length > 1 ? h("b", { class: `run run-${row.run || 0}` }, "AB"[row.run || 0]) : null,
    h("span", null, mark(row), ` ${partOf(row) === null ? outcome(row) : "progression"}`), h("span", null, turnsText(row)), h("span", null, `return ${fixed(row.return)}`),
    row.valid === null ? null : h("span", null, `${percent(row.valid)} valid`)));
  const move = (by, sign, name) => h("button", { type: "button", class: "quiet", "aria-label": name, title: name, click: () => list.step(by) }, icon(sign));
  const parting = divergence(episodes);
  const jump = parting ? h("button", { type: "button", class: "link", id: "divergence", click: () => selectTurn(parting) }, `first difference: turn ${parting}`) : null;
  return h("div", { class: "episode-head" },
    h("div", null, h("h2", null, task, h("small", null, [`#${entry.number}`, ...words].join(" · "))), h("div", { class: "both-facts" }, facts, jump)),
    h("span", { class: "moves" }, move(-1, "up", "Previous episode (k)"), move(1, "down", "Next episode (j)")));
}

/** Which episode a branch continues; null for an episode that was played from its start. */
function originText(entry) {
  const from = entry.rows.find((row) => row?.branch)?.branch;
  return from ? `continues #${from.episode} of ${from.run} (${from.player}) from turn ${from.turn}` : null;
}

/** The first turn, from 1, in which two episodes act differently; 0 if they never do, or if there is one. */
function divergence(episodes) {
  if (episodes.length < 2) return 0;
  const [a, b] = episodes.map((episode) => episode.turns);
  const place = a.findIndex((turn, i) => !b[i] || (turn.action ?? turn.response) !== (b[i].action ?? b[i].response));
  return place >= 0 ? place + 1 : b.length > a.length ? a.length + 1 : 0;
}

/** Fill the turns around `start` now, and the others while the browser is idle. */
function fillInOrder(episodes, start, mine) {
  const order = turnRows.slice(0, -1).map((_, i) => i).sort((a, b) => Math.abs(a - start) - Math.abs(b - start));
  order.splice(0, FILLED_AT_ONCE).forEach((i) => fillRow(episodes, i));
  const idle = window.requestIdleCallback || ((act) => setTimeout(act, 20));
  const more = () => {
    if (mine !== opening) return;
    const at = $("main").scrollTop;
    order.splice(0, FILLED_PER_PAUSE).forEach((i) => fillRow(episodes, i));
    if (!at) $("main").scrollTop = 0;
    if (order.length) idle(more);
    else markMatches();
  };
  if (order.length) idle(more);
}

function fillRow(episodes, i) {
  episodes.forEach((episode, side) => {
    const article = turnRows[i].children[side];
    if (!episode.turns[i]) article.replaceChildren(h("p", { class: "muted" }, "The episode is over."));
    else if (!article.classList.contains("filled")) fillTurn(article, episode, i);
  });
}

/** Move to a turn; one past the last is the end. The player moves without scrolling. */
function selectTurn(turn, isScrolling = true) {
  if (!page.episodes.length || !state.episode) return;
  state.turn = Math.max(1, Math.min(turn, stage.last()));
  const place = Math.min(state.turn, turnRows.length) - 1;
  document.querySelector(".turn-row.current")?.classList.remove("current");
  turnRows[place].classList.add("current");
  if (place < turnRows.length - 1) fillRow(page.episodes, place);
  stage.show(state.turn);
  if (!isScrolling) return;
  writeAddress();
  isScrolledByUs = Date.now();
  if (place > 0) settle(turnRows[place], 3);
  else $("main").scrollTop = 0;
}

/** Scroll to a row, and again while rows above it are still being laid out. */
function settle(row, tries) {
  if (!row.classList.contains("current")) return;
  isScrolledByUs = Date.now();
  row.scrollIntoView({ block: "start" });
  if (tries) requestAnimationFrame(() => settle(row, tries - 1));
}

/** Follow the reader: the turn at the top of the view becomes the current one. */
function onScroll() {
  if (!state.episode || stage.isPlaying() || Date.now() - isScrolledByUs < 200) return;
  const edge = $("main").getBoundingClientRect().top + 100;
  let [low, high] = [0, turnRows.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (turnRows[middle].getBoundingClientRect().top <= edge) low = middle;
    else high = middle - 1;
  }
  const turn = Math.min(low + 1, stage.last());
  if (turn === state.turn || !turnRows[low]) return;
  state.turn = turn;
  document.querySelector(".turn-row.current")?.classList.remove("current");
  turnRows[low].classList.add("current");
  stage.show(turn);
  writeAddress();
}

/** Colour the tokens by another value; the current turn stays where it is. */
function recolour(key) {
  const place = () => document.querySelector(".turn-row.current")?.getBoundingClientRect().top || 0;
  const before = place();
  page.colour = key;
  setLimits();
  stage.open(page.episodes);
  stage.show(state.turn);
  $("colour")?.focus();
  for (const row of turnRows) for (const article of row.children) article.redraw?.();
  isScrolledByUs = Date.now();
  requestAnimationFrame(() => $("main").scrollBy(0, place() - before));
}

function showOverview(isStep = false) {
  opening++;
  [state.episode, state.turn] = [0, 1];
  page.episodes = [];
  stage.close();
  document.body.classList.remove("reading");
  writeAddress(isStep);
  list.render();
  renderOverview();
  $("main").scrollTop = 0;
}
