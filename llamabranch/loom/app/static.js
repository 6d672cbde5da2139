// @ts-check
// The page in an exported file: the document is in its data block, nothing is requested, nothing is written.
import { $, tell } from "./dom.js";
import { backend, fetchDoc, net } from "./net.js";
import { pieces, putCompare, putNode, putRound, putTokens, store, texts } from "./store.js";
import { start } from "./main.js";

/** @param {string} text base64 of gzip of JSON */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** Places where a text is, by node. @param {string} q */
function findIn(q) {
  const wanted = q.toLowerCase();
  const found = [];
  for (const node of store.nodes.values()) {
    const words = texts(node.tokens.pieces);
    const where = words.join("").toLowerCase().indexOf(wanted);
    if (where < 0) continue;
    let i = 0;
    for (let sum = words[0].length; sum <= where; sum += words[i].length) i++;
    found.push({ node: node.id, at: node.at + i, text: words.slice(Math.max(0, i - 6), i + 6).join("") });
  }
  return { found: found.slice(0, 200), more: found.length > 200 };
}

/** Answer as the server would. @param {any} data */
function answering(data) {
  const names = [...new Set(data.nodes.flatMap((/** @type {object} */ node) => Object.keys(node)))]
    .filter((name) => !["tokens", "rounds", "compare", "searches"].includes(String(name)));
  const columns = Object.fromEntries(names.map((name) =>
    [name, data.nodes.map((/** @type {any} */ node) => node[/** @type {string} */ (name)] ?? null)]));
  return async (/** @type {string} */ path) => {
    const [name, query] = path.split("?");
    if (name === "/loom/find") return findIn(new URLSearchParams(query).get("q") ?? "");
    if (name === "/loom/doc") {
      return { state: "ready", file: { name: data.title, read_only: "This is an exported file.", saved: true, error: null },
        models: data.models ?? {}, current: data.current, settings: {}, jobs: [], nodes: columns, undo: 0, redo: 0 };
    }
    throw Object.assign(new Error("This is an exported file: it has no model."), { status: 409 });
  };
}

async function readExport() {
  const data = await unpack($("loom-data").textContent);
  document.documentElement.dataset.exported = "";
  backend.ask = answering(data);
  start();
  await fetchDoc();
  for (const { id, at, tokens, rounds, compare } of data.nodes) {
    putTokens({ node: id, at, ...tokens });
    rounds?.forEach(putRound);
    compare?.forEach(putCompare);
  }
  store.revision++;
  net.connected = true;
  if (!pieces(store.current, null).length) tell("The exported document is empty.");
}

if ($("loom-data")) readExport().catch((error) => tell(`The data of this file cannot be read: ${error.message}`));
