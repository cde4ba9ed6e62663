// Where a token's advantage comes from: reward, values and temporal differences, summed over the turns that follow.

const isTrained = (tokens, j) => !tokens.loss_mask || tokens.loss_mask[j];

/** The trained tokens of an episode in order, each with its reward, values and temporal difference. */
function chainOf(episode) {
  const { credit, turns } = episode;
  const chain = [];
  turns.forEach((turn, t) => {
    const { tokens } = turn;
    if (!tokens?.values) return;
    tokens.text.forEach((_, j) => isTrained(tokens, j) && chain.push({
      t, j, value: tokens.values[j], kl: credit.kl_coef ? -credit.kl_coef * ((tokens.kl || [])[j] || 0) : 0, reward: 0,
    }));
  });
  chain.forEach((token, k) => {
    const next = chain[k + 1];
    const turn = turns[token.t];
    token.isLast = !next || next.t !== token.t;
    token.reward = token.isLast ? turn.reward || 0 : 0;
    const isStep = token.isLast && !turn.summary && turn.moves !== false; // the environment moved
    token.gamma = isStep ? credit.gamma_step : credit.gamma_token;
    token.decay = token.gamma * (isStep ? credit.lambda_step : turn.lambda_token ?? credit.lambda_token);
    token.after = token.isLast && turn.end === "terminated" ? 0 : next ? next.value : credit.next_value ?? 0;
    token.delta = token.kl + token.reward + token.gamma * token.after - token.value;
  });
  return chain;
}

/** The parts of a token's advantage by the turn that they come from, and those of its own turn after this token. */
function creditParts(episode, t, j) {
  const chain = chainOf(episode);
  const start = chain.findIndex((token) => token.t === t && token.j === j);
  if (start < 0) return null;
  const byTurn = new Map();
  let weight = 1;
  let later = 0;
  for (const token of chain.slice(start)) {
    const part = weight * token.delta;
    if (token !== chain[start]) token.t === t ? (later += part) : byTurn.set(token.t, (byTurn.get(token.t) || 0) + part);
    weight *= token.decay;
  }
  const total = chain[start].delta + later + [...byTurn.values()].reduce((a, b) => a + b, 0);
  return { token: chain[start], later, byTurn, total };
}

const fine = (x) => (x === null || x === undefined ? "–" : `${x > 0 ? "+" : ""}${x.toFixed(4)}`.replace("-", "−"));

/** The table and the strip for one token; what the record lacks is left out, with a sentence. */
function creditPanel(episode, t, j) {
  const { tokens } = episode.turns[t];
  const at = (key) => (tokens[key] || [])[j];
  const title = h("p", { class: "credit-title" }, h("b", null, `“${visible(tokens.text[j])}”`), ` turn ${t + 1}, token ${j + 1} of ${tokens.text.length}`);
  const rest = [[episode.credit?.role === "critic" ? "whitened advantage (only the critic was trained)" : "advantage that was trained on (whitened)", at("advantages")], ["return = advantage + value", at("returns")]];
  const table = (rows) => h("table", { class: "credit" }, h("tbody", null, rows.filter(([, x]) => x !== undefined && x !== null).map(([name, x, title]) =>
    h("tr", { class: title ? "sum" : "" }, h("th", { scope: "row" }, name), h("td", null, fine(x))))));
  if (!isTrained(tokens, j)) return [title, h("p", { class: "muted small" }, "This token was not trained on.")];
  const isWhole = episode.credit?.form === "dual" && tokens.values;
  const parts = isWhole ? creditParts(episode, t, j) : null;
  if (!parts) {
    const why = !tokens.values ? "There is no critic's value, so the advantage cannot be split." : "The record does not hold the discounts of dual-discount GAE, so the advantage cannot be split.";
    return at("advantages") === undefined ? [title] : [title, table([["value before the token", at("values")], ...rest]), h("p", { class: "muted small" }, why)];
  }
  const { token, later, byTurn, total } = parts;
  const { credit } = episode;
  const turns = [...byTurn].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  const shown = turns.slice(0, 3);
  const others = turns.slice(3).reduce((sum, [, x]) => sum + x, 0);
  const recorded = at("returns") - at("values");
  const follows = token.isLast ? (episode.turns[t].end === "terminated" ? "nothing follows: the episode ended" : byTurn.size || t < episode.turns.length - 1 ? "value of the next turn" : "value of what follows the batch") : "value after the token";
  return [title, table([
    [token.isLast ? "reward of the turn" : "reward (paid at the turn's last token)", token.reward],
    ...(token.kl ? [["− KL × kl_coef", token.kl]] : []),
    [`${follows}, × ${token.gamma}`, token.gamma * token.after],
    ["− value before the token", -token.value],
    ["= temporal difference δ", token.delta, true],
    ["from later tokens of this turn", later],
    ...shown.map(([turn, x]) => [`from turn ${turn + 1}`, x]),
    ...(turns.length > 3 ? [[`from ${plural(turns.length - 3, "more turn")}`, others]] : []),
    ["= advantage", total, true],
    ...rest,
  ]), creditStrip(episode, t, token.delta + later, byTurn),
  h("p", { class: "muted small" }, `Between turns a part is multiplied by ${short(credit.gamma_step * credit.lambda_step)}, between tokens by ${short(credit.gamma_token * (episode.turns[t].lambda_token ?? credit.lambda_token))}.`,
    Math.abs(recorded - total) > 0.002 + 0.01 * Math.abs(total) ? ` The record has ${fine(recorded)} as the advantage: something of this batch is not in the formula here.` : "")];
}

function showCredit(episode, t, j) {
  $("credit")?.replaceChildren(...creditPanel(episode, t, j));
  $("credit")?.scrollIntoView({ block: "nearest" });
}

/** One bar per turn: how much of the token's advantage comes from it. Dots mark turns with a reward. */
function creditStrip(episode, t, own, byTurn) {
  const n = episode.turns.length;
  const [width, height, middle] = [330, 64, 32];
  const part = (k) => (k === t ? own : byTurn.get(k) || 0);
  const most = Math.max(...episode.turns.map((_, k) => Math.abs(part(k))), 1e-9);
  const step = width / n;
  const bars = episode.turns.map((turn, k) => {
    const size = (Math.abs(part(k)) / most) * (middle - 6);
    const box = svg("rect", { class: part(k) < 0 ? "less" : "more", x: k * step, width: Math.max(1, step - 1), y: part(k) < 0 ? middle : middle - size, height: Math.max(k < t ? 0 : 1, size) });
    const name = svg("title", {});
    name.textContent = `turn ${k + 1}: ${fine(part(k))}${turn.reward ? `, reward ${signed(turn.reward)}` : ""}`;
    box.append(name);
    return [box, turn.reward ? svg("circle", { class: turn.reward > 0 ? "more" : "less", cx: (k + 0.5) * step, cy: height - 4, r: 2.5 }) : null];
  });
  return svg("svg", { class: "credit-strip", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `What turn ${t + 1}'s token gets from each turn` },
    svg("rect", { class: "here", x: t * step, y: 0, width: Math.max(2, step), height }), svg("path", { d: `M0 ${middle}H${width}` }), bars);
}
