// Time chart drawn by uPlot: lines, an area, or stacked bars, with a cursor shared by all charts.

import { clock, day, isMidnight, moment } from "./format.js";
import { button, make } from "/static/dom.js";

const HEIGHT = 168;
const LEFT = 46;
const CHARACTER = 6.2;
const MIN_DRAG = 8;
const MIN_ZOOM_S = 10;
const DAY_S = 86_400;
const FONT = "11px sans-serif";
const OUTSIDE = { left: -10, top: -10 };
const FILL_ALPHA = "21"; // hexadecimal, appended to #rrggbb

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * Panel with a chart. `series` are `{key, label, hue}` from the lowest up; `hue` is a page colour
 * that replaces the default of the series' place. `kind` is "line", "area" (lines, the first one
 * filled), "stack" or "bars" (both stacked). `format` makes text of a value and takes the number of
 * digits for the axis. `note` explains the figures. `onSave` saves the displayed rows. `onZoom(from,
 * to)` is called with a selected time range, in Unix seconds. `former` is the key of the series that
 * is also drawn dashed for an earlier range; for stacked series it is their sum.
 */
export class Chart {
  constructor({ title, unit, series, kind = "line", format, onZoom, most = null, note = "", onSave, former = series[0]?.key }) {
    this.series = series;
    this.formerKey = former;
    this.former = null;
    this.kind = kind;
    this.format = format;
    this.onZoom = onZoom;
    this.most = most;
    this.rows = [];
    this.from = 0;
    this.to = 1;
    this.step = 1;
    this.unit = make("span", { class: "unit" }, unit);
    this.legend = make("dl", { class: "legend" });
    this.nothing = make("p", { class: "nothing" }, "Nothing in this range");
    this.when = make("p", { class: "when", hidden: true });
    this.spoken = make("p", { class: "spoken", "aria-live": "polite" });
    this.plot = make(
      "div",
      {
        class: "plot",
        tabIndex: 0,
        role: "group",
        "aria-roledescription": "chart",
        "aria-label": `${title}, ${unit}. Arrow keys read it step by step.`,
      },
      this.nothing,
      this.when,
    );
    const heading = make("h3", note ? { title: note } : {}, title, this.unit);
    const head = make("header", { class: "head" }, heading, this.legend, saveButton(title, onSave));
    this.panel = make("section", { class: "panel" }, head, this.plot, this.spoken);
    this.plot.addEventListener("keydown", (event) => this.#keyed(event));
    this.plot.addEventListener("blur", () => this.#point(OUTSIDE));
    new ResizeObserver(() => this.draw()).observe(this.plot);
    document.addEventListener("themechange", () => this.drawn?.redraw());
    this.#drawLegend();
  }

  /**
   * Show rows with their time `t`, over a range in steps, all in Unix seconds. `former` is `{rows,
   * shift, words}` of a range that began `shift` seconds earlier, or null.
   */
  update(rows, { from, to, step }, series = this.series, former = null) {
    const names = (all, one) => `${all.map(({ key }) => key).join()} ${one?.words ?? ""}`;
    const changed = names(series, former) !== names(this.series, this.former);
    this.series = series;
    this.former = former;
    if (changed) {
      this.drawn?.destroy();
      this.drawn = null;
      this.#drawLegend();
    }
    this.rows = rows.filter((row) => row.t >= from - step && row.t < to);
    Object.assign(this, { from, to, step });
    this.nothing.hidden = this.rows.length > 0 || Boolean(former?.rows.length);
    this.draw();
    this.#readOut();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (width === 0) return;
    this.drawn ??= new uPlot(this.#options(width), null, this.plot);
    if (this.drawn.width !== width) this.drawn.setSize({ width, height: HEIGHT });
    this.drawn.setData(this.#data());
  }

  get stacked() {
    return this.kind === "stack" || this.kind === "bars";
  }

  /**
   * Return times in the middle of their steps, then a line for each series. Of stacked series the
   * topmost comes first, so that lower ones are drawn over it.
   */
  #data() {
    this.steps = this.#steps();
    const { steps } = this;
    this.before = this.former && this.#before(steps);
    const below = steps.map(() => 0);
    const lines = this.series.map(({ key }) =>
      steps.map((row, i) => {
        if (!this.stacked) return row[key] ?? null;
        below[i] += row[key] ?? 0;
        return Object.keys(row).length > 1 ? below[i] : null;
      }),
    );
    const times = steps.map(({ t }) => t + this.step / 2);
    const drawn = [...(this.stacked ? lines.reverse() : lines), ...(this.before ? [this.before] : [])];
    // With an empty line, uPlot's own scale may not cover the other lines: compute the maximum here.
    this.highest = Math.max(0, ...drawn.flat().filter((value) => value !== null));
    return [times, ...drawn];
  }

  /** Return the values `shift` seconds before each step, to within half a step. */
  #before(steps) {
    const { rows, shift } = this.former;
    const place = (t) => Math.round(t / this.step);
    const value = (row) => (this.stacked ? this.#sum(row) : (row[this.formerKey] ?? null));
    const byPlace = new Map(rows.map((row) => [place(row.t + shift), value(row)]));
    return steps.map(({ t }) => byPlace.get(place(t)) ?? null);
  }

  #sum({ t: _, ...values }) {
    return Object.values(values).reduce((sum, value) => sum + (typeof value === "number" ? value : 0), 0);
  }

  /**
   * Return the rows, with `{t}` for each step without a row, so that gaps are not drawn as straight
   * lines.
   */
  #steps() {
    const { rows, from, to, step } = this;
    if (rows.length === 0 && this.former?.rows.length) {
      return Array.from({ length: Math.ceil((to - from) / step) }, (_, i) => ({ t: from + i * step }));
    }
    if (rows.length === 0) return [{ t: from }, { t: to }];
    const [first, last] = [rows[0].t, rows.at(-1).t];
    const numBefore = Math.max(1, Math.ceil((first - from) / step));
    const numAfter = Math.max(1, Math.ceil((to - last) / step));
    const steps = [{ t: first - numBefore * step }];
    for (const row of [...rows, { t: last + numAfter * step }]) {
      while (row.t - steps.at(-1).t > 1.5 * step) steps.push({ t: steps.at(-1).t + step });
      steps.push(row);
    }
    return steps;
  }

  #options(width) {
    const order = [...this.series.keys()];
    if (this.stacked) order.reverse();
    const count = order.length;
    return {
      width,
      height: HEIGHT,
      padding: [10, 10, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        sync: { key: "charts", scales: ["x", null], filters: { pub: (type) => type === "mousemove" } },
        drag: { x: true, y: false, setScale: false, dist: MIN_DRAG },
        points: this.kind === "bars" ? { show: false } : { size: 7 },
      },
      scales: {
        x: { range: () => [this.from, this.to] },
        y: { range: () => [0, this.most ?? (this.highest > 0 ? uPlot.rangeNum(0, this.highest, 0.1, true)[1] : 1)] },
      },
      axes: [this.#timeAxis(), this.#valueAxis()],
      series: [{}, ...order.map((place) => this.#line(place)), ...(this.former ? [formerLine()] : [])],
      bands: this.kind === "stack" ? order.slice(1).map((_, i) => ({ series: [i + 1, i + 2] })) : [],
      hooks: { setCursor: [() => this.#readOut()], setSelect: [(plot) => this.#selected(plot)] },
    };
  }

  #line(place) {
    const hue = () => colour(`--s${this.#hue(place)}`);
    const shade = () => hue() + FILL_ALPHA;
    if (this.kind === "bars") {
      return { stroke: hue, fill: hue, width: 0, paths: uPlot.paths.bars({ size: [0.9] }), points: { show: false } };
    }
    const isFilled = this.kind === "stack" || (this.kind === "area" && place === 0);
    return { stroke: hue, fill: isFilled ? shade : undefined, width: 1.6, points: { show: true, size: 4, fill: hue, filter: lonely } };
  }

  #timeAxis() {
    const values = (_plot, times, _axis, _space, step) => {
      const range = this.to - this.from;
      const isDay = (time) => step >= DAY_S || (range > DAY_S && isMidnight(time));
      const isCut = (time) => this.to - time < 0.03 * range;
      const label = (time) => (isDay(time) ? day(time, range) : clock(time, step < 60));
      return times.map((time) => (isCut(time) ? "" : label(time)));
    };
    const line = () => colour("--faint");
    return { font: FONT, stroke: () => colour("--soft"), size: 22, gap: 2, space: 84, values, grid: { show: false }, ticks: { stroke: line, size: 4, width: 1 } };
  }

  #valueAxis() {
    const values = (_plot, ticks, _axis, _space, step) => ticks.map((tick) => (this.rows.length ? this.format(tick, decimals(step)) : ""));
    const size = (_plot, labels) => Math.max(LEFT, ...(labels ?? []).map((label) => label.length * CHARACTER + 16));
    return { font: FONT, stroke: () => colour("--soft"), size, gap: 8, space: 32, values, ticks: { show: false }, grid: { stroke: () => (this.rows.length ? colour("--line") : "transparent"), width: 1 } };
  }

  /** Show the values at the shared cursor, or the latest values without a cursor. */
  #readOut() {
    const { left, idx } = this.drawn?.cursor ?? OUTSIDE;
    const pointed = left >= 0 ? (this.steps[idx] ?? null) : null;
    const row = pointed ?? this.rows.at(-1);
    this.values.forEach((value, i) => {
      value.textContent = this.format(row?.[this.series[i].key] ?? null);
    });
    if (this.former) this.formerValue.textContent = this.format(this.before?.[pointed ? idx : this.#latest()] ?? null);
    this.when.hidden = !pointed;
    if (!pointed) return;
    this.when.textContent = moment(pointed.t, this.to - this.from);
    const half = this.when.offsetWidth / 2;
    const x = this.drawn.over.offsetLeft + left;
    this.when.style.left = `${Math.min(Math.max(x, half), this.plot.clientWidth - half)}px`;
  }

  /** Return the last step with data. */
  #latest() {
    const last = this.rows.at(-1);
    return last ? this.steps.indexOf(last) : (this.before?.findLastIndex((value) => value !== null) ?? -1);
  }

  #hue(place) {
    return this.series[place].hue ?? place;
  }

  #drawLegend() {
    this.values = this.series.map(() => make("dd"));
    this.formerValue = make("dd");
    const entry = (swatch, label, value) => make("div", { class: "key" }, make("dt", {}, make("span", { class: `swatch ${swatch}` }), label), value);
    this.legend.replaceChildren(
      ...this.series.map(({ label }, i) => entry(`s${this.#hue(i)}`, label, this.values[i])),
      ...(this.former ? [entry("former", this.#formerLabel(), this.formerValue)] : []),
    );
  }

  #formerLabel() {
    const one = this.series.find(({ key }) => key === this.formerKey);
    const what = this.series.length === 1 || !one ? "" : this.stacked ? "all, " : `${one.label}, `;
    return `${what}${this.former.words}`;
  }

  #selected(plot) {
    const { left, width } = plot.select;
    if (width < MIN_DRAG) return;
    const [low, high] = [left, left + width].map((place) => plot.posToVal(place, "x"));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.onZoom(Math.floor(low), Math.ceil(Math.max(high, low + MIN_ZOOM_S)));
  }

  /** Move the cursor in this chart and in the charts that share it. */
  #point(place) {
    this.drawn?.setCursor(place, true, true);
  }

  /** Move the cursor by arrow keys and announce the values. */
  #keyed(event) {
    if (event.key === "Escape") this.#point(OUTSIDE);
    const last = this.rows.length - 1;
    const pointed = this.when.hidden ? null : this.rows.indexOf(this.steps[this.drawn.cursor.idx]);
    const next = { ArrowLeft: (pointed ?? last + 1) - 1, ArrowRight: (pointed ?? -1) + 1, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    const row = this.rows[Math.min(last, Math.max(0, next))];
    this.#point({ left: this.drawn.valToPos(row.t + this.step / 2, "x"), top: 10 });
    const values = this.series.map(({ key, label }) => `${label} ${this.format(row[key] ?? null)}`);
    if (this.former) values.push(`${this.#formerLabel()} ${this.formerValue.textContent}`);
    this.spoken.textContent = `${moment(row.t, this.to - this.from)}: ${values.join(", ")}`;
  }
}

/** Return the line of an earlier range. */
function formerLine() {
  const hue = () => colour("--soft");
  return { stroke: hue, width: 1.4, dash: [5, 4], points: { show: true, size: 4, fill: hue, filter: lonely } };
}

/** Return the indices of values without a neighbour, since a line of one point is invisible. */
function lonely(plot, line) {
  const values = plot.data[line];
  return [...values.keys()].filter((i) => values[i] !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null);
}

/** Return the number of digits after the decimal point. */
function decimals(value) {
  const [mantissa, exponent] = String(value).split("e-");
  return (mantissa.split(".")[1] ?? "").length + Number(exponent ?? 0);
}

/** Return a button that saves the rows of a panel. */
export function saveButton(title, onSave) {
  const words = `Save “${title}” as a CSV file`;
  return button("CSV", onSave, { class: "save", title: words, "aria-label": words });
}
