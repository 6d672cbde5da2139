// @ts-check
// Turns of a conversation in a path: the parts that are drawn as cards, thoughts that fold, calls of tools.
import { label, plural } from "./dom.js";
import { ownerOf, store, view } from "./store.js";

/** @typedef {import("./store.js").Path} Path @typedef {import("./store.js").Turn} Turn */
/** @typedef {object} Part of a turn, by positions of tokens
 * @property {number} from @property {number} to
 * @property {"markup" | "said" | "thought" | "call"} kind @property {number} turn its number @property {string} role
 * @property {string} title what is written above it, "" for nothing @property {string} key of a thought, else ""
 * @property {boolean} first @property {boolean} last */

/** @type {WeakMap<Path, Part[]>} */ const known = new WeakMap();

/** Whether the shown text is a conversation. @param {Path} c */
export const isChat = (c) => c.turns.length > 0;

/** The turn that a position is in, or the last one if it is after all turns. @param {Path} c @param {number} position */
export const turnAt = (c, position) => c.turns.findLastIndex(({ at }) => at <= position);

/** The parts of a path, in order; none if it is not a conversation. @param {Path} c */
export function partsOf(c) {
  const there = known.get(c);
  if (there) return there;
  /** @type {Part[]} */ const parts = [];
  const start0 = c.turns[0]?.at ?? c.n;
  const put = (/** @type {number} */ from, /** @type {number} */ to, /** @type {Partial<Part>} */ of) => {
    if (to > from) parts.push({ kind: "said", role: "", turn: -1, title: "", key: "", first: false, last: false, ...of, from, to });
  };
  if (isChat(c)) put(0, start0, { kind: "markup" });
  c.turns.forEach((turn, i) => {
    const { role, at, begin, end } = turn, next = c.turns[i + 1]?.at ?? c.n;
    const before = parts.length;
    put(at, begin, { kind: "markup", turn: i, role });
    if (role === "assistant") answer(c, turn, (from, to, of) => put(from, to, { turn: i, role, ...of }));
    else put(begin, end, { turn: i, role });
    put(end, next, { kind: "markup", turn: i, role });
    if (parts.length === before) return;
    Object.assign(parts[before], { first: true, title: parts[before].title || role });
    parts[parts.length - 1].last = true;
  });
  known.set(c, parts);
  return parts;
}

/** Thoughts, calls and the rest of an answer, as the server has read it. @param {Path} c @param {Turn} turn
 * @param {(from: number, to: number, of: Partial<Part>) => void} put */
function answer(c, { begin, end }, put) {
  let from = begin;
  for (const [kind, start, stop, calls] of readBy(c, begin)) {
    if (start >= end) break;
    put(from, start, {});
    from = Math.min(stop, end);
    if (kind === "call") put(start, from, stop > end ? {} : { kind, title: calls.map(called).join("; ") }); // a call that is cut off is drawn as text
    else {
      const isOpen = kind === "thinking" || stop > end, runs = store.nodes.get(ownerOf(c, c.n - 1) ?? "")?.reason === "running";
      const title = `${!isOpen ? "Thought," : runs ? "Thinking …" : "Thought, cut at"} ${plural(from - start, "token")}`;
      put(start, from, { kind: "thought", key: `${ownerOf(c, start)}:${start}`, title });
    }
  }
  put(from, end, {});
}

/** The facts about an answer, from the last node with tokens in it, which covers all of it. @param {Path} c @param {number} begin
 * @returns {[string, number, number, [string, any][]][]} */
const readBy = (c, begin) => c.owners.flatMap(({ id }) =>
  (store.nodes.get(id)?.answers ?? []).filter(([at]) => at === begin)).at(-1)?.[1] ?? [];

/** A call in words. @param {[string, any]} call */
function called([name, value]) {
  const facts = value && typeof value === "object"
    ? Object.entries(value).map(([key, one]) => `${key}: ${JSON.stringify(one)}`).join(", ") : String(value ?? "");
  return label(`Calls ${name}(${facts.length > 120 ? facts.slice(0, 120) + "…" : facts})`);
}

/** Whether a thought is folded: not while the cursor is in it. @param {Part | undefined} part */
export const isFolded = (part) =>
  part?.kind === "thought" && !view.unfolded.has(part.key) && !(view.cursor >= part.from && view.cursor < part.to);

/** Fold or unfold thoughts: these, or all of a path. @param {Part[]} parts */
export function toggleThoughts(parts) {
  const keys = parts.filter(({ kind }) => kind === "thought").map(({ key }) => key);
  const all = keys.every((key) => view.unfolded.has(key));
  for (const key of keys) view.unfolded[all ? "delete" : "add"](key);
  return { count: keys.length, folded: all };
}
