// @ts-check
// The text of a path, token by token: blocks with measured heights, and elements for the tokens in view; the
// cursor; continuations that could follow.
import { $, attribute, fill, h, label, later, percent, plural, redraw, set, visible, visibleTexts } from "./dom.js";
import { SOURCES, lens, looks, ownWords, sourceOf, sparing } from "./lenses.js";
import { fetchNext, fetchPath } from "./net.js";
import { look, occurrences, ownerOf, pathOf, pieceText, pieces, select, store, texts, view } from "./store.js";
import { following, goTo } from "./tree.js";
import { isFolded, partsOf, toggleThoughts } from "./turns.js";

/** @typedef {import("./store.js").Path} Path */

const BLOCK = 512, LARGEST = 1024; // tokens: a block ends at a line end between the two
const CHARACTER = 340; // square px that a character covers, about
const RUN = 48; // tokens of a long text that become elements together, as they come into view
const MARGIN = 600; // px of blocks that are text above and below the visible ones
const SHOOTS = 6, SHOOT_TOKENS = 160, SHOOT_ELEMENTS = 24; // tokens that are shown of a continuation, and painted each by itself
const SURPRISE = Math.log(0.05);

/** A function that builds a path, again only if a part of it has changed.
 * @returns {(id: string | null, end: number | null) => Path} */
function keptPath() {
  let path = pathOf(null, null);
  let drawn = "";
  return (id, end) => {
    const key = pieces(id, end).map(({ id: owner, to }) => {
      const { tokens, reason } = /** @type {import("./store.js").Node} */ (store.nodes.get(owner));
      return `${owner}:${to}:${tokens.version}:${reason}`;
    }).join();
    if (key !== drawn) [path, drawn] = [pathOf(id, end), key];
    return path;
  };
}

const kept = keptPath();

/** The path that is shown. */
export const shownPath = () => kept(store.current, view.typingAt >= 0 ? view.typingAt : store.end);

const keptBeside = keptPath();
/** @type {{c?: Path, other: Path | null, at: number}} */ let parted = { other: null, at: 0 };

/** The branch that is shown beside the text, if any, and where the two part. */
export function besides() {
  const c = shownPath(), node = store.current && view.typingAt < 0 ? store.nodes.get(view.beside ?? "") : null;
  const other = node && !node.deleted ? keptBeside(node.id, null) : null;
  if (parted.c === c && parted.other === other) return parted;
  let at = other ? 0 : c.n;
  while (other && at < Math.min(c.n, other.n) && c.ids[at] === other.ids[at]) at++;
  return (parted = { c, other, at });
}

/** The text that the mouse is in, and its node. @returns {[Path, string | null]} */
export function pointedAt() {
  const { other } = besides();
  return other && view.side && view.hover >= 0 ? [other, view.beside] : [shownPath(), store.current];
}

/** Where actions begin: after the cursor, or where the path ends. */
export function place() {
  const node = store.nodes.get(store.current ?? "");
  return view.cursor >= 0 && view.cursor < shownPath().n ? view.cursor + 1 : (store.end ?? (node ? node.at + node.n : 0));
}

/** What a screen reader says about a token. @param {Path} c @param {number} i */
function spoken(c, i) {
  const p = Math.exp(c.lp[i]), source = /** @type {any} */ (SOURCES)[sourceOf(c, i)];
  return [`'${c.shown[i]}'`, p >= 0 && percent(p), c.rk[i] > 0 && `rank ${c.rk[i]}`, source].filter(Boolean).join(", ");
}

/** Class, cue and log-probability of a token. @param {import("./store.js").Tokens} c @param {number} i */
const figures = (c, i) => ({ ...looks(c, i), "data-lp": Number.isNaN(c.lp[i]) ? null : Number(c.lp[i].toPrecision(8)) });

/** Rejected and never judged drafts, by the position that they stand before. @param {Path} c */
function ghostsOf(c) {
  /** @type {Map<number, any>} */ const ghosts = new Map();
  if (!view.ghosts && lens.name !== "source") return ghosts;
  for (const { id, from, to } of c.owners) {
    for (const { at, draft, accepted, rejected } of store.nodes.get(id)?.rounds ?? []) {
      const left = draft.slice(accepted);
      const position = at + accepted;
      if (!left.length || position < from || position >= to) continue;
      const words = visibleTexts(texts(left.map((/** @type {any} */ each) => each[1])));
      ghosts.set(position, h("span", { class: "ghost", "aria-hidden": "true" },
        rejected ? h("del", {}, words[0]) : null, h("s", {}, words.slice(rejected).join(""))));
    }
  }
  return ghosts;
}

/** Positions where branches leave the path. @param {Path} c */
const forksOf = (c) => new Set(c.owners.slice(1).map(({ from }) => from));

/** @type {WeakMap<Path, {key: string, classes: Map<number, string>}>} */ const matches = new WeakMap();

/** The classes of tokens in a match of the search. @param {Path} c */
function matchesIn(c) {
  const [at, to] = view.match, key = `${at} ${to} ${view.sought}`, there = matches.get(c);
  if (there?.key === key) return there.classes;
  /** @type {Map<number, string>} */ const classes = new Map();
  const words = c.text.map((word, i) => (c.control[i] ? "" : word)); // names of control tokens are no text
  for (const [first, last] of occurrences(words, view.sought))
    for (let i = first; i <= last; i++) classes.set(i, i >= at && i <= to ? " found now" : " found");
  matches.set(c, { key, classes });
  return classes;
}

/** @type {{draw: (moved?: boolean) => void, reveal: (i: number) => void}[]} the text, and the two columns below it */ const views = [];

let gone = { head: 0, from: 0, memory: 0, note: 0 }; // what the model did not see when it wrote last: from `head` to `from`

/** The nodes by the model in the shown text, or after it. @param {Path} c @returns {any[]} */
const ownNodes = (c) => [...c.owners.map(({ id }) => store.nodes.get(id)), ...following(store.current, store.end).map(({ first }) => first)]
  .filter((node) => ["sampled", "taken"].includes(node?.kind));

/** What the model sees of a text that is longer than its context, in words; "" if it sees all. */
export const inContext = () => (gone.from <= gone.head ? "" : [`The model sees what is below the line: ${plural(shownPath().n - gone.from, "token")}`,
  gone.memory && `${plural(gone.memory, "token")} of memory`, gone.note && `${plural(gone.note, "token")} of the author’s note`,
  gone.head > 1 && "the system message"].filter(Boolean).join(", "));

/** A view of a part of a path in a listbox. Blocks near the view have text, and the tokens in view are elements.
 * @param {any} box @param {string} prefix of the tokens' ids @param {() => [Path, number, number]} shows the path, and the positions */
export function textView(box, prefix, shows) {
  /** @type {any[]} elements with the tokens that they stand for */ const blocks = [];
  /** @type {Map<number, any>} */ let elements = new Map();
  /** @type {Path | null} */ let drawn = null;
  let width = 0, looked = "", range = "", isShort = true;

  /** Cut a path into blocks; one that was not drawn has an estimated height. @param {Path} c @param {number} start @param {number} end */
  function cut(c, start, end) {
    let count = 0;
    const parts = partsOf(c);
    for (const part of parts.length ? parts : [{ from: 0, to: c.n }]) {
      for (let from = Math.max(part.from, start); from < Math.min(part.to, end); count++) {
        const last = Math.min(part.to, end, ...[gone.head, gone.from].filter((edge) => edge > from));
        let to = Math.min(last, from + BLOCK);
        while (to < last && to - from < LARGEST && !c.text[to - 1].endsWith("\n")) to++;
        const block = (blocks[count] ??= box.insertBefore(h("div", { role: "none" }), prefix === "t" ? box.querySelector("#pair") : null));
        Object.assign(block, { from, to, turned: "kind" in part ? part : undefined });
        set(block, dressOf(block));
        if (!block.firstChild) block.style.height = `${(textOf(c, block).length * CHARACTER) / box.clientWidth}px`;
        from = to;
      }
    }
    for (const block of blocks.splice(count)) block.remove();
  }

  /** Style a block as a part of a turn. @param {any} block */
  function dressOf({ turned: part, from, to }) {
    const isGone = from >= gone.head && to <= gone.from && "gone";
    const below = isGone && to === gone.from ? `The model no longer sees what is above${gone.memory ? ` (memory: ${plural(gone.memory, "token")} stay)` : ""}` : null;
    if (!part) return { class: isGone || null, "data-title": null, "data-turn": null, "data-below": below };
    const { kind, role, first, last } = part, begins = from === part.from, ends = to === part.to;
    return { class: ["turn", kind, `by-${role}`, begins && first && "first", ends && last && "last", begins && "begins",
      isFolded(part) && "folded", isGone].filter(Boolean).join(" "), "data-title": begins ? part.title || null : null, "data-turn": part.turn,
    "data-below": below };
  }

  /** The runs of a block, each one text at first. @param {Path} c @param {any} block */
  function runsOf(c, block) {
    const size = isShort ? LARGEST : RUN;
    const count = Math.ceil((block.to - block.from) / size);
    while (block.children.length > count) block.lastChild.remove();
    for (let i = 0; i < count; i++) {
      const run = block.children[i] ?? block.appendChild(h("span", { role: "none" }));
      run.from = block.from + i * size;
      run.to = Math.min(block.to, run.from + size);
      if (!run.firstChild) run.textContent = textOf(c, run);
    }
    return [...block.children];
  }

  const textOf = (/** @type {Path} */ c, /** @type {any} */ run) => c.shown.slice(run.from, run.to).join("");

  /** The tokens of a run as elements with colour, cue and name, keeping existing elements. @param {Path} c @param {any} run
   * @param {Map<number, any>} ghosts @param {Set<number>} forks @param {Map<number, string>} found @param {Map<number, any>} kept */
  function drawRun(c, run, ghosts, forks, found, kept) {
    const content = [], cursor = prefix === "o" ? -1 : view.cursor;
    for (let i = run.from; i < run.to; i++) {
      const element = elements.get(i) ?? h("span", { role: "option", "aria-setsize": -1, "aria-posinset": i + 1,
        "data-token": i, id: `${prefix}${i}` });
      const text = c.shown[i], attributes = figures(c, i);
      attributes.class += (forks.has(i) ? " fork" : "") + (i === cursor ? " cursor" : "") + (found.get(i) ?? "");
      attributes.class += `${c.control[i] ? " control" : ""}${text === "" ? " part" : ""}${/^\n+$/.test(text) ? " line" : ""}`;
      set(element, { ...attributes, textContent: text, "aria-label": spoken(c, i), "aria-selected": String(i === cursor) });
      kept.set(i, element);
      if (ghosts.has(i)) content.push(ghosts.get(i));
      content.push(element);
    }
    const now = run.childNodes;
    if (now.length !== content.length || content.some((node, i) => now[i] !== node)) run.replaceChildren(...content);
  }

  /** Draw the changes; also after scrolling and resizing, if it is asked for. */
  function draw(moved = true) {
    if (!box.isConnected) return;
    const [c, from, to] = shows();
    const folded = partsOf(c).map((part) => Number(isFolded(part))).join("");
    const rounds = c.owners.map(({ id }) => store.nodes.get(id)?.rounds.length);
    const looks = [view.sought, view.match, view.cursor, view.limit, view.ghosts, lens.name, sparing(), folded, rounds].join();
    const span = [from, to, gone.head, gone.from].join();
    if (!moved && c === drawn && range === span && looks === looked) return;
    const anew = c !== drawn || range !== span || width !== box.clientWidth;
    isShort = to - from <= view.limit;
    if (anew) cut(c, from, to);
    [drawn, range, width, looked] = [c, span, box.clientWidth, looks];
    const { top, bottom } = scroller().getBoundingClientRect();
    const isNear = (/** @type {DOMRect} */ place, /** @type {number} */ margin) =>
      place.bottom > top - margin && place.top < bottom + margin;
    const places = blocks.map((block) => block.getBoundingClientRect());
    const runs = blocks.flatMap((block, i) => {
      const near = isNear(places[i], MARGIN);
      set(block, dressOf(block));
      if (isFolded(block.turned)) {
        block.replaceChildren();
        block.style.height = "";
        return [];
      }
      block.style.height = near ? "" : `${places[i].height}px`;
      if (!near) block.replaceChildren();
      return near ? runsOf(c, block) : [];
    });
    const seen = runs.map((run) => isShort || isNear(run.getBoundingClientRect(), 0));
    const ghosts = ghostsOf(c), forks = forksOf(c), found = matchesIn(c);
    /** @type {Map<number, any>} */ const kept = new Map();
    runs.forEach((run, i) => {
      if (seen[i] && kept.size + run.to - run.from <= view.limit) drawRun(c, run, ghosts, forks, found, kept);
      else if (run.firstElementChild || run.textContent !== textOf(c, run)) run.textContent = textOf(c, run);
    });
    elements = kept;
    if (anew && !isShort) draw(); // draw again with the measured heights
    attribute($("text"), "aria-activedescendant", $(`t${view.cursor}`) ? `t${view.cursor}` : null);
  }

  /** Scroll so that a token can be seen. @param {number} i */
  function reveal(i) {
    if (shows()[0] !== drawn) draw();
    const block = blocks.find(({ to }) => i < to);
    if (block && !elements.has(i)) {
      block.scrollIntoView({ block: "nearest" });
      draw();
      [...block.children].find((run) => i < run.to)?.scrollIntoView({ block: "center" });
      draw();
    }
    elements.get(i)?.scrollIntoView({ block: "nearest" });
  }

  views.push({ draw, reveal });
}

const drawViews = (/** @type {boolean} */ moved) => views.forEach(({ draw }) => draw(moved));

/** Scroll to an element below the text, whose blocks may get other heights on the way. @param {Element} element */
export function scrollTo(element) {
  element.scrollIntoView({ block: "start" });
  drawViews(true);
  element.scrollIntoView({ block: "start" });
}

const scroller = () => $("text").parentElement;
let follows = true, top = 0; // whether the end stays in view; how far the text was scrolled
const below = () => scroller().scrollHeight - scroller().scrollTop - scroller().clientHeight; // px of text below the view

/** Draw something else, and keep the place of the reader. @param {() => void} change */
export function steady(change) {
  const after = $("after"), box = scroller(), { scrollTop } = box;
  after.style.minHeight = `${box.scrollHeight}px`; // nothing gets shorter meanwhile
  change();
  drawShoots();
  drawViews(false);
  after.style.minHeight = view.typingAt < 0 ? "" : `${Math.max(0, scrollTop + box.clientHeight - after.offsetTop)}px`;
  box.scrollTop = scrollTop;
}

/** How many characters of the path are before a point of the screen; null if there is no text. @param {number} x @param {number} y */
export function charactersBefore(x, y) {
  const there = document.caretPositionFromPoint?.(x, y), range = there ? null : document.caretRangeFromPoint?.(x, y);
  const node = there?.offsetNode ?? range?.startContainer, c = shownPath();
  const element = node?.parentElement?.closest("[data-token]") ?? /** @type {any} */ (node?.parentElement);
  let i = Number(element?.dataset.token ?? element?.from), offset = there?.offset ?? range?.startOffset ?? 0;
  if (!$("text").contains(element) || Number.isNaN(i)) return null;
  while (i < c.n - 1 && offset > c.shown[i].length) offset -= c.shown[i++].length;
  const isWhole = c.shown[i] !== c.text[i]; // it is drawn as a code
  return c.text.slice(0, i).join("").length + (isWhole ? offset && c.text[i].length : offset);
}

/** Keep the end in view if the reader follows it. */
export function followEnd() {
  if (follows && view.cursor < 0 && view.typingAt < 0 && !view.beside) scroller().scrollTop = scroller().scrollHeight;
  top = scroller().scrollTop;
  $("to-end").hidden = view.typingAt >= 0 || below() < 60;
}

/** Follow the text that is written at a position, if it is in view. Without a position, go to the end. @param {number} [at] */
export function attend(at) {
  const { top: above, bottom } = scroller().getBoundingClientRect(), place = at && $(`t${at - 1}`)?.getBoundingClientRect();
  if (!at || (place && place.bottom > above && place.top < bottom)) follows = true;
  if (at == null) moveTo(-1), redraw(["text"]);
}

/** Fold or unfold thoughts, all of the path if none is given. @param {import("./turns.js").Part[]} [parts] */
export function foldThoughts(parts = partsOf(shownPath())) {
  const { count, folded } = toggleThoughts(parts);
  if (folded && parts.some(({ from, to }) => view.cursor >= from && view.cursor < to)) view.cursor = -1;
  look({});
  return { count, folded };
}

/** Put the cursor on a token, or nowhere. @param {number} i */
export function moveTo(i) {
  const { n } = shownPath();
  look({ cursor: i < 0 || n === 0 ? -1 : Math.min(i, n), hover: -1, reading: -1 }); // n: behind the last token
  if (view.cursor >= 0) views[view.cursor < besides().at ? 0 : 1].reveal(Math.min(view.cursor, n - 1));
}

/** Where the arrow keys begin without a cursor: where the reader continues, if there is such a place. @param {number} otherwise */
const readingFrom = (otherwise) => (view.reading >= 0 ? Math.min(view.reading, shownPath().n - 1) : otherwise);

/** What keys do in the text. @type {Record<string, () => void>} */
export const textMoves = {
  left: () => moveTo(Math.max(0, (view.cursor < 0 ? readingFrom(shownPath().n) : view.cursor) - 1)),
  right: () => moveTo(view.cursor < 0 ? readingFrom(shownPath().n - 2) + 1 : view.cursor + 1),
  first: () => moveTo(0),
  last: () => moveTo(shownPath().n - 1),
  surprise: () => seek((c, i) => c.lp[i] < SURPRISE),
  surpriseBack: () => seek((c, i) => c.lp[i] < SURPRISE, -1),
};

/** Go to the next token of a kind, or the one before; after the last comes the first.
 * @param {(c: Path, i: number) => boolean} is @param {1 | -1} [by] */
export function seek(is, by = 1) {
  const c = shownPath();
  const begin = by < 0 ? Math.max(view.cursor, 0) + c.n : view.cursor;
  for (let step = 1; step <= c.n; step++) {
    const i = (begin + by * step) % c.n;
    if (is(c, i)) return moveTo(i);
  }
}

/** For each of several texts that begin at one place: which of its tokens tells it from the others first, or -1. @param {number[][]} all */
const turnings = (all) => all.map((own) => own.findIndex((_, i) => all.length > 1 && !all.some((other) =>
  other !== own && own.slice(0, i + 1).every((id, j) => id === other[j]))));

/** What could follow, if the path ends at a fork. */
function drawShoots() {
  const box = $("shoots");
  const all = view.typingAt < 0 && !view.beside ? following(store.current, store.end) : [];
  const shown = all.slice(-SHOOTS);
  view.limit = shown.length ? 180 : 320;
  while (box.children.length > shown.length) box.lastChild.remove();
  const own = shown.map(({ first: { tokens, at, n }, from, to }) =>
    tokens.ids.slice(from - at, Math.min(tokens.n, n, to - at, from - at + SHOOT_TOKENS)));
  const turns = turnings(own);
  shown.forEach((segment, i) => {
    const button = box.children[i]
      ?? box.appendChild(h("button", { type: "button", class: "shoot", onclick: () => goTo(button.segment) }));
    const { tokens, at, text, n, id, reason, lacks } = segment.first, begin = segment.from - at;
    const told = own[i].length, turn = turns[i], count = Math.min(told, Math.max(SHOOT_ELEMENTS, turn + 8));
    const key = `${segment.key} ${tokens.version} ${lens.name} ${sparing()} ${told} ${turn} ${segment.to}`;
    button.segment = segment;
    if (button.key === key) return;
    button.key = key;
    if (told < Math.min(SHOOT_TOKENS, n - begin, segment.to - segment.from) && (reason !== "running" || lacks)) void fetchPath(id, at, n);
    const words = visibleTexts(texts(tokens.pieces.slice(begin, begin + told))), lp = tokens.lp[begin + turn];
    words[0] = words[0]?.trimStart() ?? (visible(text) || "…");
    let last = turn; // of the word that tells it from the others
    while (turn >= 0 && last + 1 < count && /^[\p{L}\p{M}]/u.test(words[last + 1])) last++;
    if (turn > 0 && words[turn].startsWith(" ")) [words[turn - 1], words[turn]] = [words[turn - 1] + " ", words[turn].slice(1)];
    const share = lp <= 0 ? percent(Math.exp(lp)) : null;
    fill(button, words.slice(0, count).map((word, k) => {
      const of = figures(tokens, begin + k);
      return h("span", k < turn || k > last ? of : { class: `${of.class} turning`, "data-share": k === last ? share : null }, word);
    }), words.slice(count).join(""), told && segment.to - segment.from > told ? "…" : "");
  });
  attribute(box, "data-more", all.length > shown.length ? `${plural(all.length - shown.length, "more", "more")} in the tree` : null);
}

export function startText() {
  textView($("text"), "t", () => [shownPath(), 0, besides().at]);
  const box = $("text");
  const resting = later(80);
  const over = (/** @type {any} */ event) => Number(event.target.closest?.("[data-token]")?.dataset.token ?? -1);
  const rest = (/** @type {number} */ i, side = false) => resting(() => {
    if (i >= 0 || !$("token-pane").matches(":hover")) Object.assign(view, { hover: i, side });
    redraw(["inspect"]);
  }, i < 0 ? 400 : 80);
  set(box, {
    onmouseover: (/** @type {any} */ event) => rest(over(event), $("other")?.contains(event.target)), onmouseleave: () => rest(-1),
    onclick: (/** @type {any} */ event) => {
      const { turned } = event.target;
      if ($("other")?.contains(event.target) && view.beside) {
        select(view.beside);
        look({ beside: null });
      }
      if (over(event) >= 0) moveTo(over(event));
      else if (turned?.kind === "thought") foldThoughts([turned]);
    },
  });
  set($("token-pane"), { onmouseleave: () => rest(-1) });
  const drawn = () => (drawViews(true), followEnd());
  new ResizeObserver(drawn).observe(scroller());
  scroller().addEventListener("scroll", () => {
    if (below() < 2) follows = true;
    else if (scroller().scrollTop < top) follows = false;
    drawn();
  }, { passive: true });
  $("to-end").onclick = () => attend();
  return () => {
    const c = shownPath();
    if (c.missing >= 0 && store.current) void fetchPath(store.current, c.missing);
    const own = ownNodes(c), before = inContext();
    ownWords(own.length > 0);
    gone = { head: 0, from: 0, memory: 0, note: 0, ...own.at(-1)?.window };
    if (before !== inContext()) redraw(["legend"]);
    drawShoots();
    drawViews(false);
    followEnd();
  };
}

/** The ten most probable tokens at a position of the path, or after it; they are fetched if they are missing.
 * @param {number} i */
export function topsAt(i) {
  const [c, node] = pointedAt();
  const owner = ownerOf(c, i);
  const key = i === c.n ? `next ${node}:${i}` : `${owner}:${i}`;
  const top = store.tops.get(key);
  if (top || !node) return top;
  if (i === c.n) void fetchNext(key, node, i);
  else if (owner) void fetchPath(node, Math.max(0, i - 8), 32, 1);
}

/** A token as it is named in a sentence. @param {import("./store.js").Piece} piece */
export const named = (piece) => label(pieceText(piece)) || "∅";
