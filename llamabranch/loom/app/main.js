// @ts-check
// The page as a whole: its state, its actions, typing, dialogs. Everything else is in the modules that it imports.
import {
  $, attribute, check, fill, h, label, later, pace, paints, plural, radios, redraw, set, tell, visible, warn,
} from "./dom.js";
import { LENSES, binOf, choose, drawLegend, turn } from "./lenses.js";
import { act, backend, connect, get, listeners, net } from "./net.js";
import { FLAGS, keepSetting, look, putNode, select, stateOf, store, view } from "./store.js";
import { goTo, segmentOf, startTree, treeMoves } from "./tree.js";
import { foldThoughts, moveTo, place, seek, shownPath, startText, textMoves } from "./text.js";
import { isChat, turnAt } from "./turns.js";
import { barOf, openBar, sentenceOf } from "./bar.js";
import { drawInspector, takeAt } from "./inspect.js";
import { fold, freeze, startLive } from "./live.js";
import { copyText, startCopy } from "./copy.js";
import { drawMono, isMono } from "./mono.js";
import { ACTIONS, keyTable, keysOf, startKeys } from "./keys.js";

const exported = () => "exported" in document.documentElement.dataset;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.style.colorScheme || (prefersDark.matches ? "dark" : "light")) === "dark";

const staying = later(250);
/** @type {Set<string | null>} nodes whose texts were looked at */ const seen = new Set();

/** Tell the server which node is shown: a reload and an export begin there. */
function keepPlace() {
  const { current, doc } = store;
  if (!current || current === doc.current || !net.connected || exported()) return;
  doc.current = current;
  void act("set", { node: current, current: true });
}

/** What happens once the reader stays at a node: text without numbers, such as imported text, is scored when first seen. */
function stay() {
  keepPlace();
  const { lp, n, missing } = shownPath();
  if (missing >= 0) return net.connected ? staying(stay) : undefined;
  if (stateOf(net) !== "ready" || seen.has(store.current) || n > store.doc.model.n_ctx) return;
  seen.add(store.current);
  if (lp.subarray(1, n).some(Number.isNaN)) void act("score", { node: store.current });
}

/** "chat" if the shown text, or the one about to begin, is a conversation. */
const mode = () => (!$("empty").hidden ? begins() : isChat(shownPath()) ? "chat" : "text");

/** Whether the path ends with a complete answer, so that a reply follows. */
function isAnswered() {
  const c = shownPath(), node = selected();
  if (!isChat(c) || c.turns.at(-1)?.role !== "assistant" || !node || place() !== node.at + node.n) return false;
  return c.n > (c.turns.at(-1)?.begin ?? 0) && node.reason === "stop";
}

/** Continue from the cursor or the end of the path, as the bar says. @param {Record<string, any>} [fields] */
async function go(fields = {}) {
  const at = fields.at ?? place(), node = selected();
  if (!node) return;
  if (fields.at == null && isAnswered()) return reply();
  const resume = node.reason === "interrupted" && at === node.at + node.n; // as if it had not been interrupted
  const kind = mode();
  const answer = await act("continue", { node: store.current, at, ...barOf(kind), resume, ...fields });
  if (!answer) return;
  if (answer.nodes.length === 1) select(answer.nodes[0].id);
  else select(node.id, at < shownPath().n ? at : store.end);
  tell(kind === "chat" ? `Writing ${plural(answer.nodes.length, "answer")}.` : `Writing ${plural(answer.nodes.length, "continuation")}.`);
  return answer;
}

const isAtEnd = () => place() >= shownPath().n;

/** The end of a path in words: "the end", or its last word before the cursor. */
function whereTo() {
  const c = shownPath(), at = place();
  if (isAtEnd()) return "at the end";
  const words = c.shown.slice(Math.max(0, at - 12), at).join("").replace(/\s+$/, "").match(/\S*$/)?.[0] ?? "";
  return words ? `after “${words.slice(-24)}”` : `after token ${at}`;
}

/** Show where the next action acts. */
function drawWhere() {
  const chat = mode() === "chat", where = whereTo(), answered = isAnswered();
  $("go").firstChild.textContent = answered ? "Reply" : `Continue ${where}`;
  $("go").lastChild.textContent = keysOf("continue")[0] ?? "";
  const words = { type: chat && isAtEnd() ? "Reply" : `Type ${where}`,
    edit: chat ? "Edit this turn" : view.cursor < 0 ? "Edit what follows the last fork"
      : `Edit from “${shownPath().shown[view.cursor]?.trim() ?? ""}” on`,
    retry: "Answer again" };
  for (const [action, title] of Object.entries(words)) {
    const button = $("actions").querySelector(`[data-action=${action}]`);
    if (!button) continue;
    if (action === "type") button.firstChild.textContent = chat && isAtEnd() ? "Reply " : "Type ";
    if (button.title !== title) button.title = title;
  }
  const more = $("actions").querySelector("[data-action=retry]"), typed = $("actions").querySelector("[data-action=type]");
  more.hidden = !chat;
  typed.hidden = answered; // there Continue is Write a reply
  const c = shownPath(), last = c.turns.at(-1);
  const reply = $("reply"), scroller = $("text").parentElement, was = reply.hidden;
  const isBelow = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
  reply.hidden = !(chat && view.typingAt < 0 && isAtEnd() && last?.role === "assistant" && c.n > last.begin
    && ["ready", "disk-error"].includes(stateOf(net)) && !exported());
  if (was && !reply.hidden && isBelow) reply.scrollIntoView({ block: "nearest" });
  for (const id of ["bar-said", "bar-begin"]) {
    const said = sentenceOf(mode());
    if ($(id).firstChild?.textContent !== said) fill($(id), said, " ", h("kbd", {}, keysOf("options")[0] ?? ""));
  }
}

// --- typing ---

/** What Ctrl+Enter and Escape do in a box. @param {any} box @param {() => void} submit @param {() => void} [leave] */
function onSubmit(box, submit, leave = () => {}) {
  box.onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Escape") leave();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
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
      h("button", { type: "button", onclick: () => keep(false) }, "Keep ", h("kbd", {}, "Esc")),
      h("button", { type: "button", onclick: close }, "Discard")));
  onSubmit(box, () => keep(true), () => keep(false));
  $("turn-tools").hidden = true;
  look({ typingAt: at });
  $("after").prepend(form);
  box.focus();
  form.scrollIntoView({ block: "nearest" });
}

/** What a box says about control tokens. @param {boolean} parsed */
const controlNote = (parsed) => {
  const { eos, chat } = store.doc.model ?? {};
  if (!eos || (!parsed && !chat)) return "";
  return parsed ? `Control tokens, such as ${eos}, are parsed.` : `Control tokens, such as ${eos}, are plain text in a message.`;
};

/** Type after a position, or edit all that follows. @param {number} at @param {boolean} edit */
function type(at, edit) {
  const node = store.current, c = shownPath(), where = whereTo();
  openBox({ at, label: edit ? "Edit what follows" : `Type ${where}`, value: edit ? c.text.slice(at).join("") : "", edit,
    note: controlNote(!isChat(c)), keep: (text) => act("type", { node, at, text, edit }) });
}

/** Add a turn to the conversation. */
function reply() {
  const node = store.current, at = place(), roles = store.doc.model?.chat?.roles ?? ["user"];
  openBox({ at, label: "Reply", roles, verb: "Send", note: controlNote(false),
    keep: (text, role) => act("chat", { node, at, text, role: role || "user" }) });
}

/** Rewrite a turn of the conversation; the old one stays as a branch. @param {number} turn */
function editTurn(turn) {
  const c = shownPath(), node = store.current, { role, begin, end } = c.turns[turn] ?? {};
  if (role == null) return;
  const isAnswer = role === "assistant";
  openBox({ at: begin, label: isAnswer ? "Edit the answer" : `Edit what the ${role} says`, edit: true,
    value: c.text.slice(begin, end).join(""), verb: isAnswer ? "Continue it" : "Ask again", note: isAnswer ? "" : controlNote(false),
    keep: (text) => act("chat", { node, turn, text }) });
}

/** Regenerate an answer. @param {number} turn */
async function retry(turn) {
  const c = shownPath(), there = c.turns.findLastIndex(({ role }, i) => role === "assistant" && i <= turn);
  if (there < 0) return tell("There is no answer here.");
  await go({ at: c.turns[there].begin });
}

/** What the user begins: "text" or "chat". */
const begins = () => /** @type {any} */ ($("mode").querySelector(":checked"))?.value ?? "text";

/** Begin a new text or conversation, and let the model continue it. @param {() => Promise<any>} [proceed] what continues it */
async function begin(proceed = go) {
  const text = $("begin").value, chat = begins() === "chat";
  let tools = [];
  try {
    tools = JSON.parse(chat && $("tools").value.trim() || "[]");
  } catch (error) {
    return tell(`The tools are not JSON: ${/** @type {Error} */ (error).message}`);
  }
  if (!text.trim()) tell("Write a beginning first.");
  const answer = text.trim() && (await (chat ? act("chat", { node: null, text, tools, system: $("system").value.trim() || null })
    : act("type", { node: null, text })));
  if (!answer) return $("begin").focus();
  $("begin").value = "";
  select(answer.node.id);
  drawState();
  $("text").focus();
  await proceed();
}

// --- find ---

/** @type {any[]} */ let hits = [], hit = -1;
let sought = "", soughtIn = -1; // the text that was searched for, and the revision of the tree

/** Find text in all branches that are shown, and count them. The next hit is the one after the hit that was shown. */
async function find() {
  const q = $("find").value;
  const { found: all, more } = await get("/loom/find", { q }).catch(() => ({ found: [], more: false }));
  const found = all.filter((/** @type {any} */ each) => segmentOf(each.node));
  if (q !== $("find").value) return;
  const { node, at } = hits[hit] ?? {};
  hit = q === sought ? found.findIndex((/** @type {any} */ each) => each.node === node && each.at === at) : -1;
  [hits, sought, soughtIn] = [found, q, store.revision];
  $("found").textContent = q && `${found.length}${more ? "+" : ""}`;
  attribute($("found"), "aria-label", plural(found.length, "place"));
}

async function nextHit(/** @type {number} */ by) {
  if ($("find").value !== sought || soughtIn !== store.revision) await find(); // the input or the branches changed
  if (!hits.length) return;
  hit = (hit + by + hits.length) % hits.length;
  const { node, at, last = at, text } = hits[hit];
  goTo(/** @type {import("./tree.js").Segment} */ (segmentOf(node, last + 1)));
  moveTo(last); // the next action acts after the match
  $("found").textContent = `${hit + 1} / ${hits.length}`;
  attribute($("found"), "title", visible(text));
}

// --- dialogs ---

/** A dialog with fields. A field is [name, title, first value]. It stays open and shows the error until the action succeeds.
 * @param {string} title @param {any[][]} fields @param {string} verb @param {(values: Record<string, any>) => any} done
 * @param {any[]} [more] what else is in it */
function ask(title, fields, verb, done, more = []) {
  const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), ...more,
    fields.map(([name, words, value]) => h("label", {}, h("span", {}, words),
      h("textarea", { name, value: value ?? "", spellcheck: false, autocomplete: "off" }))),
    h("p", { class: "wrong", role: "alert" }), h("p", { class: "row" }, verb && h("button", { type: "submit", class: "main", value: "yes" }, verb),
      h("button", { type: "submit", value: "", formNoValidate: true }, verb ? "Cancel" : "Close")));
  const dialog = $("dialog");
  fill(dialog, form);
  form.onsubmit = async (/** @type {SubmitEvent} */ event) => {
    if (!(/** @type {any} */ (event.submitter)?.value)) return;
    event.preventDefault();
    fill(form.querySelector(".wrong"));
    try {
      if (await done(Object.fromEntries(new FormData(form)))) dialog.close();
    } catch (error) {
      warn(/** @type {Error} */ (error).message);
    }
  };
  dialog.onclose = () => document.activeElement !== $("tree") && $("text").focus();
  dialog.showModal();
}

const FORMATS = {
  html: "one HTML file to read", json: "JSON, everything", markdown: "Markdown, this path", text: "text, this path",
};

/** @type {Map<string, any>} what was shown before a branch was deleted, or a text imported */ const shownBefore = new Map();

async function bring(/** @type {any} */ file) {
  if (!file) return;
  fill($("dialog").querySelector(".wrong"));
  const answer = await backend.ask("/loom/import", { method: "POST", body: file }).catch((error) => warn(error.message));
  if (!answer) return;
  $("dialog").close();
  const [first] = answer.nodes;
  if (first) {
    shownBefore.set(first.id, [store.current, store.end]);
    select(first.id);
  }
  tell(`${plural(answer.count, "node")} imported.`);
}

const bookmarked = () => [...store.nodes.values()].filter(({ flags, id }) => flags & FLAGS.bookmark && segmentOf(id));

const selected = () => store.nodes.get(store.current ?? "");

/** A branch was deleted: show the place where it began, or the first screen if it was a whole text. @param {any} node */
const leave = ({ parent, at }) => (parent ? select(parent, at) : run.new());

/** @type {Record<string, string[]>} */
const MENU = {
  "This branch": ["bookmark", "note", "copy", "delete", "retry"],
  "From here": ["options"],
  View: ["bookmarks", "text.surprise", "ghosts", "thoughts", "mono", "theme"],
  Document: ["new", "export", "help"],
};

let lastTurn = Promise.resolve();
/** Act once the previous call is done, because keys may be faster than the server. @param {() => Promise<void>} act */
const inTurn = (act) => (lastTurn = lastTurn.then(act, act));

/** @type {Record<string, () => any>} */
const run = {
  ...treeMoves,
  ...Object.fromEntries(Object.entries(textMoves).map(([name, move]) => [`text.${name}`, move])),
  continue: () => go(),
  options: () => openBar(mode(), $("empty").hidden && store.current && !isAnswered() ? () => void go() : null),
  reply,
  type: () => {
    const c = shownPath(), turn = c.turns[turnAt(c, view.cursor)];
    if (isChat(c) && isAtEnd()) return reply();
    if (isChat(c) && turn?.role !== "assistant") return run.edit();
    return type(place(), false);
  },
  edit: () => {
    const c = shownPath();
    if (isChat(c)) return editTurn(view.cursor < 0 ? c.turns.findLastIndex(({ role }) => role !== "assistant") : turnAt(c, view.cursor));
    return type(view.cursor < 0 ? (c.owners.at(-1)?.from ?? 0) : view.cursor, true);
  },
  retry: () => {
    const c = shownPath();
    return isChat(c) ? retry(view.cursor < 0 ? c.turns.length - 1 : turnAt(c, view.cursor)) : tell("This text is not a chat.");
  },
  thoughts: () => {
    const { count, folded } = foldThoughts();
    tell(count ? `${plural(count, "thought is", "thoughts are")} ${folded ? "folded" : "shown"}.` : "There is no thought here.");
  },
  stop: async () => {
    const answer = await act("stop", { job: null });
    if (answer?.stopped.length) tell("Stopped.");
  },
  lens: () => turn(1),
  lensBack: () => turn(-1),
  ghosts: () => {
    look({ ghosts: !view.ghosts });
    tell(view.ghosts ? "Rejected drafts are shown." : "Rejected drafts are hidden.");
  },
  bookmark: () => selected() && act("set", { node: store.current, bookmark: !(selected()?.flags & FLAGS.bookmark) }),
  note: () => ask("Note", [["note", "note on this branch", selected()?.note]], "Keep",
    ({ note }) => act("set", { node: store.current, note })),
  delete: async () => {
    const segment = segmentOf(store.current);
    if (!segment) return;
    const { first, from } = segment;
    if (from > first.at) return tell("Other branches fork from this one. Delete it where it begins, or delete them first.");
    const shown = [store.current, store.end];
    if (!(await act("delete", { node: first.id }))) return;
    shownBefore.set(first.id, shown);
    leave(first);
    tell("Deleted; u brings it back.");
  },
  undo: () => inTurn(async () => {
    const { op, node } = (await act("undo"))?.undone ?? {};
    if (op) putNode(node);
    const [before, end] = shownBefore.get(node?.id) ?? [node?.id, null];
    if (op === "delete" ? !(node.flags & FLAGS.deleted) : !store.current && before !== node?.id) select(before, end);
    tell(op ? "Undone." : "There is nothing to undo.");
  }),
  redo: () => inTurn(async () => {
    const { op, node, nodes = [] } = (await act("redo"))?.redone ?? {};
    if (op) putNode(node);
    if (op === "delete" && node.flags & FLAGS.deleted) leave(node);
    else if (nodes.length > 1 && node.parent) select(node.parent, node.at); // show where the continuations begin
    else if (op && op !== "set") select(node.id); // a bookmark or a note moves nothing
    tell(op ? "Redone." : "There is nothing to redo.");
  }),
  find: () => $("find").focus(),
  copy: copyText,
  mono: () => keepSetting("mono", !isMono()),
  export: () => (keepPlace(), ask("Export and import", [], "", () => {}, [
    h("ul", { class: "formats" }, Object.entries(FORMATS).map(([format, words]) => h("li", {},
      h("a", { href: `/loom/export?format=${format}&node=${store.current ?? ""}`, download: "" }, words)))),
    h("label", {}, h("span", {}, "import a file in one of these formats, or mikupad’s"),
      h("input", { type: "file", onchange: (/** @type {any} */ event) => bring(event.target.files[0]) }))])),
  help: () => ask("Help and keys", [], "", () => {}, [
    h("p", {}, "Keys act while the tree or the text has the focus."), keyTable()]),
  menu: () => ask("Menu", [], "", () => {}, [h("div", { class: "menus" }, Object.entries(MENU).map(([title, names]) =>
    h("div", {}, h("h3", {}, title), h("ul", { class: "menu" }, names.map((name) => h("li", {},
      h("button", { type: "button", onclick: () => ($("dialog").close(), run[name]()) },
        { mono: "monospace font", theme: "light or dark", new: "begin another text or chat" }[name]
          ?? ACTIONS.find(([each]) => each === name)?.[2] ?? name, " ", h("kbd", {}, keysOf(name)[0] ?? ""))))))))]),
  bookmarks: () => {
    const visit = (/** @type {string} */ id) => {
      $("dialog").close();
      showPane("text");
      select(id);
      $("text").focus();
    };
    const line = (/** @type {import("./store.js").Node} */ { id, text, note }) => h("li", {},
      h("button", { type: "button", "data-bookmark": id, onclick: () => visit(id) },
        h("span", { class: "word" }, label(text) || "…"), note && h("small", {}, visible(note))));
    const marked = bookmarked();
    ask("Bookmarks", [], "", () => {}, [marked.length ? h("ul", { class: "menu" }, marked.map(line))
      : h("p", { class: "dim" }, `None yet. ${keysOf("bookmark")[0] ?? "The menu"} bookmarks the branch you see.`)]);
  },
  new: () => {
    showPane("text");
    Object.assign(store, { current: null, end: null });
    redraw(["state", "tree", "text", "inspect", "where"]);
  },
  theme: () => keepSetting("theme", isDark() ? "light" : "dark"),
  fold: () => fold(),
  pause: freeze,
};

// --- around the text: state, header, panes ---

function drawState() {
  const root = document.documentElement;
  const { doc } = store;
  const state = stateOf(net);
  if (state === "ready" && root.dataset.state !== state) staying(stay);
  root.dataset.state = state;
  const { theme, widths } = store.settings;
  root.style.colorScheme = theme ?? "";
  for (const [side, width] of Object.entries(widths ?? {})) widen(side, width);
  const { model } = doc;
  pace.share = model?.leaves_cores ? 1 : 1 / 80; // drawing slows a model that needs all cores
  if (doc.file.name) document.title = `${visible(doc.file.name)} · llamabranch`;
  $("file").textContent = visible(doc.file.name ?? "llamabranch");
  $("saved").textContent = exported() ? "exported" : doc.file.error ? "not saved" : doc.file.read_only ? "read-only" : "saved";
  fill($("model"), model && h("span", {}, visible(model.name)),
    model?.exact === false && h("span", { class: "badge", title: "Results depend on what else is in the batch." }, "not exact"));
  $("theme").textContent = isDark() ? "Light" : "Dark";
  const job = [...store.jobs.values()].find((each) => each.state === "running" && each.message);
  const message = {
    "no-session": "This page has no session. Press Enter in the terminal where llamabranch runs, and open the new link.",
    "connection-lost": "The connection is lost. The page tries again; what you type is kept.",
    "disk-error": `The file cannot be written: ${doc.file.error}. Nothing is lost; the page tries again.`,
    "read-only": exported() ? "" : doc.file.read_only,
    "reading-again": job?.message,
  }[state];
  $("bar").hidden = !message;
  if ($("bar").textContent !== (message ?? "")) {
    fill($("bar"), visible(message ?? ""));
  }
  const canWrite = !["no-session", "connection-lost", "model-loading", "read-only"].includes(state);
  for (const button of document.querySelectorAll("[data-model]")) /** @type {any} */ (button).disabled = !canWrite;
  $("actions").lastChild.hidden = !["generating", "reading-again"].includes(state);
  $("view").hidden = exported();
  $("undo").disabled = !doc.undo || exported();
  $("redo").disabled = !doc.redo || exported();
  const empty = !exported() && state !== "no-session" && (store.nodes.size === 0 || !store.current) && doc.boot != null;
  const was = $("empty").hidden;
  $("empty").hidden = !empty;
  for (const id of ["columns", "lens-line", "legend", "actions", "bar-row"]) $(id).hidden = empty;
  attribute(root, "data-empty", empty && (store.nodes.size ? "text" : "all"));
  $("start").disabled = !canWrite;
  $("loading").textContent = state === "model-loading" ? (doc.loading?.message ?? "The model is being loaded …") : "";
  if (empty && was) $("begin").focus();
  if (empty) drawBeginning(model);
  const marked = bookmarked().length;
  set($("marks"), { textContent: `★ ${marked}` });
  attribute($("marks"), "aria-label", plural(marked, "bookmark"));
  if (!empty) drawWhere();
  else fill($("bar-begin"), sentenceOf(begins()), " ", h("kbd", {}, keysOf("options")[0] ?? ""));
}

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
function drawBeginning(model) {
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

function widen(/** @type {string} */ side, /** @type {number} */ width) {
  const splitter = $(`split-${side}`);
  const [low, high] = [Number(splitter.ariaValueMin), Number(splitter.ariaValueMax)];
  const wide = Math.max(low, Math.min(high, width));
  splitter.ariaValueNow = String(wide);
  $("main").style.setProperty(`--${side}`, `${wide}px`);
  return wide;
}

/** Show one pane if the window is too narrow for all. @param {string} pane */
function showPane(pane) {
  $("main").dataset.pane = pane;
  check("panes", pane);
  redraw(["tree", "text", "minimap"]);
}

function startPanes() {
  for (const side of ["left", "right"]) {
    const splitter = $(`split-${side}`);
    const move = (/** @type {number} */ x) => widen(side, side === "left" ? x : innerWidth - x);
    const keep = (/** @type {number} */ x) => keepSetting("widths", { ...store.settings.widths, [side]: move(x) });
    widen(side, side === "left" ? 300 : 280);
    splitter.onkeydown = (/** @type {KeyboardEvent} */ { key }) => {
      const by = { ArrowLeft: -20, ArrowRight: 20 }[key], width = Number(splitter.ariaValueNow);
      if (by) keep((side === "left" ? width : innerWidth - width) + by);
    };
    splitter.onpointerdown = (/** @type {PointerEvent} */ event) => splitter.setPointerCapture(event.pointerId);
    splitter.onpointermove = (/** @type {PointerEvent} */ event) =>
      splitter.hasPointerCapture(event.pointerId) && move(event.clientX);
    splitter.onpointerup = (/** @type {PointerEvent} */ event) => keep(event.clientX);
  }
  radios("panes", [["tree", "Tree"], ["text", "Text"], ["token", "Token"]], showPane);
  showPane("text");
}

/** Do what a card says: begin its text and continue it. @param {string} card @param {string} text */
async function runCard(card, text) {
  $("begin").value = text;
  if (card === "draft" && store.doc.model?.draft === "none") return $("begin").focus(); // the card's line says which option it needs
  if (card === "draft") choose("source"), fold(true);
  if (card === "draft") return begin(() => go({ n: 1, max_tokens: 48 }));
  return begin();
}

/** Show what can be done with the turn under the mouse. @param {any} event */
function showTools({ target }) {
  const block = target.closest?.("[data-turn]"), tools = $("turn-tools"), turn = shownPath().turns[Number(block?.dataset.turn ?? -1)];
  tools.hidden = !turn || view.typingAt >= 0 || exported() || stateOf(net) === "read-only";
  if (tools.hidden || !turn) return;
  let first = block;
  while (first.previousSibling?.dataset.turn === block.dataset.turn) first = first.previousSibling;
  tools.dataset.turn = block.dataset.turn;
  tools.lastChild.hidden = turn.role !== "assistant";
  const right = tools.offsetParent.clientWidth - first.offsetLeft - first.offsetWidth + 8;
  set(tools, { "--top": `${first.offsetTop + 4}px`, "--right": `${right}px` });
}

/** Put the parts together, without any request to a server. */
export function start() {
  radios("lenses", LENSES.map(({ name, title }) => [name, title]), choose);
  choose(LENSES[0].name);
  startPanes();
  const buttons = ["Type", "Edit", "Retry", "Stop"];
  fill($("actions"), buttons.map((title) => h("button", { type: "button", "data-action": title.toLowerCase(),
    "data-model": title === "Stop" ? null : "" }, title, " ",
  h("kbd", {}, keysOf(title.toLowerCase())[0]?.replace("Escape", "Esc")))));
  document.addEventListener("click", (event) => {
    const button = /** @type {any} */ (event.target).closest?.("[data-action], [data-card]");
    const { action, card } = button?.dataset ?? {};
    if (action) run[action]();
    if (!card) return;
    void runCard(card, button.value);
  });
  $("turn-tools").append(...[["Edit", editTurn], ["Answer again", retry]].map(([title, what]) =>
    h("button", { type: "button", onclick: () => /** @type {any} */ (what)(Number($("turn-tools").dataset.turn)) }, title)));
  $("text").addEventListener("mouseover", showTools);
  $("text").addEventListener("dblclick", () => run.type());
  $("start").onclick = () => begin();
  onSubmit($("begin"), begin);
  onSubmit($("system"), begin);
  $("about").ontoggle = () => $("about").open && $("about").scrollIntoView({ block: "start" });
  const typing = later(60);
  $("find").oninput = () => typing(() => $("find").value !== sought && find());
  $("find").onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter") void nextHit(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") $("tree").focus();
  };
  const tree = startTree();
  paints("state", drawState);
  paints("place", () => {
    $("turn-tools").hidden = true;
    staying(stay);
  });
  paints("tree", tree.tree);
  paints("text", startText());
  paints("where", () => $("empty").hidden && drawWhere());
  paints("legend", () => (drawMono(), drawLegend(shownPath(), (bin) => seek((c, i) => binOf(c, i) === bin))));
  paints("inspect", drawInspector);
  paints("live", startLive());
  paints("minimap", tree.minimap);
  listeners.push((name, { state, node }) => {
    if (name === "job" && state === "stopped") seen.add(node).add(store.current); // otherwise the page would begin to process it again
  });
  startKeys(run, takeAt);
  startCopy();
  $("untap").onclick = () => moveTo(-1);
  prefersDark.onchange = () => redraw(["state", "minimap"]);
  redraw(["state"]);
}

if (!$("loom-data")) {
  start();
  void connect();
}
