// Charts of the page: queries and series.

import { Chart } from "./chart.js";
import { moneyOf } from "./currencies.js";
import { compact, money } from "./format.js";
import { reasonsOf } from "./refusals.js";
import { byId } from "/static/dom.js";

const PERCENTILES = ["p50", "p95", "p99"];
const MAX_MODELS = 6;
const ALL_TENANTS = "Workers serve all tenants together: the filter by tenant does not apply here.";

const INTERRUPTIONS = [
  { key: "moves", label: "moved", hue: 0 },
  { key: "preemptions", label: "preempted", hue: 2 },
  { key: "shed", label: "shed", hue: 1 },
  { key: "expired", label: "expired", hue: 5 },
  { key: "failed", label: "failed", hue: 4 },
];
const RETURNS = [{ key: "resumes", label: "resumed" }, { key: "stalls", label: "stalled" }];

const DEVICES = [{ key: "busy_cost", label: "busy" }, { key: "idle_cost", label: "idle", hue: 5 }];

const latency = (name) => ({
  series: PERCENTILES.map((label) => ({ key: `${name}_${label}_ms`, label })),
  former: `${name}_p95_ms`,
});

/** All charts, in their sections; `save(query, params)` saves the rows of a chart. */
export class Board {
  constructor(save, onZoom) {
    const chart = (section, query, options) => {
      const made = new Chart({ format: compact, onZoom, onSave: () => save(query, { step_s: made.step }), ...options });
      // Tables come last in their section.
      const table = [...byId(section).children].find((panel) => panel.querySelector("table"));
      byId(section).insertBefore(made.panel, table ?? null);
      return made;
    };
    const traffic = [
      { key: "done_per_s", label: "done" },
      { key: "cancelled_per_s", label: "cancelled", hue: 5 },
      { key: "shed_per_s", label: "shed", hue: 1 },
      { key: "failed_per_s", label: "failed", hue: 4 },
    ];
    const tokens = [
      { key: "output_per_s", label: "output" },
      { key: "prompt_per_s", label: "prompt" },
      { key: "cached_per_s", label: "cached" },
    ];
    this.charts = {
      traffic: chart("traffic", "traffic", { title: "Requests", unit: "per second", kind: "stack", series: traffic, note: "Each request counts at the time of its end." }),
      tokens: chart("traffic", "tokens", { title: "Tokens", unit: "per second", kind: "area", series: tokens, note: "Tokens of requests that ended: output, prompt computed, prompt from the prefix cache." }),
      queue_wait: chart("traffic", "latency", { title: "Time in the queue", unit: "ms", ...latency("queue"), note: "From receipt to the worker's start." }),
      ttft: chart("latency", "latency", { title: "Time to first token", unit: "TTFT, ms", ...latency("ttft"), note: "From receipt to when the worker had the first token; of all requests." }),
      first_byte: chart("latency", "client_latency", { title: "First byte", unit: "at the client, ms", ...latency("first_byte"), note: "Time clients waited, without the network: from the request at the gateway, before it was read, to when the gateway wrote the first token. Of requests over HTTP and WebSocket." }),
      tpot: chart("latency", "latency", { title: "Time per output token", unit: "TPOT, ms", ...latency("tpot"), note: "A request's mean time per token after the first; each request counts once." }),
      itl: chart("latency", "latency", { title: "Between tokens", unit: "ITL, ms", ...latency("itl"), note: "As TPOT, but each token counts once: long answers weigh more." }),
      e2e: chart("latency", "latency", { title: "Whole answer", unit: "E2E, ms", ...latency("e2e"), note: "From receipt to the end, of requests that were answered." }),
      queue: chart("capacity", "workers", { title: "Queue", unit: "requests", kind: "area", series: [{ key: "queued", label: "waiting" }, { key: "running", label: "running" }], note: ALL_TENANTS }),
      batch: chart("capacity", "workers", { title: "Batch", unit: "sequences a worker", kind: "area", series: [{ key: "batch", label: "running" }, { key: "workers", label: "workers" }], note: ALL_TENANTS }),
      kv: chart("capacity", "workers", { title: "Utilisation", unit: "%", kind: "area", most: 100, series: [{ key: "kv_use_percent", label: "KV blocks" }, { key: "busy_percent", label: "device busy" }], note: ALL_TENANTS }),
      runs: chart("reliability", "interruptions", { title: "Interruptions", unit: "requests", kind: "bars", series: INTERRUPTIONS, note: "Attempts continued by another worker, preemptions for lack of KV blocks, and requests that were shed, expired or failed." }),
      refused: chart("refused-requests", "refusals_over_time", { title: "Refused", unit: "requests", kind: "bars", series: [], note: "Requests that were never accepted, by limit or error, with the HTTP status." }),
      delivery: chart("reliability", "interruptions", { title: "Seen by clients", unit: "times", kind: "bars", series: RETURNS, note: "Resumed streams, and gaps of a second or more between tokens." }),
    };
    const inCurrency = (currency) => ({ unit: currency, kind: "bars", format: (value, digits) => money(value, currency, digits) });
    this.moneyCharts = new Map();
    this.makeMoneyCharts = (currency) => ({
      cost: chart("cost", "cost_by_model", { title: "Tenants pay", series: [], ...inCurrency(currency) }),
      devices: chart("cost", "device_cost", { title: "Devices cost", series: DEVICES, note: ALL_TENANTS, ...inCurrency(currency) }),
    });
  }

  /**
   * Draw rows of the queries over the frame's range. The store's clock sets the axis, as the
   * browser's may be wrong.
   */
  show(rows, { step, barStep, seconds }) {
    const { before } = rows;
    const former = (name, of = (all) => all) => before && { rows: of(before[name]), shift: before.shift, words: before.words };
    const first = rows.traffic[0]?.t ?? Math.floor(Date.now() / 1000) - seconds;
    const from = first;
    const to = rows.traffic.length ? rows.traffic[rows.traffic.length - 1].t + step : from + seconds;
    const fine = { from, to, step };
    const coarse = { from, to, step: barStep };
    const quiet = rows.traffic.every((row) => row.done_per_s + row.cancelled_per_s + row.shed_per_s + row.failed_per_s === 0);
    const { charts } = this;
    const draw = (name, shown, axis, before_) => charts[name].update(shown, axis, charts[name].series, before_);
    draw("traffic", quiet ? [] : rows.traffic, fine, former("traffic"));
    draw("tokens", quiet ? [] : rows.tokens, fine, former("tokens"));
    for (const name of ["queue_wait", "ttft", "tpot", "itl", "e2e"]) draw(name, rows.latency, fine, former("latency"));
    draw("first_byte", rows.clientLatency, fine, former("clientLatency"));
    for (const name of ["queue", "batch", "kv"]) draw(name, rows.workers, fine, former("workers"));
    this.#showMoney(rows, coarse, former);
    for (const name of ["runs", "delivery"]) {
      const { series } = charts[name];
      const met = (all) => picked(all.filter((row) => series.some(({ key }) => row[key] > 0)), series);
      draw(name, met(rows.interruptions), coarse, former("interruptions", met));
    }
    const refused = reasonsOf(rows.refusedOverTime);
    charts.refused.update(refused.rows, coarse, refused.series, former("refusedOverTime", (all) => reasonsOf(all).rows));
  }

  /** Show two charts for each currency with costs; hide the charts of other currencies. */
  #showMoney(rows, axis, former) {
    const currencies = moneyOf(rows).map(({ currency }) => currency);
    for (const currency of currencies) {
      if (!this.moneyCharts.has(currency)) this.moneyCharts.set(currency, this.makeMoneyCharts(currency));
    }
    for (const [currency, { cost, devices }] of this.moneyCharts) {
      for (const { panel } of [cost, devices]) panel.hidden = !currencies.includes(currency);
      const { rows: shown, series } = modelCosts(rows.cost, currency);
      cost.update(shown, axis, series, former("cost", (all) => modelCosts(all, currency).rows));
      const mine = (all) => all.filter((row) => row.currency === currency && hasCost(row));
      devices.update(mine(rows.devices), axis, DEVICES, former("devices", (all) => picked(mine(all), DEVICES)));
    }
  }
}

const hasCost = (row) => row.busy_cost + row.idle_cost > 0;

/** Return rows with the values of these series only, summed by time. */
function picked(rows, series) {
  const byTime = new Map();
  for (const row of rows) {
    const merged = byTime.get(row.t) ?? { t: row.t };
    for (const { key } of series) merged[key] = (merged[key] ?? 0) + row[key];
    byTime.set(row.t, merged);
  }
  return [...byTime.values()];
}

/** Cost of requests in a currency, with one colour for each model. */
function modelCosts(rows, currency) {
  const mine = rows.filter((row) => row.currency === currency);
  const sums = new Map();
  for (const row of mine) sums.set(row.model, (sums.get(row.model) ?? 0) + Number(row.cost));
  const models = [...sums.keys()].sort((a, b) => sums.get(b) - sums.get(a));
  const drawn = models.slice(0, MAX_MODELS).sort();
  const rest = models.length > MAX_MODELS ? models[MAX_MODELS - 1] : null;
  const byTime = new Map();
  for (const row of mine) {
    const merged = byTime.get(row.t) ?? { t: row.t };
    const key = drawn.includes(row.model) ? row.model : rest;
    merged[key] = (merged[key] ?? 0) + Number(row.cost);
    byTime.set(row.t, merged);
  }
  const series = drawn.map((model) => ({ key: model, label: model === rest ? "others" : model }));
  return { rows: [...byTime.values()].sort((a, b) => a.t - b.t), series };
}
