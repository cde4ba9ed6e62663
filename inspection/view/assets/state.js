// What is shown, kept in the address after `#`, so that a link or a reload shows the same.

const FILTERS = ["study", "task", "update", "setting", "player", "outcome", "stop", "valid"];
const state = { episode: 0, turn: 1, q: "", sort: "", filters: {} };
const page = { head: null, entries: [], isPaired: false, shown: [], episodes: [], colour: null, restored: null };

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const whole = (key) => Math.max(0, Math.floor(Number(given.get(key)) || 0));
  state.episode = whole("episode");
  state.turn = whole("turn") || 1;
  state.q = given.get("q") || "";
  state.sort = given.get("sort") ?? (page.head?.runs.length > 1 ? "difference+" : "");
  state.filters = Object.fromEntries(FILTERS.filter((key) => given.get(key)).map((key) => [key, given.get(key)]));
}

/** Write the state into the address; a new episode becomes a step of the browser's history. */
function writeAddress(isStep = false) {
  const words = new URLSearchParams();
  if (state.episode) words.set("episode", state.episode);
  if (state.episode && state.turn > 1) words.set("turn", state.turn);
  for (const key of FILTERS) if (state.filters[key]) words.set(key, state.filters[key]);
  if (state.sort !== (page.head?.runs.length > 1 ? "difference+" : "")) words.set("sort", state.sort);
  if (state.q) words.set("q", state.q);
  const address = `#${words}`;
  if (address === (location.hash || "#")) return;
  if (isStep) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
}

/** The browser's storage, which may be forbidden; then nothing is remembered. */
const memory = {
  get(kind, key) {
    try {
      return window[kind].getItem(`slime-verlog ${key}`);
    } catch {
      return null;
    }
  },
  set(kind, key, value) {
    try {
      window[kind].setItem(`slime-verlog ${key}`, value);
    } catch {
      // Forbidden or full: the page works without.
    }
  },
};

const THEMES = { "": ["system", "as the system"], light: ["light", "light"], dark: ["dark", "dark"] };

function setTheme(theme) {
  const [sign, name] = THEMES[theme] || THEMES[""];
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  $("theme").replaceChildren(icon(sign));
  $("theme").setAttribute("aria-label", `Colours: ${name}`);
  $("theme").title = `Colours: ${name} (t)`;
  memory.set("localStorage", "theme", theme);
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const now = document.documentElement.dataset.theme || "";
  setTheme(names[(names.indexOf(now) + 1) % names.length]);
  announce($("theme").getAttribute("aria-label"));
}

/** Reload the page while the run goes on, unless the reader is busy; what was selected and scrolled stays. */
function startFollowing(seconds) {
  let paused = false;
  let busyUntil = 0;
  const busy = () => (busyUntil = Date.now() + 2000);
  for (const name of ["keydown", "pointerdown", "wheel", "input"]) addEventListener(name, busy, { passive: true });
  const button = h("button", { type: "button", class: "quiet", click: () => {
    paused = !paused;
    button.textContent = paused ? "Resume" : "Pause";
  } }, "Pause");
  const time = new Date(page.head.written).toLocaleTimeString();
  const { studies } = page.head;
  const isOver = studies.length > 0 && studies.every((study) => study.state && study.state !== "running");
  $("follow").replaceChildren(...(isOver ? [`Followed, ${time} `] : [h("span", { class: "dot" }), `Live, ${time} `]), button);
  $("follow").hidden = false;
  setInterval(() => {
    const reading = Date.now() < busyUntil || stage.isPlaying() || $("help").open || String(getSelection());
    if (paused || reading || document.hidden) return;
    rememberPlace();
    location.reload();
  }, 1000 * seconds);
}

function rememberPlace() {
  const place = { list: $("list").scrollTop, main: $("main").scrollTop, focus: document.activeElement.id };
  memory.set("sessionStorage", `place ${location.pathname}`, JSON.stringify(place));
}

function recallPlace() {
  const stored = memory.get("sessionStorage", `place ${location.pathname}`);
  memory.set("sessionStorage", `place ${location.pathname}`, "");
  return stored ? JSON.parse(stored) : null;
}
