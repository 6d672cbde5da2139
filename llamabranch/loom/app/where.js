// @ts-check
// Where the next action acts, and which pane is shown.
import { $, check, redraw } from "./dom.js";
import { store } from "./store.js";
import { place, shownPath } from "./text.js";
import { isChat } from "./turns.js";

export const exported = () => "exported" in document.documentElement.dataset;

/** What the user begins: "text" or "chat". */
export const begins = () => /** @type {any} */ ($("mode").querySelector(":checked"))?.value ?? "text";

/** "chat" if the shown text, or the one about to begin, is a conversation. */
export const mode = () => (!$("empty").hidden ? begins() : isChat(shownPath()) ? "chat" : "text");

/** Whether the path ends with a complete answer, so that a reply follows. */
export function isAnswered() {
  const c = shownPath(), node = selected();
  if (!isChat(c) || c.turns.at(-1)?.role !== "assistant" || !node || place() !== node.at + node.n) return false;
  return c.n > (c.turns.at(-1)?.begin ?? 0) && node.reason === "stop";
}

export const isAtEnd = () => place() >= shownPath().n;

/** The end of a path in words: "the end", or its last word before the cursor. */
export function whereTo() {
  const c = shownPath(), at = place();
  if (isAtEnd()) return "at the end";
  const words = c.shown.slice(Math.max(0, at - 12), at).join("").replace(/\s+$/, "").match(/\S*$/)?.[0] ?? "";
  return words ? `after “${words.slice(-24)}”` : `after token ${at}`;
}

export const selected = () => store.nodes.get(store.current ?? "");

/** Show one pane if the window is too narrow for all. @param {string} pane */
export function showPane(pane) {
  $("main").dataset.pane = pane;
  check("panes", pane);
  redraw(["tree", "text"]);
}
