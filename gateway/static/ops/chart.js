// A time chart in SVG: lines, an area, or stacked bars; axes, and a read-out that all charts share.

import { clock, day, isMidnight } from "./format.js";
import { decimals, timeTicks, valueTicks } from "./scale.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 168;
const MARGIN = { top: 10, right: 10, bottom: 22 };
const LEFT = 46;
const CHARACTER = 6.2;

function svg(name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function html(name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

/** All charts that point at the same moment. */
export class Cursor {
  #charts = new Set();
  time = null;

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
 * One panel. `series` are `{key, label}` in the order that they are drawn; `kind` is "line", "area"
 * (lines with the first one filled), "stack" or "bars" (both stacked). `format` makes
 * a value text; the axis asks it for as many digits as its finest tick has.
 */
export class Chart {
  constructor({ title, unit, series, kind = "line", format, cursor, most = null }) {
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
    this.panel = html("section", "panel");
    const head = html("header", "head");
    this.heading = html("h2", "", title);
    this.heading.append(html("span", "unit", unit));
    this.legend = html("dl", "legend");
    head.append(this.heading, this.legend);
    this.plot = html("div", "plot");
    this.nothing = html("p", "nothing", "Nothing in this range");
    this.svg = svg("svg", { role: "img", height: HEIGHT });
    this.svg.setAttribute("aria-label", `${title}, ${unit}`);
    this.plot.append(this.svg, this.nothing);
    this.panel.append(head, this.plot);
    this.plot.addEventListener("pointermove", (event) => this.#pointed(event));
    this.plot.addEventListener("pointerleave", () => this.cursor.point(null));
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
    this.dots = this.series.map((_, i) => svg("circle", { class: `dot s${i}`, r: 3.5 }));
    this.when = svg("text", { class: "when", y: HEIGHT - 6 });
    this.whenBack = svg("rect", { class: "when-back", y: HEIGHT - 19, height: 18, rx: 4 });
    this.svg.append(this.line, ...this.dots, this.whenBack, this.when);
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
    const long = this.to - this.from > 86_400;
    this.when.textContent = (long ? `${day(pointed.t)} ` : "") + clock(pointed.t, !long);
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
      label.textContent = this.to - this.from > 86_400 && isMidnight(time) ? day(time) : clock(time, step < 60);
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
          marks.append(svg("path", { class: `fill s${i}`, d: `${path(run)}L${last} ${this.#y(0)}L${run[0][0]} ${this.#y(0)}Z` }));
        }
      }
      for (const run of runs) {
        if (run.length === 1) marks.append(svg("circle", { class: `point s${i}`, cx: run[0][0], cy: run[0][1], r: 2 }));
        else marks.append(svg("path", { class: `stroke s${i}`, d: path(run) }));
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

  #drawStack(marks) {
    const below = this.rows.map(() => 0);
    this.series.forEach(({ key }, i) => {
      const floor = this.rows.map((row, n) => [round(this.#x(row.t + this.step / 2)), round(this.#y(below[n]))]);
      this.rows.forEach((row, n) => { below[n] += row[key] ?? 0; });
      const roof = this.rows.map((row, n) => [round(this.#x(row.t + this.step / 2)), round(this.#y(below[n]))]);
      const some = this.rows.some((row) => row[key] > 0);
      if (roof.length < 2 || (i > 0 && !some)) return;
      marks.append(svg("path", { class: `fill s${i}`, d: `${path(roof)}L${path(floor.reverse()).slice(1)}Z` }));
      marks.append(svg("path", { class: `stroke s${i}`, d: path(roof) }));
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
        marks.append(svg("rect", { class: `bar s${i}`, x: round(left), y: round(y), width: round(right - left), height: round(this.#y(below) - y) }));
        below += value;
      });
    }
  }

  #drawLegend() {
    this.values = this.series.map(() => html("dd", ""));
    this.legend.replaceChildren(
      ...this.series.map(({ label }, i) => {
        const item = html("div", "key");
        const term = html("dt", "");
        term.append(html("span", `swatch s${i}`), label);
        item.append(term, this.values[i]);
        return item;
      }),
    );
  }

  #pointed(event) {
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    const share = (x - this.left) / (this.width - this.left - MARGIN.right);
    const inside = share >= 0 && share <= 1;
    this.cursor.point(inside ? this.from + share * (this.to - this.from) : null);
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

const round = (value) => Math.round(value * 10) / 10;
const path = (points) => `M${points.map(([x, y]) => `${x} ${y}`).join("L")}`;
