// @ts-check
// The lenses: for a token of a path its value, bin and second cue; the legend. docs/page.md has the formulas.
import { $, attribute, check, fill, h, percent, redraw, set, tell } from "./dom.js";
import { keepSetting, store } from "./store.js";

/** @typedef {import("./store.js").Tokens} Columns the numbers of the tokens of a path or stretch */
/** @typedef {object} Lens
 * @property {string} name @property {string} title @property {string} says what it shows, in one line
 * @property {string[]} bins names of the bins, pale to strong; none if nothing is painted
 * @property {(c: Columns, i: number) => number} value the number, NaN if it is not known
 * @property {(value: number) => number} bin its bin
 * @property {(bin: number, c: Columns, i: number) => string} cue drawn next to the colour ("" for probability: it has
 *   underlines) */

export const SOURCES = {
  p: "prompt", t: "typed", s: "sampled", f: "forced by the grammar", d: "drafted and accepted",
  b: "bonus after a draft", c: "corrected", k: "picked",
};
const LETTERS = Object.keys(SOURCES);

/** The letter of a token's source: forced also if a draft guessed it. @param {Columns} c @param {number} i */
export const sourceOf = (c, i) => (c.al[i] === 1 ? "f" : c.src[i]);

/** The bins of a number that grows from pale to strong, by the edges between them.
 * @param {number[]} edges @param {string[]} [bins] names, if they are not the edges */
const rising = (edges, bins = [...edges.map((edge) => `< ${edge}`), "more"]) =>
  ({ bins, bin: (/** @type {number} */ x) => edges.filter((edge) => x >= edge).length });
const LEAST = [0.9, 0.5, 0.2, 0.05, 0.01, 0.001];

/** @type {Lens[]} */
export const LENSES = [
  { name: "plain", title: "Plain", says: "The text as in a book. Point at a word to see what else could have been there.",
    value: () => NaN, bins: [], bin: () => -1, cue: () => "" },
  { name: "probability", says: "How probable the model found each token. Pale tokens were expected, strong ones are a surprise.",
    title: "Probability", value: (c, i) => Math.exp(c.lp[i]), cue: () => "",
    bins: [...LEAST.map((edge) => `≥ ${percent(edge)}`), "less"], bin: (p) => LEAST.filter((edge) => p < edge).length },
  { name: "entropy", says: "How open the choice was at each position. A strong colour means that many tokens were possible.",
    title: "Entropy", value: (c, i) => c.h[i], cue: (bin) => "·".repeat(bin / 2),
    ...rising([0.1, 0.5, 1, 2, 3, 5]) },
  { name: "rank", says: "The rank of each token by probability: 1 is the most probable. Ranks from 2 on are shown as numbers.",
    title: "Rank", value: (c, i) => c.rk[i], cue: (bin, c, i) => (bin ? String(c.rk[i]) : ""),
    ...rising([2, 3, 6, 11, 101], ["1", "2", "3–5", "6–10", "11–100", "more"]) },
  { name: "source", says: "Where each token comes from: you, the sampler, a grammar, or a draft that was accepted.",
    title: "Source", value: (c, i) => (c.src[i] ? LETTERS.indexOf(sourceOf(c, i)) : NaN),
    cue: (bin) => (bin ? LETTERS[bin] : ""), bin: (place) => place, bins: Object.values(SOURCES).map((words) => words.split(" ")[0]) },
];

export let lens = LENSES[0];

/** The bin of a token in the current lens; -1 if the number is not known. @param {Columns} c @param {number} i */
export function binOf(c, i) {
  const value = lens.value(c, i);
  return Number.isNaN(value) ? -1 : lens.bin(value);
}

let hasOwn = false; // whether words of the model are shown

/** Say whether the shown text has words of the model: then its numbers paint only those. @param {boolean} is */
export const ownWords = (is) => void (hasOwn = is);

/** Whether the words of the reader stay plain. */
export const sparing = () => hasOwn && lens.name !== "source" && !store.settings.allWords;

/** The bin that a token is painted with; null for a token that stays plain. @param {Columns} c @param {number} i */
export const paintOf = (c, i) => (!lens.bins.length || (sparing() && /[pt]/.test(c.src[i])) ? null : binOf(c, i));

/** The class of a token by its bin, and its cue next to the colour. @param {Columns} c @param {number} i */
export function looks(c, i) {
  const bin = paintOf(c, i) ?? -2;
  return { class: ["t", "t bx"][bin + 2] ?? `t b${bin}`, "data-cue": bin < 0 ? null : lens.cue(bin, c, i) || null };
}

/** Look through a lens: the one that the reader chose last, if none is named. @param {string} [name] */
export function choose(name = store.settings.lens) {
  lens = LENSES.find((each) => each.name === name) ?? LENSES[0];
  document.documentElement.dataset.lens = lens.name;
  check("lenses", lens.name);
  redraw(["tree", "text", "legend", "inspect"]);
}

/** Look through a lens from now on. @param {string} name */
export function keepLens(name) {
  keepSetting("lens", name);
  choose();
}

/** The next lens, or the one before. @param {number} by */
export function turn(by) {
  keepLens(LENSES.at((LENSES.indexOf(lens) + by) % LENSES.length)?.name ?? "");
  tell(`Lens: ${lens.title.toLowerCase()}.`);
}

/** Draw the legend: bins, and how many painted tokens of the path are in each. A click goes
 * through the tokens of a bin.
 * @param {Columns} c @param {(bin: number) => void} visit @param {string} more what else is said there */
export function drawLegend(c, visit, more) {
  const names = [...lens.bins, "unknown"], unknown = lens.bins.length;
  const counts = names.map(() => 0);
  for (let i = 0; i < c.n; i++) {
    const bin = paintOf(c, i);
    if (bin != null) counts[bin < 0 ? unknown : bin]++;
  }
  const box = $("legend");
  set($("lens-line"), { textContent: more || (lens.bins.length ? lens.says : ""), "data-more": more || null });
  if (box.dataset.lens !== lens.name) {
    box.dataset.lens = lens.name;
    fill(box, names.map((name, bin) => h("button", { type: "button", title: "Go to the next",
      class: `bin b${bin === unknown ? "x" : bin}`, onclick: () => visit(bin === unknown ? -1 : bin) }, h("span", {}, name), h("small"))),
    h("button", { type: "button", title: "Paint the words that you wrote, too", onclick: () => {
      keepSetting("allWords", !store.settings.allWords);
      choose(lens.name);
    } }, "all words"));
  }
  set(box.lastChild, { hidden: !hasOwn || ["plain", "source"].includes(lens.name) });
  attribute(box.lastChild, "aria-pressed", String(Boolean(store.settings.allWords)));
  counts.forEach((count, bin) => {
    const button = box.children[bin];
    set(button.lastChild, { textContent: count ? String(count) : "" });
    set(button, { hidden: bin === unknown && count === 0 });
  });
}
