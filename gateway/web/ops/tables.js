// Small tables: workers, cost of a million tokens, errors.

import { saveButton } from "./chart.js";
import { bytes, clock, compact, dateTime, day, money, ms, percent, secondsOf, whole } from "./format.js";
import { number, saidAs, statusMark, Table } from "./table.js";
import { byId, make } from "/static/dom.js";

const PULLED = "Tokens pulled from other workers' KV caches in the last 45 seconds";
const SERVED = "Tokens other workers pulled from its KV cache in the last 45 seconds";
// A column with `isOf(row)` is shown if that is true for any row.
const WORKERS = [
  { name: "Worker", of: (row) => row.name || row.worker, kind: "mono", title: (row) => row.worker },
  { name: "Model", of: (row) => row.model },
  { name: "Device", of: (row) => row.device_name || "CPU" },
  number("Devices", (row) => whole(row.num_devices), { note: "Devices that compute one model together", isOf: isGroup }),
  { name: "Role", of: (row) => row.role, isOf: hasRole },
  number("Running", (row) => whole(row.running)),
  number("Waiting", (row) => whole(row.waiting)),
  number("KV blocks", (row) => meter(row.blocks ? (100 * usedBlocks(row)) / row.blocks : 0), {
    title: (row) => row.blocks ? `${whole(usedBlocks(row))} of ${whole(row.blocks)} blocks` : "No KV blocks are known",
  }),
  number("Pulled", (row) => whole(row.pulled_tokens), { unit: "tokens", note: PULLED, isOf: exchanges }),
  number("Served", (row) => whole(row.served_tokens), { unit: "tokens", note: SERVED, isOf: exchanges }),
  number("Busy", (row) => meter(100 * row.busy_share), { title: () => "Share of the last sample's time" }),
  number("Utilisation", (row) => (row.device_name ? percent(row.device_share <= 1 ? 100 * row.device_share : row.device_share) : "–")),
  number("Memory", (row) => (row.device_memory_total_bytes ? `${bytes(row.device_memory_bytes)} of ${bytes(row.device_memory_total_bytes)}` : "–")),
  number("Step", (row) => ms(row.step_ms), { unit: "mean" }),
  number("An hour", (row) => (Number(row.device_per_hour) ? money(row.device_per_hour, row.currency) : "–")),
];
const UNIT_COST = [
  { name: "Model", of: (row) => row.model },
  costColumn("Paid", "paid_per_million", "Price paid by tenants"),
  costColumn("Busy", "busy_cost_per_million", "Cost of busy device time"),
  costColumn("All", "all_cost_per_million", "Cost of all device time, idle time included"),
  costColumn("Best", "best_cost_per_million", "Cost at the highest measured tokens per busy second"),
];
const ERRORS = [
  { name: "What", of: (row) => statusMark("td", row.error_code || row.status, row.status) },
  { name: "Model", of: (row) => row.model },
  number("Requests", (row) => whole(row.requests), {
    title: (row) => `of ${whole(row.tenants)} tenants, on ${whole(row.workers)} workers`,
  }),
  number("Latest", latestLink, { title: (row) => dateTime(latestS(row)) }),
];
// Columns from the request to its first token, in order of time.
const WAYS = [
  { key: "intake", label: "Before receipt", note: "From the request at the gateway to its receipt: key, body, parsing" },
  { key: "ttft", label: "TTFT", note: "From receipt to when the worker had the first token: admission, queue, prefill" },
  { key: "way_back", label: "Way back", note: "From the worker over the bus and through the gateway to the connection" },
  { key: "first_byte", label: "First byte", note: "Time the client waited, without the network: sum of the three" },
];
const FIRST_BYTE = [
  { name: "Model", of: (row) => row.model || "All models", title: (row) => `${whole(row.requests)} requests` },
  { name: "What", of: (row) => row.way.label, title: (row) => row.way.note },
  ...["p50", "p95", "p99"].map((percentile) => number(percentile, (row) => ms(row[`${row.way.key}_${percentile}_ms`]))),
];

const workers = new Table("workers", WORKERS, "No worker has reported within the last 15 seconds.");
const unitCost = new Table("unit-cost", UNIT_COST, "No tokens were computed in this range.");
const errors = new Table("errors", ERRORS, "No errors in this range.");
const firstByte = new Table("first-byte", FIRST_BYTE, "No client received a first token in this range.");

/** Add the save buttons; `save(query)` saves the rows of a table. */
export function makeTables(save) {
  for (const [id, query] of [["workers", "workers_now"], ["unit-cost", "unit_cost"], ["errors", "error_codes"], ["first-byte", "first_byte"], ["slo", "slo_budget"], ["refusals", "refusals"], ["recent-refusals", "recent_refusals"]]) {
    const panel = byId(id).closest(".panel");
    panel.querySelector(".head").append(saveButton(panel.querySelector("h3").firstChild.textContent, () => save(query)));
  }
}

/** Show the rows of each table. `addressOf(id)` returns the link to a request. */
export function showTables(rows, addressOf) {
  showWorkers(rows.workersNow);
  byId("workers-note").textContent = rows.workersNow.length ? `${rows.workersNow.length} now` : "";
  unitCost.show(rows.unitCost);
  errors.show(rows.errors, addressOf);
  const models = rows.firstByte.length > 2 ? rows.firstByte : rows.firstByte.filter(({ model }) => model);
  firstByte.show(models.flatMap((row) => WAYS.map((way) => ({ ...row, way }))));
}

function showWorkers(rows) {
  const columns = WORKERS.filter(({ isOf }) => !isOf || rows.some(isOf));
  if (columns.length !== workers.columns.length || columns.some((column, i) => column !== workers.columns[i])) workers.describe(columns);
  workers.show(rows);
}

function hasRole({ role }) {
  return role !== "both";
}

function isGroup({ num_devices }) {
  return num_devices > 1;
}

function exchanges({ pulled_tokens, served_tokens }) {
  return Number(pulled_tokens) + Number(served_tokens) > 0;
}

function usedBlocks({ blocks, free_blocks }) {
  return blocks - free_blocks;
}

function meter(value) {
  const bar = make("meter", { min: 0, max: 100, value, "aria-hidden": "true" });
  return make("span", { class: "metered" }, bar, percent(value));
}

function costColumn(name, field, note) {
  const title = (row) => (row[field] === null ? "No data" : `Exactly ${row[field]} ${row.currency}`);
  return number(name, (row) => money(row[field], row.currency), { note, title });
}

function latestS({ last_at }) {
  return secondsOf(last_at);
}

function latest(row) {
  return `${day(latestS(row))}, ${clock(latestS(row), false)}`;
}

function latestLink(row, addressOf) {
  const id = row.latest_request_id;
  return make("a", { href: addressOf(id) }, ...saidAs(`${latest(row)}, request ${id}`, latest(row)));
}
