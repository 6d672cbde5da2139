// @ts-check
// The sampling bar: settings for continuing texts or chats, kept in the document; presets; grammars and schemas.
import { $, fill, h, plural, redraw, short, tell, typedNumber, visible } from "./dom.js";
import { backend, bodyOf, net } from "./net.js";
import { stateOf, store } from "./store.js";

/** @typedef {Record<string, any>} Bar */

/** @type {Record<string, Bar>} the bars of a new document */
const FIRST = { text: { n: 3, max_tokens: 24 }, chat: { n: 1, max_tokens: 512 } };
/** @type {Record<string, Record<string, Bar>>} */
const PRESETS = {
  text: {
    "three short texts": FIRST.text, "one long text": { n: 1, max_tokens: 200 },
    "the most probable text": { n: 1, max_tokens: 48, sampling: { temperature: 0 } },
    "eight bold texts": { n: 8, max_tokens: 24, sampling: { temperature: 1.3, top_p: 1, min_p: 0.05 } },
  },
  chat: {
    "one answer": FIRST.chat, "three answers to choose from": { n: 3, max_tokens: 256 },
    "the most probable answer": { n: 1, max_tokens: 512, sampling: { temperature: 0 } },
    "three bold answers": { n: 3, max_tokens: 256, sampling: { temperature: 1.2, top_p: 1, min_p: 0.05 } },
  },
};
/** @type {[string, string, string][]} name in the settings, in words, and how the bar says it */
const NUMBERS_OF_BAR = [["temperature", "temperature", "temperature"], ["top_p", "top p", "top-p"], ["top_k", "top k", "top-k"],
  ["min_p", "min p", "min-p"], ["repeat_penalty", "repeat penalty", "repeat penalty"]];
/** @type {Record<string, string>} */
const FOLLOWS = { free: "nothing: free text", json_schema: "a JSON schema", regex: "a regular expression", choice: "one of these lines",
  grammar: "a grammar (GBNF)" };

/** The bar of texts or of a chat. @param {string} mode @returns {Bar} */
export const barOf = (mode) => store.doc.bars?.[mode] ?? FIRST[mode];

/** The kind of grammar that a text must follow. @param {Bar} bar */
const followed = (bar) => Object.keys(FOLLOWS).find((kind) => bar[kind]) ?? "free";

/** The bar in words. @param {string} mode */
export function sentenceOf(mode) {
  const bar = barOf(mode), usual = store.doc.model?.sampling ?? {};
  const { n = FIRST[mode].n, max_tokens = FIRST[mode].max_tokens, seed, stop, sampling = {} } = bar;
  const numbers = NUMBERS_OF_BAR.filter(([name], i) => i < 2 || sampling[name] != null)
    .map(([name, , said]) => [said, sampling[name] ?? usual[name]]).filter(([, value]) => value != null)
    .map(([said, value]) => `${said} ${short(value)}`);
  const kind = followed(bar), isTalk = mode === "chat";
  return [plural(n, isTalk ? "answer" : "text"), `${isTalk ? "up to " : ""}${plural(max_tokens, "token")}`, ...numbers,
    seed != null && `seed ${seed}`, stop?.length && `stop at “${visible(stop[0])}”`,
    kind !== "free" && FOLLOWS[kind].replace("these lines", `${bar.choice?.length} texts`)].filter(Boolean).join(", ");
}

/** Keep a bar in the document. Raises an error if the server refuses it. @param {string} mode @param {Bar} bar */
async function keepBar(mode, bar) {
  const body = bodyOf({ cid: crypto.randomUUID(), op: "bar", set: { [mode]: bar } });
  const { bars } = stateOf(net) === "read-only" ? { bars: { ...store.doc.bars, [mode]: bar } }
    : await backend.ask("/loom/do", { method: "POST", body });
  store.doc.bars = bars;
  redraw(["state"]);
}

/** The bar that a form describes. Raises an error if a value is invalid. @param {any} form @returns {Bar} */
function read(form) {
  const data = new FormData(form);
  const of = (/** @type {string} */ name) => String(data.get(name) ?? "").trim();
  /** @type {Bar} */ const bar = { sampling: {} };
  for (const [name, words] of [["n", "how many"], ["max_tokens", "tokens"]]) bar[name] = typedNumber(of(name), words, true);
  for (const [name, words] of NUMBERS_OF_BAR) bar.sampling[name] = typedNumber(of(name), words, name === "top_k");
  if (typedNumber(of("seed"), "seed", true) != null) bar.seed = of("seed"); // kept as text: it may have more digits than a number
  if (data.get("stop")) bar.stop = [String(data.get("stop"))];
  const kind = of("kind"), text = String(data.get("follow") ?? "");
  if (kind === "free") return clean(bar);
  if (!text.trim()) throw new Error(`Write ${FOLLOWS[kind]}, or choose free text.`);
  if (kind === "json_schema") {
    try {
      bar.json_schema = JSON.parse(text);
    } catch (error) {
      throw new Error(`The schema is not JSON: ${/** @type {Error} */ (error).message}`);
    }
  } else bar[kind] = kind === "choice" ? text.split("\n").filter((line) => line.trim()) : text;
  return clean(bar);
}

/** A bar without the settings that are not set. @param {Bar} bar @returns {Bar} */
const clean = (bar) => Object.fromEntries(Object.entries(bar)
  .map(([name, value]) => [name, name === "sampling" ? clean(value) : value])
  .filter(([, value]) => value != null && value !== "" && (typeof value !== "object" || Object.keys(value).length)));

/** Open the dialog of the bar. @param {string} mode @param {(() => void) | null} proceed what to do next; null: only keep the bar */
export function openBar(mode, proceed) {
  const usual = store.doc.model?.sampling ?? {};
  const dialog = $("dialog"), wrong = h("p", { class: "wrong", role: "alert" });
  const input = (/** @type {string} */ name, /** @type {string} */ words, /** @type {any} */ placeholder = "") =>
    h("label", {}, h("span", {}, words),
      h("input", { name, placeholder: String(placeholder ?? ""), spellcheck: false, autocomplete: "off" }));
  const follow = h("textarea", { name: "follow", rows: 5, spellcheck: false });
  const kind = h("select", { name: "kind", onchange: () => showFollow() },
    Object.entries(FOLLOWS).map(([value, words]) => h("option", { value }, words)));
  const title = h("span"), box = h("label", {}, title, follow);
  const showFollow = () => {
    box.hidden = kind.value === "free";
    title.textContent = FOLLOWS[kind.value];
  };
  const presets = h("select", { onchange: () => show(PRESETS[mode][presets.value] ?? barOf(mode)) },
    h("option", { value: "now" }, "current"), Object.keys(PRESETS[mode]).map((name) => h("option", { value: name }, name)));
  const isTalk = mode === "chat";
  const form = h("form", { method: "dialog", class: "bar-form", noValidate: true },
    h("h2", { id: "dialog-title" }, isTalk ? "How to answer" : "How to continue"),
    h("label", {}, h("span", {}, "preset"), presets),
    input("n", isTalk ? "answers" : "texts", FIRST[mode].n),
    input("max_tokens", isTalk ? "max tokens" : "tokens", FIRST[mode].max_tokens),
    NUMBERS_OF_BAR.map(([id, words]) => input(`${id}`, words, usual[id])), input("seed", "seed", "random"),
    input("stop", "stop at"), h("label", {}, h("span", {}, "the text must follow"), kind), box,
    h("div", { class: "foot" }, wrong, h("p", { class: "row" },
      proceed && h("button", { type: "submit", class: "main", value: "go" }, isTalk ? "Keep and answer" : "Keep and continue"),
      h("button", { type: "submit", value: "keep", class: proceed ? "" : "main" }, "Keep"),
      h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"))));
  /** @param {Bar} bar */
  function show(bar) {
    const values = { ...bar, ...bar.sampling, stop: bar.stop?.[0], kind: followed(bar) };
    for (const field of form.elements) if (field.name && field.name !== "follow") field.value = values[field.name] ?? "";
    const value = bar[followed(bar)];
    follow.value = Array.isArray(value) ? value.join("\n") : typeof value === "object" ? JSON.stringify(value, null, 1) : value ?? "";
    showFollow();
  }
  const failed = (/** @type {any} */ error) => void (wrong.textContent = visible(error.message));
  form.onsubmit = async (/** @type {any} */ event) => {
    event.preventDefault(); // the dialog shows errors itself
    wrong.textContent = "";
    try {
      await keepBar(mode, read(form));
    } catch (error) {
      return failed(error);
    }
    dialog.close();
    if (event.submitter?.value === "go") proceed?.();
    else tell(`Now: ${sentenceOf(mode)}.`);
  };
  show(barOf(mode));
  fill(dialog, form);
  dialog.onclose = () => document.activeElement !== $("tree") && ($("empty").hidden ? $("text") : $("begin")).focus();
  dialog.showModal();
}
