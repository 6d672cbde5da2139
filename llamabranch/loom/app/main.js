// @ts-check
// The page as a whole: its state, what actions do, typing, dialogs. Everything else is in the modules it joins.
import { $, attribute, check, fill, h, later, pace, paints, plural, radios, redraw, tell, visible, visibleTexts, warn } from "./dom.js";
import { LENSES, binOf, choose, drawLegend, turn } from "./lenses.js";
import { act, backend, connect, get, net } from "./net.js";
import { FLAGS, Tokens, look, select, stateOf, store, texts, view } from "./store.js";
import { goTo, segmentOf, startTree, treeMoves } from "./tree.js";
import { moveTo, place, seek, shownPath, startText, textMoves, tokenSpan } from "./text.js";
import { drawInspector, inspected, takeAt } from "./inspect.js";
import { fold, freeze, startLive } from "./live.js";
import { closeCompare, compare, startCompare } from "./compare.js";
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

/** What is done once the reader stays at a node: text without numbers, as an imported one, is scored when first seen. */
function stay() {
  keepPlace();
  const { lp, n, missing } = shownPath();
  if (missing >= 0) return net.connected ? staying(stay) : undefined;
  if (stateOf(net) !== "ready" || seen.has(store.current) || n > store.doc.models.A.n_ctx) return;
  seen.add(store.current);
  if (lp.subarray(1, n).some(Number.isNaN)) void act("score", { node: store.current });
}

/** Continue from the cursor or the end of the path. @param {Record<string, any>} [fields] */
async function go(fields = {}) {
  const at = place(), node = selected();
  const resume = node?.reason === "interrupted" && at === node.at + node.n; // as if it had not been
  const answer = await act("continue", { node: store.current, at, n: 3, max_tokens: 24, resume, ...fields });
  if (!answer) return;
  if (answer.nodes.length === 1) select(answer.nodes[0].id);
  else select(/** @type {string} */ (store.current), at < shownPath().n ? at : store.end);
  tell(`Writing ${plural(answer.nodes.length, "continuation")}.`);
  return answer;
}

// --- typing ---

/** What Ctrl+Enter and Escape do in a box. @param {any} box @param {() => void} submit @param {() => void} [leave] */
function onSubmit(box, submit, leave = () => {}) {
  box.onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Escape") leave();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  };
}

/** Open the box: it types after a position, or edits all that follows. @param {number} at @param {boolean} edit */
function type(at, edit) {
  if (view.typingAt >= 0 || exported() || document.documentElement.dataset.state === "read-only") return;
  const c = shownPath();
  const node = store.current;
  const box = h("textarea", { rows: 3, spellcheck: false, value: edit ? c.text.slice(at).join("") : "",
    "aria-label": edit ? "Edit what follows" : "Type from here" });
  const preview = h("p", { class: "preview", "aria-hidden": "true" });
  const waiting = later(200);
  const close = () => {
    look({ typingAt: -1 });
    form.remove();
    waiting(null);
    $("text").focus();
  };
  const keep = async (/** @type {boolean} */ more) => {
    if (!edit && !box.value) return close();
    const answer = await act("type", { node, at, text: box.value, edit });
    if (!answer) return;
    close();
    select(answer.node.id);
    if (more) await go();
  };
  const score = async () => {
    const text = box.value;
    const answer = text ? await act("score", { node, at, text }) : { tokens: null };
    if (text !== box.value || !answer) return;
    if (!answer.tokens) return fill(preview);
    const columns = new Tokens();
    columns.write(0, answer.tokens);
    const words = visibleTexts(texts(columns.pieces));
    fill(preview, words.map((word, i) => tokenSpan(columns, i, word)).slice(-100));
    attribute(preview, "data-seam", answer.seam ? "A seam: read as one text, these would be other tokens." : null);
  };
  const form = h("div", { class: "typing" }, box, preview, h("p", { class: "row" },
    h("button", { type: "button", class: "main", onclick: () => keep(true) }, "Continue ", h("kbd", {}, "Ctrl Enter")),
    h("button", { type: "button", onclick: () => keep(false) }, "Keep ", h("kbd", {}, "Esc")),
    h("button", { type: "button", onclick: close }, "Discard")));
  box.oninput = () => waiting(score);
  onSubmit(box, () => keep(true), () => keep(false));
  look({ typingAt: at });
  $("after").prepend(form);
  box.focus();
  box.scrollIntoView({ block: "nearest" });
}

/** Begin a new text. */
async function begin() {
  const text = $("begin").value;
  const answer = text.trim() && (await act("type", { node: null, text }));
  if (!answer) return $("begin").focus();
  $("begin").value = "";
  select(answer.node.id);
  drawState();
  $("text").focus();
  await go();
}

// --- find ---

/** @type {any[]} */ let hits = [], hit = -1;

/** Find text in all nodes; a number of results, the first is shown. */
async function find() {
  const q = $("find").value;
  const { found, more } = await get("/loom/find", { q }).catch(() => ({ found: [], more: false }));
  if (q !== $("find").value) return;
  [hits, hit] = [found, -1];
  $("found").textContent = q && `${found.length}${more ? "+" : ""}`;
  attribute($("found"), "aria-label", plural(found.length, "place"));
}

function nextHit(/** @type {number} */ by) {
  if (!hits.length) return;
  hit = (hit + by + hits.length) % hits.length;
  const { node, at, text } = hits[hit];
  const segment = segmentOf(node, at + 1);
  if (segment) goTo(segment);
  moveTo(at);
  $("found").textContent = `${hit + 1} / ${hits.length}`;
  attribute($("found"), "title", visible(text));
}

// --- dialogs ---

/** A dialog with fields. A field is [name, title, first value, choices or null]. It stays open, and says why, until
 * what it asks for is done.
 * @param {string} title @param {any[][]} fields @param {string} verb @param {(values: Record<string, any>) => any} done
 * @param {any[]} [more] what else is in it */
function ask(title, fields, verb, done, more = []) {
  const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), ...more,
    fields.map(([name, words, value, choices]) => h("label", {}, h("span", {}, words), choices
      ? h("select", { name }, choices.map((/** @type {string} */ each) => h("option", { value: each }, each.replace(/_/g, " "))))
      : h(name === "note" ? "textarea" : "input", { name, value: value ?? "", spellcheck: false, autocomplete: "off" }))),
    h("p", { class: "wrong", role: "alert" }),
    h("p", { class: "row" }, verb && h("button", { type: "submit", class: "main", value: "yes" }, verb),
      h("button", { type: "submit", value: "", formNoValidate: true }, verb ? "Cancel" : "Close")));
  const dialog = $("dialog");
  fill(dialog, form);
  form.onsubmit = async (/** @type {SubmitEvent} */ event) => {
    if (!(/** @type {any} */ (event.submitter)?.value)) return;
    event.preventDefault();
    fill(form.querySelector(".wrong"));
    if (await done(valuesOf(new FormData(form)))) dialog.close();
  };
  dialog.onclose = () => document.activeElement !== $("tree") && $("text").focus();
  dialog.showModal();
}

const WORDS = ["seed", "answer", "note"], LISTS = ["stop", "want"];

/** What a form holds: numbers where they are, lists of one text; "a.b" is b of an object a. @param {FormData} form */
function valuesOf(form) {
  /** @type {Record<string, any>} */ const found = {};
  for (const [name, value] of form) {
    const [own, of] = name.split(".").reverse();
    const into = of ? (found[of] ??= {}) : found;
    const isText = WORDS.includes(own) || Number.isNaN(Number(value));
    if (value !== "" || own === "note") into[own] = LISTS.includes(own) ? [value] : isText ? value : Number(value);
  }
  return found;
}

const FORMATS = {
  html: "one HTML file to read", json: "JSON, everything", markdown: "Markdown, this path", "markdown-tree": "Markdown, the tree",
  logitloom: "logitloom", loomsidian: "loomsidian", socketteer: "socketteer", exoloom: "exoloom",
};

async function bring(/** @type {any} */ file) {
  if (!file) return;
  fill($("dialog").querySelector(".wrong"));
  const answer = await backend.ask("/loom/import", { method: "POST", body: file }).catch((error) => warn(error.message));
  if (!answer) return;
  tell(`${plural(answer.count, "node")} imported. ${(answer.warnings ?? []).join(" ")}`);
  $("dialog").close();
}

const selected = () => store.nodes.get(store.current ?? "");

/** @type {Record<string, () => any>} */
const run = {
  ...treeMoves,
  ...Object.fromEntries(Object.entries(textMoves).map(([name, move]) => [`text.${name}`, move])),
  pin: () => look({ pinned: view.pinned >= 0 ? -1 : inspected() }),
  continue: () => go(),
  options: () => ask("Continue with options", [["n", "how many", 3], ["max_tokens", "tokens", 24],
    ["sampling.temperature", "temperature"], ["sampling.top_k", "top k"], ["sampling.top_p", "top p"],
    ["sampling.min_p", "min p"], ["sampling.repeat_penalty", "repeat penalty"], ["seed", "seed"], ["stop", "stop at"]], "Continue", go),
  type: () => type(place(), false),
  edit: () => type(view.cursor < 0 ? (shownPath().owners.at(-1)?.from ?? 0) : view.cursor, true),
  stop: async () => {
    if (![...store.jobs.values()].some(({ state }) => state === "running") && closeCompare()) return;
    const answer = await act("stop", { job: null });
    if (answer?.stopped.length) tell("Stopped.");
  },
  replay: () => act("replay", { node: store.current }),
  lens: () => turn(1),
  lensBack: () => turn(-1),
  ghosts: () => {
    look({ ghosts: !view.ghosts });
    tell(view.ghosts ? "Rejected drafts are shown." : "Rejected drafts are hidden.");
  },
  search: () => ask("Search from here", [["kind", "kind", "", ["beam", "best_of_n", "smc", "vote", "steps", "tree"]],
    ["options.width", "width"], ["options.max_tokens", "tokens", 32], ["options.temperature", "temperature"],
    ["options.seed", "seed"], ["options.want", "text that is wanted (smc)"],
    ["options.answer", "answer, a regular expression (vote)"]], "Search",
  (fields) => act("search", { node: store.current, at: place(), ...fields })),
  compare: () => {
    const { B } = store.doc.models;
    if (closeCompare()) return;
    if (exported()) {
      view.compare = B != null;
      return redraw(["compare", "text"]);
    }
    if (!B) return tell("There is no second model: start with --compare MODEL2.");
    return ask("Compare two models here", [["mode", "how", "", ["read", "lockstep", "part"]], ["writer", "who writes", "", ["A", "B"]],
      ["max_tokens", "tokens", 24], ["seed", "seed"]], "Compare", ({ mode, ...fields }) => compare(mode, place(), fields));
  },
  bookmark: () => selected() && act("set", { node: store.current, bookmark: !(selected()?.flags & FLAGS.bookmark) }),
  note: () => ask("Note", [["note", "note of this branch", selected()?.note]], "Keep",
    ({ note }) => act("set", { node: store.current, note: String(note) })),
  delete: async () => {
    const segment = segmentOf(store.current);
    if (!segment) return;
    const { first, from, parent } = segment;
    if (from > first.at) return tell("Other branches fork from this one: delete them, or where it begins.");
    const restore = Boolean(first.flags & FLAGS.deleted);
    if (!(await act("delete", { node: first.id, restore })) || restore || store.showDeleted) return;
    if (parent) goTo(parent);
    tell("Deleted; u brings it back.");
  },
  compact: async () => (await act("compact")) && tell("The file was written anew; the old one is beside it, as .bak."),
  undo: async () => tell((await act("undo")) ? "Undone." : "There is nothing to undo."),
  redo: async () => tell((await act("redo")) ? "Done again." : "There is nothing to redo."),
  find: () => $("find").focus(),
  copy: copyText,
  mono: () => setting("mono", !isMono()),
  export: () => (keepPlace(), ask("Export and import", [], "", () => {}, [
    h("ul", { class: "formats" }, Object.entries(FORMATS).map(([format, words]) => h("li", {},
      h("a", { href: `/loom/export?format=${format}&node=${store.current ?? ""}`, download: "" }, words)))),
    h("label", {}, h("span", {}, "import a file of any of these"),
      h("input", { type: "file", onchange: (/** @type {any} */ event) => bring(event.target.files[0]) }))])),
  help: () => ask("Help and keys", [], "", () => {}, [
    h("p", {}, "Keys act while the tree or the text has the focus. Click a key to change it."), keyTable(setting)]),
  menu: () => ask("Menu", [], "", () => {}, [h("ul", { class: "menu" },
    ["options", "search", "compare", "ghosts", "bookmark", "note", "copy", "delete", "hoist", "deleted", "export", "new", "compact", "help"].map((name) =>
      h("li", {}, h("button", { type: "button", onclick: () => ($("dialog").close(), run[name]()) },
        { deleted: "show or hide deleted branches", new: "begin another text", compact: "write the file anew without what was undone" }[name]
          ?? ACTIONS.find(([each]) => each === name)?.[2] ?? name, " ", h("kbd", {}, keysOf(name)[0] ?? "")))))]),
  deleted: () => {
    store.showDeleted = !store.showDeleted;
    redraw(["tree"]);
  },
  new: () => {
    closeCompare();
    Object.assign(store, { current: null, end: null });
    redraw(["state", "tree", "text", "inspect"]);
  },
  theme: () => setting("theme", isDark() ? "light" : "dark"),
  fold: () => fold(),
  pause: freeze,
};

/** Keep a setting on the server. @param {string} name @param {any} value */
async function setting(name, value) {
  store.doc.settings = { ...store.doc.settings, [name]: value };
  redraw(["state", "minimap", "legend"]);
  if (!exported()) await act("settings", { set: { [name]: value } });
}

// --- what is around: state, header, panes ---

function drawState() {
  const root = document.documentElement;
  const { doc } = store;
  const state = stateOf(net);
  if (state === "ready" && root.dataset.state !== state) staying(stay);
  root.dataset.state = state;
  const { theme, widths } = doc.settings ?? {};
  root.style.colorScheme = theme ?? "";
  for (const [side, width] of Object.entries(widths ?? {})) widen(side, width);
  const { A, B } = doc.models;
  pace.share = A?.leaves_cores ? 1 : 1 / 80; // a model that needs all cores waits for what the page takes
  if (doc.file.name) document.title = `${visible(doc.file.name)} · llamabranch`;
  $("file").textContent = visible(doc.file.name ?? "llamabranch");
  $("saved").textContent = exported() ? "exported" : doc.file.error ? "not saved" : doc.file.read_only ? "read-only" : "saved";
  fill($("models"), A && h("span", {}, B ? h("b", {}, "A ") : null, visible(A.name)), B && h("span", {}, h("b", {}, "B "), visible(B.name)),
    A?.batch_invariant === false && h("span", { class: "badge", title: "Sums depend on what else is in the batch." }, "replay may differ"));
  $("theme").textContent = isDark() ? "Light" : "Dark";
  const job = [...store.jobs.values()].find((each) => each.state === "running" && each.message);
  const message = {
    "no-session": "This page has no session. Press Enter in the terminal where llamabranch runs, and open the fresh link.",
    "connection-lost": "The connection is lost. Trying again; what you type is kept.",
    "disk-error": `The file cannot be written: ${doc.file.error}. Nothing is discarded.`,
    "read-only": exported() ? "" : doc.file.read_only,
    "reading-again": job?.message,
  }[state];
  $("bar").hidden = !message;
  if ($("bar").textContent !== (message ?? "")) {
    fill($("bar"), visible(message ?? ""), state === "read-only" && /model/.test(message ?? "")
      && h("button", { type: "button", onclick: () => act("reread") }, "Read with this model"));
  }
  const canWrite = !["no-session", "connection-lost", "model-loading", "read-only"].includes(state);
  for (const button of document.querySelectorAll("[data-model]")) /** @type {any} */ (button).disabled = !canWrite;
  $("actions").lastChild.hidden = !["generating", "reading-again"].includes(state);
  $("undo").disabled = !doc.undo || exported();
  $("redo").disabled = !doc.redo || exported();
  const empty = !exported() && state !== "no-session" && (store.nodes.size === 0 || !store.current) && doc.boot != null;
  const was = $("empty").hidden;
  $("empty").hidden = !empty;
  for (const id of ["columns", "legend", "actions"]) $(id).hidden = empty;
  $("start").disabled = !canWrite;
  $("loading").textContent = state === "model-loading" ? (doc.loading?.message ?? "The model is being loaded …") : "";
  if (empty && was) $("begin").focus();
  $("card-draft").textContent = A?.draft === "none" ? "Start with --draft auto." : "A draft guesses tokens, the model accepts or rejects.";
  $("card-models").textContent = B ? `${visible(A?.name)} and ${visible(B.name)} on one text.` : "Start with --compare MODEL2.";
}

function widen(/** @type {string} */ side, /** @type {number} */ width) {
  const splitter = $(`split-${side}`);
  const [low, high] = [Number(splitter.ariaValueMin), Number(splitter.ariaValueMax)];
  const wide = Math.max(low, Math.min(high, width));
  splitter.ariaValueNow = String(wide);
  $("main").style.setProperty(`--${side}`, `${wide}px`);
  return wide;
}

function startPanes() {
  for (const side of ["left", "right"]) {
    const splitter = $(`split-${side}`);
    const move = (/** @type {number} */ x) => widen(side, side === "left" ? x : innerWidth - x);
    const keep = (/** @type {number} */ x) => setting("widths", { ...store.doc.settings.widths, [side]: move(x) });
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
  radios("panes", [["tree", "Tree"], ["text", "Text"], ["token", "Token"]], (pane) => {
    $("main").dataset.pane = pane;
    redraw(["tree", "text", "minimap"]);
  });
  check("panes", "text");
}

/** Put the parts together; nothing is asked of a server. */
export function start() {
  radios("lenses", LENSES.map(({ name, title }) => [name, title]), choose);
  choose(LENSES[0].name);
  startPanes();
  const buttons = ["Continue", "Type", "Edit", "Replay", "Search", "Compare", "Stop"];
  fill($("actions"), buttons.map((title) => h("button", { type: "button", "data-action": title.toLowerCase(),
    "data-model": ["Stop", "Compare"].includes(title) ? null : "" }, title, " ",
  h("kbd", {}, keysOf(title.toLowerCase())[0]?.replace("Escape", "Esc")))));
  document.addEventListener("click", (event) => {
    const button = /** @type {any} */ (event.target).closest?.("[data-action], [data-card]");
    const { action, card } = button?.dataset ?? {};
    if (action) run[action]();
    if (!card) return;
    $("begin").value = button.value; // the box is filled as the card says
    $("begin").focus();
    if (card === "draft") choose("source"), fold(true);
    if (card === "models" && store.doc.models.B) choose("divergence");
  });
  $("text").addEventListener("dblclick", () => run.type());
  $("start").onclick = begin;
  onSubmit($("begin"), begin);
  const typing = later(60);
  $("find").oninput = () => typing(find);
  $("find").onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") $("tree").focus();
  };
  const tree = startTree();
  paints("state", drawState);
  paints("place", () => staying(stay));
  paints("tree", tree.tree);
  paints("text", startText());
  paints("compare", startCompare());
  paints("legend", () => (drawMono(), drawLegend(shownPath(), (bin) => seek((c, i) => binOf(c, i) === bin))));
  paints("inspect", drawInspector);
  paints("live", startLive());
  paints("minimap", tree.minimap);
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
