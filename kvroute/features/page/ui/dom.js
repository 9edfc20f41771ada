// Elements and numbers. Text from outside becomes text, never markup: nothing here parses HTML.

/** el("p", "class names", child, ...): children are elements, text, or nothing. */
export function el(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets text only where it differs, so that what is selected or read aloud is left in peace. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Puts the elements into the parent in this order, and moves none that is in its place. */
export function arrange(parent, elements) {
  const wanted = new Set(elements);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  elements.forEach((element, i) => {
    if (parent.children[i] !== element) parent.insertBefore(element, parent.children[i] ?? null);
  });
}

/** Gives a grid so many columns that its rows are even, and the last has more than one tile if possible. */
export function layOut(grid, tileWidth) {
  const tiles = grid.children.length;
  const most = Math.max(1, Math.floor(grid.clientWidth / tileWidth));
  let even = Math.max(1, Math.ceil(tiles / Math.ceil(tiles / most)));
  while (even > 2 && tiles % even === 1) even -= 1;
  grid.style.setProperty("--columns", even);
  grid.classList.toggle("odd", even > 1 && tiles % even === 1);
}

/** A bar of parts: [class, share of the whole]. */
export function setBar(bar, parts) {
  parts.forEach(([className, share], i) => {
    const part = bar.children[i] ?? bar.appendChild(el("span", className));
    part.style.width = `${(100 * Math.max(0, share)).toFixed(2)}%`;
  });
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (n) => whole.format(n);
export const compact = (n) => (n < 10000 ? whole.format(n) : short.format(n));
export const plural = (n, noun, many = `${noun}s`) => `${count(n)} ${n === 1 ? noun : many}`;

export function percent(part, total) {
  if (!total) return "–";
  const share = (100 * part) / total;
  if (share > 0 && share < 1) return "<1%";
  if (share > 99 && share < 100) return ">99%";
  return `${Math.round(share)}%`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (Math.abs(s) < 0.00005) return "0 s";
  if (s < 0.0095) return `${(1000 * s).toFixed(1)} ms`;
  if (s < 0.9995) return `${Math.round(1000 * s)} ms`;
  return `${s < 9.95 ? s.toFixed(2) : s.toFixed(0)} s`;
}
