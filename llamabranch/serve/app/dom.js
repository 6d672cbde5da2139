// @ts-check
// Elements, characters, frames, the session. Text reaches the page as text nodes only; this module knows nothing of documents.

/** @param {string} id @returns {any} */
export const $ = (id) => document.getElementById(id);

/** Make an element. A prop that begins with "on" is a listener, "class", "role", "aria-..." and "data-..." are
 * attributes, "--x" is a style property, and everything else is a property. Children are elements or text.
 * @param {string} tag @param {Record<string, any>} [props] @param {...any} children @returns {any} */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  set(element, props);
  element.append(...children.flat(2).filter((child) => child != null && child !== false));
  return element;
}

export function set(/** @type {any} */ element, /** @type {Record<string, any>} */ props) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.getPropertyValue(name) === value || element.style.setProperty(name, value);
    else if (/^(class|role|for|aria-|data-)/.test(name)) attribute(element, name, value);
    else if (element[name] !== value) element[name] = value;
  }
}

/** Set or remove an attribute, if it differs. @param {Element} element @param {string} name @param {any} value */
export function attribute(element, name, value) {
  if (value == null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/** Replace the children of an element. @param {Element} element @param {...any} children */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((child) => child != null && child !== false));
}

/** Fill a group with radio buttons. @param {string} id @param {[string, string][]} values with titles
 * @param {(value: string) => void} chosen */
export const radios = (id, values, chosen) => fill($(id), values.map(([value, title]) =>
  h("label", {}, h("input", { type: "radio", name: id, value, onchange: () => chosen(value) }), h("span", {}, title))));

/** Check one of a group's radio buttons. @param {string} id @param {string} value */
export const check = (id, value) => void ($(id).querySelector(`[value=${value}]`).checked = true);

const UNSEEN = /\p{RGI_Emoji}|[\p{C}\p{Z}]/gv; // emoji come first, because the tags in them are unseen characters
const KEPT = " \n\t\u200c\u200d";
const MARKS = /(\p{M}{8})(\p{M}+)/gu;

/** Text as it is drawn: characters that are invisible, or reorder the text around them, are
 * written as codes, and at most eight combining marks are drawn on a character. @param {string} text */
export function visible(text) {
  if (/^[\x20-\x7e\n]*$/.test(text)) return text;
  return text
    .replace(UNSEEN, (c) =>
      KEPT.includes(c) || /^\p{RGI_Emoji}$/v.test(c) ? c : "\\u" + (c.codePointAt(0) ?? 0).toString(16).padStart(4, "0"))
    .replace(MARKS, (_, drawn, more) => `${drawn}[+${[...more].length} marks]`);
}

/** The texts of consecutive tokens, as they are drawn: many tokens may add marks to one character.
 * @param {string[]} texts */
export function visibleTexts(texts) {
  let marks = 0;
  return texts.map((text) => {
    marks = /^\p{M}*$/u.test(text) ? marks + text.length : 0;
    return marks > 8 ? "" : visible(text);
  });
}

const CHARACTERS = new Intl.Segmenter("en", { granularity: "grapheme" });
// Characters that may continue the one before them: marks, joiners, parts of emoji, Korean vowels and finals.
const GOES_ON = /^[\p{M}\u200c\u200d\u1160-\u11ff\p{Emoji_Modifier}\p{Regional_Indicator}\u{e0020}-\u{e007f}]/u;
const IS_OPEN = /[\u200d\p{Regional_Indicator}\u094d\u09cd\u0acd]$/u;

/** The first characters of a text, as a reader counts them, at least one. @param {string} text @param {number} most UTF-16 units */
export function clip(text, most) {
  if (text.length <= most) return text;
  const next = CHARACTERS.segment(text).containing(most); // the character that would be cut
  return text.slice(0, next ? next.index || next.segment.length : most);
}

/** Consecutive texts, each character in one of them: a character that several share is in the last one.
 * @param {string[]} texts */
export function wholeCharacters(texts) {
  let open = -1; // the text that holds the last character so far
  texts.forEach((text, i) => {
    if (!text) return;
    const before = open < 0 ? "" : texts[open];
    if (before && (GOES_ON.test(text) || IS_OPEN.test(before))) {
      const cut = CHARACTERS.segment(before + text).containing(before.length)?.index ?? before.length;
      if (cut < before.length) {
        texts[i] = before.slice(cut) + text;
        texts[open] = before.slice(0, cut);
      }
    }
    open = i;
  });
  return texts;
}

/** As `visible`, on one line: spaces at the ends and line ends can be seen. @param {string} text */
export const label = (text) =>
  visible(text).replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "·".repeat(s.length));

/** A number with three significant digits. @param {number | null | undefined} x */
export function short(x) {
  if (x == null || Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && size < 0.001) return x.toExponential(0);
  return size >= 100 ? x.toFixed(0) : String(Number(x.toPrecision(3)));
}

/** A probability, as exact as it is the same in batches of any shape: whole percents, below 1 % one digit. @param {number} p */
export function percent(p) {
  if (Number.isNaN(p)) return "–";
  if (p < 1e-5) return "< 0.001 %";
  if (p >= 0.995 && p < 0.9995) return "> 99 %";
  return `${p < 0.01 ? Number((100 * p).toPrecision(1)) : Math.round(100 * p)} %`;
}

/** A number with one decimal, or none from 10 on. @param {number} x */
export const rough = (x) => (Number.isNaN(x) ? "–" : x.toFixed(x < 9.95 ? 1 : 0));

/** @param {number} count @param {string} one @param {string} [many] */
export const plural = (count, one, many = one + "s") =>
  `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

let underway = 0;

/** Count requests, waits and frames that are under way. While one is, the root element has `data-busy`.
 * @param {1 | -1} by */
export function busy(by) {
  underway += by;
  document.documentElement.toggleAttribute("data-busy", underway > 0);
}

/** Make a function that runs its argument a while after its last call. @param {number} ms
 * @returns {(what: (() => void) | null, ms?: number) => void} null cancels it */
export function later(ms) {
  let timer = 0;
  return (what, wait = ms) => {
    if (timer) busy(-1);
    clearTimeout(timer);
    timer = what && window.setTimeout(() => {
      timer = 0;
      busy(-1);
      what();
    }, wait);
    if (timer) busy(1);
  };
}

// Parts of the page ask to be drawn, and each frame draws such parts once. After a key or a click that is the next
// frame. For text that a model writes it is a frame at least `least` ms after the last one, or later if frames would
// take more than a share of the time.
export const pace = { share: 1, least: 50, most: 800 };
/** @type {Map<string, () => void>} */
const painters = new Map();
/** @type {Set<string>} */
const dirty = new Set();
let asked = 0, timer = 0;
let last = -Infinity, gap = pace.least, waited = false; // of frames that may wait

export const paints = (/** @type {string} */ part, /** @type {() => void} */ paint) => void painters.set(part, paint);

function frame() {
  asked = timer = 0;
  const begin = performance.now();
  if (waited) last = begin;
  if (waited) setTimeout(() => (gap += 0.2 * (Math.min(pace.most, Math.max(pace.least, (performance.now() - begin) / pace.share)) - gap)));
  waited = false;
  const parts = [...painters.keys()].filter((part) => dirty.has(part));
  dirty.clear();
  busy(-1);
  for (const part of parts) painters.get(part)?.();
}

/** Draw parts in the next frame, or, if it may wait, as `pace` says. @param {string[]} parts @param {boolean} [waits] */
export function redraw(parts, waits = false) {
  for (const part of parts) dirty.add(part);
  waited ||= waits;
  if (asked) return;
  if (!timer) busy(1);
  const wait = waits ? Math.max(gap, pace.least) - (performance.now() - last) : 0;
  if (wait > 0) return void (timer ||= window.setTimeout(() => (asked = requestAnimationFrame(frame)), wait));
  clearTimeout(timer);
  timer = 0;
  asked = requestAnimationFrame(frame);
}

let toldAt = 0, telling = 0;

/** Clear the message, because something else is done now. */
export function hush() {
  clearTimeout(telling);
  $("status").textContent = "";
}

/** Say what went wrong, also in an open dialog, or where one typed. @param {string} message @param {any} [box] */
export function warn(message, box = document.querySelector("dialog[open] .wrong")) {
  tell(message);
  if (box) box.textContent = visible(message);
}

/** Say something in the footer and, at most once in two seconds, to a screen reader. @param {string} message */
export function tell(message) {
  $("status").textContent = visible(message);
  clearTimeout(telling);
  telling = window.setTimeout(() => {
    toldAt = performance.now();
    $("polite").textContent = visible(message);
  }, Math.max(0, 2000 - (performance.now() - toldAt)));
}

/** Exchange the token of the link that opened the page for a session. Returns whether there was a token. */
export async function openLink() {
  const token = location.hash.slice(1);
  if (!token) return false;
  history.replaceState(null, "", location.pathname);
  busy(1);
  await fetch("/session", { method: "POST", body: JSON.stringify({ token }) }).catch(() => {});
  busy(-1);
  return true;
}
