// @ts-check
// The first screen: beginning a text or a chat.
import { $, check, fill, h, later, percent, radios, redraw, set, tell, visibleTexts, warn } from "./dom.js";
import { choose, looks, ownWords } from "./lenses.js";
import { act, get } from "./net.js";
import { Tokens, keepDraft, pieceText, putTokens, select, store, texts } from "./store.js";
import { take } from "./inspect.js";
import { named } from "./text.js";
import { begins } from "./where.js";
import { go } from "./typing.js";
import { drawState } from "./main.js";

/** @type {{columns: any, tokens: Tokens, words: string[]}[]} the example as the server sends it: a sentence, then its endings */ let samples = [];
const pausing = later(100);
let exampleFor = ""; // the model that was asked for it

/** Fetch the example that the model writes, and draw it; without one its place stays empty. @param {string} model */
async function fetchExample(model) {
  exampleFor = model;
  const { parts } = await get("/loom/example").catch(() => ({ parts: [] }));
  samples = parts.map((/** @type {any} */ columns) => {
    const tokens = new Tokens();
    tokens.write(0, columns);
    return { columns, tokens, words: visibleTexts(texts(tokens.pieces)) };
  });
  const [sentence, ...endings] = samples, fork = endings[0]?.columns.at;
  if (!sentence) return fill($("example"));
  ownWords(false);
  choose("probability");
  const word = (/** @type {string} */ text, /** @type {number} */ i) => [/^\s/.test(text) && " ", h("button", { type: "button", "data-model": "",
    "data-word": i, class: i ? looks(sentence.tokens, i).class : "t", onclick: () => tryExample(i), onfocus: () => drawOthers(i),
    onmouseenter: () => pausing(() => drawOthers(i)), onmouseleave: () => pausing(null),
    "aria-label": `${text.trim()}${i ? `, ${percent(Math.exp(sentence.tokens.lp[i]))}` : ""}: continue from here` }, text.trim())];
  const ending = (/** @type {typeof sentence} */ { words, tokens }, /** @type {number} */ k) => h("li", {},
    h("button", { type: "button", "data-model": "", class: "ending", onclick: () => tryExample(fork, k) }, "… ",
      words.map((text, i) => h("span", looks(tokens, i), text.replace(/\s+/g, " ").slice(i ? 0 : 1)))));
  fill($("example"), h("h3", {}, "Or try it here: click a word, and the model continues from there"),
    h("p", { class: "sentence" }, sentence.words.map(word)),
    h("div", { class: "grown" }, h("div", {}, h("h4", {}, "Three endings by the model"), h("ol", { class: "ends" }, endings.map(ending))), h("div", { id: "others" })),
    h("p", { class: "note" }, "The stronger the colour, the less the model expected the word: ",
      ["expected", "possible", "a surprise"].map((text, i) => [h("span", { class: `t b${[0, 3, 6][i]}` }, text), " "])));
  drawOthers(fork);
  redraw(["state"]); // whether its buttons can act
}

/** Show what else the model could have written in the example. @param {number} i the position */
function drawOthers(i) {
  const [{ columns, tokens, words }, ...endings] = samples, top = columns.top[i];
  if (!top.length) return;
  for (const button of $("example").querySelectorAll("[data-word]")) button.classList.toggle("cursor", button.dataset.word === String(i));
  fill($("others"), h("h4", {}, `Instead of “${words[i].trim()}” (${percent(Math.exp(tokens.lp[i]))})`),
    h("ol", { class: "top" }, top.slice(0, 5).map((/** @type {import("./store.js").Top[0]} */ [token, lp, piece]) => h("li", {},
      h("button", { type: "button", "data-model": "", disabled: $("start").disabled, "aria-current": token === columns.ids[i] ? "true" : null, "--share": `${100 * Math.exp((lp ?? 0) - top[0][1])}%`,
        onclick: () => tryExample(i, endings.findIndex((each) => each.columns.at === i && each.columns.ids[0] === token), token) },
      h("span", { class: "word" }, pieceText(piece).trim() || named(piece)), h("span", { class: "share" }, percent(Math.exp(lp ?? NaN))))))));
}

/** Make the example a text of the document, and let the model continue it: in the sentence, at an ending, or with another token.
 * @param {number} i a position in the sentence @param {number} [ending] @param {number} [token] */
async function tryExample(i, ending = -1, token = -1) {
  const answer = await act("example");
  if (!answer) return;
  samples.forEach(({ columns }, k) => putTokens({ ...columns, node: answer.nodes[k].id }));
  select(answer.nodes[ending + 1].id);
  drawState(); // the text must be there to get the focus
  $("text").focus();
  if (ending < 0 && token >= 0 && token !== samples[0].columns.ids[i]) await take(i, token);
  else await go(ending < 0 ? { at: i + 1 } : {});
}

let modeFor = ""; // the model that the switch was set for

/** The first screen. @param {any} model */
export function drawBeginning(model) {
  const chat = model?.chat ?? null, key = `${model?.fingerprint} ${chat != null}`;
  if (model && modeFor !== key) {
    modeFor = key;
    radios("mode", [["text", "Text"], ["chat", "Chat"]], () => redraw(["state", "where"]));
    check("mode", chat ? "chat" : "text");
    $("mode").hidden = !chat;
  }
  const isTalk = begins() === "chat";
  $("mode-line").textContent = !model ? "" : !chat ? "This model continues texts. It does not chat." : isTalk
    ? "You write a message, and the model answers." : "The model continues exactly what you write.";
  $("told").hidden = !isTalk;
  $("system-box").hidden = !chat?.roles.includes("system");
  const title = isTalk ? "Ask something" : "Write a beginning";
  set($("begin"), { "aria-label": title, placeholder: title });
  $("start").firstChild.textContent = isTalk ? "Send" : "Continue";
  $("example").hidden = store.nodes.size > 0;
  if (model && exampleFor !== key && !store.nodes.size) void fetchExample(key);
}

/** Begin a new text or conversation, and let the model continue it. @param {() => Promise<any>} [proceed] what continues it */
export async function begin(proceed = go) {
  const text = $("begin").value, chat = begins() === "chat";
  const wrong = (/** @type {string} */ message) => warn(message, $("begin-wrong"));
  let tools = [];
  $("begin-wrong").textContent = "";
  try {
    tools = JSON.parse(chat && $("tools").value.trim() || "[]");
  } catch (error) {
    return wrong(`tools: ${/** @type {Error} */ (error).message}`);
  }
  if (!Array.isArray(tools)) return wrong("tools: a JSON list is wanted");
  if (!text.trim()) wrong("Write a beginning first.");
  const fields = { node: null, text, ...(chat && { tools, system: $("system").value.trim() || null }) };
  const answer = text.trim() && (await act(chat ? "chat" : "type", fields, undefined, $("begin-wrong")));
  if (!answer) return $("begin").focus();
  $("begin").value = "";
  keepDraft("begin", null);
  if (!samples.length) exampleFor = ""; // it gave way
  choose();
  select(answer.node.id);
  drawState(); // the text must be there to get the focus
  $("text").focus();
  await proceed();
}
