// @ts-check
// Finding text in all branches.
import { $, attribute, later, plural } from "./dom.js";
import { get } from "./net.js";
import { look, store, view } from "./store.js";
import { goTo, segmentOf } from "./tree.js";
import { moveTo } from "./text.js";

/** @type {any[]} */ let hits = [], hit = -1, foundIn = -1; // the revision of the tree

/** Find text in all branches that are shown, and count them. A hit that is found again stays the current one. */
async function find() {
  const q = $("find").value;
  const { found: all, more } = await get("/loom/find", { q }).catch(() => ({ found: [], more: false }));
  if (q !== $("find").value) return;
  const { node, at } = hits[hit] ?? {};
  foundIn = store.revision;
  hits = all.filter((/** @type {any} */ each) => segmentOf(each.node));
  hit = hits.findIndex((each) => each.node === node && each.at === at);
  look({ sought: q, match: [-1, -1] });
  $("found").textContent = q && `${hits.length}${more ? "+" : ""}`;
  attribute($("found"), "aria-label", plural(hits.length, "place"));
}

async function nextHit(/** @type {number} */ by) {
  if ($("find").value !== view.sought || foundIn !== store.revision) await find(); // the input or the branches changed
  if (!hits.length) return;
  hit = (hit + by + hits.length) % hits.length;
  const { node, at, last } = hits[hit];
  goTo(/** @type {import("./tree.js").Segment} */ (segmentOf(node, last + 1)));
  view.match = [at, last];
  moveTo(last); // the next action acts after the match
  $("found").textContent = `${hit + 1} / ${hits.length}`;
}

/** Let the box find while one types, and go to the next match at Enter. */
export function startFind() {
  const typing = later(60);
  $("find").oninput = () => typing(() => $("find").value !== view.sought && find());
  $("find").onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter") void nextHit(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") $("tree").focus();
  };
}
