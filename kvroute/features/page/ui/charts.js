// The charts of the last hour, of the fleet or of one replica.

import { Chart } from "./chart.js";
import { compact, el, seconds, setText } from "./dom.js";

const rate = (n) => `${n < 10 ? +n.toFixed(1) : compact(n)}/s`;
const whole = (n) => (Number.isInteger(n) ? compact(n) : n.toFixed(1));
const column = (name) => (samples, i) => samples[name][i];

const CHARTS = [
  {
    title: "Prompt tokens from cache",
    about: "The share of the prompt tokens that came from a KV cache and were not computed, for the requests that got their first token in each 10 seconds.",
    lines: [{ name: "cached", value: (all, i) => (all.prompt_tokens[i] ? all.cached_tokens[i] / all.prompt_tokens[i] : null) }],
    format: (share) => `${Math.round(100 * share)}%`,
    top: 1,
  },
  {
    title: "Wait for the first token",
    about: "Time from the arrival of a request to its first token, with the time in the queue. p50: half of the requests waited less. p90: nine of ten waited less.",
    lines: [{ name: "p50", value: column("ttft_p50_s") }, { name: "p90", value: column("ttft_p90_s") }],
    format: seconds,
  },
  {
    title: "Time between tokens",
    about: "The mean time between two tokens of an answer, for the answers that ended in each 10 seconds. p50: half of the answers were faster. p90: nine of ten were faster.",
    lines: [{ name: "p50", value: column("tpot_p50_s") }, { name: "p90", value: column("tpot_p90_s") }],
    format: seconds,
  },
  {
    title: "Requests per second",
    about: "Requests that got their first token, per second.",
    lines: [{ name: "requests", value: column("requests_per_s") }],
    format: rate,
  },
  {
    title: "Generated tokens per second",
    about: "Tokens of answers, per second.",
    lines: [{ name: "tokens", value: column("output_tokens_per_s") }],
    format: rate,
  },
  {
    title: "Requests that wait",
    about: "Queued: held back by the routers while every replica is busy. In engines: sent to a replica that has not begun with them.",
    lines: [
      { name: "queued", value: column("queued"), isOptional: true },
      { name: "in engines", value: column("waiting") },
    ],
    format: whole,
    least: 2,
  },
  {
    title: "Requests that run",
    about: "Requests that the engines compute now.",
    lines: [{ name: "in engines", value: column("running") }],
    format: whole,
    least: 2,
  },
];

const select = document.getElementById("charted");
const about = document.getElementById("history-about");
const charts = CHARTS.map((options) => new Chart(options));
let latest = null;

document.getElementById("charts").append(...charts.map((chart) => chart.element));
new ResizeObserver(() => latest && charts.forEach((chart) => chart.draw())).observe(document.getElementById("charts"));

/** Id of the replica that the charts show; empty: the fleet. */
export const charted = () => select.value;
/** Shows the fleet again: another model has other replicas. */
export const chartFleet = () => (select.value = "");
export const onCharted = (change) => select.addEventListener("change", change);

export function showCharts(history, router) {
  if (history === latest) return;
  latest = history;
  offer(history.replicas, history.replica ?? "");
  charts.forEach((chart) => chart.show(history.samples));
  setText(about, coverage(history, router));
}

function offer(replicas, current) {
  const ids = ["", ...new Set([...replicas, current].filter(Boolean))];
  if (ids.join() !== [...select.options].map((option) => option.value).join())
    select.replaceChildren(...ids.map((id) => Object.assign(el("option", "", id || "the whole fleet"), { value: id })));
  select.value = current;
}

// A router knows its own requests only, and the load of every replica and router.
function coverage({ replica, samples }, router) {
  const since = samples.at_s.length ? new Date(1000 * samples.at_s[0]).toLocaleTimeString("en-GB") : "now";
  const where = replica ? `at replica ${replica}` : "at all replicas";
  const own = `Since ${since}, one value every 10 seconds.`;
  if (router.routers < 2) return `${own} Requests ${where}.`;
  return `${own} Cached tokens, times, requests and tokens are of the requests ${where} that this router served, one of ${router.routers}; the last two charts are of all routers.`;
}
