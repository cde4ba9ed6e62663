// The world of an episode: its frames, and the stage with the player that runs through the turns.

/** Decode an episode's world: one image per state. */
async function loadWorld(episode) {
  const world = episode.world;
  if (!world || !world.frames) return null;
  const images = await Promise.all(world.frames.map((key) => loadPicture(pictureAddress(episode, key))));
  return { images, width: images[0].width, height: images[0].height };
}

function drawFrame(canvas, frames, index) {
  const place = Math.max(0, Math.min(index, frames.images.length - 1));
  if (canvas.width !== frames.width || canvas.height !== frames.height) [canvas.width, canvas.height] = [frames.width, frames.height];
  canvas.getContext("2d").drawImage(frames.images[place], 0, 0);
}

const SPEEDS = [1, 2, 4, 8, 16];

/** The pictures of the worlds, the controls that move through the turns, and the rewards as a line. */
class Stage {
  #episodes = [];
  #canvases = [];
  #timer = 0;
  #speed = 4;
  #parts = {};

  /** The last position of the slider: with a world, one past the last turn. */
  last() {
    return Math.max(...this.#episodes.map((e) => e.turns.length + (e.frames ? 1 : 0)), 1);
  }

  isPlaying() {
    return this.#timer !== 0;
  }

  /** Build the stage for the open episodes. */
  open(episodes) {
    this.pause();
    this.#episodes = episodes;
    this.#canvases = episodes.map((episode) => (episode.frames ? this.#canvas(episode) : null));
    const worlds = episodes.map((episode, i) => (this.#canvases[i] ? this.#figure(i) : [worldNote(episode), progress(episode)]));
    this.#parts = { numbers: h("p", { class: "metrics", id: "numbers" }), now: h("p", { class: "now" }), line: h("canvas", { class: "line", "aria-hidden": "true", click: (event) => this.#jump(event) }) };
    $("stage").replaceChildren(h("div", { class: "worlds" }, worlds.flat().filter(Boolean)), this.#controls(), this.#parts.line, this.#parts.now, this.#parts.numbers,
      colourLegend(episodes, recolour) || "");
    $("stage").hidden = false;
  }

  close() {
    this.pause();
    this.#episodes = [];
    $("stage").hidden = true;
  }

  #canvas(episode) {
    return h("canvas", { class: episode.frames.width < 400 ? "world crisp" : "world", role: "img", "aria-label": "The world", title: "Larger or smaller", click: () => $("stage").classList.toggle("large") });
  }

  #figure(i) {
    const caption = this.#episodes.length > 1 ? h("figcaption", null, h("b", { class: `run run-${i}` }, "AB"[i])) : null;
    return h("figure", null, this.#canvases[i], caption);
  }

  #controls() {
    const button = (name, text, act) => h("button", { type: "button", id: name, class: "quiet", "aria-label": text, title: text, click: act }, icon(name));
    const slider = h("input", { type: "range", id: "slider", min: 1, max: this.last(), step: 1, "aria-label": "Turn",
      input: (event) => selectTurn(Number(event.target.value)) });
    const speed = h("select", { id: "speed", "aria-label": "Speed in turns per second", change: (event) => {
      this.#speed = Number(event.target.value);
      if (this.#timer) this.play();
    } }, SPEEDS.map((x) => h("option", { value: x }, `${x}/s`)));
    speed.value = this.#speed;
    const play = button("play", "Play (p)", () => this.toggle());
    Object.assign(this.#parts, { play, slider });
    const larger = button("larger", "Larger or smaller drawing", () => $("stage").classList.toggle("large"));
    return h("div", { class: "controls" }, button("first", "First turn", () => selectTurn(1)), play,
      button("last", "Last turn", () => selectTurn(this.last())), slider, speed, this.#canvases.some(Boolean) ? larger : null);
  }

  /** Show the state before a turn; one past the last turn is the final state. */
  show(turn) {
    const words = this.#episodes.map((episode) => describeTurn(episode.turns[turn - 1]));
    const isOver = words.every((word) => word === OVER);
    const turns = Math.max(...this.#episodes.map((e) => e.turns.length));
    const text = isOver ? "The end" : `Turn ${turn} of ${turns}`;
    this.#canvases.forEach((canvas, i) => {
      if (!canvas) return;
      drawFrame(canvas, this.#episodes[i].frames, turn - 1);
      canvas.setAttribute("aria-label", `The world, ${text}: ${words[i]}`);
    });
    this.#parts.slider.value = turn;
    this.#parts.slider.setAttribute("aria-valuetext", `${text}: ${words.join("; ")}`);
    const badge = (i) => (words.length > 1 ? h("b", { class: `run run-${i}` }, "AB"[i]) : "");
    this.#parts.now.replaceChildren(h("b", null, text), ...(isOver ? [] : words).map((word, i) => h("span", null, badge(i), word)));
    this.#parts.numbers.replaceChildren(...(this.#episodes.length > 1 ? [] : numbersAt(this.#episodes[0], turn)));
    drawRewards(this.#parts.line, this.#episodes, turn, this.last());
  }

  #jump(event) {
    selectTurn(1 + Math.floor((event.offsetX / this.#parts.line.clientWidth) * this.last()));
  }

  play() {
    clearInterval(this.#timer);
    if (state.turn >= this.last()) selectTurn(1, false);
    this.#timer = setInterval(() => (state.turn >= this.last() ? this.pause() : selectTurn(state.turn + 1, false)), 1000 / this.#speed);
    this.#parts.play.replaceChildren(icon("pause"));
    this.#parts.play.setAttribute("aria-label", "Pause (p)");
  }

  pause() {
    if (!this.#timer) return;
    clearInterval(this.#timer);
    this.#timer = 0;
    this.#parts.play.replaceChildren(icon("play"));
    this.#parts.play.setAttribute("aria-label", "Play (p)");
    selectTurn(state.turn);
  }

  toggle() {
    if (this.#timer) this.pause();
    else this.play();
  }
}

const stage = new Stage();
const OVER = "the end";

const worldNote = (episode) => (episode.world && episode.world.note ? h("p", { class: "note" }, episode.world.note) : null);

/** Return so far and progression over the turns, where there is no world to draw. */
function progress(episode) {
  let sum = 0;
  const points = (read) => episode.turns.map((turn, i) => ({ x: i + 1, y: read(turn) ?? null }));
  const series = [{ name: "return", points: points((turn) => (sum += turn.reward || 0)) }, { name: "progression", points: points((turn) => turn.progression) }];
  const known = series.filter((s) => s.points.some((p) => p.y !== null));
  return chart({ title: "So far", series: known, span: [1, Math.max(2, episode.turns.length)], unit: "turn", choose: (turn) => selectTurn(turn) });
}

/** The environment's numbers after a turn; those that the turn changed stand out. */
function numbersAt(episode, turn) {
  const now = {};
  let sum = 0;
  for (const t of episode.turns.slice(0, turn)) {
    Object.assign(now, t.metrics || {});
    sum += t.reward || 0;
  }
  const last = episode.turns[Math.min(turn, episode.turns.length) - 1];
  const facts = [[`return so far ${fixed(sum)}`, last.reward > 0]];
  if (last.progression !== undefined) facts.push([`progression ${percent(last.progression)}`, false]);
  facts.push(...Object.entries(now).filter(([, x]) => x).map(([key, x]) => [`${visible(key)} ${short(x)}`, key in (last.metrics || {})]));
  return facts.map(([text, isNew]) => h("span", { class: isNew ? "chip good" : "chip" }, text));
}

/** A turn in a few words: the action and the reward. */
function describeTurn(turn) {
  if (!turn) return OVER;
  const words = [visible(String(turn.action ?? "")).slice(0, 60) || "…"];
  if (turn.valid === false) words.push("(invalid)");
  if (turn.reward) words.push(signed(turn.reward));
  return words.join(" ");
}

/** The rewards of all turns as bars, invalid answers as marks below them. */
function drawRewards(canvas, episodes, turn, last) {
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth || 320, 44];
  [canvas.width, canvas.height] = [width * scale, height * scale];
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const styles = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(["accent-soft", "good", "bad", "line-strong"].map((name) => [name, styles.getPropertyValue(`--${name}`)]));
  const [step, band] = [width / last, height / episodes.length];
  pen.fillStyle = colours["accent-soft"];
  pen.fillRect((turn - 1) * step, 0, Math.max(2, step), height);
  episodes.forEach((episode, k) => {
    const middle = (k + 0.5) * band;
    const most = episode.turns.reduce((found, t) => Math.max(found, Math.abs(t.reward || 0)), 1e-9);
    episode.turns.forEach((t, i) => {
      const size = Math.max(1, (Math.abs(t.reward || 0) / most) * (band / 2 - 4));
      pen.fillStyle = colours[t.reward > 0 ? "good" : t.reward < 0 ? "bad" : "line-strong"];
      pen.fillRect(i * step, t.reward > 0 ? middle - size : middle, Math.max(1, step - 1), size);
      if (t.valid === false) pen.fillRect(i * step, middle + band / 2 - 3, Math.max(1, step - 1), 2);
    });
  });
}
