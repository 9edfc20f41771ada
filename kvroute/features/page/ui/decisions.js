// Recent decisions, each with its receipt.

import { arrange, count, el, percent, plural, seconds, setBar, setText } from "./dom.js";
import { WORDS } from "./ledger.js";

const OUTCOMES = {
  ok: "answered",
  cancelled: "cancelled",
  refused: "refused",
  failed: "replica lost",
};
// What became of an answer that another replica continued, after its first replica was lost.
const CONTINUED = {
  null: "The answer goes on there",
  ok: "The answer is complete",
  cancelled: "Later the client cancelled the request",
  refused: "That replica refused the request",
  failed: "That replica was lost, too",
};
// What changed where a chat's prefix broke, by its role.
const PLACES = {
  system: "the system message",
  developer: "the developer’s message",
  user: "a user’s message",
  assistant: "an assistant’s message",
  tool: "a tool’s result",
  tools: "the definitions of tools",
  template: "all messages stay",
  other: "a message",
};
// Where the cached tokens of a prompt came from, if not from GPU memory.
const SLOWER = [
  ["host_tokens", "host memory"],
  ["disk_tokens", "the disk cache"],
  ["peer_tokens", "another replica"],
];
const AT_FIRST = 10;

const list = document.getElementById("decisions");
const pause = document.getElementById("pause");
const more = document.getElementById("more-decisions");
const items = new Map(); // by number: the decision as it is shown, and its elements
let latest = [];
let shown = []; // those, or the ones of when the list came to stand still
let isHeld = false; // by the button
let isShort = true;
let policy = "";
let words = {}; // of terms, and of reasons for evictions, from the router

pause.addEventListener("click", () => {
  isHeld = !isStill();
  if (!isHeld) for (const details of list.querySelectorAll("details[open]")) details.open = false;
  draw();
});

more.addEventListener("click", () => {
  isShort = !isShort;
  draw();
});

export function showDecisions(decisions, ofPolicy, ofRouter) {
  latest = decisions;
  policy = ofPolicy;
  words = ofRouter;
  draw();
}

const isStill = () => isHeld || list.querySelector("details[open]") !== null;

function draw() {
  const now = new Map(latest.map((decision) => [decision.number, decision]));
  shown = isStill() ? shown.map((decision) => now.get(decision.number) ?? decision) : latest;
  const numbers = new Set(shown.map((decision) => decision.number));
  for (const number of items.keys()) if (!numbers.has(number)) items.delete(number);
  const drawn = (isShort ? shown.slice(0, AT_FIRST) : shown).map(item);
  arrange(list, drawn.length ? drawn : [list.querySelector(".none") ?? el("li", "none", "No request yet.")]);
  more.hidden = shown.length <= AT_FIRST;
  setText(more, isShort ? `Show all ${shown.length}` : "Show fewer");
  showPause();
}

function showPause() {
  const behind = latest.filter((decision) => decision.number > (shown[0]?.number ?? 0)).length;
  pause.setAttribute("aria-pressed", String(isStill()));
  setText(pause, isStill() ? `Resume: ${behind} new` : "Pause");
}

function item(decision) {
  let known = items.get(decision.number);
  if (!known) {
    known = { decision: null, element: el("li", "", row(decision.number)) };
    items.set(decision.number, known);
  }
  if (known.decision !== decision) {
    known.decision = decision;
    const details = known.element.firstChild;
    showSummary(decision, details.firstChild);
    if (details.open) fill(details, decision);
  }
  return known.element;
}

function row(number) {
  const came = el("span", "came", el("span"), el("span", "wait"));
  const summary = el("summary", "", el("time"), el("b", "to"), el("span", "outcome"), el("span", "hits"), came);
  const details = el("details", "", summary);
  details.addEventListener("toggle", () => {
    if (details.open) fill(details, items.get(number).decision);
    draw();
  });
  return details;
}

function showSummary(decision, summary) {
  const [time, to, outcome, bar, came] = summary.children;
  const [hits, wait] = came.children;
  const at = new Date(decision.at_ms);
  time.dateTime = at.toISOString();
  setText(time, at.toLocaleTimeString("en-GB"));
  setText(to, `→ ${decision.replica}`);
  outcome.dataset.outcome = isContinued(decision) ? "continued" : (decision.outcome ?? "in flight");
  setText(outcome, outcomeWords(decision));
  const cached = decision.cached_tokens ?? decision.expected_tokens;
  setBar(bar, [["cached", cached / decision.prompt_tokens]]);
  const word = decision.cached_tokens === null ? "expected in cache" : "cached";
  setText(hits, `${count(cached)} of ${plural(decision.prompt_tokens, "token")} ${word}`);
  const parts = [
    ...SLOWER.map(([tier, place]) => (decision[tier] ? `${count(decision[tier])} from ${place}` : null)),
    decision.queued_s ? `queued ${seconds(decision.queued_s)}` : null,
    decision.ttft_s === null ? null : `first token ${seconds(decision.ttft_s)}`,
    `predicted ${seconds(decision.predicted_ttft_s)}`,
  ];
  setText(wait, parts.filter(Boolean).join(", "));
}

function fill(details, decision) {
  const body = receipt(decision);
  if (details.children[1]) details.children[1].replaceWith(body);
  else details.append(body);
}

function receipt(decision) {
  const { receipt } = decision;
  return el(
    "div",
    "receipt",
    el("p", "reason", el("b", "", receipt.reason.startsWith("only") ? "" : "Why: "), receipt.reason, "."),
    decision.replica === receipt.choice
      ? null
      : el("p", "", `${receipt.choice} was full or gone when the request came, so ${decision.replica} got it.`),
    decision.is_resumed ? el("p", "", "A replica was lost during this answer, and this one continues it. The prompt and the tokens that were already sent are computed again, and count as its prompt.") : null,
    decision.outcome === "failed" ? el("p", "", lossOf(decision)) : null,
    outcomeOf(decision),
    replicasOf(decision),
  );
}

// Whether a replica was lost, and the client gets the whole answer from another one all the same.
const isContinued = ({ continued_at: at, continued_outcome: outcome }) => at !== null && outcome !== "failed" && outcome !== "refused";

function outcomeWords(decision) {
  if (isContinued(decision)) return `continued on ${decision.continued_at}`;
  return decision.outcome === null ? "in flight" : OUTCOMES[decision.outcome];
}

// What the loss of the replica meant for the answer.
function lossOf(decision) {
  const { replica, continued_at: at, continued_outcome: outcome } = decision;
  if (!at) return `${replica} was lost during this request, and no other replica has got it so far.`;
  const again = isContinued(decision) ? ` ${at} computed the prompt and the answer so far again, except what it had cached.` : "";
  return `${replica} was lost during this request, and ${at} got it. ${CONTINUED[outcome]}.${again}`;
}

function outcomeOf(decision) {
  const { receipt } = decision;
  const facts = [
    ["the most that any replica holds", `${count(receipt.best_hit_tokens)} tokens`],
    ["expected here", `${count(decision.expected_tokens)} tokens`],
    ["delivered by the cache", decision.cached_tokens === null ? "–" : `${count(decision.cached_tokens)} tokens`],
  ];
  for (const [tier, place] of SLOWER) {
    if (decision[tier]) facts.push([`of these from ${place}`, `${count(decision[tier])} tokens`]);
  }
  if (decision.output_tokens !== null) facts.push(["answer", plural(decision.output_tokens, "token")]);
  if (receipt.congestion_price !== null) facts.push(["computing again what another replica has", `counts ${receipt.congestion_price.toFixed(2)} times`]);
  if (receipt.broken) facts.push(["prefix broken", changed(receipt.broken)]);
  if (decision.ledger) {
    const parts = Object.entries(decision.ledger).filter(([, tokens]) => tokens);
    facts.push(["prompt tokens", parts.map(([cause, tokens]) => `${count(tokens)} ${WORDS[cause]}`).join(", ")]);
    if (decision.evicted_why) facts.push(["why evicted", words.evicted[decision.evicted_why]]);
  }
  return el("dl", "", ...facts.map(([name, value]) => el("div", "", el("dt", "", name), el("dd", "", value))));
}

function changed({ message, token, tokens, before, after }) {
  const number = message.index === null ? "" : ` (number ${message.index})`;
  const lengths = `${plural(before.tokens, "token")} became ${count(after.tokens)}`;
  return `at token ${count(token)}, ${PLACES[message.role]}${number}: ${lengths}, and ${plural(tokens, "token")} behind it were lost`;
}

function replicasOf(decision) {
  const { replicas } = decision.receipt;
  const heading = ["replica", "hits", "queue", "prefill", "busy with", "cost"].map((name) => {
    const cell = el("th", "", name);
    cell.scope = "col";
    return cell;
  });
  const rows = replicas.flatMap((replica, i) => [
    costs(decision, replica, i),
    ...(replica.terms_s ? [terms(replica)] : []),
  ]);
  const hidden = decision.of_replicas - replicas.length;
  const table = el("table", "", el("thead", "", el("tr", "", ...heading)), el("tbody", "", ...rows));
  const scroll = el("div", "scroll", table);
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", "What each replica would have cost");
  return el(
    "div",
    "",
    scroll,
    hidden > 0 ? el("p", "about", `${plural(hidden, "more replica")} cost as much or more.`) : null,
    policy === "kvroute" ? null : el("p", "about", `The policy ${policy} has no costs.`),
  );
}

function costs(decision, replica, i) {
  const name = el("th", "", replica.id, i === 0 ? el("i", "", "choice") : i === 1 ? el("i", "", "runner-up") : null);
  name.scope = "row";
  const values = [
    percent(replica.hit_tokens, decision.prompt_tokens) + inHost(replica, decision),
    seconds(replica.backlog_s),
    seconds(replica.prefill_s),
    count(replica.unanswered),
    seconds(replica.cost_s),
  ];
  return el("tr", i === 0 ? "choice" : "", name, ...values.map((value) => el("td", "number", value)));
}

function inHost(replica, decision) {
  if (!replica.host_tokens) return "";
  return ` (${percent(replica.host_tokens, decision.prompt_tokens)} to reload, ${seconds(replica.reload_s)})`;
}

function terms(replica) {
  const parts = Object.entries(replica.terms_s).filter(([, s]) => Math.abs(s) >= 0.00005);
  const shown = parts.map(([name, s]) => `${s < 0 ? "−" : ""}${seconds(Math.abs(s))} ${words.terms[name]}`);
  const cell = el("td", "", shown.length ? `= ${shown.join(" + ")}`.replaceAll("+ −", "− ") : "costs nothing");
  cell.colSpan = 6;
  return el("tr", "terms", cell);
}
