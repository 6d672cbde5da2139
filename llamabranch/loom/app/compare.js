// @ts-check
// Two models side by side: the text under A and under B, or two texts that part; bits by span where tokenizers differ.
import { $, fill, h, label, redraw, short, tell } from "./dom.js";
import { choose, lens } from "./lenses.js";
import { act, fetchPath, listeners } from "./net.js";
import { pathOf, pieces, select, store, view } from "./store.js";
import { keptPath, shownPath, textView } from "./text.js";

/** @typedef {import("./store.js").Path} Path */

/** @type {ReturnType<typeof textView>} */ let column;
const parted = keptPath();
/** @type {Path | null} */ let from = null;
/** @type {string | null} the node that is compared */ let comparedNode = null;
let lensBefore = "probability"; // the lens before the comparison
/** @type {Path} */ let underB = pathOf(null, null);

/** Comparisons of the shown path. */
const compares = () => pieces(store.current, store.end).flatMap(({ id }) => store.nodes.get(id)?.compares ?? []);

/** The node that B wrote by itself, where it parted from the shown one. */
const partner = () => compares().findLast(({ partner: id }) => store.nodes.has(id))?.partner;

/** The text of the second column: the partner's, or the same tokens with B's numbers. */
function secondPath() {
  const other = partner();
  const c = other ? parted(other, null) : shownPath();
  if (other && c.missing >= 0) void fetchPath(other, c.missing);
  if (other || from === c) return other ? c : underB;
  from = c;
  underB = Object.create(c, {
    lp: { value: c.lpB }, h: { value: c.hB }, rk: { value: new Float32Array(c.n).fill(NaN) }, lpB: { value: c.lp },
  });
  return underB;
}

/** Spans between common byte boundaries: bits under A and under B. @param {Record<string, any>} compare */
function spanTable({ spans, totals, why }) {
  const c = shownPath();
  return [
    h("p", { class: "dim" }, why),
    h("p", {}, `${totals.bytes} bytes: A ${short(totals.bpbA)}, B ${short(totals.bpbB)} bits per byte.`),
    h("p", { class: "dim" }, "Bits of each span. Underlined: after this span the models would continue differently."),
    h("table", { class: "spans" },
      h("thead", {}, h("tr", {}, ["span", "A", "B", "B − A"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, spans.slice(0, 400).map((/** @type {any} */ [[begin, end], , , [bitsA, bitsB], agree]) =>
        h("tr", { class: agree === false ? "apart" : "" },
          h("th", { scope: "row" }, label(c.text.slice(begin, end).join(""))), h("td", {}, short(bitsA)),
          h("td", {}, short(bitsB)), h("td", {}, bitsA == null || bitsB == null ? "–"
            : (bitsB < bitsA ? "−" : "+") + short(Math.abs(bitsB - bitsA))))))),
  ];
}

function drawCompare() {
  const b = $("text-b");
  const scroller = b.parentElement;
  const { A, B } = store.doc.models;
  const all = compares(), runs = [...store.jobs.values()].some(({ op, state, node }) =>
    op === "compare" && state === "running" && pieces(store.current, store.end).some(({ id }) => id === node));
  view.compare &&= B != null && (all.length > 0 || runs || comparedNode === store.current);
  scroller.hidden = $("head-a").hidden = !view.compare;
  if (!view.compare) return;
  $("head-a").textContent = `A  ${A?.name ?? ""}`;
  $("head-b").textContent = `B  ${B.name}${partner() ? "" : " on the same text"}`;
  const unequal = all.findLast((each) => each.spans);
  b.hidden = unequal != null;
  if ($("spans").of !== unequal) fill($("spans"), unequal && spanTable(unequal));
  $("spans").of = unequal;
  if (!unequal) column.draw();
}

/** Scroll B to the character that is at the top of A. */
function follow() {
  if (!view.compare || $("text-b").hidden) return;
  const top = $("text").parentElement.getBoundingClientRect().top;
  const first = [...$("text").querySelectorAll("[data-token]")].find((each) => each.getBoundingClientRect().bottom > top);
  if (!first) return;
  const characters = shownPath().text.slice(0, Number(first.dataset.token)).join("").length;
  const c = secondPath();
  let j = 0;
  for (let sum = 0; j < c.n - 1 && sum < characters; j++) sum += c.text[j].length;
  column.reveal(j, "start");
}

/** Show one text again, with the lens there was. */
export function closeCompare() {
  if (!view.compare) return false;
  view.compare = false;
  if (["divergence", "change"].includes(lens.name)) choose(lensBefore);
  redraw(["compare", "text", "tree"]);
  return true;
}

/** Compare from a place on. @param {string} mode @param {number} at @param {Record<string, any>} fields */
export async function compare(mode, at, fields) {
  const answer = await act("compare", { node: store.current, mode, ...(mode === "read" ? {} : { at, ...fields }) });
  if (!answer) return;
  view.compare = true;
  comparedNode = answer.nodes?.[0]?.id ?? store.current;
  if (!["divergence", "change"].includes(lens.name)) lensBefore = lens.name;
  choose(store.doc.models.B?.same_vocabulary === false ? "probability" : "divergence");
  if (answer.nodes?.length) select(answer.nodes[0].id);
  redraw(["compare", "text", "tree"]);
  return answer;
}

export function startCompare() {
  column = textView($("text-b"), secondPath, "b");
  $("text").parentElement.addEventListener("scroll", follow, { passive: true });
  $("close-b").onclick = closeCompare;
  listeners.push((name, { op, state, result }) => {
    if (name !== "job" || op !== "compare" || state !== "done" || !result) return;
    const { n, kl, same, first_greedy: greedy, first_seed: seed } = result;
    const facts = [kl != null && `mean KL(A, B) ${short(kl)} nats, the same most probable token in ${short(100 * same)} %`,
      greedy != null && `first difference at token ${greedy}`, seed != null && `with A's seed B first draws another one at token ${seed}`];
    tell([`${n} tokens compared`, facts.filter(Boolean).join(", ")].filter(Boolean).join(": ") + ".");
    redraw(["compare"]);
  });
  return drawCompare;
}
