// @ts-check
// The text of a path, token by token: blocks with measured heights, of which the visible tokens are elements; the
// cursor; continuations that could follow.
import { $, attribute, fill, h, label, later, plural, redraw, set, short, visible, visibleTexts } from "./dom.js";
import { SOURCES, binClass, cueOf, lens } from "./lenses.js";
import { fetchNext, fetchPath } from "./net.js";
import { FLAGS, ownerOf, pathOf, pieceText, pieces, store, texts, view } from "./store.js";
import { following, goTo } from "./tree.js";

/** @typedef {import("./store.js").Path} Path */

const BLOCK = 512, LARGEST = 1024; // tokens: a block ends at a line end between the two
const TOKEN_HEIGHT = 4.5; // px that a token adds, about
const AROUND = 40; // tokens that are elements above and below the visible ones
const MARGIN = 600; // px of blocks that are text above and below the visible ones
const SHOOTS = 6, SHOOT_TOKENS = 24;
const SURPRISE = Math.log(0.05);

/** @type {Path} */ let path = pathOf(null, null);
let pathKey = "";

/** The path that is shown; it is put together again when something of it has changed. */
export function shownPath() {
  const parts = pieces(store.current, view.typingAt >= 0 ? view.typingAt : store.end);
  const key = parts.map(({ id, to }) => `${id}:${to}:${store.nodes.get(id)?.tokens.version}`).join();
  if (key !== pathKey) {
    pathKey = key;
    path = pathOf(store.current, view.typingAt >= 0 ? view.typingAt : store.end);
  }
  return path;
}

/** Where actions begin: after the cursor, or where the path ends. */
export function place() {
  const node = store.nodes.get(store.current ?? "");
  return view.cursor >= 0 && view.cursor < shownPath().n ? view.cursor + 1 : (store.end ?? (node ? node.at + node.n : 0));
}

/** What a screen reader says of a token. @param {Path} c @param {number} i */
function spoken(c, i) {
  const p = Math.exp(c.lp[i]);
  const parts = [`'${c.shown[i]}'`];
  if (!Number.isNaN(p)) parts.push(`${short(100 * p)} percent`);
  if (c.rk[i]) parts.push(`rank ${c.rk[i]}`);
  if (c.src[i]) parts.push(/** @type {any} */ (SOURCES)[c.src[i]]);
  return parts.join(", ");
}

/** Make or change the element of a token: its colour, cue and name.
 * @param {Path} c @param {number} i @param {any} [old] @param {string} [extra] @param {string} [prefix] */
function tokenElement(c, i, old, extra = "", prefix = "t") {
  const element = old ?? h("span", { role: "option", "aria-setsize": -1, "aria-posinset": i + 1, "data-token": i,
    id: `${prefix}${i}` });
  const text = c.shown[i];
  if (element.textContent !== text) element.textContent = text;
  const name = `${binClass(c, i)}${extra}${c.control[i] ? " control" : ""}${text === "" ? " part" : ""}${
    /^\n+$/.test(text) ? " line" : ""}`;
  if (element.className !== name) element.className = name;
  set(element, { ...told(c, i), "aria-label": spoken(c, i) });
  return element;
}

/** Log-probability and cue of a token. @param {import("./store.js").Tokens} c @param {number} i */
const told = (c, i) => ({ "data-lp": Number.isNaN(c.lp[i]) ? null : Number(c.lp[i].toPrecision(8)), "data-cue": cueOf(c, i) });

/** A token that is not in the list. @param {import("./store.js").Tokens} c @param {number} i @param {string} text */
export const tokenSpan = (c, i, text) => h("span", { class: binClass(c, i), ...told(c, i) }, text);

/** Rejected and never judged drafts by the position before which they stand. @param {Path} c */
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

/** Positions where branches leave the path or a seam is. @param {Path} c */
function marksOf(c) {
  /** @type {Map<number, string>} */ const marks = new Map();
  c.owners.forEach(({ id, from }, i) => {
    const node = store.nodes.get(id);
    if (i > 0) marks.set(from, " fork");
    if (node && node.at === from && node.flags & FLAGS.seam) marks.set(from, " fork seam");
  });
  for (let i = 0; i < c.n; i++) {
    if (c.draw[i] >= 0 && c.draw[i] !== c.ids[i]) marks.set(i, `${marks.get(i) ?? ""} parts`);
  }
  return marks;
}

/** A view of a path in a listbox: blocks, of which those that are near have text, and the tokens in view are elements.
 * @param {any} box @param {() => Path} source @param {string} prefix of the ids of its tokens */
export function textView(box, source, prefix) {
  const scroller = box.parentElement;
  /** @type {any[]} elements with the tokens that they stand for */ const blocks = [];
  /** @type {Map<number, any>} */ let elements = new Map();
  /** @type {Path | null} */ let drawn = null;
  let width = 0;

  /** Cut a path into blocks; one that was not drawn has an estimated height. @param {Path} c */
  function cut(c) {
    let count = 0;
    for (let from = 0; from < c.n; count++) {
      let to = Math.min(c.n, from + BLOCK);
      while (to < c.n && to - from < LARGEST && !c.text[to - 1].endsWith("\n")) to++;
      const block = (blocks[count] ??= box.appendChild(h("div", { role: "none" })));
      if (!block.firstChild) block.style.height = `${(to - from) * TOKEN_HEIGHT}px`;
      Object.assign(block, { from, to, shown: [from, to] });
      from = to;
    }
    for (const block of blocks.splice(count)) block.remove();
  }

  /** The first token of a block that ends below a height; the block is one run of text. @param {any} node
   * @param {Path} c @param {any} block @param {number} y */
  function tokenAt(node, c, block, y) {
    const starts = [0];
    for (let i = block.from; i < block.to; i++) starts.push(starts[i - block.from] + c.shown[i].length);
    let low = 0, high = block.to - block.from;
    const range = document.createRange();
    while (low < high) {
      const middle = (low + high) >> 1;
      range.setStart(node, starts[middle]);
      range.setEnd(node, Math.min(Math.max(starts[middle] + 1, starts[middle + 1]), node.length));
      if (range.getBoundingClientRect().bottom < y) low = middle + 1;
      else high = middle;
    }
    return block.from + low;
  }

  const run = (/** @type {Path} */ c, /** @type {number} */ from, /** @type {number} */ to) =>
    document.createTextNode(c.shown.slice(from, to).join(""));

  /** Choose which tokens of a block are elements, by what is visible. @param {Path} c @param {any} block */
  function choose(c, block) {
    if (c.n <= view.limit) return;
    const { top, bottom } = scroller.getBoundingClientRect();
    const text = run(c, block.from, block.to);
    block.replaceChildren(text);
    const first = tokenAt(text, c, block, top), last = tokenAt(text, c, block, bottom);
    const from = Math.max(block.from, first - AROUND);
    block.shown = [from, Math.min(block.to, Math.max(last + AROUND, from), from + view.limit)];
    if (last === first && (last === block.from || last === block.to)) block.shown = [block.from, block.from];
  }

  /** @param {boolean} [moved] the view was scrolled: see anew which tokens are visible */
  function draw(moved = false) {
    const c = source();
    const anew = c !== drawn || width !== box.clientWidth;
    const atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
    if (anew) cut(c);
    [drawn, width] = [c, box.clientWidth];
    const { top, bottom } = scroller.getBoundingClientRect();
    const places = blocks.map((block) => block.getBoundingClientRect());
    const ghosts = ghostsOf(c), marks = marksOf(c);
    /** @type {Map<number, any>} */ const kept = new Map();
    blocks.forEach((block, place) => {
      const isFar = places[place].bottom < top - MARGIN || places[place].top > bottom + MARGIN;
      block.style.height = isFar ? `${places[place].height}px` : "";
      if (isFar) return block.replaceChildren();
      if (anew || moved || !block.firstChild) choose(c, block);
      const [from, to] = block.shown;
      const content = [];
      if (from > block.from) content.push(run(c, block.from, from));
      for (let i = from; i < to; i++) {
        const extra = (marks.get(i) ?? "") + (i === view.cursor && prefix === "t" ? " cursor" : "");
        const element = tokenElement(c, i, elements.get(i), extra, prefix);
        attribute(element, "aria-selected", i === view.cursor ? "true" : "false");
        kept.set(i, element);
        if (ghosts.has(i)) content.push(ghosts.get(i));
        content.push(element);
      }
      if (to < block.to) content.push(run(c, to, block.to));
      const now = block.childNodes;
      if (now.length !== content.length || content.some((node, i) => now[i] !== node)) block.replaceChildren(...content);
    });
    elements = kept;
    if (anew && c.n > LARGEST) requestAnimationFrame(() => draw(true)); // heights are known now
    if (anew && atEnd && !moved && view.cursor < 0) scroller.scrollTop = scroller.scrollHeight;
    attribute(box, "aria-activedescendant", elements.has(view.cursor) ? `${prefix}${view.cursor}` : null);
  }

  /** Scroll so that a token can be seen. @param {number} i @param {ScrollLogicalPosition} [where] */
  function reveal(i, where = "nearest") {
    if (source() !== drawn) draw();
    const block = blocks.find(({ to }) => i < to);
    if (block && !elements.has(i)) {
      const share = (i - block.from) / (block.to - block.from);
      scroller.scrollTop = block.offsetTop + share * block.offsetHeight - scroller.clientHeight / 2;
      draw(true);
    }
    elements.get(i)?.scrollIntoView({ block: where });
  }

  scroller.addEventListener("scroll", () => draw(true), { passive: true });
  return { draw, reveal, element: (/** @type {number} */ i) => elements.get(i) };
}

/** @type {ReturnType<typeof textView>} */ let main;

/** Put the cursor on a token, or nowhere. @param {number} i */
export function moveTo(i) {
  const { n } = shownPath();
  view.cursor = i < 0 || n === 0 ? -1 : Math.min(i, n); // n: behind the last token
  view.hover = -1;
  redraw(["text", "inspect"]);
  if (view.cursor >= 0) main.reveal(Math.min(view.cursor, n - 1));
}

/** What keys do in the text. @type {Record<string, () => void>} */
export const textMoves = {
  left: () => moveTo(Math.max(0, (view.cursor < 0 ? shownPath().n : view.cursor) - 1)),
  right: () => moveTo(view.cursor < 0 ? shownPath().n - 1 : view.cursor + 1),
  first: () => moveTo(0),
  last: () => moveTo(shownPath().n - 1),
  surprise: () => seek((c, i) => c.lp[i] < SURPRISE),
  surpriseBack: () => seek((c, i) => c.lp[i] < SURPRISE, -1),
};

/** Go to the next token of a kind, or the one before; behind the last comes the first.
 * @param {(c: Path, i: number) => boolean} is @param {1 | -1} [by] */
export function seek(is, by = 1) {
  const c = shownPath();
  const begin = by < 0 ? Math.max(view.cursor, 0) + c.n : view.cursor;
  for (let step = 1; step <= c.n; step++) {
    const i = (begin + by * step) % c.n;
    if (is(c, i)) return moveTo(i);
  }
}

/** What could follow, if the path ends at a fork. */
function drawShoots() {
  const box = $("shoots");
  const all = view.typingAt < 0 && !view.compare ? following(store.current, store.end) : [];
  const shown = all.slice(-SHOOTS);
  view.limit = shown.length || view.compare ? 180 : 320;
  while (box.children.length > shown.length) box.lastChild.remove();
  shown.forEach((segment, i) => {
    if (!box.children[i]) {
      box.append(h("button", { type: "button", class: "shoot",
        onclick: () => goTo(box.children[i].segment) }));
    }
    const button = box.children[i];
    const { tokens, at, text, n, id } = segment.first;
    const begin = segment.from - at;
    const wanted = Math.min(SHOOT_TOKENS, n - begin, segment.to - segment.from);
    const count = Math.max(0, Math.min(wanted, tokens.n - begin));
    const key = `${segment.key} ${tokens.version} ${lens.name} ${count} ${segment.to}`;
    button.segment = segment;
    if (button.key === key) return;
    button.key = key;
    if (count < wanted && segment.first.reason !== "running") void fetchPath(id, at, n);
    const words = visibleTexts(texts(tokens.pieces.slice(begin, begin + count)));
    const tail = segment.to - segment.from > SHOOT_TOKENS ? "…" : "";
    fill(button, words.length
      ? words.map((word, j) => tokenSpan(tokens, begin + j, j ? word : word.trimStart()))
      : visible(text) || "…", tail);
  });
  attribute(box, "data-more", all.length > shown.length ? `${plural(all.length - shown.length, "more", "more")} in the tree` : null);
}

export function startText() {
  main = textView($("text"), shownPath, "t");
  $("after").append(h("div", { id: "shoots" }));
  const box = $("text");
  const resting = later(80);
  const over = (/** @type {any} */ event) => Number(event.target.closest?.("[data-token]")?.dataset.token ?? -1);
  const rest = (/** @type {number} */ i) => resting(() => {
    if (i >= 0 || !$("token-pane").matches(":hover")) view.hover = i;
    redraw(["inspect"]);
  }, i < 0 ? 400 : 80);
  set(box, {
    onmouseover: (/** @type {any} */ event) => rest(over(event)), onmouseleave: () => rest(-1),
    onclick: (/** @type {any} */ event) => over(event) >= 0 && moveTo(over(event)),
    onwheel: (/** @type {WheelEvent} */ event) => {
      if (!event.altKey) return;
      event.preventDefault();
      moveTo(Math.max(0, view.cursor + Math.sign(event.deltaY)));
    },
  });
  new ResizeObserver(() => redraw(["text"])).observe(box.parentElement);
  return () => {
    const c = shownPath();
    if (c.missing >= 0 && store.current) void fetchPath(store.current, c.missing);
    drawShoots();
    main.draw();
  };
}

/** The ten most probable tokens at a position of the path; they are fetched if they are not here. @param {number} i */
export function topsAt(i) {
  const c = shownPath();
  const owner = ownerOf(c, i);
  const top = owner ? store.tops.get(`${owner}:${i}`) : undefined;
  if (i === c.n) return nextTops(i);
  if (!top && store.current && owner) void fetchPath(store.current, Math.max(0, i - 8), 32, 1);
  return top;
}

/** The ten most probable tokens behind the path. @param {number} i */
function nextTops(i) {
  const key = `next ${store.current}:${i}`;
  const top = store.tops.get(key);
  if (!top && store.current) void fetchNext(key, store.current, i);
  return top;
}

/** A token as it is named in a sentence. @param {import("./store.js").Piece} piece */
export const named = (piece) => label(pieceText(piece)) || "∅";
