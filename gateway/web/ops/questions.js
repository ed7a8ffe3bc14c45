// Queries of a view, and how often they run.

import { ask } from "./ask.js";
import { comparedWith } from "./view.js";

const OFFER_MS = 30_000;
const ALERTS_MS = 10_000;
const BUDGET_MS = 60_000;
const USAGE_MS = 20_000;
const JOINED_MS = 10_000;
const RECENT_ROWS = 50;
const REFUSAL_ROWS = 50;
const USAGE_ROWS = 100;
const MIN_COMPARED_MS = 15_000;
const OF_WORKERS = new Set(["workers", "device_cost", "unit_cost"]);
const OF_TENANTS = new Set(["refusals", "refusals_over_time", "recent_refusals"]);

/** Return the parameters of a query for a view. Worker queries ignore the tenant filter, refusal
 * queries the model filter. */
export function asked(query, { tenant, model, refused }, bounds) {
  if (query === "alerts" || query === "rollouts") return {};
  if (query === "workers_now") return { model };
  if (query === "tenants_models") return bounds;
  if (OF_TENANTS.has(query)) return { ...bounds, tenant, ...(refused ? { find: refused } : {}) };
  return OF_WORKERS.has(query) ? { ...bounds, model } : { ...bounds, tenant, model };
}

const kept = new Map();

/** Return the rows of a query, cached if they are younger than `forMs`. */
async function askNow(query, params, forMs, signal) {
  const name = `${query} ${JSON.stringify(params)}`;
  const known = kept.get(name);
  if (known && Date.now() - known.at < forMs) return known.rows;
  const rows = await ask(query, params, { signal });
  for (const [other, { at, ms }] of kept) if (Date.now() - at > ms) kept.delete(other);
  kept.set(name, { at: Date.now(), ms: forMs, rows });
  return rows;
}

/**
 * Return all rows that the page shows for a view in its frame. `before` has the rows of the compared
 * range, with its `shift` and `words`.
 */
export async function askAll(view, frame, signal) {
  const { step, barStep, bounds } = frame;
  const put = (query, more) => ask(query, { ...asked(query, view, bounds), ...more }, { signal });
  const seldom = (query, forMs, more) => askNow(query, { ...asked(query, view, bounds), ...more }, forMs, signal);
  const fine = { step_s: step };
  const coarse = { step_s: barStep };
  const rows = { rows: USAGE_ROWS };
  const by = view.by || "tenant";
  const compared = comparedWith(view, frame);
  return together({
    totals: put("totals"),
    alerts: seldom("alerts", ALERTS_MS),
    budget: seldom("slo_budget", BUDGET_MS),
    rollouts: put("rollouts"),
    traffic: put("traffic", fine),
    tokens: put("tokens", fine),
    latency: put("latency", fine),
    clientLatency: put("client_latency", fine),
    firstByte: seldom("first_byte", JOINED_MS),
    workers: put("workers", fine),
    devices: put("device_cost", coarse),
    cost: put("cost_by_model", coarse),
    interruptions: put("interruptions", coarse),
    unitCost: put("unit_cost"),
    usage: seldom(`usage_by_${by}`, USAGE_MS, rows),
    usageSums: seldom("usage_by_model", USAGE_MS),
    errors: put("error_codes"),
    refusedOverTime: put("refusals_over_time", coarse),
    refusals: put("refusals", { rows: REFUSAL_ROWS }),
    recentRefusals: put("recent_refusals", { rows: RECENT_ROWS }),
    workersNow: put("workers_now"),
    recent: put("recent_requests", { status: view.status, id: view.id, rows: RECENT_ROWS }),
    offered: seldom("tenants_models", OFFER_MS),
    before: compared && askBefore(view, frame, compared, signal),
  });
}

/** The compared range changes little: query it once per step of the charts. */
async function askBefore(view, { step, barStep }, { bounds, shift, words }, signal) {
  const forMs = Math.max(MIN_COMPARED_MS, 1000 * step);
  const put = (query, more) => askNow(query, { ...asked(query, view, bounds), ...more }, forMs, signal);
  const fine = { step_s: step };
  const coarse = { step_s: barStep };
  const rows = await together({
    totals: put("totals"),
    traffic: put("traffic", fine),
    tokens: put("tokens", fine),
    latency: put("latency", fine),
    clientLatency: put("client_latency", fine),
    firstByte: put("first_byte"),
    workers: put("workers", fine),
    devices: put("device_cost", coarse),
    cost: put("cost_by_model", coarse),
    interruptions: put("interruptions", coarse),
    refusedOverTime: put("refusals_over_time", coarse),
  });
  return { ...rows, shift, words };
}

async function together(questions) {
  const answers = await Promise.all(Object.values(questions));
  return Object.fromEntries(Object.keys(questions).map((name, i) => [name, answers[i]]));
}
