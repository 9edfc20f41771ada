// Batches that have not ended: how far they are, and what their prompts had in the caches.

import { arrange, count, duration, el, percent, plural, setText } from "./dom.js";

const section = document.getElementById("batches-section");
const list = document.getElementById("batches");
const more = document.getElementById("batches-more");

export function showBatches(unfinished) {
  const { batches, others } = unfinished ?? { batches: [], others: 0 };
  section.hidden = !batches.length;
  arrange(list, batches.map((batch, i) => row(batch, list.children[i])));
  setText(more, others ? `${plural(others, "older batch", "older batches")}: kvroute batch list` : "");
}

function row(batch, before) {
  const item =
    before ?? el("li", "prefix", el("p", "saved", el("b"), el("span", "note")), el("p", "words"), el("p", "facts"));
  const [done, name, facts] = item.children;
  setText(done.children[0], batch.total === null ? "–" : percent(batch.completed + batch.failed, batch.total));
  setText(done.children[1], batch.pause ? "paused" : batch.status.replace("_", " "));
  setText(name, batch.id);
  setText(facts, [lines(batch), cached(batch), left(batch), batch.pause].filter(Boolean).join(" · "));
  return item;
}

function lines({ total, completed, failed }) {
  if (total === null) return "its lines are not counted yet";
  const errors = failed ? `, ${count(failed)} of them failed` : "";
  return `${count(completed + failed)} of ${plural(total, "line")}${errors}`;
}

const cached = (batch) => batch.prompt_tokens && `${percent(batch.cached_tokens, batch.prompt_tokens)} of prompt tokens from cache`;
const left = (batch) => batch.needed_s && `about ${duration(batch.needed_s)} left`;
