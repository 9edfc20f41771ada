// The live page: follows /v1/cluster/live and shows what it says, once for each event.

import { charted, chartFleet, onCharted, showCharts } from "./charts.js";
import { showDecisions } from "./decisions.js";
import { el, setText } from "./dom.js";
import { ask, follow, hasKey, setKey } from "./events.js";
import { showFigures } from "./figures.js";
import { showFleet } from "./fleet.js";
import { showLedger } from "./ledger.js";
import { explainAll } from "./tips.js";

const STALE_MS = 5000; // events come each second
const RETRY_MS = 5000; // after a refusal
const AGAIN_MS = 1000; // after a connection that broke

const byId = (id) => document.getElementById(id);
const connection = byId("connection");
const live = byId("live");
const models = byId("models");

let things = new Map(); // the router's values, by key
let source = new AbortController();
let heardMs = 0;
let retry = 0;

function connect() {
  stop();
  const current = (source = new AbortController());
  const wanted = Object.entries({ model: models.value, replica: charted() }).filter(([, value]) => value);
  follow(`v1/cluster/live?${new URLSearchParams(wanted)}`, current.signal, take)
    .catch((error) => error)
    .then((error) => current.signal.aborted || lost(error));
}

function stop() {
  clearTimeout(retry);
  source.abort();
}

function lost(error) {
  const status = error?.status;
  if (status === 401 || status === 403) {
    const wrong = hasKey() ? "this API key is unknown or revoked" : "an API key is needed";
    say("lost", status === 401 ? wrong : "this API key may not observe");
    askForKey();
    return;
  }
  if (status) say("lost", `refused; trying again every ${RETRY_MS / 1000} s. Are many of these pages open?`);
  else say("lost", "disconnected; trying again …");
  retry = setTimeout(connect, status ? RETRY_MS : AGAIN_MS);
}

// Nothing stands behind the question for a key, also where a key was revoked.
function askForKey() {
  things = new Map();
  live.hidden = true;
  setText(byId("model"), "");
  document.title = "kvroute";
  byId("login").hidden = false;
  byId("key").focus();
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
  live.hidden = false;
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
  showFigures(router, ledger, replicas, decisions, things.get("queue"), [...things.get("figures"), ...things.get("services")]);
  showRouter(router);
  showCharts(things.get("history"), router);
  showFleet(replicas);
  showLedger(ledger);
  showDecisions(decisions, router.policy, things.get("words"));
  live.setAttribute("aria-busy", "false");
}

function showRouter(router) {
  const which =
    router.routers > 1
      ? `Router ${router.id}, one of ${router.routers}: caches and loads are those of the whole fleet; hits and recent requests are those of this router.`
      : `Router ${router.id}, the only one.`;
  setText(byId("router"), `${which} Blocks of ${router.block_size} tokens; policy ${router.policy}.`);
}

setInterval(() => {
  const silentMs = performance.now() - heardMs;
  if (connection.dataset.state === "live" && silentMs > STALE_MS)
    say("stale", "no news for some seconds; what you see is old");
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

models.addEventListener("change", () => {
  chartFleet();
  connect();
});
onCharted(connect);
explainAll();
begin();
