// @ts-check
// The page as a whole: its actions, its state, its parts. Everything else is in the modules that it imports.
import { $, attribute, fill, h, later, pace, paints, plural, radios, redraw, set, tell, visible } from "./dom.js";
import { LENSES, choose, drawLegend, keepLens, paintOf, turn } from "./lenses.js";
import { act, connect, net } from "./net.js";
import { keepDraft, keepSetting, look, select, stateOf, store, view } from "./store.js";
import { segmentOf, startTree, treeMoves } from "./tree.js";
import { besides, charactersBefore, foldThoughts, followEnd, inContext, moveTo, place, seek, shownPath, startText, textMoves } from "./text.js";
import { isChat, turnAt } from "./turns.js";
import { openBar, sentenceOf } from "./bar.js";
import { drawInspector, takeAt } from "./inspect.js";
import { drawLive, fold } from "./live.js";
import { forkOf, putBeside, startBeside } from "./beside.js";
import { copyText, startCopy } from "./copy.js";
import { ACTIONS, helpOfKeys, keysOf, startKeys } from "./keys.js";
import { begins, exported, isAnswered, isAtEnd, mode, selected, showPane, whereTo } from "./where.js";
import { drawBox, edit, editTurn, go, goToDraft, keepTyped, onSubmit, opened, reopen, reply, retry, savedSentence, type } from "./typing.js";
import { begin, drawBeginning } from "./first.js";
import { startFind } from "./find.js";
import { ask, bookmarked, bookmarksDialog, exportDialog, shownBefore } from "./dialogs.js";

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.style.colorScheme || (prefersDark.matches ? "dark" : "light")) === "dark";

const staying = later(250);

/** Tell the server which node is shown: a reload and an export begin there. */
function keepPlace() {
  const { current, doc } = store;
  if (!current || current === doc.current || !net.connected || exported()) return;
  doc.current = current;
  void act("show", { node: current });
}

/** What happens once the reader stays at a node: text without numbers, such as imported text, is scored when first seen. */
function stay() {
  keepPlace();
  const { lp, n, missing } = shownPath();
  if (missing >= 0) return net.connected ? staying(stay) : undefined;
  if (!n || !["ready", "disk-error"].includes(stateOf(net)) || store.looked.has(store.current) || n > store.doc.model.n_ctx) return;
  store.looked.add(store.current);
  if (lp.slice(1, n).some(Number.isNaN)) void act("score", { node: store.current });
}

/** Show where the next action acts. */
function drawWhere() {
  const chat = mode() === "chat", where = whereTo(), answered = isAnswered();
  $("go").firstChild.textContent = answered ? "Reply" : `Continue ${where}`;
  $("go").lastChild.textContent = keysOf(answered ? "type" : "continue")[0] ?? "";
  attribute($("go"), "data-action", answered ? "reply" : "continue");
  const more = $("actions").querySelector("[data-action=retry]"), typed = $("actions").querySelector("[data-action=type]");
  more.hidden = !chat;
  $("actions").querySelector("[data-action=compare]").hidden = !forkOf().length;
  typed.hidden = answered; // there the button beside the bar is Reply
  typed.firstChild.textContent = chat && isAtEnd() ? "Reply " : "Type ";
  const c = shownPath(), last = c.turns.at(-1);
  const reply = $("reply"), was = reply.hidden;
  reply.hidden = !(chat && view.typingAt < 0 && isAtEnd() && last?.role === "assistant" && c.n > last.begin
    && ["ready", "disk-error"].includes(stateOf(net)));
  if (was && !reply.hidden) followEnd();
  const said = sentenceOf(mode());
  if ($("bar-said").firstChild?.textContent !== said) fill($("bar-said"), said, " ", h("kbd", {}, keysOf("options")[0] ?? ""));
}

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
  continue: () => (opened ? opened.keep(true) : isAnswered() ? tell("The answer is complete. Enter replies, R answers again.") : go()),
  options: () => openBar(mode(), $("empty").hidden && store.current && !isAnswered() ? () => void go() : null),
  reply,
  type: () => {
    if (opened) return opened.text.focus();
    const c = shownPath(), turn = c.turns[turnAt(c, view.cursor)];
    if (isChat(c) && isAtEnd()) return reply();
    if (isChat(c) && turn?.role !== "assistant") return edit(c.text.slice(0, place()).join("").length);
    return type(place());
  },
  edit: () => {
    if (opened) return opened.text.focus();
    const c = shownPath(), i = view.cursor < 0 ? c.n : view.cursor;
    if (isChat(c) && i === c.n) return editTurn(c.turns.findLastIndex(({ role }) => role !== "assistant"));
    return edit(c.text.slice(0, i).join("").length + (c.text[i]?.match(/^\s*/)?.[0].length ?? 0));
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
    if (opened) return opened.keep(false);
    if (![...store.jobs.values()].some(({ state }) => state === "running")) return besides().other ? putBeside() : moveTo(-1);
    const answer = await act("stop", { job: null });
    if (answer?.stopped.length) tell("Stopped.");
  },
  compare: putBeside,
  lens: () => turn(1),
  lensBack: () => turn(-1),
  ghosts: () => {
    look({ ghosts: !view.ghosts });
    tell(view.ghosts ? "Rejected drafts are shown." : "Rejected drafts are hidden.");
  },
  bookmark: () => selected() && act("set", { node: store.current, bookmark: !selected()?.bookmark }),
  note: () => {
    const node = selected();
    if (!node) return;
    const name = `note ${node.id}`, area = h("textarea", { value: store.drafts[name]?.text ?? node.note, dir: "auto", spellcheck: false });
    const form = ask("Note", [h("label", {}, h("span", {}, "note on this branch"), area)], { keep: "Keep" },
      () => act("set", { node: node.id, note: area.value }), () => keepDraft(name, null));
    keepTyped(area, name, form.querySelector(".wrong"), () => ({ node: node.id, end: store.end }));
  },
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
    const answer = await act("undo"), { op, node } = answer?.undone ?? {};
    const [before, end] = shownBefore.get(node?.id) ?? [node?.id, null];
    if (op === "delete" ? !node.deleted : !store.current && before !== node?.id) select(before, end);
    if (answer) tell("Undone.");
  }),
  redo: () => inTurn(async () => {
    const answer = await act("redo"), { op, node, nodes = [] } = answer?.redone ?? {};
    if (op === "delete" && node.deleted) leave(node);
    else if (nodes.length > 1 && node.parent) select(node.parent, node.at); // show where the continuations begin
    else if (op && op !== "set") select(node.id); // a bookmark or a note moves nothing
    if (answer) tell("Redone.");
  }),
  find: () => $("find").focus(),
  copy: copyText,
  mono: () => keepSetting("mono", !store.settings.mono),
  export: () => (keepPlace(), exportDialog()),
  help: () => ask("Help and keys", helpOfKeys()),
  exact: () => ask("Exact replay is off", [
    h("p", {}, "With the same seed the model can still write another text: while it writes several texts, numbers are rounded in another order."),
    h("p", {}, "The option ", h("code", {}, "-S exact=true"), " of ", h("code", {}, "llamabranch open"), " turns it on. "
      + "Long texts are then read more slowly. If a model cannot do it, the start says why.")]),
  menu: () => ask("Menu", [h("div", { class: "menus" }, Object.entries(MENU).map(([title, names]) =>
    h("div", {}, h("h3", {}, title), h("ul", { class: "menu" }, names.map((name) => h("li", {},
      h("button", { type: "button", onclick: () => ($("dialog").close(), run[name]()) },
        { mono: "monospace font", theme: "light or dark", new: "begin another text or chat" }[name]
          ?? ACTIONS.find(([each]) => each === name)?.[2] ?? name, " ", h("kbd", {}, keysOf(name)[0] ?? ""))))))))]),
  bookmarks: bookmarksDialog,
  saved: () => {
    if (!opened) goToDraft(run, ({ node }) => node);
    tell(savedSentence());
  },
  new: () => {
    showPane("text");
    Object.assign(store, { current: null, end: null });
    redraw(["state", "tree", "text", "inspect", "where"]);
  },
  theme: () => keepSetting("theme", isDark() ? "light" : "dark"),
  fold,
};

// --- around the text: state, header, panes ---

let reopened = false; // whether the box from before a reload is open again

export function drawState() {
  const root = document.documentElement;
  const { doc } = store;
  const state = stateOf(net);
  if (["ready", "disk-error"].includes(state) && root.dataset.state !== state) staying(stay);
  root.dataset.state = state;
  const { theme, mono = false } = store.settings;
  root.toggleAttribute("data-mono", mono);
  for (const button of document.querySelectorAll("[data-action=mono]")) attribute(button, "aria-pressed", String(mono));
  root.style.colorScheme = theme ?? "";
  const { model } = doc;
  Object.assign(pace, model?.leaves_cores ? { share: 1, least: 50 } : { share: 1 / 80, least: 250 }); // drawing slows a model that needs all cores
  if (doc.file.name) document.title = `${visible(doc.file.name)} · llamabranch`;
  $("file").textContent = visible(doc.file.name ?? "llamabranch");
  $("saved").textContent = exported() ? "exported" : doc.file.read_only ? "read-only"
    : !doc.file.error ? (doc.file.saved === false ? "saving …" : "saved") : !doc.file.unsaved ? "not saved" : `${plural(doc.file.unsaved, "text")} only in memory`;
  $("model").textContent = visible(model?.name ?? "");
  $("exact").hidden = model?.exact !== false || exported();
  $("theme").textContent = isDark() ? "Light" : "Dark";
  const job = [...store.jobs.values()].find((each) => each.state === "running" && each.message);
  const trouble = doc.file.error && `The file cannot be written: ${doc.file.error}. The page tries again; an export keeps what is only in memory.`;
  const message = {
    "no-session": "This page has no session. Press Enter in the terminal where llamabranch runs, and open the new link, here or in another tab.",
    "connection-lost": "The connection is lost. The page tries again; what you type is kept.",
    "read-only": exported() ? "" : doc.file.read_only,
    "reading-again": job?.message,
  }[state] ?? trouble;
  $("bar").hidden = !message;
  attribute($("bar"), "data-danger", message && message === trouble);
  if ($("bar").firstChild?.textContent !== (message ?? "")) {
    const offers = message && (message === trouble || state === "read-only");
    fill($("bar"), h("span", {}, visible(message ?? "")), offers && h("button", { type: "button", "data-action": "export" }, "Export"));
  }
  const canWrite = !["no-session", "connection-lost", "model-loading", "read-only"].includes(state);
  for (const button of document.querySelectorAll("[data-model]")) /** @type {any} */ (button).disabled = !canWrite;
  $("actions").lastChild.hidden = !["generating", "reading-again"].includes(state);
  $("view").hidden = exported();
  $("undo").disabled = !doc.undo;
  $("redo").disabled = !doc.redo;
  $("saved").title = savedSentence();
  if (doc.boot != null && !reopened) reopened = (reopen(run), true);
  const empty = state !== "no-session" && (store.nodes.size === 0 || !store.current) && doc.boot != null;
  const was = $("empty").hidden;
  $("empty").hidden = !empty;
  for (const id of ["columns", "lens-line", "legend", "actions", "bar-row"]) $(id).hidden = empty;
  attribute(root, "data-empty", empty && (store.nodes.size ? "text" : "all"));
  $("start").disabled = !canWrite;
  $("loading").textContent = state === "model-loading" ? doc.loading : "";
  if (empty && was) $("begin").focus();
  if (store.drafts.begin && !empty && reopened) store.drafts.begin.open = false;
  if (empty) drawBeginning(model);
  const marked = bookmarked().length;
  set($("marks"), { textContent: `★ ${marked}` });
  attribute($("marks"), "aria-label", plural(marked, "bookmark"));
  if (!empty) drawWhere();
  else set($("bar-begin"), { textContent: doc.bars?.[begins()] ? sentenceOf(begins()) : "Settings", title: `How it continues: ${sentenceOf(begins())}` });
}

/** Show what can be done with the turn under the mouse. @param {any} event */
function showTools({ target }) {
  const block = target.closest?.("[data-turn]"), tools = $("turn-tools"), turn = shownPath().turns[Number(block?.dataset.turn ?? -1)];
  tools.hidden = !turn || view.typingAt >= 0 || stateOf(net) === "read-only";
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
  radios("lenses", LENSES.map(({ name, title }) => [name, title]), keepLens);
  choose();
  radios("panes", [["tree", "Tree"], ["text", "Text"], ["token", "Token"]], showPane);
  showPane("text");
  const buttons = ["Type", "Edit", "Retry", "Compare", "Stop"];
  fill($("actions"), buttons.map((title) => h("button", { type: "button", "data-action": title.toLowerCase(),
    "data-model": ["Compare", "Stop"].includes(title) ? null : "" }, title === "Retry" ? "Answer again" : title, " ",
  h("kbd", {}, keysOf(title.toLowerCase())[0]?.replace("Escape", "Esc")))));
  document.addEventListener("click", (event) => {
    const { action } = /** @type {any} */ (event.target).closest?.("[data-action]")?.dataset ?? {};
    if (action) run[action]();
  });
  $("turn-tools").append(...[["Edit", editTurn], ["Answer again", retry]].map(([title, what]) =>
    h("button", { type: "button", onclick: () => /** @type {any} */ (what)(Number($("turn-tools").dataset.turn)) }, title)));
  $("text").addEventListener("mouseover", showTools);
  $("text").addEventListener("dblclick", (/** @type {MouseEvent} */ { clientX, clientY }) => {
    const before = charactersBefore(clientX, clientY);
    if (before != null && !opened) edit(before);
  });
  for (const id of ["begin", "system", "tools"]) keepTyped($(id), id, $("begin-wrong"));
  addEventListener("pagehide", () => opened?.save());
  $("start").onclick = () => begin();
  onSubmit($("begin"), begin);
  onSubmit($("system"), begin);
  startFind();
  paints("state", drawState);
  paints("place", () => {
    $("turn-tools").hidden = true;
    staying(stay);
  });
  const text = startText(), beside = startBeside();
  paints("tree", startTree());
  paints("text", () => (beside(), text()));
  paints("where", () => {
    drawBox();
    if ($("empty").hidden) drawWhere();
  });
  paints("legend", () => drawLegend(shownPath(), (bin) => seek((c, i) => paintOf(c, i) === bin), inContext()));
  paints("inspect", drawInspector);
  paints("live", drawLive);
  startKeys(run, takeAt);
  startCopy();
  $("untap").onclick = () => moveTo(-1);
  prefersDark.onchange = () => redraw(["state"]);
  redraw(["state"]);
}

if (!$("loom-data")) {
  start();
  void connect();
}