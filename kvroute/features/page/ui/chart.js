// One chart: lines over time in SVG, with axes, and values under the pointer or the arrow keys.

import { el, setText } from "./dom.js";
import { explain } from "./tips.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 128; // pixels, with the axes
const TOP = 8, RIGHT = 10, BOTTOM = 20, LEFT = 50;
const SHORTEST_S = 300; // time that the axis covers at least
const STEPS_S = [60, 120, 300, 600, 900, 1800];
const DOT = 3; // pixels, the radius of a value without neighbours
const LABEL = 58; // pixels of a label of the time axis
const clock = (s) => new Date(1000 * s).toLocaleTimeString("en-GB");

/** A chart has a title, an explanation, lines, a format of its values, and maybe the highest value of its axis. */
export class Chart {
  constructor({ title, about, lines, format, top, least = 0 }) {
    Object.assign(this, { title, lines, format, top, least });
    this.times = [];
    this.cursor = null; // index of the sample under the pointer
    const tip = el("button", "tip", "?");
    tip.type = "button";
    tip.setAttribute("aria-label", `About ${title}`);
    this.legend = el("p", "values");
    this.svg = svg("svg", { role: "slider", tabindex: 0, "aria-label": `${title}, over time` });
    this.element = el("figure", "chart", el("figcaption", "head", el("h3", "", title), tip), this.legend, this.svg);
    explain(tip, about);
    this.listen();
  }

  listen() {
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("blur", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => {
      const last = this.times.length - 1;
      const at = this.cursor ?? last;
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last, PageUp: at + 30, PageDown: at - 30 }[event.key];
      if (to === undefined || last < 0) return;
      event.preventDefault();
      this.move(Math.min(last, Math.max(0, to)));
    });
  }

  show(samples) {
    this.times = samples.at_s;
    this.rows = this.lines.map((line) => this.times.map((_, i) => line.value(samples, i)));
    if (this.cursor >= this.times.length) this.cursor = null;
    this.draw();
  }

  draw() {
    this.width = this.svg.clientWidth;
    if (!this.width || !this.times) return;
    const end = this.times.at(-1) ?? Date.now() / 1000;
    const begin = Math.min(this.times[0] ?? end, end - SHORTEST_S);
    const highest = this.top ?? nice(Math.max(this.least, ...this.rows.flat().filter((value) => value !== null)));
    this.x = (s) => LEFT + ((this.width - LEFT - RIGHT) * (s - begin)) / (end - begin);
    this.y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / highest);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.mark = svg("path", { class: "cursor" });
    this.svg.replaceChildren(...this.valueAxis(highest), ...this.timeAxis(begin, end), ...this.paths(), this.mark);
    this.move(this.cursor);
  }

  valueAxis(highest) {
    return [0, highest / 2, highest].flatMap((value) => [
      svg("path", { class: "rule", d: `M${LEFT} ${this.y(value)}H${this.width - RIGHT}` }),
      svg("text", { x: LEFT - 6, y: this.y(value) + 4, class: "value" }, this.format(value)),
    ]);
  }

  timeAxis(begin, end) {
    const room = (this.width - LEFT - RIGHT) / LABEL;
    const step = STEPS_S.find((s) => (end - begin) / s <= room) ?? 3600;
    const ticks = [];
    for (let s = 0; s <= end - begin; s += step) ticks.push(s);
    return ticks.map((ago) => {
      const anchor = ago ? "middle" : "end";
      return svg("text", { x: this.x(end - ago) + (ago ? 0 : RIGHT), y: HEIGHT - 5, class: anchor }, ago ? `−${ago / 60} min` : "now");
    });
  }

  paths() {
    return this.rows.flatMap((values, i) => {
      const parts = values.map((value, at) => {
        if (value === null) return "";
        const place = `${this.x(this.times[at]).toFixed(1)} ${this.y(value).toFixed(1)}`;
        return (values[at - 1] ?? null) === null ? `M${place}` : `L${place}`;
      });
      return [svg("path", { class: `line line-${i}`, d: parts.join("") }), ...this.dots(values, i)];
    });
  }

  /** A value without a neighbour has no line, so a dot shows it. */
  dots(values, i) {
    const isAlone = (at) => values[at] !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null;
    return values.flatMap((value, at) =>
      isAlone(at) ? [svg("circle", { class: `dot dot-${i}`, cx: this.x(this.times[at]), cy: this.y(value), r: DOT })] : [],
    );
  }

  point(x) {
    const distance = (i) => Math.abs(this.x(this.times[i]) - x);
    const all = [...this.times.keys()];
    this.move(all.length ? all.reduce((best, i) => (distance(i) < distance(best) ? i : best)) : null);
  }

  move(cursor) {
    this.cursor = cursor;
    const at = cursor ?? this.times.length - 1;
    if (this.mark) this.mark.setAttribute("d", cursor === null ? "" : `M${this.x(this.times[at])} ${TOP}V${HEIGHT - BOTTOM}`);
    const shown = this.lines.map((line, i) => [line, this.rows?.[i][at] ?? null, i]).filter(([, , i]) => this.isKnown(i));
    const words = shown.map(([line, value]) => `${line.name} ${value === null ? "none" : this.format(value)}`);
    const when = at < 0 ? "" : cursor === null ? "now" : clock(this.times[at]);
    for (const [name, value] of Object.entries({ min: 0, max: Math.max(0, this.times.length - 1), now: Math.max(0, at), text: `${when}: ${words.join(", ")}` }))
      this.svg.setAttribute(`aria-value${name}`, value);
    this.showLegend(shown, at < 0 ? "the first values come within 10 seconds" : when);
  }

  showLegend(shown, when) {
    const parts = shown.map(([line, value, i]) =>
      el("span", "", el("span", `swatch swatch-${i}`), `${line.name} `, el("b", "", value === null ? "–" : this.format(value))),
    );
    const time = el("span", "when");
    setText(time, when);
    this.legend.replaceChildren(...parts, time);
  }

  /** Says whether the line has a value at all: replicas have no queue. */
  isKnown(i) {
    return !this.lines[i].isOptional || this.rows?.[i].some((value) => value !== null);
  }
}

/** The next number of the form 1, 2, 4, 6 or 10 times a power of ten, so that its half is short too. */
function nice(highest) {
  const power = 10 ** Math.floor(Math.log10(highest || 1));
  return [1, 2, 4, 6, 10].map((each) => each * power).find((each) => each >= highest * 0.999);
}

function svg(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}
