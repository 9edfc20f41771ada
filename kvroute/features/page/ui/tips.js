// Explanations of buttons, shown on hover, focus and click; Escape closes them.

import { el } from "./dom.js";

const EDGE = 8; // pixels to the window's edge
const LEAVE_MS = 150; // time to move the pointer from the button to the text

let tips = 0;
let shown = null; // the open tip: { button, text }
let closing = 0;

/** Gives the button an explanation that screen readers find too. */
export function explain(button, words) {
  const text = el("span", "tooltip", words);
  text.id = `tip-${++tips}`;
  text.setAttribute("role", "tooltip");
  text.hidden = true;
  button.setAttribute("aria-describedby", text.id);
  document.body.append(text);
  for (const name of ["mouseenter", "focus", "click"]) button.addEventListener(name, () => open(button, text));
  button.addEventListener("mouseleave", close);
  button.addEventListener("blur", hide);
  text.addEventListener("mouseenter", () => clearTimeout(closing));
  text.addEventListener("mouseleave", close);
}

/** Does so for every button of the page that has a data-tip. */
export function explainAll() {
  for (const button of document.querySelectorAll("[data-tip]")) {
    button.setAttribute("aria-label", `About ${button.dataset.about}`);
    explain(button, button.dataset.tip);
  }
}

function open(button, text) {
  clearTimeout(closing);
  hide();
  shown = { button, text };
  text.hidden = false;
  place();
}

// Below the button, or above it where the window ends; also while the page scrolls to the focus.
function place() {
  if (!shown) return;
  const { button, text } = shown;
  text.style.left = "0"; // it is measured with all the width that it may have
  const at = button.getBoundingClientRect();
  const box = text.getBoundingClientRect();
  const { clientWidth, clientHeight } = document.documentElement;
  const isBelow = at.bottom + EDGE + box.height <= clientHeight;
  text.style.left = `${Math.max(EDGE, Math.min(at.left, clientWidth - box.width - EDGE))}px`;
  text.style.top = `${isBelow ? at.bottom + 4 : at.top - box.height - 4}px`;
}

function close() {
  clearTimeout(closing);
  closing = setTimeout(hide, LEAVE_MS);
}

function hide() {
  if (shown) shown.text.hidden = true;
  shown = null;
}

document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
for (const name of ["scroll", "resize"]) addEventListener(name, place, { passive: true });
