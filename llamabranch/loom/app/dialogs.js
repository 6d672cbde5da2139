// @ts-check
// Dialogs: questions, bookmarks, export and import.
import { $, fill, h, label, plural, redraw, tell, visible, warn } from "./dom.js";
import { choose } from "./lenses.js";
import { backend, fetchDoc } from "./net.js";
import { select, store } from "./store.js";
import { segmentOf } from "./tree.js";
import { keysOf } from "./keys.js";
import { showPane } from "./where.js";

/** A dialog with fields. A field is [name, title, first value]. It stays open and shows the error until the action succeeds.
 * @param {string} title @param {any[][]} fields @param {string} verb @param {(values: Record<string, any>) => any} done
 * @param {any[]} [more] what else is in it */
export function ask(title, fields, verb, done, more = []) {
  const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), ...more,
    fields.map(([name, words, value]) => h("label", {}, h("span", {}, words),
      h("textarea", { name, value: value ?? "", dir: "auto", spellcheck: false, autocomplete: "off" }))),
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
  await fetchDoc(); // the new nodes must be here to be shown, and scored
  select(answer.shown);
  redraw(["place"]); // it may be chosen already
  const more = answer.bar.map((/** @type {string} */ name) => (name === "memory" ? "memory" : "author’s note")).join(" and ");
  tell(`${plural(answer.count, "node")} imported.${more && ` The ${more} went to the settings of texts.`}`);
}

export const bookmarked = () => [...store.nodes.values()].filter(({ bookmark, id }) => bookmark && segmentOf(id));

/** Export the document, or import a file. */
export const exportDialog = () => ask("Export and import", [], "", () => {}, [
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
  ask("Bookmarks", [], "", () => {}, [marked.length ? h("ul", { class: "menu" }, marked.map(line))
    : h("p", { class: "dim" }, `None yet. ${keysOf("bookmark")[0] ?? "The menu"} bookmarks the branch you see.`)]);
}
