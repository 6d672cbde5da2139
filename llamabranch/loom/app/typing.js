// @ts-check
// Writing: the model continues, or one types in a box of the text: what follows, an edit, a turn of a chat.
import { $, fill, h, plural, tell } from "./dom.js";
import { act } from "./net.js";
import { keepDraft, look, select, store } from "./store.js";
import { segmentOf } from "./tree.js";
import { attend, place, shownPath, steady } from "./text.js";
import { isChat, turnAt } from "./turns.js";
import { barOf } from "./bar.js";
import { mode, selected, showPane, whereTo } from "./where.js";

/** Continue from the cursor or the end of the path, as the bar says. @param {Record<string, any>} [fields] */
export async function go(fields = {}) {
  const at = fields.at ?? place(), node = selected();
  if (!node) return $("begin").focus();
  const resume = node.reason === "interrupted" && at === node.at + node.n; // as if it had not been interrupted
  const kind = mode();
  attend(at);
  const answer = await act("continue", { node: store.current, at, ...barOf(kind), resume, ...fields });
  if (!answer) return;
  if (answer.nodes.length === 1) select(answer.nodes[0].id);
  else select(node.id, at < shownPath().n ? at : store.end);
  const isWriting = store.jobs.get(answer.job)?.state === "running"; // else its end has been told
  if (isWriting) tell(`Writing ${plural(answer.nodes.length, kind === "chat" ? "answer" : "continuation")}.`);
  return answer;
}

/** @typedef {{kind: "type" | "edit" | "reply" | "turn", node: string, end: number | null, at: number, turn?: number, doc?: string,
 *   text?: string, caret?: number, role?: string, open?: boolean}} Draft the text of a box, and its place: `at` is where it begins */

/** The box that is open. @type {{place: string, text: any, save: () => void, keep: (more: boolean) => Promise<any>, park: () => void} | null} */
export let opened = null;

const nowAt = () => `${store.current} ${store.end}`; // the name of the draft of the place that is shown
const MOST = 100_000; // characters of a box that something is pasted into: with more of them a browser is slow

/** What Ctrl+Enter and Escape do in a box. @param {any} where @param {() => void} submit @param {() => void} [leave] */
export function onSubmit(where, submit, leave = () => {}) {
  where.onkeydown = (/** @type {KeyboardEvent} */ event) => {
    const does = event.isComposing ? null : event.key === "Escape" ? leave
      : event.key === "Enter" && (event.ctrlKey || event.metaKey) ? submit : null;
    if (!does) return;
    event.preventDefault();
    does();
  };
}

/** Keep the text of a field in this tab. @param {any} field @param {string} name of the draft @param {any} wrong shows errors
 * @param {() => Record<string, any> | null} [draft] other values to keep; null = keep nothing */
export function keepTyped(field, name, wrong, draft = () => (field.value ? {} : null)) {
  const save = () => {
    const facts = draft();
    const isKept = keepDraft(name, facts && { doc: store.doc.file.name, open: true, ...facts, text: field.value, caret: field.selectionStart });
    if (!isKept) wrong.textContent = "The browser cannot keep a text of this length: it is lost with the tab until you keep it here.";
  };
  field.addEventListener("input", save);
  field.onbeforeinput = (/** @type {InputEvent} */ event) => {
    const pasted = event.data?.length ?? 0, n = field.value.length + pasted;
    if (n <= MOST || pasted < 1000) return;
    event.preventDefault();
    wrong.textContent = `A box takes ${plural(MOST, "character")}; with this it would have ${plural(n, "character")}. Import a file instead (E).`;
  };
  return save;
}

/** The text of a box with the line ends of the text that was put into it, as far as that has not changed. A box has only \n.
 * @param {string} was @param {string} now */
function withLineEnds(was, now) {
  if (!was.includes("\r")) return now;
  const before = was.split(/(\r\n|[^])/).filter(Boolean), after = before.map((each) => each.replace(/\r\n?/, "\n"));
  let a = 0, b = 0;
  while (a < now.length && a < after.length && now[a] === after[a]) a++;
  while (a + b < now.length && a + b < after.length && now.at(-1 - b) === after.at(-1 - b)) b++;
  return before.slice(0, a).join("") + now.slice(a, now.length - b) + before.slice(before.length - b).join("");
}

/** Open a box to write in. An edit is in the place of the text. @param {Omit<Draft, "node" | "end"> & Partial<Draft>} what
 * @param {boolean} [focuses] */
function openBox(what, focuses = true) {
  if (opened || !$("empty").hidden) return;
  if (document.documentElement.dataset.state === "read-only") return tell("This document is read-only.");
  showPane("text");
  const draft = { node: store.current, end: store.end, ...what }, { kind, at } = draft, c = shownPath(), turn = c.turns[draft.turn ?? -1], isEdit = kind === "edit" || kind === "turn";
  const was = isEdit ? c.text.slice(at, turn?.end).join("") : "", speaker = turn?.role ?? "";
  const [words, verb] = {
    type: [`Type ${whereTo()}`, "Continue"], edit: ["Edit from this line on", "Continue"], reply: ["Reply", "Send"],
    turn: speaker === "assistant" ? ["Edit the answer", "Continue it"] : [`Edit what the ${speaker} says`, "Ask again"],
  }[kind];
  const roles = kind === "reply" ? store.doc.model?.chat?.roles ?? ["user"] : [], place = nowAt();
  const text = h("textarea", { spellcheck: false, dir: "auto", value: draft.text ?? was, "aria-label": words });
  const role = h("select", { "aria-label": "Role" }, roles.map((/** @type {string} */ value) => h("option", { value }, value)));
  const wrong = h("p", { class: "wrong", role: "alert" });
  const remove = () => steady(() => {
    opened = null;
    form.remove();
    $("columns").classList.remove("editing");
    look({ typingAt: -1 });
  });
  const close = () => {
    keepDraft(place, null);
    remove();
    $("text").focus({ preventScroll: true });
  };
  const keep = async (/** @type {boolean} */ more) => {
    if (withLineEnds(was, text.value) === was && !(more && isEdit)) return close();
    fill(wrong);
    text.readOnly = true;
    const isTurn = kind === "turn" || kind === "reply", where = kind === "turn" ? { turn: draft.turn } : { at, edit: kind === "edit" };
    const answer = await act(isTurn ? "chat" : "type", { node: draft.node, text: withLineEnds(was, text.value), ...where, ...(roles.length && { role: role.value }) }, undefined, wrong);
    text.readOnly = false;
    if (!answer) return;
    close();
    steady(() => select(answer.node.id, answer.same ? answer.at ?? null : null));
    if (more) return go();
    look({ reading: Math.min(answer.node.at, shownPath().n - 1) }); // arrow keys start at the first new token
  };
  const form = h("div", { class: `typing ${isEdit ? "inplace" : ""} ${turn ? `turn said by-${speaker} last` : ""}` }, text,
    h("div", { class: "foot" }, wrong, h("p", { class: "row" }, h("span", { class: "dim" }, words), roles.length > 1 && role,
      h("button", { type: "button", class: "main", onclick: () => keep(true) }, `${verb} `, h("kbd", {}, "Ctrl Enter")),
      h("button", { type: "button", onclick: () => keep(false) }, "Keep as a branch ", h("kbd", {}, "Esc")),
      h("button", { type: "button", onclick: close }, "Discard"))));
  const save = keepTyped(text, place, wrong, () => (withLineEnds(was, text.value) === was ? null : { ...draft, role: role.value }));
  const park = () => {
    save();
    if (store.drafts[place]) keepDraft(place, { ...store.drafts[place], open: false });
    remove();
  };
  onSubmit(form, () => keep(true), () => keep(false));
  opened = { place, text, save, keep, park };
  $("turn-tools").hidden = true;
  steady(() => {
    look({ typingAt: at });
    $("columns").classList.toggle("editing", isEdit);
    $("after").prepend(form);
  });
  if (draft.role) role.value = draft.role;
  text.setSelectionRange(draft.caret ?? text.value.length, draft.caret ?? text.value.length);
  if (focuses) text.focus({ preventScroll: !draft.open });
  if (!isEdit) form.scrollIntoView({ block: "nearest" });
}

/** Follow the reader: the box of another place is put away with its text, and one that was put away here is open again. */
export function drawBox() {
  if (opened && opened.place !== nowAt()) opened.park();
  const draft = store.drafts[nowAt()], c = shownPath();
  if (draft && !opened && document.documentElement.dataset.state !== "read-only" && c.missing < 0 && c.n >= draft.at) openBox(draft, draft.open);
}

/** Go where something was typed. @param {Record<string, () => any>} run @param {(draft: any) => any} is which draft */
export function goToDraft(run, is) {
  const [name, draft] = Object.entries(store.drafts).find(([, each]) => is(each)) ?? [];
  if (draft?.node) select(draft.node, draft.end);
  if (name === "begin") run.new();
  if (name?.startsWith("note")) run.note();
}

/** After a reload: show where one was typing. A text whose place is gone is on the first screen. @param {Record<string, () => any>} run */
export function reopen(run) {
  const field = $("begin");
  for (const id of ["begin", "system", "tools"]) $(id).value = store.drafts[id]?.text ?? "";
  for (const [name, { node, doc, text }] of Object.entries(store.drafts)) {
    if (node == null || (doc === store.doc.file.name && segmentOf(node))) continue;
    field.value += (field.value && "\n\n") + text;
    keepDraft(name, null);
    keepDraft("begin", { text: field.value, caret: field.value.length, open: true });
    tell("The place where you were typing is gone. Your text is here.");
  }
  goToDraft(run, ({ open }) => open);
  const { caret = 0 } = store.drafts.begin ?? {};
  field.setSelectionRange(caret, caret);
}

/** How much is saved, and in which file. */
export function savedSentence() {
  const nodes = [...store.nodes.values()], { name, unsaved, error } = store.doc.file, typed = Object.keys(store.drafts).filter((each) => !["system", "tools"].includes(each)).length;
  const n = nodes.reduce((sum, each) => sum + each.n, 0), there = nodes.length - (unsaved ?? 0);
  return [`${plural(there, "text")}${unsaved || error ? "" : ` with ${plural(n, "token")}`} ${there === 1 ? "is" : "are"} in ${name}`,
    unsaved && `${plural(unsaved, "text")} ${unsaved === 1 ? "is" : "are"} only in memory`,
    typed && `${typed === 1 ? "a text" : `${typed} texts`} you are typing ${typed === 1 ? "is" : "are"} kept in this tab`].filter(Boolean).join("; ") + ".";
}

/** Type after a position. @param {number} at */
export const type = (at) => openBox({ kind: "type", at });

/** Add a turn to the conversation. */
export const reply = () => openBox({ kind: "reply", at: place() });

/** Rewrite a turn of the conversation; the old one stays as a branch. @param {number} turn @param {number} [before] the caret */
export function editTurn(turn, before) {
  const c = shownPath(), { begin, end } = c.turns[turn] ?? {};
  if (begin == null) return;
  const [skipped, length] = [c.text.slice(0, begin), c.text.slice(begin, end)].map((all) => all.join("").length);
  openBox({ kind: "turn", at: begin, turn, caret: before == null ? length : Math.max(0, Math.min(length, before - skipped)) });
}

/** Edit the text from the line of the caret on; in a chat, its turn. @param {number} before how many characters are before the caret */
export function edit(before) {
  const c = shownPath();
  let i = 0;
  for (let sum = 0; i < c.n && (sum += c.text[i].length) <= before; ) i++;
  if (isChat(c)) return editTurn(turnAt(c, i), before);
  while (i > c.control[0] && !c.text[i - 1].endsWith("\n")) i--;
  openBox({ kind: "edit", at: i, caret: before - c.text.slice(0, i).join("").length });
}

/** Regenerate an answer. @param {number} turn */
export async function retry(turn) {
  const c = shownPath(), there = c.turns.findLastIndex(({ role }, i) => role === "assistant" && i <= turn);
  if (there < 0) return tell("There is no answer here.");
  await go({ at: c.turns[there].begin });
}
