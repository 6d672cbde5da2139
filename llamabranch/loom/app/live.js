// @ts-check
// The instrument: rounds of speculation with their totals, searches as outlines that can be adopted.
import { $, attribute, fill, h, label, plural, redraw, set, short, tell, visible } from "./dom.js";
import { act, listeners } from "./net.js";
import { pieces, select, store, texts } from "./store.js";
import { moveTo, named } from "./text.js";

/** @typedef {Record<string, any>} Loose */
/** @typedef {{job: string, kind: string, nodes: any[], children: number[][], stats: Loose, sizes: number[], votes: Loose,
 *   adopted: Map<number, string>}} Search `adopted`: nodes, by the place that they were */

const LINES = 2000, LISTED = 60; // the most lines of a search, and of rounds
/** @type {Map<string, Search>} */ const searches = new Map();
let isOpen = false;
let frozen = false;
let at = -1; // the round that is looked at; -1: the latest
/** @type {Map<string, string>} tokens a second, by node */ const rates = new Map();
let drawn = "";

/** The job that runs, the newest one that writes or reads. */
const runningJob = () => [...store.jobs.values()].findLast((job) => job.state === "running");

/** Rounds of the job that writes. If no job writes, the rounds of the shown path. */
function rounds() {
  const written = runningJob()?.nodes ?? [];
  const ids = written.length ? written : pieces(store.current, store.end).map(({ id }) => id);
  return ids.flatMap((/** @type {string} */ id) => store.nodes.get(id)?.rounds ?? []);
}

const DOES = { continue: "writing", fork: "writing", replay: "replaying", score: "reading", type: "reading", search: "searching", compare: "comparing" };

/** What a job does, how far it is, and a button that stops it. @param {Loose} job */
function drawJob({ id, op, message, nodes }) {
  const [read, total] = (/([\d,]+) of ([\d,]+)/.exec(message ?? "") ?? []).slice(1).map((n) => Number(n.replaceAll(",", "")));
  const written = nodes.reduce((/** @type {number} */ n, /** @type {string} */ name) => n + (store.nodes.get(name)?.tokens.n ?? 0), 0);
  return h("p", { class: "row job" },
    h("span", {}, message ?? `${/** @type {any} */ (DOES)[op] ?? op}${written ? `: ${plural(written, "token")}` : ""}`),
    total > 0 && h("progress", { max: total, value: read, "aria-label": "How much is read" }),
    h("button", { type: "button", onclick: () => act("stop", { job: id }) }, "Stop"));
}

function totals(/** @type {Loose[]} */ all) {
  const sum = (/** @type {(round: Loose) => any} */ of) => all.reduce((n, round) => n + Number(of(round) ?? 0), 0);
  const length = Math.max(0, ...all.map(({ accepted, rejected }) => accepted + rejected));
  return {
    drafted: sum(({ draft }) => draft.length), accepted: sum(({ accepted }) => accepted),
    rejected: sum(({ rejected }) => rejected), unreached: sum(({ unreached }) => unreached),
    draft: sum(({ ms }) => ms?.[0]), verify: sum(({ ms }) => ms?.[1]),
    byPosition: Array.from({ length }, (_, i) =>
      [sum(({ accepted }) => i < accepted), sum(({ accepted, rejected }) => i < accepted + rejected)]),
  };
}

const sentence = (/** @type {Loose} */ { round, draft, accepted, rejected, unreached }) =>
  `Round ${round}: drafted ${draft.length}, accepted ${accepted}, rejected ${rejected}, not reached ${unreached}`;

/** One round: its tokens as they were judged, then what replaced or followed them. @param {Loose} round @param {boolean} chosen */
function roundLine(round, chosen) {
  const { draft, accepted, rejected, next, src, ms } = round;
  const words = texts(draft.map((/** @type {any} */ each) => each[1]));
  return h("li", { class: chosen ? "round chosen" : "round", title: sentence(round) },
    h("span", { class: "number" }, round.round),
    draft.map((/** @type {any} */ [, , lp], /** @type {number} */ i) => {
      const state = i < accepted ? "accepted" : i < accepted + rejected ? "rejected" : "unreached";
      return h("span", { class: `judged ${state}` }, visible(words[i]) || "∅",
        state !== "unreached" && lp != null ? h("small", {}, short(Math.exp(lp))) : null);
    }),
    next && h("span", { class: "judged next" }, src === "c" ? "→ " : "+ ", named(next[1])),
    ms && h("span", { class: "ms" }, `${short(ms[0])} + ${short(ms[1])} ms`));
}

function drawRounds(/** @type {Loose[]} */ all, /** @type {any} */ job) {
  const sum = totals(all);
  const spent = sum.draft + sum.verify;
  return h("div", { class: "panel" }, h("div", { class: "totals" }, job,
    h("p", {}, `${sum.drafted} drafted = ${sum.accepted} accepted + ${sum.rejected} rejected + ${sum.unreached} not reached.`),
    h("p", {}, `${short(1 + sum.accepted / all.length)} tokens a round; ${short((100 * sum.draft) / (spent || 1))} % of the time for drafts.`),
    bars("Accepted by position in the draft, in percent", sum.byPosition.map(([yes, n]) => [(100 * yes) / n, `${yes} of ${n}`]))),
  h("ol", { class: "rounds", role: "list", tabIndex: 0, "aria-label": "Rounds" },
    all.slice(-LISTED).map((round, i, some) => roundLine(round, i === (at < 0 ? some.length - 1 : at)))));
}

/** Percentages as bars: [height, title]. @param {string} name @param {[number, string][]} values */
const bars = (name, values) => [h("p", { class: "dim" }, `${name}:`), h("ol", { class: "positions", "aria-label": name },
  values.map(([value, title]) => h("li", { "--share": `${value}%`, title }, short(Math.round(value)))))];

/** Lines of a search from the top down, the best first; a node with one child is on its child's line. @param {Search} search */
function outline({ nodes, children }) {
  /** @type {[any, string, number, number][]} the last place of a line, its text, tokens and depth */ const lines = [];
  const waiting = nodes.length ? [[0, 0]] : [];
  while (waiting.length && lines.length < LINES) {
    let [i, depth] = /** @type {number[]} */ (waiting.pop());
    let [, , text, n] = nodes[i];
    while (i && children[i]?.length === 1 && nodes[i][7] !== "finished") {
      i = children[i][0];
      [text, n] = [text + nodes[i][2], n + nodes[i][3]];
    }
    lines.push([nodes[i], text, n, depth]);
    const worth = (/** @type {number} */ j) => (nodes[j][7] === "finished" ? 1e6 : 0) + (nodes[j][5] ?? -1e5);
    const below = [...(children[i] ?? [])].sort((a, b) => worth(a) - worth(b));
    for (const child of below) waiting.push([child, depth + 1]);
  }
  return lines;
}

function drawSearch(/** @type {Search} */ search) {
  const { job, kind, stats, sizes, votes, nodes } = search;
  const { state, result } = store.jobs.get(job) ?? { state: "done", result: null };
  for (const [leaf, , score] of result?.hypotheses ?? []) {
    if (nodes[leaf]) [nodes[leaf][5], nodes[leaf][7]] = [score, "finished"];
  }
  const counted = Object.entries(votes).sort((a, b) => b[1] - a[1]);
  return h("div", { class: "panel" }, h("div", { class: "totals" },
    h("p", {}, `${kind.replace(/_/g, " ")}: ${state}, ${plural(nodes.length, "node")}, `,
      `${short(stats.tokens_decoded)} tokens decoded, ${short(stats.tokens_shared)} shared, ${short(stats.elapsed_s)} s`),
    h("p", {}, state === "running" && h("button", { type: "button", onclick: () => act("stop", { job }) }, "Stop"),
      h("button", { type: "button", onclick: () => { searches.delete(job); redraw(["live"]); } }, "Close")),
    sizes.length > 0 && bars("Effective number of particles by step, in percent of the largest",
      sizes.slice(-9).map((size) => [(100 * size) / Math.max(...sizes), `effective size ${short(size)}`])),
    counted.length > 0 && h("table", {}, h("tbody", {}, counted.map(([answer, n]) =>
      h("tr", {}, h("th", { scope: "row" }, visible(answer)), h("td", {}, plural(n, "vote"))))))),
    h("ol", { class: "outline", role: "list" }, outline(search).map(([[i, , , , lp, score, visits, status], text, n, depth]) => {
      const facts = [score != null && `score ${short(score)}`, visits > 0 && plural(visits, "visit"), plural(n, "token"),
        lp != null && `log p ${short(lp)}`].filter(Boolean).join(", ");
      const isAdopted = store.nodes.has(search.adopted.get(i) ?? "");
      return h("li", { class: `${status}${isAdopted ? " adopted" : ""}`, "--level": Math.min(depth, 12) },
        h("button", { type: "button", onclick: () => adopt(search, i),
          title: isAdopted ? "Adopted: Enter shows the branch." : `${status}. Enter adopts it as a branch.` },
          h("span", { class: "mark" }, isAdopted ? "✓" : { open: "○", pruned: "×", finished: "●" }[/** @type {string} */ (status)] ?? ""),
          h("span", {}, label(text) || "start"), h("small", {}, facts)));
    })));
}

/** Adopt a text of a search, or show the branch that it is already. @param {Search} search @param {number} leaf */
async function adopt({ job, adopted }, leaf) {
  const answer = await act("adopt", { job, leaf });
  if (!answer) return;
  adopted.set(leaf, answer.nodes.at(-1).id);
  select(answer.nodes.at(-1).id);
  drawn = "";
  tell(answer.same ? "This is already a branch of the document." : "Adopted: this is a branch of the document now.");
}

function drawLive() {
  if (frozen) return;
  const all = rounds();
  const search = [...searches.values()].at(-1);
  const latest = all.at(-1);
  const running = runningJob(), sum = totals(all);
  const rate = (running ? "" : rates.get(store.current ?? "")) ?? "";
  set($("live-line"), { textContent: running?.message ?? (search && !latest ? `${search.kind.replace(/_/g, " ")}: ${plural(search.nodes.length, "node")}`
    : latest ? `${sentence(latest)} · ${sum.accepted} of ${sum.drafted} accepted${rate && ` · ${rate}`}` : rate) });
  const body = $("live-body");
  for (const each of [body, $("pause")]) set(each, { hidden: !isOpen });
  attribute($("fold"), "aria-expanded", String(isOpen));
  if (!isOpen) return;
  const written = running?.nodes.map((/** @type {string} */ id) => store.nodes.get(id)?.tokens.n).join();
  const key = `${all.length} ${latest?.node} ${at} ${searches.size} ${search?.nodes.length} ${JSON.stringify(search?.stats)} ${
    store.jobs.get(search?.job ?? "")?.state} ${running?.id} ${running?.message} ${all.length ? "" : written} ${[...search?.adopted ?? []]}`;
  if (key === drawn) return;
  drawn = key;
  const inside = body.contains(document.activeElement) && document.activeElement?.classList.contains("rounds");
  const job = running && running.id !== search?.job && drawJob(running);
  fill(body, search ? [job, drawSearch(search)] : all.length ? drawRounds(all, job) : [job, h("p", { class: "dim" },
    running ? "Drafts are shown here as they are judged." : "No tokens were drafted here. Drafts and searches are shown while they run.")]);
  const list = body.querySelector(".rounds");
  list?.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
  if (inside) list?.focus();
}

export function fold(/** @type {boolean} */ to = !isOpen) {
  isOpen = to;
  drawn = "";
  redraw(["live", "text", "tree"]);
}

/** Freeze the view of what runs, not the run. */
export function freeze() {
  frozen = !frozen;
  attribute($("pause"), "aria-pressed", String(frozen));
  redraw(["live"]);
}

/** What an event tells of a search. @param {Loose} data */
function searched({ job, add, set: changed, ...rest }) {
  if (!searches.has(job)) {
    searches.set(job, { job, adopted: new Map(), kind: store.jobs.get(job)?.kind ?? "search", nodes: [], children: [], stats: {}, sizes: [],
      votes: {} });
    fold(true);
  }
  const search = /** @type {Search} */ (searches.get(job));
  for (const node of add) {
    search.nodes[node[0]] = node;
    if (node[1] >= 0) (search.children[node[1]] ??= []).push(node[0]);
  }
  for (const [i, ...state] of changed) search.nodes[i]?.splice(5, 3, ...state);
  Object.assign(search, rest);
}

export function startLive() {
  listeners.push((name, data) => {
    if (name === "search") searched(data);
    if (name === "end" && data.rate) rates.set(data.node, `${short(data.rate)} tokens/s`);
    if (name === "job" && data.state === "running") at = -1;
  });
  $("live-body").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const target = /** @type {any} */ (event.target);
    if (target.closest(".outline")) return target.closest("li")[by < 0 ? "previousSibling" : "nextSibling"]?.firstChild.focus();
    const n = Math.min(LISTED, rounds().length);
    at = Math.max(0, Math.min(n - 1, (at < 0 ? n - 1 : at) + by));
    if (at === n - 1) at = -1;
    const round = rounds().slice(-LISTED).at(at);
    if (round) moveTo(round.at);
    redraw(["live"]);
  });
  return drawLive;
}
