// @ts-check
// The sampling bar: settings for continuing texts or chats, kept in the document; grammars and schemas.
import { $, h, label, plural, redraw, short, tell } from "./dom.js";
import { ask } from "./dialogs.js";
import { backend, bodyOf, net } from "./net.js";
import { keepDraft, stateOf, store } from "./store.js";

/** @typedef {Record<string, any>} Bar */

/** @type {Record<string, Bar>} the bars of a new document */
const FIRST = { text: { n: 3, max_tokens: 24 }, chat: { n: 1, max_tokens: 512 } };
/** @type {[string, string, number | null][]} settings that have a field: name, in words, the value that does nothing */
const NUMBERS_OF_BAR = [["temperature", "temperature", null], ["top_p", "top-p", 1], ["top_k", "top-k", 0],
  ["min_p", "min-p", 0], ["repeat_penalty", "repeat penalty", 1]];
/** How a chat's answers think. @type {Record<string, string>} */
const THINKS = { usual: "as the chat template does", on: "on", off: "off" };
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

/** The bar that a form describes. Raises an error if a value is invalid. @param {FormData} data @returns {Bar} */
function read(data) {
  const of = (/** @type {string} */ name) => String(data.get(name) ?? ""), number = (/** @type {string} */ name) => (of(name) ? Number(of(name)) : null);
  const kind = of("kind"), text = of("follow"), thinking = of("thinking");
  /** @type {Bar} */ const bar = { n: number("n"), max_tokens: number("max_tokens"),
    sampling: Object.fromEntries(NUMBERS_OF_BAR.map(([name]) => [name, number(name)])),
    seed: of("seed"), // kept as text: it may have more digits than a number
    stop: of("stop").split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n")),
    memory: of("memory").trim(), authors_note: of("authors_note").trim(),
    thinking: { on: number("budget") ?? true, off: false }[thinking] };
  if (kind === "free") return clean(bar);
  if (!text.trim()) throw new Error(`Write ${FOLLOWS[kind]}, or choose free text.`);
  try {
    bar[kind] = kind === "json_schema" ? JSON.parse(text) : kind === "choice" ? text.split("\n").filter((line) => line.trim()) : text;
  } catch (error) {
    throw new Error(`The schema is not JSON: ${/** @type {Error} */ (error).message}`);
  }
  if (kind === "json_schema" && !/^\s*\{/.test(text)) throw new Error("The schema is not a JSON object. It begins with {.");
  return clean(bar);
}

/** A bar without the settings that are not set. @param {Bar} bar @returns {Bar} */
const clean = (bar) => Object.fromEntries(Object.entries(bar)
  .map(([name, value]) => [name, name === "sampling" ? clean(value) : value])
  .filter(([, value]) => value != null && value !== "" && (typeof value !== "object" || Object.keys(value).length)));

/** Open the dialog of the bar. @param {string} mode @param {(() => void) | null} proceed what to do next; null: only keep the bar */
export function openBar(mode, proceed) {
  const bar = barOf(mode), usual = store.doc.model?.sampling ?? {}, isTalk = mode === "chat";
  const { stop = [], thinking } = bar, kind = followed(bar), rule = bar[kind] ?? "";
  const draft = `bar ${mode}`, { doc, values: typed } = store.drafts[draft] ?? {}, isBack = doc === store.doc.file.name;
  /** @type {Record<string, any>} what the fields show */ const values = { ...bar, ...bar.sampling, kind,
    stop: stop.map((/** @type {string} */ each) => each.replaceAll("\n", "\\n")).join("\n"),
    follow: Array.isArray(rule) ? rule.join("\n") : typeof rule === "object" ? JSON.stringify(rule, null, 1) : rule,
    thinking: thinking == null ? "usual" : thinking === false ? "off" : "on", budget: Number.isInteger(thinking) ? thinking : "", ...(isBack && typed) };
  const field = (/** @type {string} */ tag, /** @type {string} */ name, /** @type {string} */ words, /** @type {any} */ props = {}) =>
    h("label", { title: props.title ?? "" }, h("span", {}, words),
      h(tag, { name, value: values[name] ?? "", spellcheck: false, autocomplete: "off", ...props }));
  const number = (/** @type {string} */ name, /** @type {string} */ words, /** @type {any} */ usually = "", /** @type {any} */ props = { min: "1" }) =>
    field("input", name, words, { type: "number", placeholder: String(usually), ...props });
  const lines = (/** @type {string} */ name, /** @type {string} */ words, /** @type {string} */ note) =>
    field("textarea", name, words, { rows: 2, placeholder: note, title: note });
  const choice = (/** @type {string} */ name, /** @type {string} */ words, /** @type {Record<string, string>} */ named) =>
    h("label", {}, h("span", {}, words), h("select", { name }, Object.entries(named).map(([value, title]) =>
      h("option", { value, selected: value === values[name] }, title))));
  const form = ask(isTalk ? "How to answer" : "How to continue", [
    number("n", isTalk ? "answers" : "texts", FIRST[mode].n, { min: "1", max: String(store.doc.model?.max_choices ?? "") }),
    number("max_tokens", "limit, in tokens", FIRST[mode].max_tokens),
    NUMBERS_OF_BAR.map(([name, words]) => number(name, words, usual[name], { step: name === "top_k" ? "1" : "any" })),
    field("input", "seed", "seed", { placeholder: "random", pattern: "-?[0-9]{1,20}", title: "a whole number of at most 20 digits" }),
    isTalk ? [choice("thinking", "thinking", THINKS), number("budget", "thinks at most, in tokens", "no limit", { min: "0" })]
      : [lines("memory", "memory", "Stays at the top of what the model sees."),
        lines("authors_note", "author’s note", "Is put near the end of what the model sees.")],
    lines("stop", "stop at", "One text a line; \\n is a line end."),
    choice("kind", "the text must follow", FOLLOWS), field("textarea", "follow", "written here", { rows: 5 })],
  { ...(proceed && { go: isTalk ? "Keep and answer" : "Keep and continue" }), keep: "Keep" }, async (data, verb) => {
    await keepBar(mode, read(data));
    if (verb === "go") proceed?.();
    else tell(`Now: ${sentenceOf(mode)}.`);
    return true;
  }, () => keepDraft(draft, null));
  form.oninput = () => keepDraft(draft, { doc: store.doc.file.name, values: Object.fromEntries(new FormData(form)) });
  if (isBack) form.querySelector(".wrong").textContent = "You changed this before, and did not keep it. Cancel discards the changes.";
}
