// The turns of an episode as chat bubbles: what is new in the prompt, then the answer.

const ROLES = { system: "System", user: "Environment", assistant: "Model", tool: "Tool" };
const LONG_LINES = 14;

/** A message's texts and pictures as blocks. */
function contentBlocks(message, episode, className) {
  const parts = typeof message.content === "string" ? [{ type: "text", text: message.content }] : message.content || [];
  const blocks = parts.map((part) => {
    if (part.type === "image") return picture(episode, part.image);
    return textBlock(String(part.text ?? JSON.stringify(part)), className);
  });
  if (message.tool_calls) blocks.push(textBlock(JSON.stringify(message.tool_calls, null, 1), "mono"));
  return blocks;
}

function picture(episode, key) {
  const address = pictureAddress(episode, key);
  if (!address) return h("p", { class: "muted" }, "A picture that the record does not hold.");
  return h("img", { class: "picture", src: address, alt: "The picture in the prompt", loading: "lazy", decoding: "async",
    title: "Larger or smaller", click: (event) => event.target.classList.toggle("large") });
}

function bubble(role, note, ...children) {
  const name = ROLES[role] || role || "Message";
  const known = role in ROLES ? role : "other";
  return h("div", { class: `bubble ${known}` }, h("span", { class: "role" }, name, note ? [" ", h("i", null, note)] : null), children);
}

/** A long text is folded after some lines, with a button that shows the rest. */
function folded(blocks, text) {
  const lines = text.split("\n").length;
  if (lines <= LONG_LINES && text.length < 1600) return blocks;
  const box = h("div", { class: "clamp" }, blocks);
  const button = h("button", { type: "button", class: "link", "aria-expanded": "false", click: () => {
    const isOpen = box.classList.toggle("open");
    button.setAttribute("aria-expanded", String(isOpen));
    button.textContent = isOpen ? "Show less" : `Show all ${count(lines)} lines`;
  } }, `Show all ${count(lines)} lines`);
  return [box, button];
}

/** An observation whose text, if it is one piece, shows what changed since the prompt before. */
function observationBlocks(message, before, episode) {
  const parts = typeof message.content === "string" ? [{ type: "text", text: message.content }] : message.content || [];
  const texts = parts.filter((part) => part.type === "text");
  const isPlain = before && texts.length === 1 && texts[0].text.length <= CLIPPED;
  if (!isPlain) return folded(contentBlocks(message, episode), messageText(message));
  return parts.map((part) => (part.type === "text" ? changedText(part.text, messageText(before)) : picture(episode, part.image)));
}

/** A text with its unchanged lines dimmed; a repeated ending, such as the request for an answer, is folded. */
function changedText(whole, before) {
  const paragraphs = whole.split("\n\n");
  const earlier = before.split("\n\n");
  let same = 0;
  while (same < Math.min(paragraphs.length, earlier.length) - 1 && paragraphs.at(-1 - same) === earlier.at(-1 - same)) same++;
  const known = new Set(before.split("\n"));
  const text = paragraphs.slice(0, paragraphs.length - same).join("\n\n");
  const isSame = text === earlier.slice(0, earlier.length - same).join("\n\n");
  const lines = text.split("\n").map((line, i) => [i ? "\n" : "", h("span", { class: known.has(line) && !isSame ? "same" : "" }, visible(line))]);
  const ending = same ? paragraphs.slice(-same).join("\n\n") : "";
  return [h("div", { class: "text" }, lines),
    isSame ? h("p", { class: "muted small" }, "The same as in the turn before.") : null,
    ending ? h("details", { class: "ending" }, h("summary", null, `unchanged: ${visible(ending.slice(0, 42))}…`), textBlock(ending)) : null];
}

/** A system message that changed during the episode, as the lines that came and went. */
function changeBlocks(message, before) {
  const [now, then] = [messageText(message), messageText(before)].map((text) => text.split("\n"));
  const [hasNow, hadThen] = [new Set(now), new Set(then)];
  const gone = then.filter((line) => !hasNow.has(line)).map((line) => h("del", null, `− ${visible(line)}`, "\n"));
  const come = now.filter((line) => !hadThen.has(line)).map((line) => h("ins", null, `+ ${visible(line)}`, "\n"));
  return [h("div", { class: "text change" }, gone, come)];
}

/** The bubbles of what is new in a turn's prompt. */
function freshBubbles(episode, index) {
  const turn = episode.turns[index];
  const earlier = index ? episode.turns[index - 1].prompt : [];
  return turn.fresh.map((message) => {
    const before = message.role === "system" ? earlier.find((m) => m.role === "system") : earlier.at(-1);
    if (index && message.role === "system" && before) return bubble("system", "changed", changeBlocks(message, before));
    const isLast = message === turn.fresh.at(-1) && before && before.role === message.role;
    if (isLast) return bubble(message.role, null, observationBlocks(message, before, episode));
    return bubble(message.role, null, folded(contentBlocks(message, episode), messageText(message)));
  });
}

function promptBubbles(episode, index) {
  return episode.turns[index].prompt.map((message) => bubble(message.role, null, contentBlocks(message, episode)));
}

/** The notes before this turn; empty if there are none. */
function notesBefore(episode, index) {
  return episode.turns.slice(0, index).findLast((turn) => turn.notes)?.notes ?? "";
}

/** Notes; words that the notes before already had are marked. */
function keptBlocks(text, before) {
  const known = new Set(before.split(/\s+/));
  const legend = h("p", { class: "muted small" }, h("b", null, "Bold"), ": words copied from the notes before");
  const block = h("div", { class: "text" }, text.split(/(\s+)/).map((word) => h("span", { class: word.trim() && known.has(word) ? "kept" : "" }, visible(word))));
  return block.querySelector(".kept") ? [block, legend] : [block];
}

function answerBubble(episode, index, isRaw) {
  const turn = episode.turns[index];
  let blocks = isRaw ? [textBlock(turn.response, "mono")] : answerBlocks(turn.response);
  if (page.colour && turn.tokens) {
    blocks = [tokenBlock(turn.tokens, page.colour, episode.limit, (i) => showCredit(episode, index, i))];
  }
  const wrong = turn.valid === false;
  const note = turn.summary ? "its notes; the environment does not see them" : wrong ? `invalid, played: ${visible(String(turn.action ?? ""))}` : null;
  if (turn.summary && !isRaw && !(page.colour && turn.tokens)) blocks = keptBlocks(turn.notes ?? turn.response, notesBefore(episode, index));
  const notes = turn.notes && !turn.summary ? h("details", { class: "ending notes", open: "" }, h("summary", null, "notes after this turn"), textBlock(turn.notes)) : null;
  const result = bubble("assistant", note, blocks, notes);
  if (wrong) result.classList.add("invalid");
  if (turn.summary) result.classList.add("summary");
  return result;
}

function turnChips(turn) {
  const chips = [];
  if (turn.summary) chips.push(h("span", { class: "chip" }, "notes"));
  if (turn.action) chips.push(h("span", { class: "chip" }, visible(String(turn.action)).slice(0, 80)));
  if (turn.reward) chips.push(h("span", { class: `chip ${turn.reward > 0 ? "good" : "bad"}` }, `reward ${signed(turn.reward)}`));
  if (turn.valid === false) chips.push(h("span", { class: "chip bad" }, "invalid"));
  if (turn.end) chips.push(h("span", { class: "chip" }, turn.end));
  return chips;
}

/** One turn; the buttons switch to the whole prompt and to the raw answer. */
function fillTurn(article, episode, index) {
  const turn = episode.turns[index];
  const view = { whole: false, raw: false };
  const bubbles = h("div", { class: "bubbles" });
  const draw = () => {
    const whole = view.whole ? promptBubbles(episode, index) : freshBubbles(episode, index);
    bubbles.replaceChildren(...whole, answerBubble(episode, index, view.raw));
    markMatches();
  };
  const toggle = (name, text) => h("button", { type: "button", class: "tool", "aria-pressed": "false", click: (event) => {
    view[name] = !view[name];
    event.currentTarget.setAttribute("aria-pressed", String(view[name]));
    draw();
  } }, text);
  const hasPicture = turn.fresh.some((message) => Array.isArray(message.content) && message.content.some((part) => part.type === "image"));
  const thumb = episode.frames && !hasPicture ? h("canvas", { class: "thumb", role: "img", "aria-label": `The world before turn ${index + 1}`, click: () => selectTurn(index + 1) }) : null;
  const title = h("h3", null, h("a", { href: linkTo(index + 1), click: (event) => {
    event.preventDefault();
    selectTurn(index + 1);
  } }, `Turn ${index + 1}`));
  const tools = h("span", { class: "tools" }, toggle("whole", `Whole prompt (${plural(turn.prompt.length, "message")})`), toggle("raw", "Raw answer"));
  tools.firstChild.dataset.tool = "whole";
  const body = h("div", { class: thumb ? "body with-thumb" : "body" }, thumb, bubbles);
  article.replaceChildren(h("div", { class: "turn-head" }, title, turnChips(turn), tools), body);
  article.classList.add("filled");
  article.redraw = draw;
  draw();
  if (thumb) drawFrame(thumb, episode.frames, index);
}

function linkTo(turn) {
  const words = new URLSearchParams(location.hash.slice(1));
  words.set("episode", state.episode);
  words.set("turn", turn);
  return `#${words}`;
}

const STOPS = {
  terminated: "the environment ended the episode",
  time_limit: "the environment's step limit",
  max_turns: "the limit max_turns",
  context: "the next prompt would not fit",
  encoding: "the next prompt could not be encoded",
  cut: "the batch ended; the episode goes on in the next one",
  failed: "the environment was lost",
};

/** What stands below the last turn: how the episode ended, and the environment's numbers. */
function endBlock(episode) {
  const { row } = episode;
  const facts = [STOPS[row.stop] || visible(row.stop) || "no reason is recorded", `return ${fixed(row.return)}`, `progression ${percent(row.progression)}`];
  const metrics = Object.entries(episode.metrics || {}).filter(([, x]) => x);
  return h("div", { class: "end" },
    h("p", null, mark(row), " ", facts.join(" · ")),
    metrics.length ? h("p", { class: "metrics" }, metrics.map(([name, x]) => h("span", { class: "chip" }, `${name} ${Number(x.toPrecision(4))}`))) : null,
    episode.fault ? h("div", { class: "fault" }, h("b", null, "Fault"), textBlock(String(episode.fault), "mono")) : null);
}
