// @ts-check
// The instrument: what runs, and rounds of speculation with their totals.
import { $, attribute, fill, h, percent, plural, redraw, rough, set, short, visible } from "./dom.js";
import { pieces, store, texts } from "./store.js";
import { named } from "./text.js";

/** @typedef {Record<string, any>} Loose */

const LISTED = 60; // the most rounds that are shown
let isOpen = false;
let drawn = "";

/** The job that runs, the newest one that writes or reads. */
const runningJob = () => [...store.jobs.values()].findLast((job) => job.state === "running");

/** Rounds of the job that writes. If no job writes, the rounds of the shown path. */
function rounds() {
  const written = runningJob()?.nodes ?? [];
  const ids = written.length ? written : pieces(store.current, store.end).map(({ id }) => id);
  return ids.flatMap((/** @type {string} */ id) => store.nodes.get(id)?.rounds ?? []);
}

/** Sums of rounds, and how many of their tokens fitted in words. @param {Loose[]} all */
function totals(all) {
  const sum = (/** @type {(round: Loose) => any} */ of) => all.reduce((n, round) => n + Number(of(round) ?? 0), 0);
  const drafted = sum(({ draft }) => draft.length), accepted = sum((round) => round.accepted);
  const how = /^(suffix|grammar|\+)+$/.test(store.doc.model?.draft) ? "copied" : "drafted"; // from the text, or by a model
  return { drafted, accepted, how, rejected: sum((round) => round.rejected), unreached: sum((round) => round.unreached),
    draft: sum(({ ms }) => ms?.[0]), verify: sum(({ ms }) => ms?.[1]), said: `${how} ahead: ${accepted} of ${plural(drafted, "token")} fitted` };
}

/** One round: its tokens with their verdicts, then the token that replaced or followed them. @param {Loose} round */
function roundLine(round) {
  const { draft, accepted, rejected, next, src, ms } = round;
  const words = texts(draft.map((/** @type {any} */ each) => each[1]));
  return h("li", { class: "round", title: totals([round]).said },
    h("span", { class: "number" }, round.round),
    draft.map((/** @type {any} */ [, , lp], /** @type {number} */ i) => {
      const state = i < accepted ? "accepted" : i < accepted + rejected ? "rejected" : "unreached";
      return h("span", { class: `judged ${state}` }, visible(words[i]) || "∅",
        state !== "unreached" && lp != null ? h("small", {}, percent(Math.exp(lp))) : null);
    }),
    next && h("span", { class: "judged next" }, src === "c" ? "→ " : "+ ", named(next[1])),
    ms && h("span", { class: "ms" }, `${short(ms[0])} + ${short(ms[1])} ms`));
}

function drawRounds(/** @type {Loose[]} */ all) {
  const { drafted, accepted, rejected, unreached, draft, verify, how } = totals(all);
  return [h("p", {}, `${plural(drafted, "token")} ${how} ahead: ${accepted} fitted, ${rejected} did not, ${unreached} were not looked at. `,
    `${rough(1 + accepted / all.length)} tokens a round, ${percent(draft / (draft + verify || 1))} of the time for drafts.`),
  h("ol", { class: "rounds", role: "list", tabIndex: 0, "aria-label": "Rounds" }, all.slice(-LISTED).map(roundLine))];
}

export function drawLive() {
  const all = rounds(), running = runningJob(), body = $("live-body");
  const rate = !running && store.nodes.get(store.current ?? "")?.rate;
  set($("live-line"), { textContent: running?.message
    ?? [all.length && totals(all).said, rate && `${short(rate)} tokens/s`].filter(Boolean).join(" · ") });
  set(body, { hidden: !isOpen });
  attribute($("fold"), "aria-expanded", String(isOpen));
  const key = `${all.length} ${all.at(-1)?.node} ${Boolean(running)}`;
  if (!isOpen || key === drawn) return;
  drawn = key;
  const inside = document.activeElement?.classList.contains("rounds");
  fill(body, all.length ? drawRounds(all) : h("p", { class: "dim" },
    running ? "Drafts are shown here as they are judged." : "No tokens were drafted here."));
  const list = body.querySelector(".rounds");
  if (list) list.scrollTop = list.scrollHeight;
  if (inside) list?.focus();
}

export function fold(/** @type {boolean} */ to = !isOpen) {
  isOpen = to;
  drawn = "";
  redraw(["live", "text", "tree"]);
}
