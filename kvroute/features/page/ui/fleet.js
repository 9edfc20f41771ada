// Replicas as tiles.

import { arrange, compact, count, el, layOut, percent, setBar, setText } from "./dom.js";

const AT_ONCE = 24; // tiles
const WIDTH = 200; // pixels that a tile needs
const SIFTED = 9; // from so many replicas on there is a filter

const STATES = {
  ready: "ready",
  degraded: "degraded: it differs from the routers, so its cache is ignored",
  silent: "does not answer, and gets no new requests",
  away: "its server does not answer",
  starting: "starting",
  lost: "lost: Ray Serve replaces it",
  leaving: "leaving: finishes its requests, and gets no new ones",
  elsewhere: "of another deployment with the same --cluster",
};

const isWell = (replica) => replica.state === "ready";
const load = (replica) => (replica.running ?? 0) + (replica.waiting ?? 0);
const room = (replica) => (replica.capacity_blocks ?? 0) + (replica.host_blocks ?? 0);
const share = (part, total) => (total ? (part ?? 0) / total : 0);
const byName = (a, b) => (a.id < b.id ? -1 : 1);
const ORDERS = {
  name: () => 0,
  busiest: (a, b) => load(b) - load(a) || b.requests - a.requests,
  fullest: (a, b) => share(b.cached_blocks, room(b)) - share(a.cached_blocks, room(a)),
  missing: (a, b) => !a.requests - !b.requests || share(a.hit_tokens, a.prompt_tokens) - share(b.hit_tokens, b.prompt_tokens),
};

const list = document.getElementById("tiles");
const sift = document.getElementById("sift");
const filter = document.getElementById("filter");
const order = document.getElementById("order");
const more = document.getElementById("more");
const tiles = new Map(); // by replica id
let replicas = [];
let most = AT_ONCE;
let isFirst = true;

new ResizeObserver(() => layOut(list, WIDTH)).observe(list);
sift.addEventListener("input", draw);
sift.addEventListener("submit", (event) => event.preventDefault());
more.addEventListener("click", () => {
  most += AT_ONCE;
  draw();
});

export function showFleet(all) {
  replicas = all;
  if (isFirst && all.length > AT_ONCE) order.value = "busiest";
  isFirst = false;
  sift.hidden = all.length < SIFTED;
  draw();
}

function draw() {
  const words = filter.value.toLowerCase().split(/\s+/);
  const text = (replica) => `${replica.id} ${replica.node ?? ""} ${replica.state}`.toLowerCase();
  const found = replicas.filter((replica) => words.every((word) => text(replica).includes(word)));
  found.sort((a, b) => isWell(a) - isWell(b) || ORDERS[order.value](a, b) || byName(a, b));
  const shown = found.slice(0, most);
  const ids = new Set(shown.map((replica) => replica.id));
  for (const id of tiles.keys()) if (!ids.has(id)) tiles.delete(id);
  arrange(list, shown.map(tile));
  layOut(list, WIDTH);
  more.hidden = shown.length === found.length;
  setText(more, `Show more: ${count(found.length - shown.length)} are not shown`);
}

function tile(replica) {
  let item = tiles.get(replica.id);
  if (!item) {
    const bar = el("div", "kv");
    bar.setAttribute("role", "img");
    item = el("li", "tile", el("h3"), el("p", "place"), bar, el("p", "cache"), el("dl"));
    tiles.set(replica.id, item);
  }
  const [name, place, bar, cache, figures] = item.children;
  item.dataset.state = replica.state;
  setText(name, replica.id);
  setText(place, [replica.state === "ready" ? "ready" : STATES[replica.state], replica.node].filter(Boolean).join(" · "));
  showCache(replica, bar, cache);
  showFigures(replica, figures);
  return item;
}

function showCache(replica, bar, cache) {
  const capacity = room(replica);
  if (!capacity) {
    setText(cache, "its cache is not known yet");
    return;
  }
  const pinned = Math.min(replica.pinned_blocks, replica.used_blocks);
  const used = replica.used_blocks - pinned;
  const kept = Math.max(0, (replica.cached_blocks ?? 0) - replica.used_blocks);
  const own = replica.capacity_blocks; // requests and pins are in the GPU's memory only
  setBar(bar, [["pinned", pinned / capacity], ["used", used / capacity], ["cached", kept / capacity]]);
  const words = [
    replica.cached_blocks === null ? "cached: unknown" : `${percent(replica.cached_blocks, capacity)} cached`,
    `${percent(used, own)} in use`,
    pinned ? `${percent(pinned, own)} pinned` : null,
  ].filter(Boolean);
  setText(cache, words.join(" · "));
  const where = replica.host_blocks ? `, ${count(replica.host_blocks)} of them in host memory` : "";
  bar.setAttribute("aria-label", `KV cache of ${count(capacity)} blocks${where}: ${words.join(", ")}`);
}

function showFigures(replica, list) {
  const figures = [
    ["hits", percent(replica.hit_tokens, replica.prompt_tokens)],
    ["done", compact(replica.requests)],
    ["running", compact(replica.running ?? 0)],
    ["waiting", compact(replica.waiting ?? 0)],
  ];
  figures.forEach(([name, value], i) => {
    const box = list.children[i] ?? list.appendChild(el("div", "", el("dd"), el("dt")));
    setText(box.children[0], value);
    setText(box.children[1], name);
  });
}
