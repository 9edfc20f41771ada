// Named prefixes: where they are warm, and what they save.

import { arrange, compact, count, el, percent, plural, setText } from "./dom.js";

const list = document.getElementById("named");
const more = document.getElementById("named-more");

export function showNamed(named) {
  if (!named) return;
  const { prefixes, others, of_tenants: ofTenants } = named;
  const none = el("li", "none", "None is declared. ", el("code", "", "kvroute prefixes"), " declares one, so that it stays in the caches.");
  arrange(list, prefixes.length ? prefixes.map((prefix, i) => row(prefix, list.children[i])) : [list.querySelector(".none") ?? none]);
  const notes = [others ? `${plural(others, "more prefix", "more prefixes")} saved less` : null, ofTenants ? `${plural(ofTenants, "prefix", "prefixes")} of tenants are not shown` : null];
  setText(more, notes.filter(Boolean).join("; "));
}

function row(prefix, before) {
  const item =
    before?.className === "prefix"
      ? before
      : el("li", "prefix", el("p", "saved", el("b"), el("span", "note")), el("p", "words"), el("p", "facts"));
  const [saved, name, facts] = item.children;
  setText(saved.children[0], `${compact(prefix.tokens_saved)} tokens saved`);
  setText(saved.children[1], `by ${plural(prefix.hits, "request")}`);
  setText(name, prefix.id);
  setText(facts, `${plural(prefix.tokens, "token")} · ${warmth(prefix)}`);
  return item;
}

function warmth(prefix) {
  const [warm, wanted] = [prefix.warm_on, prefix.assigned_to];
  const pinned = prefix.pinned ? (prefix.pinned === true ? ", pinned" : ", pinned in host memory") : "";
  if (!wanted.length) return "no replica to keep it";
  if (!prefix.full_blocks) return "shorter than a block: nothing of it can be cached";
  if (warm.length === wanted.length) return `warm on ${where(warm)}${pinned}`;
  const whole = prefix.tokens - prefix.partial_tokens;
  return `warm on ${count(warm.length)} of ${plural(wanted.length, "replica")}, ${percent(prefix.computed_tokens, whole * wanted.length)} computed`;
}

const where = (ids) => (ids.length > 3 ? `all ${count(ids.length)} replicas` : ids.join(", "));
