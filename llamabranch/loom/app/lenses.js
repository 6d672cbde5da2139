// @ts-check
// The six lenses: for a token of a path its value, bin and second cue; the legend. Formulas are those of docs/page.md.
import { $, check, fill, h, redraw, short, tell } from "./dom.js";

/** @typedef {import("./store.js").Tokens} Columns what is known of the tokens of a path or stretch */
/** @typedef {object} Lens
 * @property {string} name @property {string} title @property {string[]} bins names of the bins, pale to strong
 * @property {(c: Columns, i: number) => number} value the number, NaN if it is not known
 * @property {(value: number) => number} bin its bin
 * @property {(c: Columns, i: number) => string} cue drawn beside the colour ("" for probability: it has underlines) */

/** @param {number[]} edges */
const above = (edges) => (/** @type {number} */ x) => edges.filter((edge) => x >= edge).length;
const ENTROPY = above([0.1, 0.5, 1, 2, 3, 5]);
const DOTS = ["", "", "·", "·", "··", "··", "···"];
export const SOURCES = {
  p: "prompt", t: "typed", s: "sampled", f: "forced by the grammar", d: "drafted and accepted",
  b: "bonus after a draft", c: "corrected",
};
const LETTERS = Object.keys(SOURCES);

/** @type {Lens[]} */
export const LENSES = [
  {
    name: "probability", title: "Probability",
    bins: ["≥ .9", "≥ .5", "≥ .2", "≥ .05", "≥ .01", "≥ .001", "less"],
    value: (c, i) => Math.exp(c.lp[i]),
    bin: (p) => [0.9, 0.5, 0.2, 0.05, 0.01, 0.001].filter((edge) => p < edge).length,
    cue: () => "",
  },
  {
    name: "entropy", title: "Entropy",
    bins: ["< .1", "< .5", "< 1", "< 2", "< 3", "< 5", "more"],
    value: (c, i) => c.h[i],
    bin: ENTROPY,
    cue: (c, i) => DOTS[ENTROPY(c.h[i])],
  },
  {
    name: "rank", title: "Rank",
    bins: ["1", "2", "3–5", "6–10", "11–100", "more"],
    value: (c, i) => c.rk[i],
    bin: above([2, 3, 6, 11, 101]),
    cue: (c, i) => (c.rk[i] > 1 ? String(c.rk[i]) : ""),
  },
  {
    name: "source", title: "Source",
    bins: ["prompt", "typed", "sampled", "forced", "drafted", "bonus", "corrected"],
    value: (c, i) => (c.src[i] ? LETTERS.indexOf(c.src[i]) : NaN),
    bin: (place) => place,
    cue: (c, i) => (c.src[i] === "p" ? "" : c.src[i] || ""),
  },
  {
    name: "divergence", title: "Divergence",
    bins: ["< .001", "< .01", "< .05", "< .1", "< .5", "< 1", "more"],
    value: (c, i) => c.kl[i],
    bin: above([0.001, 0.01, 0.05, 0.1, 0.5, 1]),
    cue: (c, i) => (c.same[i] !== 0 ? "" : i === c.same.indexOf(0) ? "⚑" : "▲"),
  },
  {
    name: "change", title: "Change",
    bins: ["< −2", "< −.5", "< −.1", "± .1", "> .1", "> .5", "> 2"],
    value: (c, i) => c.lpB[i] - c.lp[i],
    bin: above([-2, -0.5, -0.1, 0.1, 0.5, 2]),
    cue: (c, i) => {
      const change = c.lpB[i] - c.lp[i];
      return change >= 0.1 ? "+" : change < -0.1 ? "−" : "";
    },
  },
];

export let lens = LENSES[0];

/** The bin of a token in the current lens; -1 if the number is not known. @param {Columns} c @param {number} i */
export function binOf(c, i) {
  const value = lens.value(c, i);
  return Number.isNaN(value) ? -1 : lens.bin(value);
}

/** The class of a token by its bin. @param {Columns} c @param {number} i */
export const binClass = (c, i) => `t b${binOf(c, i) < 0 ? "x" : binOf(c, i)}`;

/** The cue of a token beside its colour. @param {Columns} c @param {number} i */
export const cueOf = (c, i) => (binOf(c, i) < 0 ? null : lens.cue(c, i) || null);

export function choose(/** @type {string} */ name) {
  lens = LENSES.find((each) => each.name === name) ?? LENSES[0];
  document.documentElement.dataset.lens = lens.name;
  check("lenses", lens.name);
  redraw(["tree", "text", "compare", "legend", "inspect"]);
}

/** The next lens, or the one before. @param {number} by */
export function turn(by) {
  const place = (LENSES.indexOf(lens) + by + LENSES.length) % LENSES.length;
  choose(LENSES[place].name);
  tell(`Lens: ${lens.title.toLowerCase()}.`);
}

/** Draw the legend: bins, how many tokens of the path are in each, the share that is not known. A click goes
 * through the tokens of a bin.
 * @param {Columns} c @param {(bin: number) => void} visit */
export function drawLegend(c, visit) {
  const counts = new Array(lens.bins.length).fill(0);
  let unknown = 0;
  for (let i = 0; i < c.n; i++) {
    const bin = binOf(c, i);
    if (bin < 0) unknown++;
    else counts[bin]++;
  }
  const box = $("legend");
  if (box.dataset.lens !== lens.name) {
    box.dataset.lens = lens.name;
    fill(box, [...lens.bins, "not known"].map((name, bin) => {
      const at = bin === lens.bins.length ? -1 : bin;
      return h("button", { type: "button", title: "Go to the next", class: `bin b${at < 0 ? "x" : at}`, onclick: () => visit(at) },
        h("span", {}, name), h("small"));
    }));
  }
  [...counts, unknown].forEach((count, bin) => {
    const button = box.children[bin];
    const told = bin < counts.length ? String(count) : `${short((100 * count) / Math.max(1, c.n))} %`;
    button.lastChild.textContent = told;
    button.hidden = bin === counts.length && count === 0;
  });
}
