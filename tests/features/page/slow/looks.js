// What tests measure of the live page in a browser. Each function returns what is wrong.

/** Texts with less contrast than WCAG's level AA requires, each with its ratio. */
function paleTexts() {
  const pale = [];
  for (const element of document.querySelectorAll("body *")) {
    const words = [...element.childNodes].filter((node) => node.nodeType === 3 && node.data.trim());
    if (!words.length || !element.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(element);
    const ratio = contrast(element.closest("svg") ? style.fill : style.color, behind(element));
    const isLarge = parseFloat(style.fontSize) >= 24;
    if (ratio < (isLarge ? 3 : 4.5)) pale.push(`${words[0].data.trim()} ${ratio.toFixed(2)}`);
  }
  return pale;
}

/** Ratios of the charts' lines that have too little contrast with the card behind them. */
function paleLines() {
  return [...document.querySelectorAll(".line")]
    .map((line) => contrast(getComputedStyle(line).stroke, behind(line)))
    .filter((ratio) => ratio < 3);
}

/** The colour that is behind an element's text or line. */
function behind(element) {
  for (let parent = element; parent; parent = parent.parentElement) {
    const color = getComputedStyle(parent).backgroundColor;
    if (!color.endsWith(", 0)") && color !== "transparent") return color;
  }
  return "rgb(255, 255, 255)";
}

/** The contrast ratio of two colours, as WCAG defines it: from 1 to 21. */
function contrast(color, background) {
  const [low, high] = [luminance(color), luminance(background)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function luminance(color) {
  const parts = color.match(/[\d.]+/g).slice(0, 3).map((part) => part / 255);
  const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Grids whose last row has one card and an empty place beside it. */
function orphans() {
  return ["figures", "charts", "tiles"].filter((id) => {
    const rows = new Map();
    const grid = document.getElementById(id);
    for (const card of grid.children) rows.set(card.offsetTop, (rows.get(card.offsetTop) ?? 0) + 1);
    const isWide = grid.lastElementChild.offsetWidth >= grid.clientWidth - 2;
    return [...rows.values()].at(-1) === 1 && !isWide;
  });
}

/** Boxes with a vertical scroll bar of their own. Only the page itself should have one. */
function scrollBoxes() {
  return [...document.querySelectorAll("main *")]
    .filter((box) => /auto|scroll/.test(getComputedStyle(box).overflowY) && box.scrollHeight > box.clientHeight + 1)
    .map((box) => box.id || box.className);
}

/** The name of the element that has the focus, and whether the focus is visible. */
function focused() {
  const element = document.activeElement;
  const name = element.id || element.getAttribute("aria-label") || element.textContent.trim().slice(0, 30);
  return { name: `${element.tagName.toLowerCase()} ${name}`, isSeen: getComputedStyle(element).outlineStyle !== "none" };
}

/** Whether the open explanations are inside the window and wide enough to read. */
const tipsFit = () =>
  [...document.querySelectorAll(".tooltip:not([hidden])")].every((tip) => {
    const { left, right, top, bottom, width, height } = tip.getBoundingClientRect();
    return left >= 0 && right <= innerWidth && top >= 0 && bottom <= innerHeight && width > height / 2;
  });

const openTips = () => [...document.querySelectorAll(".tooltip:not([hidden])")].map((tip) => tip.textContent);

/** The labels of each chart's axes, by its title. */
const axes = () =>
  Object.fromEntries(
    [...document.querySelectorAll(".chart")].map((chart) => [
      chart.querySelector("h3").textContent,
      [...chart.querySelectorAll("text")].map((label) => label.textContent),
    ]),
  );
