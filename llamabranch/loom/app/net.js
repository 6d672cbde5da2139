// @ts-check
// The server: session, requests, one event stream. Requests go to the page's own origin only.
import { busy, hush, openLink, plural, redraw, short, tell, warn } from "./dom.js";
import { putDoc, putFacts, putNode, putRound, putTokens, store } from "./store.js";

export const net = { session: true, connected: true };

/** Answers the page's requests: here the server, in an exported file its data block. */
export const backend = {
  /** @param {string} path @param {RequestInit} [init] @returns {Promise<any>} */
  async ask(path, init) {
    busy(1);
    try {
      const answer = await fetch(path, { credentials: "same-origin", cache: "no-store", ...init });
      if (!net.connected && events?.readyState === EventSource.OPEN) connection(true); // only a request was lost
      if (net.session === (answer.status === 401)) { // the last answer says whether there is a session
        net.session = !net.session;
        redraw(["state"]);
      }
      const body = answer.status === 204 ? {} : await answer.json().catch(() => ({}));
      if (answer.ok || answer.status === 507) return body; // 507: it was done, and is only in memory yet
      throw Object.assign(new Error(body.error?.message ?? `The server answered ${answer.status}.`), { status: answer.status });
    } finally {
      busy(-1);
    }
  },
};

export function get(/** @type {string} */ path, /** @type {Record<string, any>} */ query = {}) {
  const given = Object.entries(query).filter(([, value]) => value != null);
  const search = new URLSearchParams(given.map(([name, value]) => [name, String(value)]));
  return backend.ask(`${path}?${search}`);
}

/** The body of an action. Half a surrogate pair, as from some clipboards, becomes U+FFFD. @param {Record<string, any>} fields */
export const bodyOf = (fields) => JSON.stringify(fields, (_, value) => (typeof value === "string" ? value.toWellFormed() : value));

/** @type {Map<string, (node: any) => void>} functions that wait for the first node of an action, by the action's id */
const beginnings = new Map();

/** @param {string} cid of the action that made a node @param {any} node */
function begun(cid, node) {
  beginnings.get(cid)?.(node);
  beginnings.delete(cid);
}

let handled = -1; // the number of the last event that changed the page
/** @type {(() => void)[]} */ const waiting = []; // for the next event

/** Return an answer once the page has handled the events before it, which come over another connection.
 * @param {any} answer */
export async function caughtUp(answer) {
  busy(1);
  while (handled < answer.event) await new Promise((resolve) => waiting.push(() => resolve(null)));
  await fetched;
  busy(-1);
  return answer;
}

const QUIET = ["show", "score"]; // operations without a user's action keep the footer

/** Do an action. While the connection is lost it is repeated under the same id, so that it is done once. If the server
 * refuses it, the footer shows why, and the answer is null. Otherwise it comes after all events that were sent before it.
 * @param {string} op @param {Record<string, any>} [fields]
 * @param {(node: any) => void} [first] called with the node it makes: the event comes before the answer, which waits
 * for the disk @param {any} [wrong] where it is said, too, why the server refuses it @returns {Promise<any>} */
export async function act(op, fields = {}, first, wrong) {
  const cid = crypto.randomUUID();
  const body = bodyOf({ cid, op, ...fields });
  if (first) beginnings.set(cid, first);
  if (!QUIET.includes(op)) hush();
  for (let wait = 250; ; wait = Math.min(4000, 2 * wait)) {
    try {
      const answer = await caughtUp(await backend.ask("/loom/do", { method: "POST", body }));
      begun(cid, (answer.nodes ?? [answer.node])[0]); // if its event was lost
      return answer;
    } catch (error) {
      const { message, status } = /** @type {any} */ (error);
      if (status && status !== 401) {
        beginnings.delete(cid);
        warn(message, wrong);
        return null;
      }
      if (!status) connection(false); // with a status, the session is missing: the user opens a fresh link
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}

/** The connection is lost or back: draw the page again; this fetches missing tokens. @param {boolean} is */
function connection(is) {
  net.connected = is;
  redraw(["state", "tree", "text", "inspect"]);
}

/** @type {Promise<any>} the document, which must be here before what came later */ let fetched = Promise.resolve();

/** Fetch the document, after the one that is on its way. */
export function fetchDoc() {
  const next = fetched.then(async () => {
    putDoc(await get("/loom/doc"));
    net.connected = true;
    redraw(["state", "tree", "text", "inspect", "live", "legend"]);
  });
  fetched = next.catch(() => {});
  return next;
}

/** @type {Set<string>} */
const fetching = new Set();

/** Fetch something unless it is already being fetched. @param {string} key @param {() => Promise<void>} fetched */
async function once(key, fetched) {
  if (fetching.has(key)) return;
  fetching.add(key);
  await fetched().catch((error) => {
    if (error.status) return;
    net.connected = false;
    redraw(["state"]);
    setTimeout(() => redraw(["tree", "text", "inspect"]), 1000); // drawing asks for the tokens again
  });
  fetching.delete(key);
}

/** Fetch tokens of a path, with the ten most probable ones at each place if `top` is given.
 * @param {string} node @param {number} from @param {number | null} [n] all, if it is not given @param {1} [top] */
export const fetchPath = (node, from, n, top) => once(`${node}:${from}:${top}`, async () => {
  const { parts, nodes, rounds } = await get("/loom/tokens", { node, from, n, top });
  parts.forEach(putTokens);
  nodes?.forEach(putFacts);
  rounds?.forEach(putRound);
  redraw(top ? ["inspect"] : ["tree", "text", "inspect", "where", "live", "legend"]);
});

/** Fetch what could follow a text. @param {string} key of the store @param {string} node @param {number} at */
export const fetchNext = (key, node, at) => once(key, async () => {
  store.tops.set(key, (await get("/loom/next", { node, at })).top);
  redraw(["inspect"]);
});

/** @type {Record<string, (data: any) => string[]>} what an event changes, and the parts to draw again */
const EVENTS = {
  node: ({ node, cid }) => {
    const { bookmark, reason } = store.nodes.get(node.id) ?? /** @type {Record<string, any>} */ ({});
    putNode(node);
    begun(cid, node);
    if (reason === "running" && node.reason !== reason)
      tell(`${plural(node.read ?? 0, "prompt token")} read${node.rate ? `, ${short(node.rate)} tokens/s` : ""}.`);
    return ["tree", "text", "inspect", "live", ...(bookmark === node.bookmark ? [] : ["state"])];
  },
  tokens: (data) => (putTokens(data), ["tree", "text", "live"]), // the inspector and the legend are drawn once all are there
  round: (data) => (putRound(data), ["live"]),
  job: (data) => {
    store.jobs.set(data.id, data);
    if (data.state === "stopped") store.looked.add(data.node).add(store.current); // otherwise the page would begin to process it again
    if (data.error) tell(data.error);
    return ["state", "live", "inspect", "legend"];
  },
  set: (data) => (Object.assign(store.doc, data), ["state"]),
  reset: () => (void fetchDoc().catch(() => {}), []),
};

/** @type {EventSource | null} */ let events = null;

/** Listen for events; the first one makes the page fetch the document. After a lost connection the browser tries again. If it
 * was refused, that works once the browser has a session, for example because the new link was opened in another tab. */
function listen() {
  events?.close(); // of a session before
  const source = new EventSource("/loom/events");
  events = source;
  source.onopen = () => connection(true);
  source.onerror = () => {
    connection(false);
    handled = -1; // the next server counts its own
    if (source.readyState !== EventSource.CLOSED) return;
    setTimeout(() => source === events && listen(), 2000);
    void fetchDoc().catch(() => {}); // it says whether the session is missing
  };
  for (const [name, handle] of Object.entries(EVENTS)) {
    source.addEventListener(name, async (/** @type {any} */ event) => {
      const data = JSON.parse(event.data);
      await fetched;
      const isFirst = name === "tokens" && !store.nodes.get(data.node)?.tokens.n; // the first tokens of a text are drawn at once
      redraw(handle(data), !isFirst && ["tokens", "round"].includes(name));
      handled = Number(event.lastEventId);
      waiting.splice(0).forEach((go) => go());
    });
  }
}

/** Exchange the link's token for a session, fetch the document, listen. */
export async function connect() {
  addEventListener("hashchange", connect, { once: true }); // a fresh link in the same tab
  await openLink();
  listen();
}
