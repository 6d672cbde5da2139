// @ts-check
// The inspector: one token with its numbers and alternatives, where it came from, its branch.
import { $, attribute, clip, fill, h, label, percent, plural, rough, visible } from "./dom.js";
import { barOf, settingsOf } from "./bar.js";
import { SOURCES, lens, looks, sourceOf, sparing } from "./lenses.js";
import { act } from "./net.js";
import { look, ownerOf, select, store, view } from "./store.js";
import { following, segmentOf } from "./tree.js";
import { attend, moveTo, named, pointedAt, topsAt } from "./text.js";
import { isChat } from "./turns.js";
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

const numbers = (/** @type {import("./store.js").Path} */ c, /** @type {number} */ i) => h("dl", { class: "numbers" }, Object.entries({
  probability: percent(Math.exp(c.lp[i])), rank: c.rk[i] || "–", entropy: [rough(c.h[i]), h("small", {}, " nats")],
  choices: rough(Math.exp(c.h[i])) }).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

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

/** What a grammar did at a place. @param {import("./store.js").Path} c @param {number} i */
function rule(c, i) {
  if (!(c.al[i] > 0)) return null;
  const { json_schema, regex, choice } = /** @type {Record<string, any>} */ (store.nodes.get(ownerOf(c, i) ?? "") ?? {}), [best, lp, piece] = topsAt(i)?.[0] ?? [];
  const what = json_schema ? "schema" : regex ? "expression" : choice ? "list of texts" : "grammar";
  return h("p", { class: "rule" }, `The ${what} left ${plural(c.al[i], "choice")}`,
    piece != null && (best === c.ids[i] ? ", which the model wanted too" : ["; the model wanted ", h("b", {}, named(piece)), ` ${percent(Math.exp(lp ?? NaN))}`]), ".");
}

let isDetailed = false; // the details are open

/** A list of facts; empty ones are left out. @param {Record<string, any>} all */
const facts = (all) => h("dl", { class: "facts" }, Object.entries(all).filter(([, value]) => value || value === 0)
  .map(([name, value]) => [h("dt", {}, name), h("dd", {}, visible(String(value)))]));

/** The beginning of a text that may be long. @param {string} [text] */
const brief = (text = "") => (text.length > 120 ? `${clip(text, 120)}…` : text);

/** Where the token and its branch come from. @param {import("./store.js").Path} c @param {number} i */
function origin(c, i) {
  const node = store.nodes.get(ownerOf(c, i) ?? "");
  if (!node) return null;
  const piece = c.pieces[i];
  const bytes = Array.isArray(piece) ? piece : typeof piece === "string" ? [...new TextEncoder().encode(piece)] : [];
  const isPlain = !Array.isArray(piece) && /^[\x20-\x7e]+$/.test(c.text[i]);
  const round = node.rounds.find(({ at, draft }) => i >= at && i <= at + draft.length);
  const isModels = node.by === "A" && node.max_tokens != null, { seed, memory, note, regex: expression, grammar } = node;
  return [h("h3", {}, "Origin"), facts({
    source: /** @type {any} */ (SOURCES)[sourceOf(c, i)] ?? "unknown",
    "written with": isModels && settingsOf({ ...node, seed: null }, isChat(c) ? "chat" : "text").join(", "),
    memory: brief(memory), "author’s note": brief(node.authors_note),
    read: node.read != null && `${plural(node.read, "prompt token")}, ${node.cached ?? 0} in the cache`,
    note, bookmark: node.bookmark && "★" }),
  h("details", { open: isDetailed, ontoggle: (/** @type {any} */ event) => (isDetailed = event.target.open) }, h("summary", {}, "Details"), facts({
    exact: c.lp[i] <= 0 && `p ${Math.exp(c.lp[i]).toPrecision(6)}, ln p ${c.lp[i].toPrecision(6)}, entropy ${c.h[i].toPrecision(6)}`,
    seed, draft: round && `${round.accepted} of ${plural(round.draft.length, "token")} fitted`,
    schema: node.json_schema && JSON.stringify(node.json_schema), expression, grammar, texts: node.choice?.map(label).join(" | "),
    token: `${c.ids[i]} at ${i}`, bytes: !isPlain && bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ") }))];
}

export function drawInspector() {
  const [c] = pointedAt();
  const i = inspected();
  const box = $("token");
  if (i < 0) {
    $("main").classList.remove("tapped");
    return fill(box, h("p", { class: "dim" }, "Point at a token to see what else the model had in mind."));
  }
  const isNext = i === c.n, isTapped = Math.max(view.cursor, view.reading) >= 0;
  const content = h("div", { "data-of": `${i} ${isTapped}` },
    h("h2", {}, isNext ? "What could follow" : h("span", { class: looks(c, i).class }, named(c.pieces[i]))),
    !isNext && [numbers(c, i), rule(c, i)], alternatives(c, i), !isNext && origin(c, i));
  if (box.firstChild?.isEqualNode(content)) return; // an element under the mouse or with the focus stays
  const focused = /** @type {any} */ (document.activeElement)?.dataset?.alternative;
  fill(box, content);
  if (focused) box.querySelector(`[data-alternative="${CSS.escape(focused)}"]`)?.focus();
  attribute($("token-pane"), "data-position", i);
  // On a phone the tapped token is inspected below the text.
  $("main").classList.toggle("tapped", isTapped);
  if (innerWidth <= 900) $("text").querySelector(".cursor")?.scrollIntoView({ block: "nearest" });
}
