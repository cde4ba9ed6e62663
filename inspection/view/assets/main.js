// Starts the page.

function listen() {
  addEventListener("keydown", onKey);
  addEventListener("hashchange", onAddress);
  addEventListener("popstate", onAddress);
  addEventListener("resize", () => {
    list.render();
    measureHead();
    if (state.episode && page.episodes.length) stage.show(state.turn);
  });
  let isWaiting = false;
  $("main").addEventListener("scroll", () => {
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      onScroll();
    });
  }, { passive: true });
  $("list").addEventListener("scroll", () => list.render(), { passive: true });
  $("search").addEventListener("input", onSearchInput);
  $("theme").addEventListener("click", nextTheme);
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("overview-button").addEventListener("click", () => {
    showOverview(true);
    document.body.classList.add("reading");
  });
  $("back").addEventListener("click", () => showOverview(true));
  $("skip").addEventListener("click", (event) => {
    event.preventDefault();
    $("main").focus();
  });
}

/** The reader changed the address or went back. */
function onAddress() {
  const before = { ...state };
  readAddress();
  $("search").value = state.q;
  if (state.q !== before.q) search.start(state.q);
  renderFilters();
  applyFilters();
  if (!state.episode) showOverview();
  else if (state.episode !== before.episode) openEpisode(state.episode, state.turn);
  else if (state.turn !== before.turn) selectTurn(state.turn);
}

async function start() {
  setTheme(memory.get("localStorage", "theme") || "");
  fillHelp();
  $("back").append(icon("back"));
  page.head = JSON.parse(await unpack("head"));
  page.entries = makeEntries(page.head);
  page.isPaired = page.entries.some((entry) => entry.rows[0] && entry.rows[1]);
  document.body.classList.toggle("pair", page.head.runs.length > 1);
  for (const entry of page.entries) for (const row of entry.rows) if (row) row.number = entry.number;
  readAddress();
  $("search").value = state.q;
  document.body.classList.toggle("reading", page.head.studies.length > 0);
  renderFilters();
  applyFilters();
  listen();
  const place = recallPlace();
  if (state.q) search.start(state.q);
  if (state.episode) await openEpisode(state.episode, state.turn);
  if (place) {
    [$("list").scrollTop, $("main").scrollTop] = [place.list, place.main];
    if (place.focus) $(place.focus)?.focus();
  }
  if (page.head.follow) startFollowing(page.head.follow);
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  $("main").replaceChildren(h("p", { class: "loading" }, `The page cannot be read: ${error}`));
  throw error;
});
