// @ts-check
// Keys: one table of actions with their keys; they act wherever nothing is typed.
import { $, h } from "./dom.js";
import { keepSetting, store } from "./store.js";

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
  ["continue", "", "the model writes on", ["g", "Ctrl+Enter"]],
  ["options", "", "how the model continues", ["G"]],
  ["type", "", "write here; reply in a chat", ["Enter"]],
  ["edit", "", "edit this line; this turn in a chat", ["e"]],
  ["retry", "", "answer again, in a chat", ["R"]],
  ["thoughts", "", "show or fold thoughts", ["t"]],
  ["compare", "", "two branches side by side", ["d"]],
  ["stop", "", "keep what you typed, or stop the model, or leave the word", ["Escape"]],
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

const TYPED = "input:not([type=radio]), textarea, select, dialog"; // where keys are text
const PRESSED = "button, a, summary, input, [role=separator]"; // elements with keys of their own

/** Let keys act wherever nothing is typed; some of them act in the tree or the text, whichever was used last.
 * @param {Record<string, () => void>} run @param {(place: number) => void} take */
export function startKeys(run, take) {
  let used = "text";
  for (const name of ["tree", "text"]) $(name).addEventListener("focus", () => (used = name));
  document.addEventListener("keydown", (event) => {
    const target = /** @type {Element} */ (event.target), key = keyName(event);
    if (event.defaultPrevented || event.isComposing || target.closest(TYPED)) return;
    if (target.closest(PRESSED) && /^(Enter|Space|Home|End|Arrow.*)$/.test(key)) return;
    if (key.length === 1 && store.settings.keys === false) return;
    const action = ACTIONS.find(([name, place]) => (!place || place === used) && keysOf(name).includes(key))?.[0];
    if (!action && !/^[0-9]$/.test(key)) return;
    event.preventDefault();
    if (action) run[action]();
    else take(key === "0" ? 9 : Number(key) - 1);
  });
}

const BASIC = ["continue", "type", "edit", "stop", "undo", "find"]; // what everybody needs

/** The help: the keys that everybody needs, then all others. */
export function helpOfKeys() {
  const line = (/** @type {string} */ title, /** @type {string[]} */ keys) =>
    h("div", {}, h("dt", {}, keys.map((key) => h("kbd", {}, key.replace("Escape", "Esc").replace("Arrow", "")))), h("dd", {}, title));
  const lines = (/** @type {typeof ACTIONS} */ all) => all.map(([, , title, keys]) => line(title, keys));
  const others = ACTIONS.filter(([name]) => !BASIC.includes(name));
  const part = (/** @type {string} */ title, /** @type {string} */ place) => [h("h3", {}, title),
    h("dl", { class: "keys" }, lines(others.filter(([, where]) => where === place)))];
  return [h("dl", { class: "keys first" }, lines(BASIC.map((name) => /** @type {any} */ (ACTIONS.find(([each]) => each === name)))),
    line("pick that alternative", ["1 … 9, 0"])),
  h("label", { class: "check" }, h("input", { type: "checkbox", checked: store.settings.keys !== false,
    onchange: (/** @type {any} */ event) => keepSetting("keys", event.target.checked) }),
  h("span", {}, "letters, digits and signs act as keys, wherever nothing is typed")),
  h("div", { class: "menus" }, h("div", {}, part("Everywhere", "")), h("div", {}, part("In the tree", "tree"), part("In the text", "text")))];
}
