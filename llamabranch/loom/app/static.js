// @ts-check
// The page in an exported file: the document is in its data block, nothing is requested, nothing is written.
import { $, tell } from "./dom.js";
import { backend, fetchDoc } from "./net.js";
import { occurrences, pieces, putNode, putRound, putTokens, store, texts } from "./store.js";
import { start } from "./main.js";

/** The places where a text occurs in the nodes, as the server finds them. @param {string} q */
function findIn(q) {
  const found = [];
  for (const node of store.nodes.values()) {
    const begin = Math.max(0, node.at - 4 * q.length); // a match may begin in the text before
    const words = texts(pieces(node.id, null).filter(({ to }) => to > begin).flatMap(({ id, from, to }) => {
      const { at, tokens } = /** @type {any} */ (store.nodes.get(id));
      return tokens.pieces.slice(Math.max(from, begin) - at, to - at);
    }));
    for (const [first, last] of occurrences(words, q))
      if (begin + last >= node.at) found.push({ node: node.id, at: begin + first, last: begin + last });
  }
  return { found: found.slice(0, 200), more: found.length > 200 };
}

/** Answer as the server would. @param {any} data */
const answering = ({ title, model }) => async (/** @type {string} */ path) => {
  const [name, query] = path.split("?");
  if (name === "/loom/find") return findIn(new URLSearchParams(query).get("q") ?? "");
  if (name === "/loom/doc") {
    return { loading: null, file: { name: title, read_only: "This is an exported file.", saved: true, error: null }, model,
      nodes: { id: [] }, undo: 0, redo: 0 };
  }
  throw Object.assign(new Error("This is an exported file. It has no model."), { status: 409 });
};

const FRESH = { parent: null, at: 0, n: 0, kind: "typed", by: "user", reason: null, deleted: false, bookmark: false, text: "", note: "" };

/** Do what the records of a document say, see document.py. @param {any[]} records */
function apply(records) {
  /** @type {Record<number, any>} */ let vocabulary = {};
  for (const { op, id, name, value = true, data, p, ...rest } of records) {
    const node = /** @type {any} */ (store.nodes.get(id));
    if (op === "voc") vocabulary = p;
    if (op === "node") putNode({ ...FRESH, ...rest, id,
      turns: (rest.turns ?? []).map((/** @type {any} */ turn) => [turn.role, turn.at, turn.begin, turn.end ?? null]) });
    if (op === "tok") putTokens({ ...rest, node: id, at: node.at + (rest.at ?? 0), text: rest.ids.map((/** @type {number} */ t) => vocabulary[t]),
      top: rest.top.map((/** @type {any[]} */ top) => top.map(([t, lp]) => [t, lp, vocabulary[t]])) });
    if (op === "end") Object.assign(node, rest);
    if (name === "rounds") putRound(data);
    if (name === "current") store.current = id;
    if (["bookmark", "note", "deleted"].includes(name)) node[name] = value;
  }
  store.current ??= [...store.nodes.keys()].at(-1) ?? null;
}

async function readExport() {
  const bytes = Uint8Array.from(atob($("loom-data").textContent.trim()), (c) => c.charCodeAt(0)); // gzip of JSON
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = JSON.parse(await new Response(stream).text());
  document.documentElement.dataset.exported = "";
  backend.ask = answering(data);
  start();
  await fetchDoc(); // drawing waits until the records are applied
  apply(data.records);
  for (const [id, answers] of Object.entries(data.answers ?? {})) /** @type {any} */ (store.nodes.get(id)).answers = answers;
  if (!store.current) tell("The exported document is empty.");
}

if ($("loom-data")) readExport().catch((error) => tell(`The document in this file cannot be read: ${error.message}`));
