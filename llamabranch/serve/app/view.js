// @ts-check
// The requests of a server: a tree with a branch for each session, a bar for each request, and why it has read tokens.
import { $, attribute, busy, fill, h, openLink, plural, set, tell, visible } from "./dom.js";

/** @typedef {{kind: string, n_tokens: number, told: string, start?: number, compared_with?: number, place?: string,
 *   before?: string, after?: string}} Cause */
/** @typedef {{number: number, time: number, door: string, id: string, session?: string, parent?: string,
 *   num_prompt_tokens?: number, cached?: number, evaluated?: number, generated?: number, queued_s?: number,
 *   read_s?: number, write_s?: number, finish_reason?: string, causes?: Cause[], follows?: number,
 *   dropped?: string[], hint?: string}} Request */
/** @typedef {{key: string, session: string, door: string, parent: Branch | null, requests: Request[],
 *   branches: Branch[], first: number}} Branch */

const MOST = 500, WAIT_MS = 1000;
const FRESH = ["first", "new"]; // all other causes are for tokens that had been read before
const STATES = {
  "no-session": "This page has no session. Press Enter in the terminal where llamabranch runs, and open the new link; without a terminal, add #KEY to the address, where KEY is an API key of the server.",
  "model-loading": "The model is being loaded.",
  "connection-lost": "The server does not answer. The page tries again.",
};

/** @type {Map<number, Request>} oldest first */
const requests = new Map();
/** @type {Map<number | string, any>} elements, by the numbers of requests and the keys of branches */
const elements = new Map();
/** @type {WeakMap<Element, string>} the content that is drawn in an element */
const drawn = new WeakMap();

const count = (/** @type {number | undefined} */ n) => (n ?? 0).toLocaleString("en");
const clock = (/** @type {number} */ time) => new Date(1000 * time).toLocaleTimeString("en-GB");
const sum = (/** @type {number[]} */ numbers) => numbers.reduce((a, b) => a + b, 0);
const isAgain = (/** @type {Cause} */ cause) => !FRESH.includes(cause.kind);
const again = (/** @type {Request} */ { causes = [] }) => sum(causes.filter(isAgain).map((cause) => cause.n_tokens));
const seconds = (/** @type {number | undefined} */ s) => `${(s ?? 0).toFixed(1)} s`;

/** Text with the parts between backticks as code. @param {string} text */
const told = (text) => visible(text).split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

// --- which request belongs to which branch ---

/** The branches without a parent, oldest first: one for each session, and one for each chain of requests without a session. */
function roots() {
  /** @type {Map<string, Branch>} */ const found = new Map();
  /** @type {Map<number | undefined, Branch>} */ const homes = new Map();
  const branch = (/** @type {string} */ key, /** @type {Request} */ { number, door }, session = "", /** @type {Branch | null} */ parent = null) => {
    const made = found.get(key) ?? { key, session, door, parent, requests: [], branches: [], first: number };
    if (!found.has(key)) parent?.branches.push(made);
    found.set(key, made);
    return made;
  };
  for (const request of requests.values()) {
    const { number, session, parent, follows } = request;
    const before = homes.get(follows);
    const goesOn = before && !before.session && before.requests.at(-1)?.number === follows;
    const above = session && parent && parent !== session ? branch(`s${parent}`, request, parent) : null;
    const home = session ? branch(`s${session}`, request, session, above)
      : goesOn ? before : branch(`n${number}`, request, "", before ?? null);
    home.requests.push(request);
    homes.set(number, home);
  }
  const all = [...found.values()].filter((each) => !each.parent);
  const isSingle = (/** @type {Branch} */ each) => !each.session && each.requests.length === 1 && !each.branches.length;
  const singles = all.filter(isSingle);
  if (singles.length < 2) return all;
  const gathered = { ...singles[0], key: "none", requests: singles.flatMap((each) => each.requests) };
  return [...all.filter((each) => !isSingle(each)), gathered].sort((a, b) => a.first - b.first);
}

// --- drawing ---

/** The element for a key, drawn again if its content has changed.
 * @param {number | string} key @param {string} kind @param {any} shows @param {(element: any) => void} draw */
function element(key, kind, shows, draw) {
  const found = elements.get(key) ?? h("li", { class: kind });
  const now = JSON.stringify(shows);
  elements.set(key, found);
  if (drawn.get(found) !== now) draw(found);
  drawn.set(found, now);
  return found;
}

/** Give a list these children; those already in place stay there and keep the focus. @param {Element} list @param {Element[]} children */
function place(list, children) {
  children.forEach((child, i) => child !== list.children[i] && list.insertBefore(child, list.children[i] ?? null));
  while (list.children.length > children.length) list.lastChild?.remove();
}

function drawBranch(/** @type {Branch} */ { key, session, door, requests: own, branches, first }, level = 0) {
  const read = sum(own.map((each) => each.evaluated ?? 0)), asked = sum(own.map((each) => each.num_prompt_tokens ?? 0));
  const title = session ? visible(session) : key === "none" ? "single requests" : `${door}, no session`;
  const facts = own.length ? `${plural(own.length, "request")}, ${count(read)} of ${count(asked)} prompt tokens read` : "its requests are no longer listed";
  const item = element(key, "branch", [title, facts, level], (/** @type {any} */ box) => {
    box.list ??= h("ol");
    set(box, { "--level": Math.min(level, 3) });
    fill(box, h("h2", { title }, h("b", {}, title), " ", h("small", {}, facts)), box.list);
  });
  const parts = [...own.map((each) => ({ at: each.number, part: drawRequest(each) })),
    ...branches.map((each) => ({ at: each.first, part: drawBranch(each, level + 1) }))];
  place(item.list, parts.sort((a, b) => a.at - b.at).map(({ part }) => part));
  return item;
}

function drawRequest(/** @type {Request} */ request) {
  return element(request.number, "request", request, (/** @type {any} */ row) => {
    const { number, time, num_prompt_tokens: asked = 0, cached = 0, evaluated = 0, generated = 0, causes = [], hint } = request;
    const runs = !request.finish_reason, old = again(request);
    row.button ??= h("button", { type: "button", tabIndex: -1, "aria-expanded": "false", onclick: () => open(row) });
    row.request = request;
    attribute(row, "data-number", number);
    attribute(row, "data-again", old ? "" : null);
    attribute(row, "data-runs", runs ? "" : null);
    const part = (/** @type {string} */ name, /** @type {number} */ n) => n > 0 && h("i", { class: name, "--n": n });
    const main = [...causes].sort((a, b) => Number(isAgain(b)) - Number(isAgain(a)) || b.n_tokens - a.n_tokens);
    const more = causes.filter(isAgain).length - 1;
    fill(row.button,
      h("time", { title: new Date(1000 * time).toLocaleString("en-GB") }, clock(time)),
      h("span", { class: "bar", "aria-hidden": "true" }, part("cached", cached), part("again", old),
        part("new", evaluated - old), part("generated", generated)),
      h("span", { class: "numbers" }, h("b", {}, count(asked)), ` = ${count(cached)} cached + ${count(evaluated)} read`),
      h("span", { class: "seconds" }, runs ? "running" : `${seconds(request.read_s)} + ${seconds(request.write_s)}`),
      h("span", { class: "why" }, main[0] && isAgain(main[0]) && h("b", {}, main[0].kind, " "), told(main[0]?.told ?? ""),
        more > 0 && ` (and ${plural(more, "more cause")})`, hint && h("span", { class: "hint" }, " ", told(hint))));
    fill(row, row.button, row.detail && (row.detail = detail(request)));
  });
}

const SAME = 12; // this many equal characters end a difference between two texts

/** Two excerpts of texts, with the part marked that differs: from the end of the common beginning to the next equal characters.
 * @param {string} before @param {string} after */
function marked(before, after) {
  const [a, b] = [[...before], [...after]];
  let start = 0;
  while (start < a.length && a[start] === b[start]) start += 1;
  const isAlike = (/** @type {number} */ i, /** @type {number} */ j) => {
    const n = Math.min(SAME, a.length - i, b.length - j);
    return n > 3 && a.slice(i, i + n).join("") === b.slice(j, j + n).join("");
  };
  const nearest = () => {
    for (let d = 0; d <= a.length + b.length - 2 * start; d += 1) {
      for (let i = start; i <= start + d; i += 1) if (isAlike(i, 2 * start + d - i)) return [i, 2 * start + d - i];
    }
    return [a.length, b.length];
  };
  const ends = nearest();
  return [a, b].map((text, which) => {
    const [left, differs, right] = [text.slice(0, start), text.slice(start, ends[which]), text.slice(ends[which])]
      .map((part) => visible(part.join("")));
    const shown = (differs.trim() ? differs : differs.replace(/ /g, "·")).replace(/\n/g, "⏎\n");
    return h("pre", {}, left, h("mark", {}, shown), right);
  });
}

/** Everything that is known about a request. @param {Request} request */
function detail(request) {
  const { causes = [], dropped = [] } = request;
  const go = (/** @type {number | undefined} */ number) => number == null ? null : !requests.has(number) ? `request ${number}`
    : h("button", { type: "button", class: "go", onclick: () => focus(elements.get(number).button) }, `request ${number}`);
  const facts = {
    request: `${request.number}, ${request.door}, ${request.id}`, session: request.session, parent: request.parent,
    follows: go(request.follows), waited: (request.queued_s ?? 0) >= 0.05 && seconds(request.queued_s),
    generated: plural(request.generated ?? 0, "token"), ended: request.finish_reason || "still running",
    "left out": dropped.length ? dropped.map((line) => h("code", {}, visible(line))) : null,
    hint: request.hint && told(request.hint),
  };
  return h("div", { class: "detail" },
    causes.map((cause) => {
      const [was, is] = marked(cause.before ?? "", cause.after ?? "");
      return h("section", { class: isAgain(cause) ? "again" : "fresh" },
        h("p", {}, h("b", {}, cause.kind), " ", told(cause.told)),
        h("p", { class: "dim" }, `${plural(cause.n_tokens, "token")} from ${count(cause.start)}${cause.place ? `; ${visible(cause.place)}` : ""}`),
        (cause.before || cause.after) && h("dl", { class: "texts" },
          h("dt", {}, go(cause.compared_with) ?? "before"), h("dd", {}, was),
          h("dt", {}, "here"), h("dd", {}, is)));
    }),
    h("dl", { class: "facts" }, Object.entries(facts).filter(([, value]) => value).map(([name, value]) =>
      [h("dt", {}, name), h("dd", {}, typeof value === "string" ? visible(value) : value)])));
}

/** @typedef {{num_prompt_tokens: number, evaluated: number, reread: number, since: number, causes: Record<string, number>}} Totals */
function drawTotals(/** @type {Totals} */ { num_prompt_tokens: asked, evaluated, reread, since, causes }) {
  const isToday = new Date(1000 * since).toDateString() === new Date().toDateString();
  const kinds = Object.entries(causes).filter(([kind, n]) => n && !FRESH.includes(kind)).sort((a, b) => b[1] - a[1]);
  fill($("totals"), h("b", {}, count(asked)), " prompt tokens, ", h("b", {}, count(evaluated)), " of them read, ",
    h("b", { class: reread ? "again" : "" }, count(reread)), " read again");
  fill($("causes"), `since ${clock(since).slice(0, 5)} ${isToday ? "today" : `on ${new Date(1000 * since).toLocaleDateString("en-GB", { day: "numeric", month: "long" })}`}; `,
    kinds.length ? `read again: ${kinds.map(([kind, n]) => `${count(n)} ${kind}`).join(", ")}` : "nothing was read twice");
}

function draw() {
  const all = [...requests.values()], empty = all.length === 0;
  $("empty").hidden = !empty || document.documentElement.dataset.state !== "ready";
  $("legend").hidden = $("columns").hidden = $("totals").hidden = $("causes").hidden = empty;
  const most = Math.max(1, ...all.map((each) => (each.num_prompt_tokens ?? 0) + (each.generated ?? 0)));
  const ten = 10 ** Math.floor(Math.log10(most)), unit = [5, 2, 1].map((n) => n * ten).find((n) => n <= most / 2) ?? ten / 2;
  set(document.documentElement, { "--most": most });
  set($("scale").firstChild, { "--n": unit });
  $("scale").lastChild.textContent = `${count(unit)} tokens`;
  place($("tree"), roots().map((each) => drawBranch(each)));
  for (const [key, each] of elements) if (!each.isConnected) elements.delete(key);
  const rows = buttons();
  if (!rows.some((each) => each.tabIndex === 0) && rows[0]) rows[0].tabIndex = 0;
}

// --- moving and opening ---

/** The buttons of the requests, as they are shown. @returns {any[]} */
const buttons = () => [...document.querySelectorAll(".request > button")];

function focus(/** @type {any} */ button) {
  for (const each of buttons()) each.tabIndex = each === button ? 0 : -1;
  button?.focus();
}

function open(/** @type {any} */ row, is = !row.detail) {
  row.detail?.remove();
  row.detail = is ? detail(row.request) : null;
  if (is) row.append(row.detail);
  attribute(row.button, "aria-expanded", String(is));
}

$("tree").addEventListener("focusin", (/** @type {any} */ { target }) => target.parentElement.button === target && focus(target));
$("tree").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  const row = /** @type {any} */ (event.target).closest(".request"), all = buttons(), at = all.indexOf(row?.button);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (!row || event.ctrlKey || event.altKey || event.metaKey) return;
  if (to != null) focus(all[Math.max(0, Math.min(all.length - 1, to))]);
  else if (event.key === "ArrowRight") open(row, true);
  else if (["ArrowLeft", "Escape"].includes(event.key)) open(row, false), focus(row.button);
  else return;
  event.preventDefault();
});

// --- the server ---

function enter(/** @type {string} */ state) {
  document.documentElement.dataset.state = state;
  $("bar").hidden = !(state in STATES);
  const message = /** @type {any} */ (STATES)[state] ?? "";
  if ($("bar").textContent !== message) $("bar").textContent = message;
}

/** Keep what the server sent; announce ended requests, unless it is the first answer. @param {Request[]} listed */
function keep(listed) {
  const isFirst = document.documentElement.dataset.state === "connecting", came = new Set(listed.map(({ number }) => number));
  const last = [...requests.keys()].at(-1), newest = elements.get(last ?? "")?.getBoundingClientRect();
  for (const { number, finish_reason: ended } of [...requests.values()]) if (!ended && !came.has(number)) requests.delete(number);
  for (const request of listed) {
    const was = requests.get(request.number);
    requests.set(request.number, request);
    if (!isFirst && request.finish_reason && !was?.finish_reason) {
      const why = (request.causes ?? []).filter(isAgain).map((cause) => cause.told);
      tell([`Request ${request.number}: ${count(request.evaluated)} of ${count(request.num_prompt_tokens)} tokens read`, ...why].join("; "));
    }
  }
  for (const number of [...requests.keys()].slice(0, -MOST)) requests.delete(number);
  return () => { // a reader who was looking at the newest request is shown the new one
    const now = [...requests.keys()].at(-1);
    const isSeen = newest && newest.top < innerHeight && newest.bottom > 0;
    if (now !== last && isSeen) elements.get(now ?? "")?.scrollIntoView({ block: "nearest" });
  };
}

async function poll() {
  const running = [...requests.values()].filter((each) => !each.finish_reason).map(({ number }) => number);
  const after = Math.min(...requests.size ? [Math.max(...requests.keys())] : [-1], ...running.map((number) => number - 1));
  busy(1);
  const answer = await fetch(`/requests?after=${after}`, { cache: "no-store" }).catch(() => null);
  const body = answer?.ok ? await answer.json().catch(() => null) : null;
  busy(-1);
  if (!body) return enter({ 401: "no-session", 503: "model-loading" }[answer?.status ?? 0] ?? "connection-lost");
  const follow = keep(body.requests);
  enter("ready");
  drawTotals(body.totals);
  draw();
  follow();
}

/** Begin a session. Another server numbers its requests from 0 again. */
async function begin() {
  if (await openLink()) requests.clear(), elements.clear();
}

$("where").textContent = location.host;
$("point").textContent = `ANTHROPIC_BASE_URL=${location.origin}`;
addEventListener("hashchange", begin); // a fresh link in the same tab
await begin();
for (;;) {
  if (!document.hidden) await poll();
  await new Promise((resolve) => setTimeout(resolve, WAIT_MS));
}
