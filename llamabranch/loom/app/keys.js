// @ts-check
// Keys: one table of actions with their keys; they act in the tree and the text.
import { $, h } from "./dom.js";

/** @type {[string, string, string, string[]][]} name, where it acts, what it does, keys */
export const ACTIONS = [
  ["up", "tree", "the branch above", ["ArrowUp", "k"]],
  ["down", "tree", "the branch below", ["ArrowDown", "j"]],
  ["left", "tree", "close, or go to the parent", ["ArrowLeft", "h"]],
  ["right", "tree", "open, or go to the first child", ["ArrowRight", "l"]],
  ["first", "tree", "the first branch", ["Home"]],
  ["last", "tree", "the last branch", ["End"]],
  ["toggle", "tree", "open or close", ["Space"]],
  ["text.left", "text", "the previous token", ["ArrowLeft"]],
  ["text.right", "text", "the next token", ["ArrowRight"]],
  ["text.first", "text", "the first token", ["Home"]],
  ["text.last", "text", "the last token", ["End"]],
  ["text.surprise", "text", "the next surprise, p < .05", ["}"]],
  ["text.surpriseBack", "text", "the previous surprise", ["{"]],
  ["continue", "", "continue, as the bar says", ["g", "Ctrl+Enter"]],
  ["options", "", "how to continue: opens the bar", ["G"]],
  ["type", "", "type from here; reply in a chat", ["Enter"]],
  ["edit", "", "edit what follows; this turn in a chat", ["e"]],
  ["retry", "", "answer again, in a chat", ["R"]],
  ["thoughts", "", "show or fold thoughts", ["t"]],
  ["stop", "", "stop", ["Escape"]],
  ["compare", "", "two branches side by side", ["d"]],
  ["lens", "", "the next lens", ["v"]],
  ["lensBack", "", "the previous lens", ["V"]],
  ["ghosts", "", "show or hide rejected drafts", ["x"]],
  ["bookmark", "", "bookmark", ["b"]],
  ["bookmarks", "", "list of bookmarks", ["B"]],
  ["note", "", "note", ["m"]],
  ["delete", "", "delete", ["Delete"]],
  ["undo", "", "undo", ["u", "Ctrl+z"]],
  ["redo", "", "redo", ["Ctrl+Shift+Z", "U"]],
  ["find", "", "find in all branches", ["/"]],
  ["copy", "", "copy the text", ["c"]],
  ["export", "", "export and import", ["E"]],
  ["help", "", "help and keys", ["?"]],
];

/** The keys of an action. @param {string} name @returns {string[]} */
export const keysOf = (name) => ACTIONS.find(([each]) => each === name)?.[3] ?? [];

/** The name of a pressed key; Shift is added only if the key itself does not show it. @param {KeyboardEvent} event */
function keyName({ key, ctrlKey, metaKey, altKey, shiftKey }) {
  const name = key === " " ? "Space" : key;
  const shift = shiftKey && (name.length > 1 || ctrlKey || metaKey);
  return (ctrlKey || metaKey ? "Ctrl+" : "") + (altKey ? "Alt+" : "") + (shift ? "Shift+" : "") + name;
}

/** Let keys act. @param {Record<string, () => void>} run @param {(place: number) => void} take */
export function startKeys(run, take) {
  document.addEventListener("keydown", (event) => {
    const where = event.target === $("tree") ? "tree" : event.target === $("text") ? "text" : "";
    if (!where || event.isComposing) return;
    const key = keyName(event);
    const action = ACTIONS.find(([name, place]) => (!place || place === where) && keysOf(name).includes(key))?.[0];
    if (!action && !/^[0-9]$/.test(key)) return;
    event.preventDefault();
    if (action) run[action]();
    else take(key === "0" ? 9 : Number(key) - 1);
  });
}

/** The table of keys in the help. */
export const keyTable = () => h("table", { class: "keys" }, h("tbody", {}, ACTIONS.map(([, where, title, keys]) =>
  h("tr", {}, h("th", { scope: "row" }, title, where && h("small", {}, ` in the ${where}`)), h("td", {}, keys.map((key) => h("kbd", {}, key))))),
  h("tr", {}, h("th", { scope: "row" }, "take that alternative"), h("td", {}, h("kbd", {}, "1 … 9, 0")))));
