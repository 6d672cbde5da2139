// @ts-check
// Two branches side by side: below the text that they share, two columns, each with its figures.
import { $, clip, fill, h, label, percent, plural, set, tell } from "./dom.js";
import { fetchPath } from "./net.js";
import { look, select, store, view } from "./store.js";
import { following, heading, segmentOf } from "./tree.js";
import { besides, named, scrollTo, shownPath, textView } from "./text.js";

/** @typedef {import("./store.js").Path} Path @typedef {import("./tree.js").Segment} Segment */

/** What begins at the last fork of the shown branch: its own stretch first; nothing if it has no fork. @returns {Segment[]} */
export function forkOf() {
  const here = following(store.current, store.end);
  let own = here.length > 1 ? here[0] : segmentOf(store.current);
  while (own?.parent && own.parent.children.length < 2) own = own.parent;
  return own?.parent ? [own, ...own.parent.children.filter((each) => each !== own)] : [];
}

/** The node where a branch ends, if it is followed straight on. @param {Segment} segment @returns {string} */
const endOf = ({ node, children }) => (children.length ? endOf(children[0]) : node.id);

/** Show the branch beside the text that parts from it last, or none again. */
export function putBeside() {
  const [own, other] = forkOf();
  if (view.beside) return look({ beside: null });
  if (!other) return tell("There is no other branch yet. Continue the text, or pick another word.");
  if (following(store.current, store.end).includes(own)) select(endOf(own));
  look({ beside: endOf(other) });
}

/** A probability that may be tiny. @param {number} lp */
const odds = (lp) => (lp > Math.log(1e-5) ? percent(Math.exp(lp))
  : `1 in 10${String(Math.round(-lp / Math.LN10)).replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(digit)])}`);

/** How probable a branch is from a position on, by the words of the model if it has any. @param {Path} c @param {number} at */
function figuresOf(c, at) {
  const all = [...c.lp.keys()].slice(at, c.n).filter((i) => c.lp[i] <= 0), own = all.filter((i) => !/[pt]/.test(c.src[i]));
  const used = own.length ? own : all, lp = used.reduce((sum, i) => sum + c.lp[i], 0), mean = lp / used.length;
  return { textContent: plural(c.n - at, "token") + (used.length ? `, on average ${percent(Math.exp(mean))} a token, all together ${odds(lp)}` : ""),
    title: used.length ? `perplexity ${Math.exp(-mean).toFixed(3)}, log-probability ${lp.toFixed(3)}` : "" };
}

export function startBeside() {
  const list = h("select", { onchange: () => look({ beside: list.value }) });
  const bar = h("p", { id: "beside", class: "row" }, h("label", { title: "Choose the first branch in the tree" }, "Side by side with ", list),
    h("button", { type: "button", "data-action": "compare" }, "Close ", h("kbd", {}, "Esc")));
  const sides = ["This branch", "The other branch"].map((name, i) => h("div", { role: "group", "aria-label": name, id: i ? "other" : "own" },
    h("div", { class: "parting" }), h("div", { class: "column", role: "none" }), h("div", { class: "figures" })));
  const pair = h("div", { id: "pair", role: "none" }, sides), paths = () => [shownPath(), besides().other ?? shownPath()];
  $("columns").before(bar);
  sides.forEach((side, i) => textView(side.children[1], "to"[i], () => [paths()[i], besides().at, paths()[i].n]));
  return () => {
    const [own, ...others] = view.beside ? forkOf() : [];
    if (view.beside === store.current) view.beside = others.length ? endOf(others[0]) : null;
    const { other, at } = besides();
    bar.hidden = !other;
    const isAlone = other ? at === shownPath().n && shownPath().missing < 0 : view.typingAt < 0; // the other was deleted, or continues from here
    if (view.beside && isAlone) look({ beside: null });
    if (!other || !view.beside) return pair.remove();
    if (other.missing >= 0) void fetchPath(view.beside, other.missing);
    const ends = others.map((each, i) => [endOf(each), label(clip(heading(each, [own, ...others], i + 1).words, 48))]);
    if (!ends.some(([id]) => id === view.beside)) ends.unshift([view.beside, label(clip(other.shown.slice(at, at + 12).join("").trim(), 48))]);
    if (list.key !== ends.join()) fill(list, ends.map(([value, words]) => h("option", { value }, words || "…")));
    set(list, { key: ends.join(), value: view.beside });
    paths().forEach((c, i) => {
      const [head, , foot] = sides[i].children;
      fill(head, at < c.n ? [h("b", {}, c.shown[at].trim() || named(c.pieces[at])), ` ${percent(Math.exp(c.lp[at]))}`] : "ends here");
      set(foot, figuresOf(c, at));
    });
    if (pair.isConnected) return;
    $("text").append(pair);
    requestAnimationFrame(() => scrollTo(pair));
  };
}
