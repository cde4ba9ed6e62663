// The embedded blocks: gzip in base64, decoded when they are needed.

const KEPT_CHUNKS = 12;
const chunks = new Map();

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function unpack(id) {
  const stream = new Blob([bytesOf($(id).textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

/** A chunk's lines: first what its episodes share, then one JSON document per episode. */
async function loadChunk(number) {
  let chunk = chunks.get(number);
  chunks.delete(number);
  if (!chunk) chunk = unpack(`chunk-${number}`).then((text) => ({ lines: text.split("\n"), shared: null }));
  chunks.set(number, chunk);
  if (chunks.size > KEPT_CHUNKS) chunks.delete(chunks.keys().next().value);
  return chunk;
}

function sharedOf(chunk) {
  chunk.shared = chunk.shared || JSON.parse(chunk.lines[0]);
  return chunk.shared;
}

/** An episode whose turns have their messages: `prompt` and `fresh` are lists of {role, content}. */
async function loadEpisode(row) {
  const chunk = await loadChunk(row.chunk);
  const { messages, pictures } = sharedOf(chunk);
  const episode = JSON.parse(chunk.lines[row.place + 1]);
  let before = [];
  for (const turn of episode.turns) {
    const [shared, ...rest] = turn.prompt;
    before = before.slice(0, shared).concat(rest);
    turn.prompt = before.map((i) => messages[i]);
    turn.fresh = turn.fresh.map((i) => messages[i]);
  }
  return { ...episode, row, pictures };
}

async function loadPicture(address) {
  const image = new Image();
  image.src = address;
  await image.decode();
  return image;
}

const PICTURE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/;

/** The address of a stored picture; null for anything else than an embedded bitmap. */
function pictureAddress(episode, key) {
  const address = key === null || key === undefined ? "" : episode.pictures[key] || String(key);
  return PICTURE.test(address) ? address : null;
}

/** One entry per line of the list: an episode, or in a comparison the two with the same task, seed and update.

    Two runs whose last evaluations came after different updates are compared at those, too. */
function makeEntries(head) {
  if (head.runs.length < 2) return head.episodes.map((row, i) => ({ number: i + 1, rows: [row] }));
  const settings = [0, 1].map((run) => new Set(head.episodes.filter((r) => (r.run || 0) === run).map((r) => r.setting)));
  const common = [...settings[0]].some((setting) => settings[1].has(setting));
  const last = [-1, -1];
  for (const row of head.episodes) if (row.player !== TRAINING) last[row.run || 0] = Math.max(last[row.run || 0], row.update ?? -1);
  const settingOf = (row) => (Math.min(...last) >= 0 && row.player !== TRAINING && row.update === last[row.run || 0] ? "last" : row.setting);
  const pairs = new Map();
  const seen = new Map();
  for (const row of head.episodes) {
    const name = JSON.stringify([row.task, row.seed, common ? settingOf(row) : ""]);
    const occurrence = `${row.run || 0} ${name}`;
    seen.set(occurrence, (seen.get(occurrence) || 0) + 1);
    const key = `${seen.get(occurrence)} ${name}`;
    if (!pairs.has(key)) pairs.set(key, [null, null]);
    pairs.get(key)[row.run || 0] = row;
  }
  // Each branch stands beside the episode that it continues.
  const first = head.episodes.filter((row) => !row.run);
  for (const pair of pairs.values()) {
    const from = pair[1]?.branch && first[pair[1].branch.episode - 1];
    if (from && from.seed === pair[1].seed && from.task === pair[1].task) pair[0] = from;
  }
  return [...pairs.values()].map((rows, i) => ({ number: i + 1, rows }));
}

const firstRow = (entry) => entry.rows[0] || entry.rows[1];

function outcome(row) {
  if (!row) return "missing";
  if (row.stop === "failed" || row.fault) return "failed";
  if (row.success === null) return "played";
  return row.success ? "won" : "lost";
}
