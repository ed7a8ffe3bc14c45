// Small tables: the workers, what a million tokens cost, what went wrong.

import { saveButton } from "./chart.js";
import { bytes, clock, compact, dateTime, day, money, percent, whole } from "./format.js";
import { number, statusMark, Table } from "./table.js";
import { byId, make } from "/static/dom.js";

const WORKERS = [
  { name: "Worker", of: (row) => row.name || row.worker, kind: "mono", title: (row) => row.worker },
  { name: "Model", of: (row) => row.model },
  { name: "Device", of: (row) => row.device_name || "CPU" },
  number("Running", (row) => whole(row.running)),
  number("Waiting", (row) => whole(row.waiting)),
  number("KV blocks", (row) => meter(row.blocks ? (100 * usedBlocks(row)) / row.blocks : 0), {
    title: (row) => `${whole(usedBlocks(row))} of ${whole(row.blocks)} blocks`,
  }),
  number("Busy", (row) => meter(100 * row.busy_share), { title: () => "of the last sample's time" }),
  number("Utilisation", (row) => (row.device_name ? percent(row.device_share <= 1 ? 100 * row.device_share : row.device_share) : "–")),
  number("Memory", (row) => (row.device_memory_total_bytes ? `${bytes(row.device_memory_bytes)} of ${bytes(row.device_memory_total_bytes)}` : "–")),
  number("Step", (row) => `${compact(row.step_ms)} ms`),
  number("An hour", (row) => (Number(row.device_per_hour) ? money(row.device_per_hour, row.currency) : "–")),
];
const UNIT_COST = [
  { name: "Model", of: (row) => row.model },
  costColumn("Paid", "paid_per_million", "What tenants paid"),
  costColumn("Busy", "busy_cost_per_million", "The device while it was busy"),
  costColumn("All", "all_cost_per_million", "The device while it was there, idle time included"),
  costColumn("Best", "best_cost_per_million", "At the most tokens per busy second that were seen"),
];
const ERRORS = [
  { name: "What", of: (row) => statusMark("td", row.error_code || row.status, row.status) },
  { name: "Model", of: (row) => row.model },
  number("Requests", (row) => whole(row.requests), {
    title: (row) => `of ${whole(row.tenants)} tenants, on ${whole(row.workers)} workers`,
  }),
  number("Latest", latestLink, { title: (row) => dateTime(latestS(row)) }),
];
const REFUSALS = [
  { name: "Reason", of: (row) => statusMark("td", row.code || row.door, row.status < 500 ? "shed" : "failed") },
  number("Status", (row) => (row.status ? String(row.status) : "–")),
  { name: "Limit", of: (row) => row.limit_reached || "–" },
  { name: "Tenant", of: (row) => row.tenant || "–", title: (row) => (row.tenant ? "" : "Nobody knows who asked") },
  { name: "Key", of: (row) => row.api_key || "–", kind: "mono" },
  { name: "Endpoint", of: (row) => row.door },
  number("Requests", (row) => whole(row.refused)),
  number("Latest", latest, {
    title: (row) => dateTime(latestS(row)) + (row.request_id ? `; request ${row.request_id} is one of them` : ""),
  }),
];

const workers = new Table("workers", WORKERS, "No worker has reported within the last 15 seconds.");
const unitCost = new Table("unit-cost", UNIT_COST, "Nothing was computed in this range.");
const errors = new Table("errors", ERRORS, "Nothing went wrong in this range.");
const refusals = new Table("refusals", REFUSALS, "Nothing was refused in this range.");

/** Give the tables their buttons: `save(query)` saves what one shows. */
export function makeTables(save) {
  for (const [id, query] of [["workers", "workers_now"], ["unit-cost", "unit_cost"], ["errors", "error_codes"], ["refusals", "refusals"]]) {
    const panel = byId(id).closest(".panel");
    panel.querySelector(".head").append(saveButton(panel.querySelector("h3").firstChild.textContent, () => save(query)));
  }
}

/** Show the rows of each; `addressOf(id)` is where a request is seen. */
export function showTables(rows, addressOf) {
  workers.show(rows.workersNow);
  byId("workers-note").textContent = rows.workersNow.length ? `${rows.workersNow.length} now` : "";
  unitCost.show(rows.unitCost);
  errors.show(rows.errors, addressOf);
  refusals.show(rows.refusals);
  const numRefused = rows.refusals.reduce((sum, row) => sum + Number(row.refused), 0);
  byId("refusals-note").textContent = numRefused ? `${whole(numRefused)} requests` : "";
}

function usedBlocks({ blocks, free_blocks }) {
  return blocks - free_blocks;
}

function meter(value) {
  const bar = make("meter", { min: 0, max: 100, value, "aria-hidden": "true" });
  return make("span", { class: "metered" }, bar, percent(value));
}

function costColumn(name, field, note) {
  const title = (row) => (row[field] === null ? "There is nothing to tell by" : `Exactly ${row[field]} ${row.currency}`);
  return number(name, (row) => money(row[field], row.currency), { note, title });
}

function latestS({ last_at }) {
  return Date.parse(`${last_at.replace(" ", "T")}Z`) / 1000;
}

function latest(row) {
  return `${day(latestS(row))}, ${clock(latestS(row), false)}`;
}

function latestLink(row, addressOf) {
  const id = row.latest_request_id;
  return make("a", { href: addressOf(id), "aria-label": `The latest, request ${id}` }, latest(row));
}
