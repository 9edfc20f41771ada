// The live page: follows /v1/cluster/live and shows what it says, once for each event.

import { showDecisions } from "./decisions.js";
import { el, plural, seconds, setText, count, percent } from "./dom.js";
import { ask, follow, setKey } from "./events.js";
import { showFleet } from "./fleet.js";
import { hitTokens, showLedger, totalTokens } from "./ledger.js";
import { showPrefixes } from "./prefixes.js";

const STALE_MS = 5000; // events come each second
const RETRY_MS = 5000; // after a refusal
const AGAIN_MS = 1000; // after a connection that broke

const byId = (id) => document.getElementById(id);
const connection = byId("connection");
const live = byId("live");
const models = byId("models");

let things = new Map(); // what there is to see, by key
let source = new AbortController();
let heardMs = 0;
let retry = 0;

function connect() {
  stop();
  const current = (source = new AbortController());
  const model = models.value;
  follow(`v1/cluster/live${model ? `?model=${encodeURIComponent(model)}` : ""}`, current.signal, take)
    .catch((error) => error)
    .then((error) => current.signal.aborted || lost(error));
}

function stop() {
  clearTimeout(retry);
  source.abort();
}

function lost(error) {
  const status = error?.status;
  byId("login").hidden = status !== 401 && status !== 403;
  if (!byId("login").hidden) {
    say("lost", status === 401 ? "an API key is needed" : "this API key may not observe");
    return;
  }
  if (status) say("lost", `refused; trying again every ${RETRY_MS / 1000} s. Are many such pages open?`);
  else say("lost", "disconnected; trying again …");
  retry = setTimeout(connect, status ? RETRY_MS : AGAIN_MS);
}

// Each model has replicas, an index and decisions of its own.
async function offerModels() {
  const answer = await ask("v1/models");
  const { data } = await answer.json();
  const names = data.filter((card) => !card.parent).map((card) => card.id);
  if (names.length < 2) return;
  models.replaceChildren(...names.map((name) => el("option", "", name)));
  byId("choice").hidden = false;
}

function take(name, { changed, gone }) {
  if (name === "whole") things = new Map();
  for (const [key, value] of Object.entries(changed)) things.set(key, value);
  for (const key of gone) things.delete(key);
  heardMs = performance.now();
  say("live", "live");
  show();
}

function say(state, text) {
  connection.dataset.state = state;
  setText(connection, text);
  live.classList.toggle("old", state !== "live");
}

function all(kind) {
  return [...things].filter(([key]) => key.startsWith(kind)).map(([, value]) => value);
}

function show() {
  const router = things.get("router");
  const ledger = things.get("ledger");
  const replicas = all("replica/");
  const decisions = all("decision/").sort((a, b) => b.number - a.number);
  setText(byId("model"), router.model);
  document.title = `${router.model} – kvroute`;
  showFigures(router, ledger, replicas, decisions, things.get("queue"), things.get("seats"));
  showRouter(router);
  showFleet(replicas);
  showLedger(ledger);
  showPrefixes(things.get("prefixes"));
  showDecisions(decisions, router.policy);
  live.setAttribute("aria-busy", "false");
}

function showFigures(router, ledger, replicas, decisions, queue, seats) {
  const ready = processes(replicas.filter((replica) => replica.state === "ready"));
  const known = processes(replicas);
  const total = (name) => replicas.reduce((sum, replica) => sum + (replica[name] ?? 0), 0);
  const answered = decisions.filter((one) => one.ttft_s !== null);
  const waits = answered.map((one) => one.queued_s + one.ttft_s).sort((a, b) => a - b);
  const minutes = Math.round(ledger.window_s / 60);
  const refused = sum(queue.recent.refused);
  const figures = [
    ["Prompt tokens from cache", percent(hitTokens(ledger), totalTokens(ledger)), `last ${minutes} minutes`],
    ["Wait for the first token", seconds(waits[waits.length >> 1]), `median of the last ${waits.length}`],
    ["Requests in flight", count(router.in_flight), `in engines: ${count(total("running"))} run, ${count(total("waiting"))} wait`],
    ["Held back by routers", count(queue.all_routers.requests), queueNote(queue, refused), refused > 0],
    ...(seats ? [["Sessions with a seat", seats.is_limited ? count(seats.seats) : "all", seatNote(seats), seats.all_routers.waiting > 0]] : []),
    ["Requests answered", count(ledger.requests), `last ${minutes} minutes`],
    ["Replicas ready", `${count(ready)} of ${count(known)}`, ready === known ? "all of them" : "see the tiles", ready < known],
    ["Index of the caches", router.index.reachable ? "in step" : "away", indexNote(router.index), !router.index.reachable],
  ];
  const list = byId("figures");
  figures.forEach(([name, value, note, isBad], i) => {
    const box = list.children[i] ?? list.appendChild(el("div", "", el("dt"), el("dd", "value"), el("dd", "note")));
    const [dt, dd, small] = box.children;
    setText(dt, name);
    setText(dd, value);
    setText(small, note);
    box.classList.toggle("bad", Boolean(isBad));
  });
}

const sum = (counts) => Object.values(counts).reduce((total, n) => total + n, 0);

// Requests wait in the routers while every replica has enough to do.
function queueNote(queue, refused) {
  const notes = [
    queue.all_routers.requests ? `${seconds(queue.all_routers.prefill_s)} of prefill` : "none has to wait",
    queue.requests ? `here for up to ${seconds(queue.oldest_s)}` : null,
    refused ? `${count(refused)} refused in ${Math.round(queue.recent.window_s / 60)} minutes` : null,
  ];
  return notes.filter(Boolean).join("; ");
}

// Sessions need a seat to send while their contexts exceed the caches, or where a number is set.
function seatNote(seats) {
  if (!seats.is_limited) return `${count(seats.sessions)} active; none needs one`;
  const why = seats.most ? `--max-sessions ${count(seats.most)}` : `${count(seats.tokens)} tokens for ${count(seats.limit_tokens)}`;
  const wait = seats.all_routers.waiting ? ` for up to ${seconds(seats.all_routers.oldest_s)}` : "";
  return `${count(seats.all_routers.waiting)} requests wait for one${wait}: ${why}`;
}

// Each rank of a replica has an entry: "replica.rank", or "replica" if there is one.
function processes(replicas) {
  return new Set(replicas.map((replica) => replica.id.split(".")[0])).size;
}

function indexNote(index) {
  if (!index.reachable) return `Redis does not answer; known as of ${seconds(index.age_s)} ago`;
  return `${plural(index.blocks, "block")} known, as of ${index.age_s < 2 ? "now" : `${seconds(index.age_s)} ago`}`;
}

function showRouter(router) {
  const which =
    router.routers > 1
      ? `Seen by router ${router.id}, one of ${router.routers}: caches and loads are the whole fleet’s; hits, prefixes and decisions are those of this router’s own requests.`
      : `Seen by router ${router.id}, the only one.`;
  setText(byId("router"), `${which} Blocks of ${router.block_size} tokens; policy ${router.policy}.`);
}

setInterval(() => {
  const silentMs = performance.now() - heardMs;
  if (connection.dataset.state === "live" && silentMs > STALE_MS)
    say("stale", "nothing heard for some seconds; what you see is old");
}, 1000);

// The router serves a few pages only: one that nobody looks at makes room.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return connect();
  stop();
  say("connecting", "paused in the background");
});

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key");
  setKey(key.value.trim());
  key.value = "";
  begin();
});

function begin() {
  byId("login").hidden = true;
  connect();
  offerModels().catch(() => {}); // without the key for it, there is one model to see
}

models.addEventListener("change", connect);
begin();
