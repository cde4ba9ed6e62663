// The keyboard, and the dialog that explains it.

const KEYS = [
  ["j  k", "next and previous episode", { j: () => list.step(1), k: () => list.step(-1) }],
  ["←  →", "previous and next turn", { ArrowLeft: () => selectTurn(state.turn - 1), ArrowRight: () => selectTurn(state.turn + 1) }],
  ["p", "play or pause", { p: () => state.episode && stage.toggle() }],
  ["w", "whole prompt of the turn", { w: () => toggleWholePrompt() }],
  ["/", "search all text", { "/": () => focusSearch() }],
  ["n  N", "next and previous hit of the search (also Enter in the search box)", { n: () => nextHit(1), N: () => nextHit(-1) }],
  ["o", "overview", { o: () => showOverview(true) }],
  ["t", "light, dark or system colours", { t: () => nextTheme() }],
  ["?", "this help", { "?": () => $("help").showModal() }],
];
const ACTIONS = Object.assign({}, ...KEYS.map(([, , actions]) => actions));

function focusSearch() {
  document.body.classList.remove("reading");
  $("search").focus();
  $("search").select();
}

function toggleWholePrompt() {
  document.querySelector(".turn-row.current [data-tool=whole]")?.click();
}

const isTyping = (target) => target.closest("input:not([type=range]), textarea, select, dialog");

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && event.target === $("search")) {
    if ($("search").value) clearAll();
    else $("list").focus();
    return;
  }
  if (event.key === "Enter" && event.target === $("search")) {
    nextHit(event.shiftKey ? -1 : 1);
    return;
  }
  if (isTyping(event.target)) return;
  if (event.target === $("list") && onListKey(event)) return;
  if (event.target.id === "slider" && event.key.startsWith("Arrow")) return;
  const act = ACTIONS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

/** In the list, the arrow keys choose episodes. */
function onListKey(event) {
  const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
  if (by) {
    event.preventDefault();
    list.step(by);
    return true;
  }
  if (event.key === "Enter" && state.episode) {
    $("main").focus();
    return true;
  }
  return false;
}

function fillHelp() {
  const rows = KEYS.map(([keys, text]) => h("tr", null, h("th", { scope: "row" }, keys.split("  ").map((key) => h("kbd", null, key))), h("td", null, text)));
  $("help").replaceChildren(
    h("h2", { id: "help-title" }, "Keyboard"),
    h("table", null, h("tbody", null, rows)),
    h("p", { class: "muted" }, "A turn shows what is new in its prompt: lines that were already there are dimmed, and past turns that the memory repeats are left out. “Whole prompt” shows everything that the model saw."),
    h("p", { class: "muted" }, "The address of this page names the episode and the turn, so it can be shared together with the file."),
    h("form", { method: "dialog" }, h("button", { type: "submit", class: "primary" }, "Close")));
}
