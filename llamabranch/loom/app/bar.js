// @ts-check
// The sampling bar: settings for continuing texts or chats, kept in the document; grammars and schemas.
import { $, fill, h, label, plural, redraw, short, tell, typedNumber, visible } from "./dom.js";
import { backend, bodyOf, net } from "./net.js";
import { keepDraft, stateOf, store } from "./store.js";

/** @typedef {Record<string, any>} Bar */

/** @type {Record<string, Bar>} the bars of a new document */
const FIRST = { text: { n: 3, max_tokens: 24 }, chat: { n: 1, max_tokens: 512 } };
/** @type {[string, string, number | null][]} settings that have a field: name, in words, the value that does nothing */
const NUMBERS_OF_BAR = [["temperature", "temperature", null], ["top_p", "top-p", 1], ["top_k", "top-k", 0],
  ["min_p", "min-p", 0], ["repeat_penalty", "repeat penalty", 1]];
/** How a chat's answers think. @type {Record<string, string>} */
const THINKS = { "": "as the chat template does", on: "on", off: "off" };
/** @type {Record<string, string>} */
const FOLLOWS = { free: "nothing: free text", json_schema: "a JSON schema", regex: "a regular expression", choice: "one of these lines",
  grammar: "a grammar (GBNF)" };

/** The bar of texts or of a chat. @param {string} mode @returns {Bar} */
export const barOf = (mode) => store.doc.bars?.[mode] ?? FIRST[mode];

/** The kind of grammar that a text must follow. @param {Bar} bar */
const followed = (bar) => Object.keys(FOLLOWS).find((kind) => bar[kind]) ?? "free";

/** The thinking of a bar in words. @param {Bar["thinking"]} thinking */
const thinkingOf = (thinking) => thinking == null ? "" : !thinking ? "no thinking"
  : thinking === true ? "thinking" : `thinking for ${plural(thinking, "token")} at most`;

/** The bar in words: every setting that acts. @param {string} mode */
export const sentenceOf = (mode) => [plural(barOf(mode).n ?? FIRST[mode].n, mode === "chat" ? "answer" : "text"),
  ...settingsOf(barOf(mode), mode)].join(", ");

/** Every setting that acts, in words. @param {Bar} bar or a node that was written with one @param {string} mode */
export function settingsOf(bar, mode) {
  const { max_tokens = FIRST[mode].max_tokens, seed, stop = [] } = bar;
  const acting = { ...store.doc.model?.sampling, ...bar.sampling };
  const known = NUMBERS_OF_BAR.map(([name]) => name);
  if (acting.temperature === 0) acting.top_p = acting.top_k = acting.min_p = null; // the most probable token is always among those
  const numbers = [...NUMBERS_OF_BAR.filter(([name, , none]) => acting[name] != null && acting[name] !== none)
    .map(([name, words]) => `${words} ${short(acting[name])}`),
  ...Object.keys(acting).filter((name) => !known.includes(name)).map((name) => `${name.replaceAll("_", " ")} ${acting[name]}`)];
  const kind = followed(bar);
  return [`limit: ${plural(max_tokens, "token")}`, ...numbers,
    seed != null && `seed ${seed}`, mode === "chat" && thinkingOf(bar.thinking),
    stop.length && `stop at ${stop.map((/** @type {string} */ each) => `“${label(each)}”`).join(" or ")}`,
    bar.memory && "memory", bar.authors_note && "author’s note",
    kind !== "free" && FOLLOWS[kind].replace("these lines", `${bar.choice?.length} texts`)].filter(Boolean);
}

/** Keep a bar in the document. Raises an error if the server refuses it. @param {string} mode @param {Bar} bar */
async function keepBar(mode, bar) {
  const body = bodyOf({ cid: crypto.randomUUID(), op: "bar", mode, bar });
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
  for (const [name, words] of [["n", "how many"], ["max_tokens", "limit"]]) {
    bar[name] = typedNumber(of(name), words, true);
    if (bar[name] < 1) throw new Error(`${words}: it must be 1 or more`);
  }
  for (const [name, words] of NUMBERS_OF_BAR) bar.sampling[name] = typedNumber(of(name), words, name === "top_k");
  if (!/^(-?\d{1,20})?$/.test(of("seed"))) throw new Error(`seed: “${of("seed")}” is not a whole number of at most 20 digits`);
  bar.seed = of("seed"); // kept as text: it may have more digits than a number
  bar.stop = String(data.get("stop") ?? "").split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  for (const name of ["memory", "authors_note"]) bar[name] = String(data.get(name) ?? "").trim();
  const thinking = of("thinking");
  if (thinking) bar.thinking = thinking === "on" ? typedNumber(of("budget"), "thinking, at most", true) ?? true : false;
  if (Number(bar.thinking) < 0) throw new Error("thinking, at most: it must be 0 or more");
  const kind = of("kind"), text = String(data.get("follow") ?? "");
  if (kind === "free") return clean(bar);
  if (!text.trim()) throw new Error(`Write ${FOLLOWS[kind]}, or choose free text.`);
  if (kind === "json_schema") {
    try {
      bar.json_schema = JSON.parse(text);
    } catch (error) {
      throw new Error(`The schema is not JSON: ${/** @type {Error} */ (error).message}`);
    }
    if (!/^\s*\{/.test(text)) throw new Error("The schema is not a JSON object. It begins with {.");
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
  const options = (/** @type {Record<string, string>} */ named) =>
    Object.entries(named).map(([value, words]) => h("option", { value }, words));
  const follow = h("textarea", { name: "follow", rows: 5, spellcheck: false });
  const kind = h("select", { name: "kind", onchange: () => showFollow() },
    options(FOLLOWS));
  const title = h("span"), box = h("label", {}, title, follow);
  const showFollow = () => {
    box.hidden = kind.value === "free";
    title.textContent = FOLLOWS[kind.value];
  };
  const lines = (/** @type {string} */ name, /** @type {string} */ words, /** @type {string} */ note) => h("label", { title: note },
    h("span", {}, words), h("textarea", { name, rows: 2, spellcheck: false, placeholder: note }));
  const isTalk = mode === "chat", draft = `bar ${mode}`;
  const form = h("form", { method: "dialog", class: "bar-form", noValidate: true },
    h("h2", { id: "dialog-title" }, isTalk ? "How to answer" : "How to continue"),
    input("n", isTalk ? "answers" : "texts", FIRST[mode].n),
    input("max_tokens", "limit, in tokens", FIRST[mode].max_tokens),
    NUMBERS_OF_BAR.map(([id, words]) => input(`${id}`, words, usual[id])), input("seed", "seed", "random"),
    isTalk && [h("label", {}, h("span", {}, "thinking"), h("select", { name: "thinking" }, options(THINKS))),
      input("budget", "thinks at most, in tokens", "no limit")],
    lines("stop", "stop at", "One text a line; \\n is a line end."),
    !isTalk && [lines("memory", "memory", "Stays at the top of what the model sees."),
      lines("authors_note", "author’s note", "Is put near the end of what the model sees.")],
    h("label", {}, h("span", {}, "the text must follow"), kind), box,
    h("div", { class: "foot" }, wrong, h("p", { class: "row" },
      proceed && h("button", { type: "submit", class: "main", value: "go" }, isTalk ? "Keep and answer" : "Keep and continue"),
      h("button", { type: "submit", value: "keep", class: proceed ? "" : "main" }, "Keep"),
      h("button", { type: "button", onclick: () => (keepDraft(draft, null), dialog.close()) }, "Cancel"))));
  form.oninput = () => keepDraft(draft, { doc: store.doc.file.name, values: Object.fromEntries(new FormData(form)) });
  /** @param {Bar} bar */
  function show(bar) {
    const { stop = [], thinking } = bar;
    const values = { ...bar, ...bar.sampling, stop: stop.map((/** @type {string} */ each) => each.replaceAll("\n", "\\n")).join("\n"),
      kind: followed(bar), thinking: thinking == null ? "" : thinking === false ? "off" : "on", budget: Number.isInteger(thinking) ? thinking : "" };
    for (const field of form.elements) if (field.name && field.name !== "follow") field.value = values[field.name] ?? "";
    const value = bar[followed(bar)];
    follow.value = Array.isArray(value) ? value.join("\n") : typeof value === "object" ? JSON.stringify(value, null, 1) : value ?? "";
    const { doc, values: typed } = store.drafts[draft] ?? {}, isBack = doc === store.doc.file.name;
    if (isBack) for (const name of Object.keys(typed)) form.elements[name].value = typed[name];
    wrong.textContent = isBack ? "You changed this before, and did not keep it. Cancel discards the changes." : "";
    showFollow();
  }
  const failed = (/** @type {any} */ error) => void (wrong.textContent = visible(error.message.replace(/^n must/, "how many: it must")));
  form.onsubmit = async (/** @type {any} */ event) => {
    event.preventDefault(); // the dialog shows errors itself
    wrong.textContent = "";
    try {
      await keepBar(mode, read(form));
    } catch (error) {
      return failed(error);
    }
    keepDraft(draft, null);
    dialog.close();
    if (event.submitter?.value === "go") proceed?.();
    else tell(`Now: ${sentenceOf(mode)}.`);
  };
  show(barOf(mode));
  fill(dialog, form);
  dialog.onclose = () => document.activeElement !== $("tree") && ($("empty").hidden ? $("text") : $("begin")).focus();
  dialog.showModal();
}
