// @ts-check
// The monospace font: automatic for code; a switch turns it on or off, and is remembered.
import { attribute } from "./dom.js";
import { store } from "./store.js";
import { shownPath } from "./text.js";

const LOOKED = 400; // only this many tokens from the start of a text are examined
// Lines that hardly anyone writes in prose.
const CODE = [
  /^\s*(?:def|class)\s+\w+\s*[(:]/, /^\s*(?:from\s+[\w.]+\s+)?import\s+[\w.*{]/, /^\s*#\s*(?:include|define|ifdef|pragma)\b/,
  /^\s*(?:export\s+|async\s+|pub\s+|static\s+)*(?:function|func|fn)\b.*\(/, /^\s*(?:const|let|var)\s+[\w{[].*=/, /\w\([^)]*\).*;\s*$|=.*;\s*$|\{\s*$/,
  /^\s*[})\]]+[;,]?\s*$/, /^\s*(?:if|for|while|switch|elif)\b.*[:{]\s*$/, /^\s*(?:return|else|try|finally)\b[^.!?]*[:;{)]?\s*$/,
  /^\s*[\w.[\]"']+\s*(?:[-+*/|&]?=)\s*\S/, /^\s*<\/?[a-z][\w-]*(?:\s[^<>]*)?>/i, /^\s*(?:SELECT|INSERT|UPDATE|CREATE)\s.*\b(?:FROM|INTO|SET|TABLE)\b/,
  /^\s*@\w+/, /^\s*[\w.]+\([^()]*\)\s*;?\s*$/, /^\s*```/, /^\s*(?:\/\/|\/\*|\*\/)/, /^\s*[$>]\s+\w+\s+-/,
];

/** Whether a text is code: half of its lines look like it. @param {string} text */
function isCode(text) {
  const lines = text.split("\n").filter((line) => line.trim());
  const likely = lines.filter((line) => CODE.some((pattern) => pattern.test(line)));
  return likely.length > 0 && likely.length * 2 >= lines.length;
}

let lookedAt = "", seemsCode = false;

/** Whether the font is monospace now: as the switch says, or because the text is code. */
export function isMono() {
  const kept = store.settings.mono;
  if (kept != null) return kept === true;
  const c = shownPath(), key = `${store.current} ${Math.min(c.text.length, LOOKED)}`;
  if (key !== lookedAt) [lookedAt, seemsCode] = [key, isCode(c.text.slice(0, LOOKED).join(""))];
  return seemsCode;
}

/** Set the font of the page. */
export function drawMono() {
  document.documentElement.toggleAttribute("data-mono", isMono());
  for (const button of document.querySelectorAll("[data-action=mono]")) attribute(button, "aria-pressed", String(isMono()));
}
