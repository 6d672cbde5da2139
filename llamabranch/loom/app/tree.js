// @ts-check
// The tree: stretches without forks as rows of a pool.
import { $, attribute, clip, h, label, later, redraw, set } from "./dom.js";
import { binOf, lens } from "./lenses.js";
import { fetchPath } from "./net.js";
import { holder, select, store, texts } from "./store.js";

/** @typedef {import("./store.js").Node} Node */
/** @typedef {object} Segment a stretch without forks, over one node or several
 * @property {string} key of its first token, so it stays while the segment grows @property {Node} first @property {Node} node its last
 * @property {Node[]} parts all of them
 * @property {number} from @property {number} to positions in the path @property {number} level
 * @property {Segment | null} parent @property {Segment[]} children */

const [LOW, HIGH] = matchMedia("(pointer: coarse), (max-width: 600px)").matches ? [44, 60] : [34, 54]; // px: rows of one and two lines
const FEW = 24; // up to so many rows have two lines
const POOL = 80;
const WORDED = 48; // tokens that the words of a row are made of
const NEIGHBOURS = 50; // that a row's words are compared with
const TOLD = 20; // the list of nodes has at least this many first characters of each text
/** @type {Set<string>} */ const closed = new Set();
/** @type {Segment[]} */ let roots = [];
/** @type {Segment[]} */ let rows = [];
/** @type {Map<string, Segment[]>} */ let byNode = new Map();
let built = -1; // the revision that the rows show
let high = LOW; // px of a row

/** Cut the nodes into segments. */
function build() {
  const shown = [...store.nodes.values()].filter(({ deleted }) => !deleted);
  const forks = Map.groupBy(shown, (node) => holder(node)?.id ?? "");
  for (const list of forks.values()) list.sort((a, b) => a.at - b.at);
  byNode = new Map();
  roots = (forks.get("") ?? []).map((node) => firstOf(node, 0, null));
  const waiting = [...roots]; // segments whose last node is not cut yet
  while (waiting.length) {
    let segment = /** @type {Segment} */ (waiting.pop());
    const { node } = segment, end = node.at + node.n, own = [segment];
    byNode.set(node.id, own);
    for (const [cut, branches] of Map.groupBy(forks.get(node.id) ?? [], ({ at }) => Math.min(at, end))) {
      segment.to = cut;
      if (cut === end && branches.length === 1) { // it goes straight on
        segment.node = branches[0];
        segment.parts.push(segment.node);
        waiting.push(segment);
        break;
      }
      const rest = firstOf(node, cut, segment), others = branches.map((branch) => firstOf(branch, cut, segment));
      segment.children.push(...(cut < end ? [rest] : []), ...others);
      waiting.push(...others);
      if (cut === end) break;
      own.push(rest);
      segment = rest;
    }
    segment.to = end;
  }
}

/** @param {Node} node @param {number} from @param {Segment | null} parent @returns {Segment} */
const firstOf = (node, from, parent) => ({
  key: `${node.id}@${from}`, first: node, node, parts: [node], from, to: from, level: (parent?.level ?? 0) + 1, parent, children: [],
});

/** The rows that are open, from top to bottom. */
function unfold() {
  rows = [];
  const waiting = [...roots].reverse();
  while (waiting.length) {
    const segment = /** @type {Segment} */ (waiting.pop());
    rows.push(segment);
    if (!closed.has(segment.key)) for (let i = segment.children.length; i--; ) waiting.push(segment.children[i]);
  }
}

/** Rebuild the parts that changed. */
function update() {
  if (built !== store.revision) {
    built = store.revision;
    build();
    unfold();
  }
  for (const id of store.grown) {
    const node = store.nodes.get(id), segment = byNode.get(id)?.at(-1);
    if (node && segment?.node === node) segment.to = node.at + node.n;
  }
  store.grown.clear();
}

/** The segment that holds a place of a path. @param {string | null} id @param {number | null} end */
export function segmentOf(id, end = store.end) {
  update();
  const all = (id && byNode.get(id)) || [];
  return all.find(({ from, to }) => end != null && from < end && end <= to) ?? all.at(-1);
}

/** Where the children of the shown place are: what could follow it. @param {string | null} id @param {number | null} end */
export function following(id, end) {
  const segment = segmentOf(id, end);
  return segment && (end == null || end >= segment.to) ? segment.children : [];
}

/** Show a path up to the end of a segment: null where its node ends. @param {Segment} segment */
export const goTo = ({ node, to }) => select(node.id, to < node.at + node.n ? to : null);

function setOpen(/** @type {Segment} */ { key }, /** @type {boolean} */ open) {
  closed[open ? "delete" : "add"](key);
  unfold();
  redraw(["tree"]);
}

/** Make a function that does something with the chosen segment. @param {(segment: Segment) => void} what */
const chosen = (what) => () => {
  const segment = segmentOf(store.current);
  if (segment) what(segment);
};

/** What keys do in the tree. @type {Record<string, () => void>} */
export const treeMoves = {
  up: () => step(-1),
  down: () => step(1),
  left: chosen((segment) => {
    if (segment.children.length && !closed.has(segment.key)) setOpen(segment, false);
    else if (segment.parent) goTo(segment.parent);
  }),
  right: chosen((segment) => {
    if (closed.has(segment.key)) setOpen(segment, true);
    else if (segment.children.length) goTo(segment.children[0]);
  }),
  first: () => rows.length && goTo(rows[0]),
  last: () => rows.length && goTo(rows[rows.length - 1]),
  toggle: chosen((segment) => setOpen(segment, closed.has(segment.key))),
};

function step(/** @type {number} */ by) {
  const segment = segmentOf(store.current);
  const next = rows[(segment ? rows.indexOf(segment) : -1) + by];
  if (next) goTo(next);
}

/** The turn of a chat at a position of a node's text. @param {Node | null | undefined} node @param {number} position @returns {any[]} */
function turnOf(node, position) {
  for (let cut = Infinity; node; node = store.nodes.get(node.parent ?? "")) {
    const [role, at, begin, end] = node.turns?.findLast((/** @type {any[]} */ [, at]) => at <= position && at < cut) ?? [];
    if (role) return [role, at, begin, end > cut ? null : end]; // a node that forks inside a message continues it
    cut = Math.min(cut, node.at);
  }
  return [];
}

/** Who says what a row's words are made of, and where that is: in a chat the first message, in its first row the question.
 * @param {Segment} segment @returns {{role: string, from: number, to: number}} */
function message({ parts, from, to }) {
  const inside = parts.flatMap(({ turns }) => turns ?? []).filter(([, at]) => at > from && at < to);
  const turns = [turnOf(parts[0], from), ...inside];
  const said = turns.map(([role = "", , begin = from, end = to], i) =>
    ({ role, from: Math.max(from, begin), to: Math.min(to, end ?? to, turns[i + 1]?.[1] ?? to) })).filter((each) => each.to > each.from);
  return (from === 0 && said.find(({ role }) => role === "user")) || (said[0] ?? { role: turns[0][0] ?? "", from: to, to });
}

/** @typedef {{role: string, words: string}} Wording */
/** @type {WeakMap<Segment, Wording & {key: string}>} */ const wordings = new WeakMap();

/** The words that a row begins with, at most up to the next fork, and who says them. @param {Segment} segment @returns {Wording} */
function wording(segment) {
  const key = `${segment.to} ${segment.parts.slice(0, 9).map(({ tokens }) => tokens.version)}`, before = wordings.get(segment);
  if (before?.key === key) return before;
  const { role, from, to } = message(segment);
  /** @type {import("./store.js").Piece[]} */ const pieces = [];
  let isCut = false;
  for (const { tokens, text, at, n } of segment.parts) {
    const begin = Math.max(0, from - at), end = Math.min(n, to - at, begin + WORDED);
    if (end <= begin) continue;
    if (tokens.n < end && begin === 0 && end === Math.min(n, WORDED)) { // without tokens: take the text from the list of nodes
      pieces.push(text);
      isCut = end < n || [...text].length >= TOLD;
      break;
    }
    pieces.push(...tokens.pieces.slice(begin, end).filter((piece) => !role || typeof piece === "string" || Array.isArray(piece)));
    isCut = tokens.n < end || end < Math.min(n, to - at);
    if (isCut || pieces.length >= WORDED) break;
  }
  const said = texts(pieces).join("").replace(/^\ufffd+|\ufffd+$/g, ""); // parts of characters
  const found = { key, role, words: (isCut ? clip(said, said.length - 1) : said).trimStart() }; // the last character may be incomplete
  wordings.set(segment, found);
  return found;
}

/** The words of a row. They begin where it differs from the rows next to it. @param {Segment} segment @param {Segment[]} family
 * @param {number} place in the family @returns {Wording} */
export function heading(segment, family, place) {
  const { role, words } = wording(segment);
  let same = 0;
  for (const other of family.slice(Math.max(0, place - NEIGHBOURS), place + NEIGHBOURS)) {
    const { words: theirs } = other === segment ? { words: "" } : wording(other);
    let i = 0;
    while (i < words.length && words[i] === theirs[i]) i++;
    if (i < words.length) same = Math.max(same, i);
  }
  const word = words.slice(0, same).match(/\S*$/)?.[0].length ?? 0;
  const cut = word > 24 ? clip(words, same).length : same - word; // a script without spaces
  return { role, words: cut ? `… ${words.slice(cut).trimStart()}` : words };
}

/** Mean bin of a segment and where its worst token is, in the current lens. @param {Segment} segment */
function strip({ first, parts, from, to }) {
  let sum = 0, known = 0, worst = -1, most = -1;
  /** @type {number[]} */ const counts = new Array(7).fill(0);
  for (const { tokens, at, n } of parts) {
    if (tokens.n < n) { // without tokens: use the means from the list of nodes
      const { lp, h: entropy } = first;
      const mean = { probability: Math.exp(lp ?? NaN), entropy: entropy ?? NaN }[lens.name] ?? NaN;
      return { bin: Number.isNaN(mean) ? -1 : lens.bin(mean), worst: -1 };
    }
    for (let i = Math.max(from - at, 0); i < Math.min(n, to - at); i++) {
      const bin = binOf(tokens, i);
      if (bin < 0) continue;
      sum += bin;
      known++;
      counts[bin]++;
      if (bin > most) [most, worst] = [bin, (at + i - from) / Math.max(1, to - from)];
    }
  }
  if (known && lens.name === "source") return { bin: counts.indexOf(Math.max(...counts)), worst: -1 };
  return { bin: known ? Math.round(sum / known) : -1, worst };
}

const ROLES = { user: "You", assistant: "Model", tool: "Tool", system: "System" };

/** A row of the pool. */
function makeRow() {
  const row = h("div", { role: "treeitem", class: "row" }, h("span", { class: "twist" }), h("span", { class: "words", dir: "auto" }),
    h("span", { class: "strip" }));
  row.onclick = (/** @type {MouseEvent} */ event) => {
    const segment = rows[Number(row.dataset.row)];
    if (!segment) return;
    if (event.target === row.firstChild && segment.children.length) setOpen(segment, closed.has(segment.key));
    else goTo(segment);
    $("tree").focus({ preventScroll: true });
  };
  return row;
}

/** @param {any} row @param {Segment} segment @param {number} place @param {Segment | undefined} chosen */
function drawRow(row, segment, place, chosen) {
  const { node, children, level } = segment;
  const family = segment.parent?.children ?? roots, among = family.indexOf(segment);
  const { role, words: said } = heading(segment, family, among);
  const isClosed = closed.has(segment.key);
  const [, words, line] = row.children;
  const { bin, worst } = strip(segment);
  const marks = (node.bookmark ? " ★" : "") + (node.note ? " ✎" : "")
    + (isClosed ? `  ${children.length}` : "");
  const steps = (/** @type {number} */ percent) => `${4 * Math.round(percent / 4)}%`; // rounded, so that most new tokens change no style
  set(row, {
    hidden: false, "--top": `${place * high}px`, "--level": String(Math.min(level - 1, 14)),
    id: `row-${place}`, "data-row": place, "data-node": node.id, "aria-level": level,
    "aria-posinset": among + 1, "aria-setsize": family.length, "aria-selected": segment === chosen ? "true" : "false",
    "aria-expanded": children.length ? String(!isClosed) : null,
    class: `row${node.reason === "running" ? " running" : ""}`,
  });
  set(words, { textContent: label(clip(said, high === HIGH ? 160 : 80)) || "…", "data-marks": marks.trim() || null,
    "data-role": /** @type {Record<string, string>} */ (ROLES)[role] ?? null });
  set(line, { class: `strip b${bin < 0 ? "x" : bin}`, "--worst": worst < 0 ? "-9px" : steps(100 * worst),
    "--length": steps(Math.min(100, 8 + 14 * Math.log2(1 + segment.to - segment.from))) });
}

/** @type {any} */ let shownRow = null;
const resting = later(150);

function drawTree() {
  update();
  const box = $("tree"), pool = $("rows");
  const chosen = segmentOf(store.current);
  let place = chosen ? rows.indexOf(chosen) : -1;
  if (chosen && place < 0) { // it is under a closed row: open it
    for (let up = chosen.parent; up; up = up.parent) closed.delete(up.key);
    unfold();
    place = rows.indexOf(chosen);
  }
  high = rows.length <= FEW ? HIGH : LOW;
  box.classList.toggle("tall", high === HIGH);
  pool.style.height = `${rows.length * high}px`;
  if (chosen?.key !== shownRow && place >= 0) {
    const height = box.clientHeight;
    if (place * high < box.scrollTop) box.scrollTop = place * high;
    else if ((place + 1) * high > box.scrollTop + height) box.scrollTop = (place + 1) * high - height;
    shownRow = chosen?.key;
  }
  const begin = Math.max(0, Math.floor(box.scrollTop / high) - 2);
  const count = Math.min(POOL, Math.ceil(box.clientHeight / high) + 4, Math.max(0, rows.length - begin));
  while (pool.children.length < count) pool.append(makeRow());
  for (let i = 0; i < pool.children.length; i++) {
    const row = pool.children[i];
    if (i < count) drawRow(row, rows[begin + i], begin + i, chosen);
    else set(row, { hidden: true, id: "" });
  }
  attribute(box, "aria-activedescendant", place >= begin && place < begin + count ? `row-${place}` : null);
  resting(() => { // fetch the tokens of rows that stay in view
    const parts = rows.slice(begin, begin + count).flatMap((segment) => segment.parts.slice(0, 4));
    for (const node of parts) {
      if (node.tokens.n < node.n && (node.reason !== "running" || node.lacks)) void fetchPath(node.id, node.at, node.n);
    }
  });
}

export function startTree() {
  $("tree").addEventListener("scroll", () => redraw(["tree"]), { passive: true });
  new ResizeObserver(() => redraw(["tree"])).observe($("tree-pane"));
  return drawTree;
}
