// @ts-check
// The first screen: beginning a text or a chat.
import { $, check, fill, h, radios, redraw, set, tell, warn } from "./dom.js";
import { LENSES, choose } from "./lenses.js";
import { act } from "./net.js";
import { keepDraft, select, store } from "./store.js";
import { begins } from "./where.js";
import { controlNote, go } from "./typing.js";
import { fold } from "./live.js";
import { drawState } from "./main.js";

/** Examples that run at a click. @type {Record<string, Record<string, string>>} */
const CARDS = {
  sentence: { title: "Continue a sentence", text: "Once upon a time there was a little fox who",
    chat: "Tell me about a little fox, in three sentences.", line: "Each token is coloured by its probability." },
  draft: { title: "Watch a draft being judged", text: "The old king called his three sons and said",
    chat: "Count from one to twenty in words.",
    line: "Tokens are drafted ahead, and the model accepts or rejects each of them.", without: "This needs drafts: start with --\u2060draft auto." },
};

let modeFor = ""; // the model that the switch was set for

/** The first screen. @param {any} model */
export function drawBeginning(model) {
  const chat = model?.chat ?? null, key = `${model?.fingerprint} ${chat != null}`;
  if (model && modeFor !== key) {
    modeFor = key;
    radios("mode", [["text", "Text"], ["chat", "Chat"]], () => redraw(["state", "where"]));
    check("mode", chat ? "chat" : "text");
    /** @type {any} */ ($("mode").querySelector("[value=chat]")).disabled = !chat;
  }
  const isTalk = begins() === "chat";
  $("mode-line").textContent = !model ? "" : !chat ? "This model has no chat template: it continues texts." : isTalk
    ? "The model's chat template formats the turns." : "The model continues exactly what you write.";
  $("system-box").hidden = !isTalk || !chat?.roles.includes("system");
  $("tools-box").hidden = !isTalk;
  $("begin-note").textContent = model ? controlNote(!isTalk) || "" : "";
  const title = isTalk ? "First message" : "Beginning of a text";
  set($("begin"), { "aria-label": title, placeholder: title });
  $("start").firstChild.textContent = isTalk ? "Send" : "Continue";
  if ($("cards").dataset.for === `${key} ${isTalk} ${model?.draft}`) return;
  $("cards").dataset.for = `${key} ${isTalk} ${model?.draft}`;
  fill($("cards"), Object.entries(CARDS).map(([card, { title, line, without, ...words }]) =>
    h("button", { type: "button", class: "card", "data-card": card, "data-model": "", value: words[isTalk ? "chat" : "text"] },
      h("b", {}, isTalk && card === "sentence" ? "Ask something" : title),
      h("span", {}, model?.draft === "none" && without || line))));
  fill($("about").lastElementChild, LENSES.map(({ title, says }) => [h("dt", {}, title), h("dd", {}, says)]));
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
  const answer = text.trim() && (await (chat ? act("chat", { node: null, text, tools, system: $("system").value.trim() || null }, undefined, $("begin-wrong"))
    : act("type", { node: null, text }, undefined, $("begin-wrong"))));
  if (!answer) return $("begin").focus();
  $("begin").value = "";
  keepDraft("begin", null);
  select(answer.node.id);
  drawState(); // the text must be there to get the focus
  $("text").focus();
  await proceed();
}

/** Do what a card says: begin its text and continue it. @param {string} card @param {string} text */
export async function runCard(card, text) {
  $("begin").value = text;
  if (card === "draft" && store.doc.model?.draft === "none") return $("begin").focus(); // the card's line says which option it needs
  if (card === "draft") choose("source"), fold(true);
  if (card === "draft") return begin(() => go({ n: 1, max_tokens: 48 }));
  return begin();
}
