// @ts-check
// The three panes, and the splitters between them.
import { $, check, radios, redraw } from "./dom.js";
import { keepSetting, store } from "./store.js";

export function widen(/** @type {string} */ side, /** @type {number} */ width) {
  const splitter = $(`split-${side}`);
  const [low, high] = [Number(splitter.ariaValueMin), Number(splitter.ariaValueMax)];
  const wide = Math.max(low, Math.min(high, width));
  splitter.ariaValueNow = String(wide);
  $("main").style.setProperty(`--${side}`, `${wide}px`);
  return wide;
}

/** Show one pane if the window is too narrow for all. @param {string} pane */
export function showPane(pane) {
  $("main").dataset.pane = pane;
  check("panes", pane);
  redraw(["tree", "text"]);
}

export function startPanes() {
  for (const side of ["left", "right"]) {
    const splitter = $(`split-${side}`);
    const move = (/** @type {number} */ x) => widen(side, side === "left" ? x : innerWidth - x);
    const keep = (/** @type {number} */ x) => keepSetting("widths", { ...store.settings.widths, [side]: move(x) });
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
  radios("panes", [["tree", "Tree"], ["text", "Text"], ["token", "Token"]], showPane);
  showPane("text");
}
