// A time chart in SVG: lines, an area, or stacked bars; axes, and a read-out that all charts share.

import { make } from "./dom.js";
import { clock, day, isMidnight, moment } from "./format.js";
import { decimals, timeTicks, valueTicks } from "./scale.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 168;
const MARGIN = { top: 10, right: 10, bottom: 22 };
const LEFT = 46;
const CHARACTER = 6.2;
const MIN_DRAG = 8;
const MIN_ZOOM_S = 10;

function svg(name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** All charts that point at the same moment; `onZoom` takes a stretch of time that was drawn. */
export class Cursor {
  #charts = new Set();
  time = null;
  onZoom = () => {};

  join(chart) {
    this.#charts.add(chart);
  }

  point(time) {
    if (time === this.time) return;
    this.time = time;
    for (const chart of this.#charts) chart.showCursor();
  }
}

/**
 * One panel. `series` are `{key, label, hue}` in the order that they are drawn, `hue` one of the
 * page's colours if it is not that of their place; `kind` is "line", "area"
 * (lines with the first one filled), "stack" or "bars" (both stacked). `format` makes
 * a value text; the axis asks it for as many digits as its finest tick has. `note` is what is known
 * of the figures themselves; `onSave` saves what is shown.
 */
export class Chart {
  constructor({ title, unit, series, kind = "line", format, cursor, most = null, note = "", onSave = null }) {
    this.series = series;
    this.kind = kind;
    this.format = format;
    this.cursor = cursor;
    this.most = most;
    this.rows = [];
    this.from = 0;
    this.to = 1;
    this.step = 1;
    this.left = LEFT;
    this.pressedAt = null;
    this.title = title;
    this.panel = make("section", "panel");
    this.unit = make("span", "unit", unit);
    this.heading = make("h3", "", title, this.unit);
    if (note) this.heading.title = note;
    this.legend = make("dl", "legend");
    this.plot = make("div", "plot");
    this.nothing = make("p", "nothing", "Nothing in this range");
    this.spoken = make("p", "spoken");
    this.spoken.setAttribute("aria-live", "polite");
    this.svg = svg("svg", { "aria-hidden": "true", height: HEIGHT });
    this.plot.append(this.svg, this.nothing);
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "group");
    this.plot.setAttribute("aria-roledescription", "chart");
    this.plot.setAttribute("aria-label", `${title}, ${unit}. Arrow keys read it step by step.`);
    this.panel.append(make("header", "head", this.heading, this.legend), this.plot, this.spoken);
    if (onSave) this.panel.firstChild.append(saveButton(title, onSave));
    this.plot.addEventListener("pointermove", (event) => this.#pointed(event));
    this.plot.addEventListener("pointerleave", () => this.#left());
    this.plot.addEventListener("pointerdown", (event) => this.#pressed(event));
    this.plot.addEventListener("pointerup", (event) => this.#released(event));
    this.plot.addEventListener("keydown", (event) => this.#keyed(event));
    this.plot.addEventListener("blur", () => this.cursor.point(null));
    new ResizeObserver(() => this.draw()).observe(this.plot);
    cursor.join(this);
    this.#drawLegend();
  }

  /** Show these rows, each with its time `t`, over a range in steps; all in Unix seconds. */
  update(rows, { from, to, step }, series = this.series) {
    const changed = series.map((one) => one.key).join() !== this.series.map((one) => one.key).join();
    this.series = series;
    if (changed) this.#drawLegend();
    this.rows = rows.filter((row) => row.t >= from - step && row.t < to);
    Object.assign(this, { from, to, step });
    this.draw();
  }

  get stacked() {
    return this.kind === "stack" || this.kind === "bars";
  }

  draw() {
    const width = this.plot.clientWidth;
    if (width === 0) return;
    this.width = width;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("width", width);
    this.svg.replaceChildren();
    const ticks = valueTicks(this.most ?? this.#highest());
    this.top = ticks[ticks.length - 1];
    const digits = Math.max(...ticks.map(decimals));
    const labels = ticks.map((tick) => this.format(tick, digits));
    this.left = Math.max(LEFT, Math.max(...labels.map((label) => label.length)) * CHARACTER + 16);
    this.#drawAxes(ticks, labels);
    const marks = svg("g", { class: "marks" });
    this.svg.append(marks);
    if (this.kind === "bars") this.#drawBars(marks);
    else if (this.kind === "stack") this.#drawStack(marks);
    else this.#drawLines(marks);
    this.line = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    this.dots = this.series.map((_, i) => svg("circle", { class: `dot ${this.#hue(i)}`, r: 3.5 }));
    this.when = svg("text", { class: "when", y: HEIGHT - 6 });
    this.whenBack = svg("rect", { class: "when-back", y: HEIGHT - 19, height: 18, rx: 4 });
    this.stretch = svg("rect", { class: "stretch", y: MARGIN.top, height: HEIGHT - MARGIN.top - MARGIN.bottom, hidden: "" });
    this.svg.append(this.stretch, this.line, ...this.dots, this.whenBack, this.when);
    const empty = this.rows.length === 0;
    this.nothing.hidden = !empty;
    this.panel.classList.toggle("is-empty", empty);
    this.showCursor();
  }

  /** Read out the values at the shared cursor; the latest when nobody points. */
  showCursor() {
    if (!this.line) return;
    const pointed = this.cursor.time === null ? null : this.#rowAt(this.cursor.time);
    const row = pointed ?? this.rows[this.rows.length - 1] ?? null;
    this.values.forEach((value, i) => {
      const number = row?.[this.series[i].key];
      value.textContent = this.format(number ?? null);
    });
    const visible = pointed !== null;
    for (const part of [this.line, this.when, this.whenBack]) part.toggleAttribute("hidden", !visible);
    let below = 0;
    this.dots.forEach((dot, i) => {
      const number = pointed?.[this.series[i].key];
      const there = number !== undefined && number !== null;
      dot.toggleAttribute("hidden", !visible || !there || this.kind === "bars");
      if (!visible || !there) return;
      below = this.stacked ? below + number : number;
      dot.setAttribute("cx", this.#x(pointed.t + this.step / 2));
      dot.setAttribute("cy", this.#y(below));
    });
    if (!visible) return;
    const x = this.#x(pointed.t + this.step / 2);
    this.line.setAttribute("x1", x);
    this.line.setAttribute("x2", x);
    this.when.textContent = this.#nameOf(pointed);
    const half = this.when.textContent.length * 3.3 + 7;
    const middle = Math.min(Math.max(x, this.left + half - 6), this.width - half - 1);
    this.when.setAttribute("x", middle);
    this.whenBack.setAttribute("x", middle - half);
    this.whenBack.setAttribute("width", 2 * half);
  }

  #highest() {
    const sum = (row) => this.series.reduce((total, { key }) => total + (row[key] ?? 0), 0);
    const max = (row) => Math.max(...this.series.map(({ key }) => row[key] ?? 0));
    return Math.max(0, ...this.rows.map(this.stacked ? sum : max));
  }

  /** The class that gives a series its colour. */
  #hue(i) {
    return `s${this.series[i].hue ?? i}`;
  }

  #x(time) {
    const inner = this.width - this.left - MARGIN.right;
    return this.left + ((time - this.from) / (this.to - this.from)) * inner;
  }

  #y(value) {
    const inner = HEIGHT - MARGIN.top - MARGIN.bottom;
    return MARGIN.top + (1 - value / this.top) * inner;
  }

  #drawAxes(ticks, labels) {
    const axes = svg("g", { class: "axes" });
    ticks.forEach((tick, i) => {
      const y = Math.round(this.#y(tick)) + 0.5;
      axes.append(svg("line", { class: tick === 0 ? "base" : "grid", x1: this.left, x2: this.width - MARGIN.right, y1: y, y2: y }));
      const label = svg("text", { class: "y", x: this.left - 8, y: y + 3.5 });
      label.textContent = labels[i];
      axes.append(label);
    });
    const { step, ticks: times } = timeTicks(this.from, this.to, Math.max(2, Math.floor(this.width / 84)));
    for (const time of times) {
      const x = this.#x(time);
      if (x < this.left + 12 || x > this.width - MARGIN.right - 14) continue;
      const label = svg("text", { class: "x", x, y: HEIGHT - 6 });
      label.textContent = step >= 86_400 || (this.to - this.from > 86_400 && isMidnight(time)) ? day(time, this.to - this.from) : clock(time, step < 60);
      axes.append(svg("line", { class: "tick", x1: x, x2: x, y1: HEIGHT - MARGIN.bottom, y2: HEIGHT - MARGIN.bottom + 4 }), label);
    }
    this.svg.append(axes);
  }

  #drawLines(marks) {
    this.series.forEach(({ key }, i) => {
      const runs = this.#runs(key);
      if (i === 0 && this.kind === "area") {
        for (const run of runs) {
          const last = run[run.length - 1][0];
          marks.append(svg("path", { class: `fill ${this.#hue(i)}`, d: `${path(run)}L${last} ${this.#y(0)}L${run[0][0]} ${this.#y(0)}Z` }));
        }
      }
      for (const run of runs) {
        if (run.length === 1) marks.append(svg("circle", { class: `point ${this.#hue(i)}`, cx: run[0][0], cy: run[0][1], r: 2 }));
        else marks.append(svg("path", { class: `stroke ${this.#hue(i)}`, d: path(run) }));
      }
    });
  }

  /** Points of one series, cut where a step is missing: a gap is not a straight line. */
  #runs(key) {
    const runs = [];
    let before = -Infinity;
    for (const row of this.rows) {
      if (row[key] === null || row[key] === undefined) continue;
      if (row.t - before > 1.5 * this.step) runs.push([]);
      runs[runs.length - 1].push([round(this.#x(row.t + this.step / 2)), round(this.#y(row[key]))]);
      before = row.t;
    }
    return runs;
  }

  /** Layers on one another; the line of a lower one is drawn over those of thin ones upon it. */
  #drawStack(marks) {
    const below = this.rows.map(() => 0);
    this.series.forEach(({ key }, i) => {
      const floor = this.rows.map((row, n) => [round(this.#x(row.t + this.step / 2)), round(this.#y(below[n]))]);
      this.rows.forEach((row, n) => { below[n] += row[key] ?? 0; });
      const roof = this.rows.map((row, n) => [round(this.#x(row.t + this.step / 2)), round(this.#y(below[n]))]);
      const some = this.rows.some((row) => row[key] > 0);
      if (roof.length < 2 || (i > 0 && !some)) return;
      const fill = svg("path", { class: `fill ${this.#hue(i)}`, d: `${path(roof)}L${path(floor.reverse()).slice(1)}Z` });
      marks.prepend(fill, svg("path", { class: `stroke ${this.#hue(i)}`, d: path(roof) }));
    });
  }

  #drawBars(marks) {
    for (const row of this.rows) {
      const left = Math.max(this.#x(row.t) + 1, this.left);
      const right = Math.min(this.#x(row.t + this.step) - 1, this.width - MARGIN.right);
      let below = 0;
      this.series.forEach(({ key }, i) => {
        const value = row[key] ?? 0;
        if (value <= 0 || right <= left) return;
        const y = this.#y(below + value);
        marks.append(svg("rect", { class: `bar ${this.#hue(i)}`, x: round(left), y: round(y), width: round(right - left), height: round(this.#y(below) - y) }));
        below += value;
      });
    }
  }

  #drawLegend() {
    this.values = this.series.map(() => make("dd"));
    this.legend.replaceChildren(
      ...this.series.map(({ label }, i) => make("div", "key", make("dt", "", make("span", `swatch ${this.#hue(i)}`), label), this.values[i])),
    );
  }

  #timeAt(event) {
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    const share = (x - this.left) / (this.width - this.left - MARGIN.right);
    return { share, time: this.from + Math.min(1, Math.max(0, share)) * (this.to - this.from) };
  }

  #pointed(event) {
    const { share, time } = this.#timeAt(event);
    this.cursor.point(share >= 0 && share <= 1 ? time : null);
    if (this.pressedAt === null || !this.stretch) return;
    const [low, high] = [this.pressedAt, time].sort((a, b) => a - b);
    this.stretch.toggleAttribute("hidden", this.#x(high) - this.#x(low) < MIN_DRAG);
    this.stretch.setAttribute("x", this.#x(low));
    this.stretch.setAttribute("width", this.#x(high) - this.#x(low));
  }

  #left() {
    this.pressedAt = null;
    this.stretch?.setAttribute("hidden", "");
    this.cursor.point(null);
  }

  /** A mouse may draw a stretch of time to look at; a finger scrolls the page. */
  #pressed(event) {
    if (event.pointerType !== "mouse" || event.button !== 0) return;
    event.preventDefault();
    this.plot.focus({ preventScroll: true });
    this.pressedAt = this.#timeAt(event).time;
  }

  #released(event) {
    const begun = this.pressedAt;
    this.pressedAt = null;
    this.stretch?.setAttribute("hidden", "");
    if (begun === null) return;
    const [low, high] = [begun, this.#timeAt(event).time].sort((a, b) => a - b);
    if (this.#x(high) - this.#x(low) < MIN_DRAG) return;
    this.cursor.onZoom(Math.floor(low), Math.ceil(Math.max(high, low + MIN_ZOOM_S)));
  }

  /** Arrow keys go from step to step and say what is there. */
  #keyed(event) {
    if (event.key === "Escape") this.cursor.point(null);
    const last = this.rows.length - 1;
    const now = this.cursor.time === null ? null : this.rows.indexOf(this.#rowAt(this.cursor.time));
    const next = { ArrowLeft: (now ?? last + 1) - 1, ArrowRight: (now ?? -1) + 1, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    const row = this.rows[Math.min(last, Math.max(0, next))];
    this.cursor.point(row.t + this.step / 2);
    const values = this.series.map(({ key, label }) => `${label} ${this.format(row[key] ?? null)}`);
    this.spoken.textContent = `${this.#nameOf(row)}: ${values.join(", ")}`;
  }

  #nameOf(row) {
    return moment(row.t, this.to - this.from);
  }

  /** The row whose step holds a moment, or the nearest within a step of it. */
  #rowAt(time) {
    let nearest = null;
    for (const row of this.rows) {
      const distance = Math.abs(row.t + this.step / 2 - time);
      if (distance <= this.step && (nearest === null || distance < Math.abs(nearest.t + this.step / 2 - time))) nearest = row;
    }
    return nearest;
  }
}

/** A button that saves what a panel shows. */
export function saveButton(title, onSave) {
  const button = make("button", "save", "CSV");
  button.type = "button";
  button.title = `Save “${title}” as a CSV file`;
  button.setAttribute("aria-label", button.title);
  button.addEventListener("click", onSave);
  return button;
}

const round = (value) => Math.round(value * 10) / 10;
const path = (points) => `M${points.map(([x, y]) => `${x} ${y}`).join("L")}`;
