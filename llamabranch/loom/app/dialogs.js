// @ts-check
// Dialogs: questions, bookmarks, export and import.
import { $, fill, h, label, plural, redraw, tell, visible, warn } from "./dom.js";
import { choose } from "./lenses.js";
import { backend, caughtUp } from "./net.js";
import { select, store } from "./store.js";
import { segmentOf } from "./tree.js";
import { keysOf } from "./keys.js";
import { showPane } from "./where.js";

/** Open a dialog, and return its form. It stays open and shows the error until a button's action succeeds.
 * @param {string} title @param {any[]} content @param {Record<string, string>} [verbs] titles of buttons, the main one first
 * @param {(data: FormData, verb: string) => any} [done] called at a button; true = it succeeded
 * @param {() => void} [forget] called once it succeeded, or at Cancel */
export function ask(title, content, verbs = {}, done = () => {}, forget = () => {}) {
  const buttons = Object.entries(verbs).map(([value, words], i) => h("button", { type: "submit", value, class: i ? "" : "main" }, words));
  const dialog = $("dialog"), wrong = h("p", { class: "wrong", role: "alert" });
  const close = h("button", { type: "button", onclick: () => (forget(), dialog.close()) }, buttons.length ? "Cancel" : "Close");
  const form = h("form", {}, h("h2", { id: "dialog-title" }, title), content, h("div", { class: "foot" }, wrong, h("p", { class: "row" }, buttons, close)));
  form.onsubmit = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    fill(wrong);
    try {
      if (!(await done(new FormData(form), /** @type {any} */ (event.submitter)?.value))) return;
      forget();
      dialog.close();
    } catch (error) {
      warn(/** @type {Error} */ (error).message);
    }
  };
  fill(dialog, form);
  dialog.onclose = () => document.activeElement !== $("tree") && ($("empty").hidden ? $("text") : $("begin")).focus();
  dialog.showModal();
  return form;
}

const FORMATS = {
  html: "one HTML file to read", json: "JSON, everything", markdown: "Markdown, this path", text: "text, this path",
};

/** @type {Map<string, any>} the node and the end that were shown before a branch was deleted or a text imported */
export const shownBefore = new Map();

async function bring(/** @type {any} */ file) {
  if (!file) return;
  fill($("dialog").querySelector(".wrong"));
  const answer = await backend.ask("/loom/import", { method: "POST", body: file }).catch((error) => warn(error.message));
  if (!answer) return;
  $("dialog").close();
  shownBefore.set(answer.nodes[0].id, [store.current, store.end]);
  if (!store.current) choose(); // the example's lens is not for a text of one's own
  await caughtUp(answer); // the new nodes must be here to be shown, and scored
  select(answer.shown);
  redraw(["place"]); // it may be chosen already
  const more = answer.bar.map((/** @type {string} */ name) => (name === "memory" ? "memory" : "author’s note")).join(" and ");
  tell(`${plural(answer.count, "node")} imported.${more && ` The ${more} went to the settings of texts.`}`);
}

export const bookmarked = () => [...store.nodes.values()].filter(({ bookmark, id }) => bookmark && segmentOf(id));

/** Export the document, or import a file. */
export const exportDialog = () => ask("Export and import", [
  h("ul", { class: "formats" }, Object.entries(FORMATS).map(([format, words]) => h("li", {},
    h("a", { href: `/loom/export?format=${format}&node=${store.current ?? ""}`, download: "" }, words)))),
  h("label", {}, h("span", {}, "import a file in one of these formats, or mikupad’s"),
    h("input", { type: "file", onchange: async (/** @type {any} */ { target }) => {
      await bring(target.files[0]);
      target.value = ""; // so that the same file, mended, can be chosen again
    } }))]);

/** The list of bookmarks. */
export function bookmarksDialog() {
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
  ask("Bookmarks", [marked.length ? h("ul", { class: "menu" }, marked.map(line))
    : h("p", { class: "dim" }, `None yet. ${keysOf("bookmark")[0] ?? "The menu"} bookmarks the branch you see.`)]);
}
