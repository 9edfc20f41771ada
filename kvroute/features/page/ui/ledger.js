// The ledger: every token of every prompt, by where it came from.

import { compact, count, el, percent, plural, setText } from "./dom.js";
import { explain } from "./tips.js";

// As in the table of docs/metrics.md.
export const CAUSES = [
  ["hit", "came from the cache, as the router expected", ""],
  ["pulled", "were copied from another replica's host memory, as the router expected", ""],
  ["disk", "were read from the disk cache, as the router expected", ""],
  ["unexpected_hit", "came from the cache, although the router did not expect it", "see whether kvroute_index_age_seconds is high"],
  ["stale", "were expected in the cache but were not there: they were evicted meanwhile, or the index was wrong", "give the cache more memory; see whether kvroute_publisher_lag_seconds is high"],
  ["spilled", "were cached on a replica that was not chosen, mostly because it was busy", "add replicas"],
  ["unpinned", "belong to the request's named prefix, but were cached nowhere", "see in GET /v1/prefixes/ID where the prefix is warm; raise --pin-share, or drop prefixes"],
  ["partial", "were cached by the layers with full attention, but the layers with windows or states kept nothing at that place", "set --engine-arg prefix_cache_retention_interval=N, or declare a named prefix"],
  ["evicted", "were cached once and are not now: evicted, cleared, or lost with their replica", "give the cache more memory, add replicas, or declare named prefixes"],
  ["broken", "are in the chat's earlier prompt too, but after a place that has changed since, so no cache had them", "change chats at their end only: put dates and ids into the last user message. kvroute doctor names the place"],
  ["new", "were never cached, as far as the router remembers (the last 100,000 evicted blocks); or belong to a prompt with prompt_logprobs, for which vLLM reads no cache", "see whether more prompts could begin with the same text"],
  ["isolated", "were never cached under the prompt's cache_salt. Whether they are cached under other salts is not checked", "use fewer salts, if that is allowed"],
  ["tail", "are in no full block, or in the last token's block, which is always computed", "set a smaller --block-size"],
];

// A few words for each cause, after a number of tokens.
export const WORDS = {
  hit: "from the cache",
  pulled: "from another replica’s memory",
  disk: "from the disk",
  unexpected_hit: "from the cache, unexpectedly",
  stale: "no longer in the cache",
  spilled: "cached on another replica",
  unpinned: "of a named prefix that no cache had",
  partial: "cached for some layers only",
  evicted: "evicted",
  broken: "after a change in the chat",
  new: "never cached",
  isolated: "new under this cache_salt",
  tail: "in no full block",
};
const LETTER = 9; // pixels in the bar

const bar = document.getElementById("bar");
const about = document.getElementById("ledger-about");
const rows = document.querySelector("#causes tbody");
const zeros = document.getElementById("zeros");
let areZerosShown = false;

zeros.addEventListener("click", () => {
  areZerosShown = !areZerosShown;
  fold();
});

for (const [cause, meaning, remedy] of CAUSES) {
  bar.append(el("span", cause));
  const button = el("button", "term", cause);
  button.type = "button";
  const name = el("th", "", el("span", `key ${cause}`), button);
  name.scope = "row";
  rows.append(el("tr", "", name, el("td", "number"), el("td", "number")));
  explain(button, `Tokens that ${meaning}.${remedy && ` When there are many: ${remedy}.`}`);
}

export const totalTokens = (ledger) => Object.values(ledger.tokens).reduce((a, b) => a + b, 0);
export const hitTokens = ({ tokens }) => tokens.hit + tokens.pulled + tokens.disk + tokens.unexpected_hit;

export function showLedger(ledger) {
  const total = totalTokens(ledger);
  const words = CAUSES.map(([cause]) => `${cause} ${percent(ledger.tokens[cause], total)}`).join(", ");
  CAUSES.forEach(([cause], i) => {
    const share = total ? ledger.tokens[cause] / total : 0;
    const part = bar.children[i];
    part.style.width = `${(100 * share).toFixed(2)}%`;
    setText(part, share * bar.clientWidth > LETTER * (cause.length + 1) ? cause : "");
    const [, portion, tokens] = rows.children[i].children;
    setText(portion, percent(ledger.tokens[cause], total));
    setText(tokens, compact(ledger.tokens[cause]));
    rows.children[i].dataset.isZero = String(!ledger.tokens[cause]);
  });
  bar.setAttribute("aria-label", total ? words : "no tokens yet");
  bar.classList.toggle("nothing", !total);
  setText(about, sentence(ledger, total));
  fold();
}

// Hides the causes that have no tokens, unless they are asked for.
function fold() {
  const empty = [...rows.children].filter((row) => row.dataset.isZero === "true");
  for (const row of rows.children) row.hidden = row.dataset.isZero === "true" && !areZerosShown;
  rows.parentElement.tHead.hidden = !areZerosShown && empty.length === CAUSES.length;
  zeros.hidden = !empty.length;
  zeros.setAttribute("aria-expanded", String(areZerosShown));
  setText(zeros, areZerosShown ? "Hide causes without tokens" : `Show ${plural(empty.length, "cause")} without tokens`);
}

function sentence(ledger, total) {
  const minutes = Math.round(ledger.window_s / 60);
  if (!total) return `No request was answered in the last ${minutes} minutes.`;
  const computed = total - hitTokens(ledger);
  return (
    `${plural(ledger.requests, "request")} in the last ${minutes} minutes had ${plural(total, "prompt token")}: ` +
    `${percent(hitTokens(ledger), total)} came from a KV cache, and ${plural(computed, "token")} had to be computed.`
  );
}
