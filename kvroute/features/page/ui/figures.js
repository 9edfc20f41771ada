// The figures at the top: the fleet now, and what features do.

import { arrange, count, el, layOut, percent, plural, seconds, setText } from "./dom.js";
import { hitTokens, totalTokens } from "./ledger.js";
import { explain } from "./tips.js";

const ABOUT = {
  "Tokens from cache": "The share of this router’s prompt tokens that came from a KV cache and were not computed.",
  "First token": "Time from a request’s arrival to its first token, with the time in the queue.",
  "In flight": "Requests that this router has sent to replicas and that have not ended. Below: the engines’ own counts, for all routers, which are about a second old.",
  Queued: "Requests that all routers hold back while every replica is busy.",
  "Requests answered":
    "Requests of this router whose answer has ended: all of it was sent, or the client has left. An answer that another replica continued counts once.",
  "Replicas ready": "Replicas that get requests, of those that Ray Serve keeps running.",
  Index: "The routers’ knowledge of the caches’ contents, which they read from Redis.",
};

const MISSING = ["silent", "away", "starting", "lost"]; // states of replicas that are wanted and not ready
const WIDTH = 170; // pixels that a figure needs
const list = document.getElementById("figures");
const boxes = new Map(); // by title
new ResizeObserver(() => layOut(list, WIDTH)).observe(document.body);
const sum = (counts) => Object.values(counts).reduce((total, n) => total + n, 0);

export function showFigures(router, ledger, replicas, decisions, queue, ofFeatures) {
  const minutes = `last ${Math.round(ledger.window_s / 60)} minutes`;
  const ready = processes(replicas.filter(({ state }) => state === "ready" || state === "degraded"));
  const missing = replicas.filter(({ state }) => MISSING.includes(state));
  const wanted = router.wanted ?? ready + processes(missing);
  const figures = [
    ["Tokens from cache", percent(hitTokens(ledger), totalTokens(ledger)), minutes],
    ["First token", ...firstToken(decisions)],
    ["In flight", count(router.in_flight), engines(replicas)],
    ["Queued", count(queue.all_routers.requests), queueNote(queue), sum(queue.recent.refused) > 0],
    ["Requests answered", count(ledger.requests), minutes],
    ["Replicas ready", `${count(ready)} of ${count(wanted)}`, missingNote(missing), ready < wanted],
    ["Index", router.index.reachable ? "Up to date" : "Not reachable", indexNote(router.index), !router.index.reachable],
  ].map(([title, value, note, isBad]) => [title, value, note, ABOUT[title], isBad]);
  arrange(list, [...figures, ...ofFeatures].map(figure));
  layOut(list, WIDTH);
}

// A figure of a feature has the same form (features/figure.py).
function figure([title, value, note, about, isBad]) {
  const box = boxes.get(title) ?? empty(title, about);
  setText(box.querySelector(".value"), value);
  setText(box.querySelector(".note"), note);
  box.classList.toggle("bad", Boolean(isBad));
  return box;
}

function empty(title, about) {
  const button = el("button", "term", title);
  button.type = "button";
  const box = el("div", "", el("dt", "", button), el("dd", "value"), el("dd", "note"));
  explain(button, about);
  boxes.set(title, box);
  return box;
}

function firstToken(decisions) {
  const answered = decisions.filter((one) => one.ttft_s !== null);
  const waits = answered.map((one) => one.queued_s + one.ttft_s).sort((a, b) => a - b);
  return [seconds(waits[waits.length >> 1]), waits.length ? `median of the last ${waits.length}` : "no request yet"];
}

function engines(replicas) {
  const total = (name) => replicas.reduce((all, replica) => all + (replica[name] ?? 0), 0);
  return `in engines: ${count(total("running"))} run, ${count(total("waiting"))} wait`;
}

function queueNote(queue) {
  const refused = sum(queue.recent.refused);
  const notes = [
    queue.all_routers.requests ? `${seconds(queue.all_routers.prefill_s)} of prefill` : "none waits",
    queue.requests ? `here for up to ${seconds(queue.oldest_s)}` : null,
    refused ? `${count(refused)} refused in ${Math.round(queue.recent.window_s / 60)} minutes` : null,
  ];
  return notes.filter(Boolean).join("; ");
}

// Each rank of a replica has an entry: "replica.rank", or "replica" if there is one.
function processes(replicas) {
  return new Set(replicas.map((replica) => replica.id.split(".")[0])).size;
}

function missingNote(missing) {
  if (!missing.length) return "all of them";
  return missing.slice(0, 3).map(({ id, state }) => `${id} ${state === "silent" ? "does not answer" : `is ${state}`}`).join(", ");
}

function indexNote(index) {
  if (!index.reachable) return `Redis does not answer; last read ${seconds(index.age_s)} ago`;
  return `${plural(index.blocks, "block")}, read ${index.age_s < 2 ? "just now" : `${seconds(index.age_s)} ago`}`;
}
