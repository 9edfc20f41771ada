// The hottest prefixes, with their text from where they differ from each other.

import { arrange, compact, count, el, plural, setText } from "./dom.js";

const AT_FIRST = 6;

const more = document.getElementById("more-prefixes");
const list = document.getElementById("prefixes");
const rate = (n) => (n < 10 ? n.toFixed(n < 0.1 ? 2 : 1) : compact(n));

let all = [];
let isShort = true;

more.addEventListener("click", () => {
  isShort = !isShort;
  showPrefixes(all);
});

export function showPrefixes(prefixes) {
  all = prefixes;
  more.hidden = all.length <= AT_FIRST;
  setText(more, isShort ? `Show all ${all.length}` : "Show fewer");
  if (!prefixes.length) {
    arrange(list, [list.querySelector(".none") ?? el("li", "none", "None in the last minute: no two prompts began alike.")]);
    return;
  }
  const most = prefixes[0].tokens_saved_per_s;
  const shown = isShort ? prefixes.slice(0, AT_FIRST) : prefixes;
  arrange(list, shown.map((prefix, i) => row(prefix, most, list.children[i])));
}

function row(prefix, most, before) {
  const item =
    before?.className === "prefix"
      ? before
      : el("li", "prefix", el("p", "saved", el("b"), el("span", "saving", el("span"))), el("p", "words"), el("p", "facts"));
  const [saved, words, facts] = item.children;
  setText(saved.children[0], `${rate(prefix.tokens_saved_per_s)} tokens/s saved`);
  saved.children[1].children[0].style.width = `${(100 * prefix.tokens_saved_per_s) / (most || 1)}%`;
  setText(words, text(prefix));
  const named = prefix.prefix_id === null ? "" : ` · named ${prefix.prefix_id}`;
  const from = prefix.differs_at ? ` · differs from token ${count(prefix.differs_at)}` : "";
  setText(facts, `${plural(prefix.tokens, "token")}${from} · ${rate(prefix.requests_per_s)} requests/s · ${held(prefix.replicas)}${named}`);
  return item;
}

function text(prefix) {
  if (prefix.text === null) return `of tenant ${prefix.tenant}`;
  return `${prefix.differs_at ? "… " : ""}${prefix.differing_text || prefix.text}`;
}

function held(replicas) {
  if (!replicas.length) return "evicted everywhere";
  return `held by ${replicas.length > 3 ? `${count(replicas.length)} replicas` : replicas.join(", ")}`;
}
