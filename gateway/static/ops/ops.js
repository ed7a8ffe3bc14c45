// The operations page: asks the saved queries every two seconds and shows what they answer.

import { Chart, Cursor } from "./chart.js";
import { clock, compact, money, ms, percent, whole } from "./format.js";
import { showRecent } from "./recent.js";
import { askForKey, fetchWithKey } from "/static/key.js";

const REFRESH_MS = 2_000;
const AWAY_REFRESH_MS = 4_000;
const TIMEOUT_MS = 8_000;
const RANGES = [
  { id: "5m", label: "5 min", words: "the last 5 minutes", minutes: 5, step: 3, costStep: 15 },
  { id: "15m", label: "15 min", words: "the last 15 minutes", minutes: 15, step: 10, costStep: 30 },
  { id: "1h", label: "1 h", words: "the last hour", minutes: 60, step: 30, costStep: 120 },
  { id: "6h", label: "6 h", words: "the last 6 hours", minutes: 360, step: 180, costStep: 720 },
  { id: "24h", label: "24 h", words: "the last 24 hours", minutes: 1440, step: 720, costStep: 3600 },
  { id: "7d", label: "7 d", words: "the last 7 days", minutes: 10080, step: 5040, costStep: 21600 },
];

const at = (id) => document.getElementById(id);
const cursor = new Cursor();
let range = RANGES.find((one) => `#${one.id}` === location.hash) ?? RANGES[1];
let timer = 0;
let round = 0;
let currency = "USD";
let lastSeen = null;

const charts = {
  traffic: new Chart({ title: "Requests", unit: "per second", kind: "stack", format: compact, cursor, series: [{ key: "done_per_s", label: "done" }, { key: "other_per_s", label: "not done" }] }),
  tokens: new Chart({ title: "Tokens", unit: "per second", kind: "area", format: compact, cursor, series: [{ key: "decode_tokens_per_s", label: "output" }, { key: "prefill_tokens_per_s", label: "prefill" }] }),
  ttft: new Chart({ title: "Time to first token", unit: "ms", format: compact, cursor, series: [{ key: "ttft_p50_ms", label: "p50" }, { key: "ttft_p95_ms", label: "p95" }] }),
  tpot: new Chart({ title: "Time per output token", unit: "ms", format: compact, cursor, series: [{ key: "tpot_p50_ms", label: "p50" }, { key: "tpot_p95_ms", label: "p95" }] }),
  queue: new Chart({ title: "Queue", unit: "requests", kind: "area", format: compact, cursor, series: [{ key: "queued", label: "waiting" }, { key: "running", label: "running" }] }),
  kv: new Chart({ title: "KV use", unit: "%", kind: "area", format: compact, cursor, most: 100, series: [{ key: "kv_use_percent", label: "KV blocks" }, { key: "busy_percent", label: "engine busy" }] }),
  cost: new Chart({ title: "Cost by model", unit: "", kind: "bars", format: (value, digits) => money(value, currency, digits), cursor, series: [] }),
};
charts.cost.panel.classList.add("wide");
at("charts").append(...Object.values(charts).map((chart) => chart.panel));

/** The gateway demands an administrator's key. */
class KeyNeededError extends Error {}

async function ask(name, params) {
  const answer = await fetchWithKey(`api/${name}?${new URLSearchParams(params)}`, {
    headers: { accept: "application/json" },
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (!answer.ok) {
    const text = await answer.json().then((body) => body.error?.message, () => "");
    if (answer.status === 401 || answer.status === 403) throw new KeyNeededError(text);
    throw new Error(text || `the gateway answered ${answer.status}`);
  }
  return answer.json();
}

async function refresh() {
  clearTimeout(timer);
  const mine = ++round;
  const { minutes, step, costStep } = range;
  let wait = REFRESH_MS;
  try {
    const stepped = { minutes, step_s: step };
    const [totals, traffic, latency, workers, cost, recent] = await Promise.all([
      ask("totals", { minutes }),
      ask("traffic", stepped),
      ask("latency", stepped),
      ask("workers", stepped),
      ask("cost_by_model", { minutes, step_s: costStep }),
      ask("recent_requests", { minutes, rows: 50 }),
    ]);
    if (mine !== round) return;
    show({ totals: totals[0], traffic, latency, workers, cost, recent });
    lastSeen = Date.now() / 1000;
    say("live", "Live");
  } catch (error) {
    if (mine !== round) return;
    if (error instanceof KeyNeededError) {
      sayLocked(error);
      return;
    }
    sayAway(error);
    wait = AWAY_REFRESH_MS;
  }
  if (!document.hidden) timer = setTimeout(refresh, wait);
}

function show({ totals, traffic, latency, workers, cost, recent }) {
  currency = totals.currency || currency;
  // The store's clock sets the axis: the reader's own may be wrong.
  const from = traffic.length ? traffic[0].t : Math.floor(Date.now() / 1000) - range.minutes * 60;
  const to = traffic.length ? traffic[traffic.length - 1].t + range.step : from + range.minutes * 60;
  const axis = { from, to, step: range.step };
  const quiet = totals.requests === 0;
  charts.traffic.update(quiet ? [] : traffic, axis);
  charts.tokens.update(workers, axis);
  charts.ttft.update(latency, axis);
  charts.tpot.update(latency, axis);
  charts.queue.update(workers, axis);
  charts.kv.update(workers, axis);
  showCost(cost, { from, to: Math.max(to, from + range.minutes * 60), step: range.costStep });
  showTotals(totals);
  showRecent(recent);
  at("empty").hidden = !quiet;
  at("empty-range").textContent = range.words;
  document.body.classList.remove("stale");
}

/** One colour for each model; of several currencies, the one of most requests is drawn. */
function showCost(rows, axis) {
  const mine = rows.filter((row) => row.currency === currency);
  const sums = new Map();
  for (const row of mine) sums.set(row.model, (sums.get(row.model) ?? 0) + row.cost);
  const models = [...sums.keys()].sort();
  const drawn = models.slice(0, 6);
  const byTime = new Map();
  for (const row of mine) {
    const merged = byTime.get(row.t) ?? { t: row.t };
    const key = drawn.includes(row.model) ? row.model : drawn[5];
    merged[key] = (merged[key] ?? 0) + row.cost;
    byTime.set(row.t, merged);
  }
  const label = (model, i) => (i === 5 && models.length > 6 ? "others" : model);
  const series = drawn.map((model, i) => ({ key: model, label: `${label(model, i)}` }));
  const others = new Set(rows.filter((row) => row.currency !== currency).map((row) => row.currency));
  charts.cost.heading.lastElementChild.textContent = others.size ? `${currency}; also ${[...others].join(", ")}` : currency;
  charts.cost.update([...byTime.values()].sort((a, b) => a.t - b.t), axis, series);
}

function showTotals(totals) {
  const lost = totals.failed + totals.shed;
  const share = totals.requests ? (100 * totals.cached_tokens) / Math.max(1, totals.prompt_tokens) : null;
  const tiles = [
    ["Requests", whole(totals.requests), `${compact(totals.requests / (range.minutes * 60))} per second, ${whole(totals.cancelled)} cancelled`],
    ["Not answered", whole(lost), `${whole(totals.failed)} failed, ${whole(totals.shed)} shed`, lost > 0],
    ["TTFT", ms(totals.ttft_p50_ms), `p95 ${ms(totals.ttft_p95_ms)}`],
    ["TPOT", ms(totals.tpot_p50_ms), `p95 ${ms(totals.tpot_p95_ms)}`],
    ["Output tokens", compact(totals.completion_tokens), `${compact(totals.prompt_tokens)} in, ${share === null ? "none" : percent(share)} cached`],
    ["Cost", money(totals.cost, totals.currency), totals.completion_tokens ? `${money((1e6 * totals.cost) / totals.completion_tokens, totals.currency)} per 1M output` : "nothing yet"],
  ];
  at("totals").replaceChildren(
    ...tiles.map(([name, value, detail, alarm]) => {
      const tile = document.createElement("div");
      tile.className = alarm ? "tile alarm" : "tile";
      const term = document.createElement("dt");
      const number = document.createElement("dd");
      const small = document.createElement("dd");
      term.textContent = name;
      number.textContent = value;
      number.className = "value";
      small.textContent = detail;
      small.className = "detail";
      tile.append(term, number, small);
      return tile;
    }),
  );
}

function say(state, text) {
  at("state").dataset.state = state;
  if (at("state-text").textContent !== text) at("state-text").textContent = text;
  at("away").hidden = true;
}

function sayLocked({ message }) {
  at("state").dataset.state = "away";
  at("state-text").textContent = "Needs a key";
  at("away").textContent = "The figures of all tenants are shown for the key of an administrator.";
  at("away").hidden = false;
  document.body.classList.add("stale");
  askForKey(at("key"), message, refresh);
}

function sayAway(error) {
  at("state").dataset.state = "away";
  at("state-text").textContent = "Away";
  const reason = error.name === "TimeoutError" ? "It does not answer." : `${error.message.replace(/\.$/, "")}.`;
  const since = lastSeen === null ? "Nothing has been seen yet." : `What you see is from ${clock(lastSeen)}.`;
  at("away").textContent = `Telemetry is away. ${reason} ${since} Requests are served and recorded meanwhile; this page tries again every few seconds.`;
  at("away").hidden = false;
  document.body.classList.add("stale");
}

function choose(one) {
  range = one;
  history.replaceState(null, "", `#${one.id}`);
  for (const button of at("ranges").children) {
    const mine = button.value === one.id;
    button.setAttribute("aria-checked", String(mine));
    button.tabIndex = mine ? 0 : -1;
  }
  refresh();
}

function makeRanges() {
  for (const one of RANGES) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", value: one.id, textContent: one.label });
    button.setAttribute("role", "radio");
    button.addEventListener("click", () => choose(one));
    at("ranges").append(button);
  }
  at("ranges").addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const next = (RANGES.indexOf(range) + move + RANGES.length) % RANGES.length;
    choose(RANGES[next]);
    at("ranges").children[next].focus();
  });
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(timer);
    say("paused", "Paused");
  } else refresh();
});

at("empty-curl").textContent = `curl ${location.origin}/v1/chat/completions \\
  -H 'Content-Type: application/json' \\
  -d '{"model": "demo", "messages": [{"role": "user", "content": "What is TTFT?"}]}'`;
makeRanges();
choose(range);
