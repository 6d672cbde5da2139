// @ts-check
// The page's copy of the document: nodes, columns of numbers, the shown path. No elements, no requests.
import { hush, redraw, visibleTexts, wholeCharacters } from "./dom.js";

/** @typedef {string | number[] | {c: string}} Piece text of a token: a string, bytes, or the name of a control token
 * @typedef {[number, number | null, Piece][]} Top
 * @typedef {Record<string, any>} Loose an object as the server sends it */

const CACHED_TOPS = 2000;

const COLUMNS = /** @type {const} */ (["ids", "lp", "h", "rk", "al", "pieces", "src"]);

/** Tokens with their numbers in columns; unknown numbers are NaN. */
export class Tokens {
  version = 0; // counts changes
  /** @type {number[]} */ ids = [];
  /** @type {number[]} */ lp = [];
  /** @type {number[]} */ h = [];
  /** @type {number[]} */ rk = [];
  /** @type {number[]} how many tokens a grammar allowed */ al = [];
  /** @type {Piece[]} */ pieces = [];
  /** @type {string[]} */ src = [];

  get n() {
    return this.ids.length;
  }

  /** Write columns from a place on, as the server sends them. @param {number} at @param {Loose} from */
  write(at, from) {
    this.version++;
    from.ids.forEach((/** @type {number} */ id, /** @type {number} */ k) => {
      const i = at + k, same = this.ids[i] === id; // keep numbers that an event brought before this older answer
      for (const name of /** @type {const} */ (["lp", "h", "rk", "al"])) this[name][i] = from[name]?.[k] ?? (same ? this[name][i] : NaN);
      [this.ids[i], this.pieces[i], this.src[i]] = [id, from.text[k], from.src[k] ?? ""];
    });
  }

  /** Append a range of other tokens. @param {Tokens} other @param {number} from @param {number} to */
  append(other, from, to) {
    for (let i = from; i < to; i++) for (const name of COLUMNS) /** @type {any[]} */ (this[name]).push(other[name][i]);
  }
}

const NONE = new Tokens(); // of nodes whose tokens are not here

/** @typedef {Loose & {id: string, parent: string | null, at: number, n: number, deleted: boolean, bookmark: boolean, text: string,
 *   tokens: Tokens, rounds: Loose[]}} Node */

const SETTINGS = "llamabranch"; // the name of the settings in the browser's storage

/** The values that this browser keeps: settings, and the drafts of this tab. @param {() => Storage} storage @returns {Loose} */
function keptIn(storage) {
  try {
    return JSON.parse(storage().getItem(SETTINGS) ?? "{}") ?? {};
  } catch { // it is blocked
    return {};
  }
}

/** Everything that is known. `revision` counts changes of the tree's shape; `end` is where the shown path ends. */
export const store = {
  /** @type {Map<string, Node>} */ nodes: new Map(),
  /** @type {Loose} */ doc: { model: null, file: {}, loading: "The model is being loaded …", undo: 0, redo: 0 },
  /** @type {Map<string, Loose>} */ jobs: new Map(),
  /** @type {string | null} */ current: null,
  /** @type {number | null} null: to the end of the node, also when it grows */ end: null,
  revision: 0,
  /** @type {Set<string>} nodes that grew since the tree was drawn */ grown: new Set(),
  settings: keptIn(() => localStorage),
  /** drafts: texts in boxes, by the field or the place */ drafts: keptIn(() => sessionStorage),
  /** @type {Set<string | null>} nodes that were shown: their tokens without numbers were scored then */ looked: new Set(),
  /** @type {Map<string, Top>} by "node:position" */ tops: new Map(),
};

/** Keep a setting in this browser. @param {string} name @param {any} value */
export function keepSetting(name, value) {
  store.settings[name] = value;
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(store.settings));
  } catch {} // it is blocked: the setting holds until the page is left
  redraw(["state", "legend"]);
}

/** Keep the text of a box in this tab, until the user keeps or discards it. Returns whether the browser keeps it.
 * @param {string} name @param {Loose | null} draft */
export function keepDraft(name, draft) {
  if (!draft !== !store.drafts[name]) redraw(["state"]);
  if (draft) store.drafts[name] = draft;
  else delete store.drafts[name];
  try {
    sessionStorage.setItem(SETTINGS, JSON.stringify(store.drafts));
    return true;
  } catch {
    return false;
  }
}

/** What the reader looks at: the cursor and the token under the mouse as positions; -1 = no token. */
export const view = { sought: "", /** @type {number[]} the match that was gone to, as positions */ match: [-1, -1], cursor: -1, hover: -1, ghosts: false, typingAt: -1, limit: 320,
  /** the end of a branch that is shown beside the text, and whether the mouse is in it
   * @type {string | null} */ beside: null, side: false,
  /** where the reader continues after a new branch: the inspector and the arrow keys begin there */ reading: -1,
  /** @type {Set<string>} thoughts that are unfolded */ unfolded: new Set() };

/** Change what the reader looks at. @param {Partial<typeof view>} changes */
export function look(changes) {
  Object.assign(view, changes);
  redraw(["text", "inspect", "where"]);
}

/** The node that a place belongs to, and the place; null: the node's end. @param {string} id @param {number | null} end
 * @returns {[string, number | null]} */
function home(id, end) {
  let node = store.nodes.get(id);
  while (node?.parent && end != null && end <= node.at) node = store.nodes.get(node.parent);
  return node && end != null ? [node.id, end < node.at + node.n ? end : null] : [id, end];
}

/** Show a node, up to a position. @param {string} id @param {number | null} [to] */
export function select(id, to = null) {
  const [node, end] = home(id, to);
  if (store.current === node && store.end === end) return;
  if (store.current == null) redraw(["state"]); // leave the first screen
  Object.assign(store, { current: node, end });
  hush();
  look({ cursor: -1, hover: -1, reading: -1, typingAt: -1 });
  redraw(["place", "tree", "live", "legend"]);
}

/** @param {Loose} from a node as the server sends it */
export function putNode(from) {
  const old = store.nodes.get(from.id);
  if (from.hidden) return hide(from.id);
  if (old) {
    if (old.deleted !== from.deleted || old.at !== from.at) store.revision++;
    return Object.assign(old, from, { n: Math.max(old.n, from.n) }); // its tokens may have arrived first
  }
  const node = /** @type {Node} */ ({ tokens: NONE, rounds: [], ...from });
  store.nodes.set(node.id, node);
  store.revision++;
  return node;
}

/** Take a whole document; tokens that are known stay. @param {Loose} doc */
export function putDoc(doc) {
  // Another process may give a name to another text, and once there is a model it finds thoughts and calls in answers.
  const old = doc.boot === store.doc.boot && !doc.model === !store.doc.model ? store.nodes : new Map();
  store.nodes = new Map();
  const columns = Object.entries(doc.nodes);
  doc.nodes.id.forEach((/** @type {string} */ id, /** @type {number} */ i) => {
    const node = Object.fromEntries(columns.map(([name, column]) => [name, column[i]]));
    const { tokens, rounds, n, known, ...facts } = old.get(id) ?? /** @type {Loose} */ ({});
    putNode({ ...facts, ...node, ...(n === node.n && known === node.known ? { tokens, rounds } : {}) });
  });
  const { nodes: _, ...rest } = doc;
  store.doc = { ...store.doc, ...rest };
  store.jobs = new Map((doc.jobs ?? []).map((/** @type {Loose} */ job) => [job.id, job]));
  if (!store.current || !store.nodes.has(store.current)) {
    const isThere = (/** @type {string} */ id) => store.nodes.has(id) && !isGone(store.nodes.get(id));
    store.current = isThere(doc.current) ? doc.current : doc.nodes.id.findLast(isThere) ?? null;
    store.end = null;
  }
  store.revision++;
}

/** Put facts into a node that the list of nodes leaves out; they come with its tokens. An event may have brought newer ones of its
 * state. @param {Loose} from */
export function putFacts({ id, n, text, deleted, bookmark, reason, ...from }) {
  Object.assign(store.nodes.get(id) ?? {}, Object.fromEntries(Object.entries(from).filter(([, value]) => value != null)));
}

function hide(/** @type {string} */ id) {
  const node = store.nodes.get(id);
  if (!node || !store.nodes.delete(id)) return;
  store.revision++;
  const parent = store.nodes.get(node.parent ?? "");
  const [owner, end] = parent ? home(parent.id, node.at) : [null, null];
  if (store.current === id) Object.assign(store, { current: owner, end });
  if (!parent || store.current !== owner || store.end !== end) return;
  for (const other of store.nodes.values()) if (other.parent === parent.id && other.at === node.at) return;
  Object.assign(store, { current: parent.id, end: null }); // nothing else continues the parent here: show the parent's text
  if (node.kind === "sampled" && node.at < parent.at + parent.n) view.cursor = node.at - 1; // put the cursor back to where Continue acted
}

/** @param {Loose} columns of a stretch of one node, at absolute positions */
export function putTokens(columns) {
  const node = store.nodes.get(columns.node);
  if (!node) return;
  const at = columns.at - node.at;
  const end = at + columns.ids.length;
  if (end > node.n) {
    node.n = end;
    store.grown.add(node.id);
  }
  node.lacks = at > node.tokens.n; // the tokens before it are fetched when the node is shown
  if (node.lacks) return;
  if (node.tokens === NONE) node.tokens = new Tokens();
  node.tokens.write(at, columns);
  if (columns.answers) node.answers = columns.answers;
  if (node.text.length < 40) node.text = node.tokens.pieces.slice(0, 40).map(pieceText).join("").slice(0, 60);
  columns.top?.forEach((/** @type {Top} */ top, /** @type {number} */ i) => store.tops.set(`${node.id}:${columns.at + i}`, top));
  for (const key of store.tops.keys()) if (store.tops.size > CACHED_TOPS) store.tops.delete(key);
}

export function putRound(/** @type {Loose} */ round) {
  const rounds = store.nodes.get(round.node)?.rounds;
  if (rounds && !rounds.some((each) => each.at === round.at && each.round === round.round)) rounds.push(round);
}

/** The node that a node's first token is put into, when nodes that keep no tokens are left out. @param {Node} node */
export function holder(node) {
  let parent = node.parent ? store.nodes.get(node.parent) : undefined;
  while (parent && node.at <= parent.at) parent = parent.parent ? store.nodes.get(parent.parent) : undefined;
  return parent;
}

/** Whether a node, or one that it continues, is deleted. @param {Node | undefined} node */
function isGone(node) {
  for (; node; node = holder(node)) if (node.deleted) return true;
  return false;
}

/** @typedef {Tokens & {text: string[], shown: string[], owners: {id: string, from: number, to: number}[], missing: number,
 *   control: Uint8Array, turns: Turn[]}} Path
 * @typedef {{role: string, at: number, begin: number, end: number}} Turn the template's tokens from `at` on, and from `begin`
 *   to `end` what it says */

/** Nodes whose own tokens make up a path, from the root on. @param {string | null} id @param {number | null} end */
export function pieces(id, end) {
  const parts = [];
  let node = id ? store.nodes.get(id) : undefined;
  let to = node ? Math.min(end ?? Infinity, node.at + node.n) : 0;
  while (node) {
    if (to > node.at) parts.push({ id: node.id, from: node.at, to });
    to = Math.min(to, node.at);
    node = node.parent ? store.nodes.get(node.parent) : undefined;
  }
  return parts.reverse();
}

/** The turns of a path: a node's own turns replace its parents' turns from there on.
 * @param {Path["owners"]} owners @param {number} n how many tokens of the path are here @returns {Turn[]} */
function turnsOf(owners, n) {
  /** @type {[string, number, number, number | null][]} */ let found = [];
  for (const { id, to } of owners) {
    const own = (store.nodes.get(id)?.turns ?? []).filter((/** @type {any[]} */ [, at]) => at < to);
    if (own.length) found = [...found.filter(([, at]) => at < own[0][1]), ...own];
    const last = found.at(-1);
    if (last && (last[3] ?? 0) > to) found = found.with(-1, [last[0], last[1], last[2], null]); // what follows continues its message
  }
  return found.filter(([, at]) => at < n).map(([role, at, begin, end], i) => {
    const limit = Math.min(n, found[i + 1]?.[1] ?? n);
    return { role, at, begin: Math.min(begin, limit), end: Math.min(end ?? limit, limit) };
  });
}

/** The tokens of a path, joined. `missing` is the first position that has to be fetched, or -1.
 * @param {string | null} id @param {number | null} end @returns {Path} */
export function pathOf(id, end) {
  const owners = pieces(id, end);
  const path = /** @type {Path} */ (new Tokens());
  path.owners = owners;
  path.missing = -1;
  for (const { id: owner, from, to } of owners) {
    const { tokens, at } = /** @type {Node} */ (store.nodes.get(owner));
    const there = Math.min(tokens.n, to - at);
    if (there > from - at) path.append(tokens, from - at, there);
    if (there === to - at) continue;
    path.missing = Math.max(from, at + there);
    break;
  }
  path.turns = turnsOf(owners, path.n);
  path.text = texts(path.pieces);
  path.shown = visibleTexts(path.text);
  path.control = Uint8Array.from(path.pieces, (piece) => (typeof piece === "object" && "c" in piece ? 1 : 0));
  return path;
}

/** Which node owns a position of a path. @param {Path} path @param {number} position */
export const ownerOf = (path, position) =>
  path.owners.find(({ from, to }) => position >= from && position < to)?.id ?? null;

const UTF8 = new TextDecoder("utf-8", { ignoreBOM: true });

/** The texts of consecutive tokens: a character that several tokens share is in the last one's text; bytes that are
 * not UTF-8 become \ufffd. */
export const texts = (/** @type {Piece[]} */ all) => wholeCharacters(all.map((piece, i) => {
  if (!Array.isArray(piece)) return typeof piece === "string" ? piece : piece.c;
  return UTF8.decode(new Uint8Array(piece), { stream: Array.isArray(all[i + 1]) });
}));

/** A piece by itself, with bytes that are not text as \xNN. @param {Piece} piece */
export const pieceText = (piece) => Array.isArray(piece) && texts([piece])[0].includes("\ufffd")
  ? piece.map((byte) => byte < 128 ? String.fromCharCode(byte) : "\\x" + byte.toString(16)).join("") : texts([piece])[0];

/** Where a text occurs in consecutive texts: its first and last one. @param {string[]} words @param {string} q
 * @returns {Generator<[number, number]>} */
export function* occurrences(words, q) {
  const wanted = new RegExp(q.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), "giu");
  let i = 0, end = words[0]?.length ?? 0; // of word i
  const at = (/** @type {number} */ place) => {
    while (end <= place) end += words[++i].length;
    return i;
  };
  for (const { index, 0: { length } } of q ? words.join("").matchAll(wanted) : []) yield [at(index), at(index + length - 1)];
}

/** The state of the page, the most pressing first. @param {{session: boolean, connected: boolean}} net */
export function stateOf(net) {
  const { doc, jobs } = store;
  const running = [...jobs.values()].filter((job) => job.state === "running");
  /** @type {Record<string, any>} */ const states = {
    "no-session": !net.session, "connection-lost": !net.connected,
    "model-loading": doc.loading, "reading-again": running.some(({ message }) => message),
    generating: running.length, "disk-error": doc.file.error, "read-only": doc.file.read_only,
  };
  return Object.keys(states).find((name) => states[name]) ?? "ready";
}
