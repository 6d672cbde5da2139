// @ts-check
// Writing: the model continues, or one types in a box of the text: what follows, an edit, a turn of a chat.
import { $, h, plural, tell } from "./dom.js";
import { act } from "./net.js";
import { look, select, store, view } from "./store.js";
import { attend, place, shownPath } from "./text.js";
import { isChat } from "./turns.js";
import { barOf } from "./bar.js";
import { exported, mode, selected, showPane, whereTo } from "./where.js";

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
  tell(kind === "chat" ? `Writing ${plural(answer.nodes.length, "answer")}.` : `Writing ${plural(answer.nodes.length, "continuation")}.`);
  return answer;
}

/** @type {{text: any, keep: (more: boolean) => Promise<any>} | null} the box that is open */ export let opened = null;

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

/** Open a box to write in. @param {{at: number, label: string, value?: string, edit?: boolean, roles?: string[],
 *   keep: (text: string, role: string) => Promise<any>, verb?: string, note?: string}} what `at`: the text is shown up to there */
function openBox({ at, label: title, value = "", edit = false, roles = [], keep: kept, verb = "Continue", note = "" }) {
  if (view.typingAt >= 0 || exported() || document.documentElement.dataset.state === "read-only") return;
  showPane("text");
  const box = h("textarea", { rows: 3, spellcheck: false, value, "aria-label": title });
  const role = h("select", { "aria-label": "Role" }, roles.map((each) => h("option", { value: each }, each)));
  const close = () => {
    opened = null;
    look({ typingAt: -1 });
    form.remove();
    $("text").focus();
  };
  const keep = async (/** @type {boolean} */ more) => {
    if (!edit && !box.value) return close();
    const answer = await kept(box.value, role.value);
    if (!answer) return;
    close();
    select(answer.node.id, answer.same ? answer.at ?? null : null);
    if (more) return go();
    look({ reading: Math.min(answer.node.at, shownPath().n - 1) }); // arrow keys start at the first new token
  };
  const form = h("div", { class: "typing" }, h("p", { class: "row dim" }, title, roles.length > 1 && role), box,
    note && h("p", { class: "dim note" }, note), h("p", { class: "row" },
      h("button", { type: "button", class: "main", onclick: () => keep(true) }, `${verb} `, h("kbd", {}, "Ctrl Enter")),
      h("button", { type: "button", onclick: () => keep(false) }, "Keep as a branch ", h("kbd", {}, "Esc")),
      h("button", { type: "button", onclick: close }, "Discard")));
  onSubmit(form, () => keep(true), () => keep(false));
  opened = { text: box, keep };
  $("turn-tools").hidden = true;
  look({ typingAt: at });
  $("after").prepend(form);
  box.focus();
  form.scrollIntoView({ block: "nearest" });
}

/** What a box says about control tokens. @param {boolean} parsed */
export const controlNote = (parsed) => {
  const { eos, chat } = store.doc.model ?? {};
  if (!eos || (!parsed && !chat)) return "";
  return parsed ? `Control tokens, such as ${eos}, are parsed.` : `Control tokens, such as ${eos}, are plain text in a message.`;
};

/** Type after a position, or edit all that follows. @param {number} at @param {boolean} edit */
export function type(at, edit) {
  const node = store.current, c = shownPath(), where = whereTo();
  openBox({ at, label: edit ? "Edit what follows" : `Type ${where}`, value: edit ? c.text.slice(at).join("") : "", edit,
    note: controlNote(!isChat(c)), keep: (text) => act("type", { node, at, text, edit }) });
}

/** Add a turn to the conversation. */
export function reply() {
  const node = store.current, at = place(), roles = store.doc.model?.chat?.roles ?? ["user"];
  openBox({ at, label: "Reply", roles, verb: "Send", note: controlNote(false),
    keep: (text, role) => act("chat", { node, at, text, role: role || "user" }) });
}

/** Rewrite a turn of the conversation; the old one stays as a branch. @param {number} turn */
export function editTurn(turn) {
  const c = shownPath(), node = store.current, { role, begin, end } = c.turns[turn] ?? {};
  if (role == null) return;
  const isAnswer = role === "assistant";
  openBox({ at: begin, label: isAnswer ? "Edit the answer" : `Edit what the ${role} says`, edit: true,
    value: c.text.slice(begin, end).join(""), verb: isAnswer ? "Continue it" : "Ask again", note: isAnswer ? "" : controlNote(false),
    keep: (text) => act("chat", { node, turn, text }) });
}

/** Regenerate an answer. @param {number} turn */
export async function retry(turn) {
  const c = shownPath(), there = c.turns.findLastIndex(({ role }, i) => role === "assistant" && i <= turn);
  if (there < 0) return tell("There is no answer here.");
  await go({ at: c.turns[there].begin });
}
