// Full-text search: goes through all chunks in the background and adds matches as it finds them.

const SHOW_EVERY_MS = 150;

/** The text of a message without its pictures. */
function messageText(message) {
  if (typeof message.content === "string") return message.content;
  return (message.content || []).map((part) => part.text || "").join("\n");
}

class Search {
  #query = "";
  #matches = null;
  #searched = 0;
  #total = 0;
  #run = 0;

  query() {
    return this.#query;
  }

  /** The numbers of the entries found so far; null without a search. */
  found() {
    return this.#matches;
  }

  /** A note on how far the search is. */
  progress() {
    const isRunning = this.#query && this.#searched < this.#total;
    return isRunning ? `, searched ${Math.floor((100 * this.#searched) / this.#total)} %` : "";
  }

  /** Search for a text; an empty one ends the search. */
  async start(text) {
    const mine = ++this.#run;
    const isNarrower = this.#query && this.#searched === this.#total && text.toLowerCase().includes(this.#query);
    const before = isNarrower ? this.#matches : null;
    this.#query = text.trim().toLowerCase();
    state.q = text.trim();
    this.#matches = this.#query ? new Set(page.head.episodes.filter((row) => this.#inRow(row)).map((row) => row.number)) : null;
    const rows = this.#query ? page.head.episodes.filter((row) => !before || before.has(row.number)) : [];
    const numbers = [...new Set(rows.map((row) => row.chunk))];
    [this.#searched, this.#total] = [0, numbers.length];
    applyFilters();
    let shown = performance.now();
    for (const number of numbers) {
      const chunk = await loadChunk(number);
      if (mine !== this.#run) return;
      this.#searchChunk(number, chunk);
      this.#searched++;
      if (this.#searched === this.#total || performance.now() - shown > SHOW_EVERY_MS) {
        applyFilters();
        shown = performance.now();
      }
    }
    markMatches();
  }

  /** Whether a loaded turn shows the text for the first time. */
  inTurn(turn) {
    return Boolean(this.#query) && (this.#inText(turn.response) || turn.fresh.some((m) => this.#inText(messageText(m))));
  }

  #inText(text) {
    return Boolean(text) && String(text).toLowerCase().includes(this.#query);
  }

  #inRow(row) {
    return this.#inText(`${row.task} ${row.setting} seed ${row.seed} ${row.stop}`);
  }

  /** Search the JSON text first, because most chunks and episodes need not be parsed. */
  #searchChunk(number, chunk) {
    const escaped = JSON.stringify(this.#query).slice(1, -1);
    const hits = new Set();
    if (chunk.lines[0].toLowerCase().includes(escaped)) {
      sharedOf(chunk).messages.forEach((message, i) => this.#inText(messageText(message)) && hits.add(i));
    }
    for (const row of page.head.episodes) {
      if (row.chunk !== number || this.#matches.has(row.number)) continue;
      const line = chunk.lines[row.place + 1];
      if (!hits.size && !line.toLowerCase().includes(escaped)) continue;
      if (this.#inEpisode(JSON.parse(line), hits)) this.#matches.add(row.number);
    }
  }

  #inEpisode(episode, hits) {
    return this.#inText(episode.fault) || episode.turns.some((turn) =>
      this.#inText(turn.response) || this.#inText(turn.action) || turn.prompt.slice(1).some((i) => hits.has(i)));
  }
}

const search = new Search();

/** Highlight the matches in the open episode, without changing its elements. */
function markMatches() {
  if (!window.CSS || !CSS.highlights) return;
  const ranges = [];
  const query = search.query();
  if (query) {
    const walker = document.createTreeWalker($("main"), NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node && ranges.length < 2000; node = walker.nextNode()) {
      const text = node.data.toLowerCase();
      for (let at = text.indexOf(query); at >= 0 && text.length === node.data.length; at = text.indexOf(query, at + query.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + query.length);
        ranges.push(range);
      }
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

/** Go to the next turn that shows the searched text, from the open turn on, then in the next episode of the list. */
async function nextHit(by = 1) {
  if (!search.query() || !page.shown.length) return;
  const turns = page.episodes.length ? Math.max(...page.episodes.map((e) => e.turns.length)) : 0;
  for (let turn = state.turn + by; turn >= 1 && turn <= turns; turn += by) {
    if (page.episodes.some((episode) => episode.turns[turn - 1] && search.inTurn(episode.turns[turn - 1]))) {
      selectTurn(turn);
      return showHit();
    }
  }
  const place = page.shown.findIndex((entry) => entry.number === state.episode);
  const next = page.shown[(place + by + page.shown.length) % page.shown.length];
  await openEpisode(next.number, 1, true);
  showHit();
}

/** Unfold and scroll to the first match in the open turn. */
function showHit() {
  const row = document.querySelector(".turn-row.current");
  const found = [...(CSS.highlights?.get("found") || [])].find((range) => row?.contains(range.startContainer));
  if (!found) return;
  const box = found.startContainer.parentElement.closest(".clamp:not(.open)");
  box?.parentElement.querySelector("[aria-expanded=false]")?.click();
  found.startContainer.parentElement.closest("details")?.setAttribute("open", "");
  requestAnimationFrame(() => requestAnimationFrame(() => {
    const [view, at] = [$("main").getBoundingClientRect(), found.getBoundingClientRect()];
    if (at.bottom > view.bottom - 20 || at.top < view.top + 90) $("main").scrollBy(0, at.top - view.top - view.height / 3);
  }));
}

let searchTimer = 0;

function onSearchInput() {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(() => search.start($("search").value), 120);
}
