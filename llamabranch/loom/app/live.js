// @ts-check
// The instrument: rounds of speculation with their totals, and the jobs that run.
import { $, attribute, fill, h, percent, plural, redraw, rough, set, short, visible } from "./dom.js";
import { act, listeners } from "./net.js";
import { pieces, store, texts } from "./store.js";
import { moveTo, named } from "./text.js";

/** @typedef {Record<string, any>} Loose */

const LISTED = 60; // the most rounds that are shown
let isOpen = false;
let frozen = false;
let at = -1; // the round that is shown; -1: the latest
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

const DOES = { continue: "writing", fork: "writing", score: "reading", type: "reading" };

/** What a job does, its progress, and a button that stops it. @param {Loose} job */
function drawJob({ id, op, message, nodes }) {
  const [read, total] = (/([\d,]+) of ([\d,]+)/.exec(message ?? "") ?? []).slice(1).map((n) => Number(n.replaceAll(",", "")));
  const written = nodes.reduce((/** @type {number} */ n, /** @type {string} */ name) => n + (store.nodes.get(name)?.tokens.n ?? 0), 0);
  return h("p", { class: "row job" },
    h("span", {}, message ?? `${/** @type {any} */ (DOES)[op] ?? op}${written ? `: ${plural(written, "token")}` : ""}`),
    total > 0 && h("progress", { max: total, value: read, "aria-label": "Reading progress" }),
    h("button", { type: "button", onclick: () => act("stop", { job: id }) }, "Stop"));
}

/** Sums of rounds, and how many of their tokens fitted in words. @param {Loose[]} all */
function totals(all) {
  const sum = (/** @type {(round: Loose) => any} */ of) => all.reduce((n, round) => n + Number(of(round) ?? 0), 0);
  const drafted = sum(({ draft }) => draft.length), accepted = sum((round) => round.accepted);
  const how = /^(suffix|grammar|\+)+$/.test(store.doc.model?.draft) ? "copied" : "drafted"; // from the text, or by a model
  return { drafted, accepted, how, rejected: sum((round) => round.rejected), unreached: sum((round) => round.unreached),
    draft: sum(({ ms }) => ms?.[0]), verify: sum(({ ms }) => ms?.[1]), said: `${how} ahead: ${accepted} of ${plural(drafted, "token")} fitted` };
}

/** One round: its tokens with their verdicts, then the token that replaced or followed them. @param {Loose} round @param {boolean} chosen */
function roundLine(round, chosen) {
  const { draft, accepted, rejected, next, src, ms } = round;
  const words = texts(draft.map((/** @type {any} */ each) => each[1]));
  return h("li", { class: chosen ? "round chosen" : "round", title: totals([round]).said },
    h("span", { class: "number" }, round.round),
    draft.map((/** @type {any} */ [, , lp], /** @type {number} */ i) => {
      const state = i < accepted ? "accepted" : i < accepted + rejected ? "rejected" : "unreached";
      return h("span", { class: `judged ${state}` }, visible(words[i]) || "∅",
        state !== "unreached" && lp != null ? h("small", {}, percent(Math.exp(lp))) : null);
    }),
    next && h("span", { class: "judged next" }, src === "c" ? "→ " : "+ ", named(next[1])),
    ms && h("span", { class: "ms" }, `${short(ms[0])} + ${short(ms[1])} ms`));
}

function drawRounds(/** @type {Loose[]} */ all, /** @type {any} */ job) {
  const { drafted, accepted, rejected, unreached, draft, verify, how } = totals(all);
  return [job, h("p", {}, `${plural(drafted, "token")} ${how} ahead: ${accepted} fitted, ${rejected} did not, ${unreached} were not looked at. `,
    `${rough(1 + accepted / all.length)} tokens a round, ${percent(draft / (draft + verify || 1))} of the time for drafts.`),
  h("ol", { class: "rounds", role: "list", tabIndex: 0, "aria-label": "Rounds" },
    all.slice(-LISTED).map((round, i, some) => roundLine(round, i === (at < 0 ? some.length - 1 : at))))];
}

function drawLive() {
  if (frozen) return;
  const all = rounds();
  const latest = all.at(-1);
  const running = runningJob();
  const rate = (running ? "" : rates.get(store.current ?? "")) ?? "";
  set($("live-line"), { textContent: running?.message
    ?? [latest && totals(all).said, rate].filter(Boolean).join(" · ") });
  const body = $("live-body");
  for (const each of [body, $("pause")]) set(each, { hidden: !isOpen });
  attribute($("fold"), "aria-expanded", String(isOpen));
  if (!isOpen) return;
  const written = running?.nodes.map((/** @type {string} */ id) => store.nodes.get(id)?.tokens.n).join();
  const key = `${all.length} ${latest?.node} ${at} ${running?.id} ${running?.message} ${all.length ? "" : written}`;
  if (key === drawn) return;
  drawn = key;
  const inside = body.contains(document.activeElement) && document.activeElement?.classList.contains("rounds");
  const job = running && drawJob(running);
  fill(body, all.length ? drawRounds(all, job) : [job, h("p", { class: "dim" },
    running ? "Drafts are shown here as they are judged." : "No tokens were drafted here.")]);
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

export function startLive() {
  listeners.push((name, data) => {
    if (name === "end" && data.rate) rates.set(data.node, `${short(data.rate)} tokens/s`);
    if (name === "job" && data.state === "running") at = -1;
  });
  $("live-body").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const n = Math.min(LISTED, rounds().length);
    at = Math.max(0, Math.min(n - 1, (at < 0 ? n - 1 : at) + by));
    if (at === n - 1) at = -1;
    const round = rounds().slice(-LISTED).at(at);
    if (round) moveTo(round.at);
    redraw(["live"]);
  });
  return drawLive;
}
