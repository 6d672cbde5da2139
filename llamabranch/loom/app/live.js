// @ts-check
// The instrument: what runs, and rounds of speculation with their totals.
import { $, attribute, fill, h, percent, plural, redraw, rough, set, short, visible } from "./dom.js";
import { pieces, store, texts } from "./store.js";
import { named } from "./text.js";

/** @typedef {Record<string, any>} Loose */

const LISTED = 60; // the most rounds that are shown
let drawn = "";

/** The job that runs, the newest one that writes or reads. */
const runningJob = () => [...store.jobs.values()].findLast((job) => job.state === "running");

/** Rounds of the job that writes. If no job writes, the rounds of the shown path. */
function rounds() {
  const written = runningJob()?.nodes ?? [];
  const ids = written.length ? written : pieces(store.current, store.end).map(({ id }) => id);
  return ids.flatMap((/** @type {string} */ id) => store.nodes.get(id)?.rounds ?? []);
}

/** @param {Loose[]} all rounds @param {(round: Loose) => any} of */
const sum = (all, of) => all.reduce((n, round) => n + Number(of(round) ?? 0), 0);

/** How tokens were drafted: from the text, or by a model. */
const how = () => (/^(suffix|grammar|\+)+$/.test(store.doc.model?.draft) ? "copied" : "drafted");

/** How many of the drafted tokens fitted. @param {Loose[]} all */
const fitted = (all) => `${how()} ahead: ${sum(all, ({ accepted }) => accepted)} of ${plural(sum(all, ({ draft }) => draft.length), "token")} fitted`;

/** All rounds in words. @param {Loose[]} all */
function totals(all) {
  const [accepted, rejected, unreached] = ["accepted", "rejected", "unreached"].map((name) => sum(all, (round) => round[name]));
  const [draft, verify] = [0, 1].map((i) => sum(all, ({ ms }) => ms?.[i]));
  return `${plural(accepted + rejected + unreached, "token")} ${how()} ahead: ${accepted} fitted, ${rejected} did not, ${unreached} were not looked at. `
    + `${rough(1 + accepted / all.length)} tokens a round, ${percent(draft / (draft + verify || 1))} of the time for drafts.`;
}

/** One round: its tokens with their verdicts, then the token that replaced or followed them. @param {Loose} round */
function roundLine(round) {
  const { draft, accepted, rejected, next, src, ms } = round;
  const words = texts(draft.map((/** @type {any} */ each) => each[1]));
  return h("li", { class: "round", title: fitted([round]) },
    h("span", { class: "number" }, round.round),
    draft.map((/** @type {any} */ [, , lp], /** @type {number} */ i) => {
      const state = i < accepted ? "accepted" : i < accepted + rejected ? "rejected" : "unreached";
      return h("span", { class: `judged ${state}` }, visible(words[i]) || "∅",
        state !== "unreached" && lp != null ? h("small", {}, percent(Math.exp(lp))) : null);
    }),
    next && h("span", { class: "judged next" }, src === "c" ? "→ " : "+ ", named(next[1])),
    ms && h("span", { class: "ms" }, `${short(ms[0])} + ${short(ms[1])} ms`));
}

export function drawLive() {
  const all = rounds(), running = runningJob(), list = $("rounds");
  const rate = !running && store.nodes.get(store.current ?? "")?.rate;
  set($("live-line"), { textContent: running?.message ?? [all.length && fitted(all), rate && `${short(rate)} tokens/s`].filter(Boolean).join(" · ") });
  const key = `${all.length} ${all.at(-1)?.node} ${Boolean(running)}`;
  if ($("live-body").hidden || key === drawn) return;
  drawn = key;
  $("totals").textContent = all.length ? totals(all) : running ? "Drafts are shown here as they are judged." : "No tokens were drafted here.";
  list.hidden = !all.length;
  fill(list, all.slice(-LISTED).map(roundLine));
  list.scrollTop = list.scrollHeight;
}

/** Unfold the rounds, or fold them. */
export function fold() {
  const body = $("live-body");
  body.hidden = !body.hidden;
  attribute($("fold"), "aria-expanded", String(!body.hidden));
  drawn = "";
  redraw(["live", "text", "tree"]);
}
