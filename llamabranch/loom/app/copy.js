// @ts-check
// Copying: the text of a path, with the parts that are not drawn, and without anything drawn around it.
import { $, plural, tell, warn } from "./dom.js";
import { store } from "./store.js";
import { besides, shownPath } from "./text.js";

/** @typedef {import("./store.js").Path} Path */

/** Copy the whole text. */
export async function copyText() {
  const { text, missing } = shownPath(), whole = text.join("");
  if (missing >= 0) return warn("The text is still being fetched.");
  try {
    await navigator.clipboard.writeText(whole);
    tell(`Copied ${plural([...whole].length, "character")}.`);
  } catch (error) {
    warn(`This could not be copied: ${/** @type {any} */ (error).message}`);
  }
}

/** The selected part of a token or a run. @param {Range} range @param {Node} element @param {string} shown the text that is drawn there
 * @param {string} text its own text */
function selectedOf(range, element, shown, text) {
  if (shown !== text) return text; // it is drawn as a code, so it is copied as a whole
  const inside = (/** @type {Node} */ node, /** @type {number} */ offset, /** @type {number} */ otherwise) =>
    element.contains(node) && node.nodeType === Node.TEXT_NODE ? offset : otherwise;
  return text.slice(inside(range.startContainer, range.startOffset, 0), inside(range.endContainer, range.endOffset, text.length));
}

/** The text of a selection in a list of tokens. @param {Range} range @param {any} box @param {Path} c */
function selectedText(range, box, c) {
  return [...box.querySelectorAll("*")].filter((each) => !each.firstElementChild && range.intersectsNode(each)).map((each) => {
    const { text } = ($("other")?.contains(each) && besides().other) || c, token = each.dataset.token;
    const words = token ? text[token] : text.slice(each.from ?? 0, each.to ?? 0).join("");
    return selectedOf(range, each, each.textContent, words);
  }).join("");
}

export function startCopy() {
  document.addEventListener("keydown", (event) => {
    const target = /** @type {any} */ (event.target);
    if (event.key.toLowerCase() !== "a" || !(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey) return;
    if (target.closest("input, textarea, dialog") || !store.current) return;
    event.preventDefault();
    getSelection()?.selectAllChildren($("text"));
  });
  document.addEventListener("copy", (event) => {
    const selection = getSelection(), box = $("text");
    if (!selection?.rangeCount || selection.isCollapsed || /** @type {any} */ (document.activeElement)?.matches("input, textarea")) return;
    const range = selection.getRangeAt(0);
    if (!range.intersectsNode(box)) return;
    event.clipboardData?.setData("text/plain", selectedText(range, box, shownPath()));
    event.preventDefault();
  });
}
