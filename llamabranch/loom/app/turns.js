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

/** @type {WeakMap<Path, Part[]>} */ let known = new WeakMap();
/** @type {any} what is known of the template's thoughts and calls */ let form;

/** Whether the shown text is a conversation. @param {Path} c */
export const isChat = (c) => c.turns.length > 0;

/** The turn that a position is in: the last, if it is behind all. @param {Path} c @param {number} position */
export const turnAt = (c, position) => c.turns.findLastIndex(({ at }) => at <= position);

/** The parts of a path, in order; none where it is no conversation. @param {Path} c */
export function partsOf(c) {
  if (form !== store.doc.models.A?.chat) [form, known] = [store.doc.models.A?.chat, new WeakMap()];
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

/** Thought, calls and the rest of an answer. @param {Path} c @param {Turn} turn
 * @param {(from: number, to: number, of: Partial<Part>) => void} put */
function answer(c, { at, begin, end }, put) {
  const { thought, call } = form ?? {};
  const text = c.text.slice(begin, end).join("");
  /** The token that a character is in; one that ends there. */
  const ends = [begin];
  let sum = 0;
  /** @type {number[]} */ const sums = [0];
  for (let i = begin; i < end; i++) {
    sums.push((sum += c.text[i].length));
    ends.push(i + 1);
  }
  const tokenOf = (/** @type {number} */ place) => ends[Math.max(0, sums.findLastIndex((each) => each <= place))];
  const tokenEnd = (/** @type {number} */ place) => ends[sums.findIndex((each) => each >= place)] ?? end;
  let from = begin, past = 0;
  if (thought) {
    const [start, stop] = thought, header = c.text.slice(at, begin).join("");
    const inside = start && header.lastIndexOf(start) > header.lastIndexOf(stop);
    if (inside || (start ? text.trimStart().startsWith(start) : text.includes(stop))) {
      const found = text.indexOf(stop);
      past = found < 0 ? text.length : found + stop.length;
      past += text.slice(past).search(/\S|$/);
      const to = found < 0 ? end : tokenEnd(past), count = plural(to - begin, "token");
      const title = found < 0 ? `Thinking … ${count}` : `Thought, ${count}`;
      put(begin, to, { kind: "thought", key: `${ownerOf(c, begin)}:${begin}`, title });
      from = to;
    }
  }
  for (const found of call ? text.slice(past).matchAll(new RegExp(call.pattern, "g")) : []) {
    const a = tokenOf(past + found.index + found[0].length - found[0].trimStart().length);
    const b = tokenEnd(past + found.index + found[0].trimEnd().length);
    if (a < from || b <= a) continue;
    put(from, a, {});
    put(a, b, { kind: "call", title: calls(found.groups ?? {}, call).join("; ") });
    from = b;
  }
  put(from, end, {});
}

/** What is called, in words. @param {Record<string, string>} groups @param {{name: string[], arguments: string[]}} paths */
function calls({ name, json, arguments: given }, paths) {
  const at = (/** @type {any} */ value, /** @type {string[]} */ path) => path.reduce((one, key) => one?.[key], value);
  /** @type {[string, any][]} */ let found = [[name ?? "a tool", given ?? ""]];
  try {
    if (json) found = [JSON.parse(json)].flat().map((one) => paths.name.length
      ? [at(one, paths.name), at(one, paths.arguments)] : /** @type {[string, any]} */ (Object.entries(one)[0]));
  } catch { /* it is drawn as it was written */ }
  return found.map(([called, value]) => {
    const facts = value && typeof value === "object"
      ? Object.entries(value).map(([key, one]) => `${key}: ${JSON.stringify(one)}`).join(", ") : String(value ?? "");
    return label(`Calls ${called}(${facts.length > 120 ? facts.slice(0, 120) + "…" : facts})`);
  });
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
