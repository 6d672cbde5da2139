// @ts-check
// The inspector: one token with its numbers and alternatives, where it came from, its branch.
import { $, attribute, fill, h, label, percent, plural, rough, short, visible } from "./dom.js";
import { barOf } from "./bar.js";
import { SOURCES, lens, looks, sparing } from "./lenses.js";
import { act } from "./net.js";
import { FLAGS, look, ownerOf, select, store, view } from "./store.js";
import { following, segmentOf } from "./tree.js";
import { attend, moveTo, named, pointedAt, topsAt } from "./text.js";
import { mode } from "./where.js";

/** The token that is inspected: under the mouse, at the cursor, or the last. */
const inspected = () => {
  const [{ n }, node] = pointedAt();
  if (node !== store.current) return Math.min(view.hover, n - 1);
  const found = [view.hover < n ? view.hover : -1, view.cursor, view.reading].find((i) => i >= 0 && i <= n);
  return found ?? n - 1;
};

/** Take the alternative of a number key: 1 is the most probable. @param {number} place */
export function takeAt(place) {
  const top = topsAt(inspected());
  if (top?.[place]) void take(inspected(), top[place][0]);
}

/** Take another token at a position. If a branch has it already, that branch is shown.
 * @param {number} i @param {number} token */
export async function take(i, token) {
  const [c, node] = pointedAt();
  if (c.ids[i] === token) return moveTo(i);
  const segment = segmentOf(ownerOf(c, i), i + 1);
  const others = segment?.from === i ? (segment.parent?.children ?? []) : following(node, i);
  const there = others.find(({ first, from }) => first.tokens.n > from - first.at && first.tokens.ids[from - first.at] === token);
  const show = (/** @type {{id: string}} */ { id }) => {
    select(id);
    look({ cursor: -1, reading: i }); // arrow keys start here; actions act at the end
  };
  if (there) show(there.node);
  else {
    attend(i);
    await act("fork", { ...barOf(mode()), n: 1, node, at: i, token }, show);
  }
}

/** @param {string} name @param {...any} value */
const fact = (name, ...value) => [h("dt", {}, name), h("dd", {}, ...value)];

const numbers = (/** @type {import("./store.js").Path} */ c, /** @type {number} */ i) => h("dl", { class: "numbers" }, [
  fact("probability", percent(Math.exp(c.lp[i]))), fact("rank", c.rk[i] || "–"), fact("entropy", rough(c.h[i]), h("small", {}, " nats")),
  fact("choices", rough(Math.exp(c.h[i])))].map((each) => h("div", {}, each)));

/** The ten most probable tokens as buttons. @param {import("./store.js").Path} c @param {number} i */
function alternatives(c, i) {
  const top = topsAt(i);
  if (!top?.length) return h("p", { class: "dim" }, top ? "The alternatives at this position are unknown." : "…");
  const most = Math.exp(top[0]?.[1] ?? 0);
  const rest = 1 - top.reduce((sum, [, lp]) => sum + Math.exp(lp ?? -Infinity), 0);
  return [h("ol", { class: "top" }, top.map(([token, lp, piece], place) => {
    const chosen = token === c.ids[i];
    return h("li", {}, h("button", {
      type: "button", "data-alternative": token, "aria-current": chosen ? "true" : null,
      "--share": `${(100 * Math.exp(lp ?? -Infinity)) / most}%`, onclick: () => take(i, token),
    }, h("kbd", {}, place === 9 ? "0" : place + 1), h("span", { class: "word" }, named(piece)),
    h("span", { class: "share" }, percent(Math.exp(lp ?? NaN)))));
  })), rest > 0.0005 && h("p", { class: "dim rest" }, `all other tokens ${percent(rest)}`)];
}

/** Where the token and its branch come from. @param {import("./store.js").Path} c @param {number} i */
function origin(c, i) {
  const node = store.nodes.get(ownerOf(c, i) ?? "");
  if (!node) return null;
  const piece = c.pieces[i];
  const bytes = Array.isArray(piece) ? piece : typeof piece === "string" ? [...new TextEncoder().encode(piece)] : [];
  const shared = Array.isArray(piece) || c.text[i] === "";
  const round = node.rounds.find(({ at, draft }) => i >= at && i <= at + draft.length);
  const sampling = Object.entries(node.sampling ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");
  return [h("h3", {}, "Origin"), h("dl", {},
    fact("source", /** @type {any} */ (SOURCES)[c.src[i]] ?? "unknown"),
    round ? fact("round", `${round.accepted} of ${round.draft.length} drafted accepted`) : [],
    node.by === "A" ? fact("written by", store.doc.model?.name ?? "A") : [],
    node.seed != null ? fact("seed", node.seed) : [],
    sampling ? fact("sampling", sampling) : [],
    node.max_tokens ? fact("limit", plural(node.max_tokens, "token")) : [],
    node.stop?.length ? fact("stops at", node.stop.map(label).join(", ")) : [],
    node.grammar || node.json_schema ? fact("follows", node.grammar ? "a grammar" : "a JSON schema") : [],
    fact("token", `${c.ids[i]} at ${i}`),
    shared || /[^\x20-\x7e]/.test(c.text[i])
      ? fact("bytes", bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")) : [],
    node.read != null ? fact("read", `${plural(node.read, "prompt token")}, ${node.cached ?? 0} in the cache`) : [],
    node.note ? fact("note", visible(node.note)) : [],
    node.flags & FLAGS.bookmark ? fact("bookmark", "★") : [])];
}

/** @type {any} */ let drawnFor = null;

export function drawInspector() {
  const [c] = pointedAt();
  const i = inspected();
  const box = $("token");
  if (i < 0) {
    drawnFor = null;
    $("main").classList.remove("tapped");
    return fill(box, h("p", { class: "dim" }, "Point at a token to see what else the model had in mind."));
  }
  const owner = store.nodes.get(ownerOf(c, i) ?? "");
  const top = topsAt(i);
  const key = [ownerOf(c, i), i, c.ids[i], c.lp[i], top?.length, owner?.flags, owner?.note, owner?.seed,
    owner?.read, owner?.rounds.length, owner?.sampling, Math.max(view.cursor, view.reading) >= 0, lens.name, sparing()].join();
  if (drawnFor === key) return; // an element under the mouse or with the focus stays
  drawnFor = key;
  const isNext = i === c.n;
  const focused = /** @type {any} */ (document.activeElement)?.dataset?.alternative;
  fill(box,
    h("h2", {}, isNext ? "What could follow" : h("span", { class: looks(c, i).class }, named(c.pieces[i]))),
    !isNext && numbers(c, i), alternatives(c, i), !isNext && origin(c, i));
  if (focused) box.querySelector(`[data-alternative="${CSS.escape(focused)}"]`)?.focus();
  attribute($("token-pane"), "data-position", i);
  // On a phone the tapped token is inspected below the text.
  $("main").classList.toggle("tapped", Math.max(view.cursor, view.reading) >= 0);
  if (innerWidth <= 900) $("text").querySelector(".cursor")?.scrollIntoView({ block: "nearest" });
}
