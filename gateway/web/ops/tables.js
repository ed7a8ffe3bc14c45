// Small tables: the workers, what a million tokens cost, what went wrong.

import { saveButton } from "./chart.js";
import { at, cell, emptyRow, make, statusMark } from "./dom.js";
import { bytes, clock, compact, dateTime, day, money, percent, whole } from "./format.js";

/** Give the tables their buttons: `save(query)` saves what one shows. */
export function makeTables(save) {
  for (const [id, query] of [["workers", "workers_now"], ["unit-cost", "unit_cost"], ["errors", "error_codes"], ["refusals", "refusals"]]) {
    const panel = at(id).closest(".panel");
    panel.querySelector(".head").append(saveButton(panel.querySelector("h3").firstChild.textContent, () => save(query)));
  }
}

/** The workers that reported a moment ago. */
export function showWorkers(rows) {
  const lines = rows.map((row) => {
    const used = row.blocks - row.free_blocks;
    const memory = row.device_memory_total_bytes ? `${bytes(row.device_memory_bytes)} of ${bytes(row.device_memory_total_bytes)}` : "–";
    return make(
      "tr",
      "",
      cell(row.name || row.worker, "mono", row.worker),
      cell(row.model),
      cell(row.device_name || "CPU"),
      cell(whole(row.running), "number"),
      cell(whole(row.waiting), "number"),
      meter(row.blocks ? (100 * used) / row.blocks : 0, `${whole(used)} of ${whole(row.blocks)} blocks`),
      meter(100 * row.busy_share, "of the last sample's time"),
      cell(row.device_name ? percent(row.device_share <= 1 ? 100 * row.device_share : row.device_share) : "–", "number"),
      cell(memory, "number"),
      cell(`${compact(row.step_ms)} ms`, "number"),
      cell(Number(row.device_per_hour) ? money(row.device_per_hour, row.currency) : "–", "number"),
    );
  });
  fill("workers", lines, "No worker has reported within the last 15 seconds.", 11);
  at("workers-note").textContent = rows.length ? `${rows.length} now` : "";
}

function meter(value, title) {
  const bar = make("meter");
  Object.assign(bar, { min: 0, max: 100, value });
  bar.setAttribute("aria-hidden", "true");
  return cell(make("span", "metered", bar, percent(value)), "number", title);
}

function fill(id, lines, none, columns) {
  const body = at(id).tBodies[0];
  body.replaceChildren(...(lines.length ? lines : [emptyRow(none, columns)]));
}

/** What a million tokens cost, by model: what tenants paid, and devices by three measures. */
export function showUnitCost(rows) {
  const lines = rows.map((row) => {
    const amount = (name) => cell(money(row[name], row.currency), "number", row[name] === null ? "There is nothing to tell by" : `Exactly ${row[name]} ${row.currency}`);
    return make("tr", "", cell(row.model), amount("paid_per_million"), amount("busy_cost_per_million"), amount("all_cost_per_million"), amount("best_cost_per_million"));
  });
  fill("unit-cost", lines, "Nothing was computed in this range.", 5);
}

/** How requests went wrong, the most frequent first; `addressOf(id)` is where the latest is seen. */
export function showErrors(rows, addressOf) {
  const lines = rows.map((row) => {
    const at_s = Date.parse(`${row.last_at.replace(" ", "T")}Z`) / 1000;
    const latest = make("a", "", `${day(at_s)}, ${clock(at_s, false)}`);
    latest.href = addressOf(row.latest_request_id);
    latest.setAttribute("aria-label", `The latest, request ${row.latest_request_id}`);
    return make(
      "tr",
      "",
      statusMark("td", row.error_code || row.status, row.status),
      cell(row.model),
      cell(whole(row.requests), "number", `of ${whole(row.tenants)} tenants, on ${whole(row.workers)} workers`),
      cell(latest, "number", dateTime(at_s)),
    );
  });
  fill("errors", lines, "Nothing went wrong in this range.", 4);
}

/** What was refused before it was a job, the most frequent first. */
export function showRefusals(rows) {
  const lines = rows.map((row) => {
    const at_s = Date.parse(`${row.last_at.replace(" ", "T")}Z`) / 1000;
    const latest = `${day(at_s)}, ${clock(at_s, false)}`;
    return make(
      "tr",
      "",
      statusMark("td", row.code || row.door, row.status < 500 ? "shed" : "failed"),
      cell(row.status ? String(row.status) : "–", "number"),
      cell(row.limit_reached || "–"),
      cell(row.tenant || "–", "", row.tenant ? "" : "Nobody knows who asked"),
      cell(row.api_key || "–", "mono"),
      cell(row.door),
      cell(whole(row.refused), "number"),
      cell(latest, "number", row.request_id ? `${dateTime(at_s)}; request ${row.request_id} is one of them` : dateTime(at_s)),
    );
  });
  fill("refusals", lines, "Nothing was refused in this range.", 8);
  const total = rows.reduce((sum, row) => sum + Number(row.refused), 0);
  at("refusals-note").textContent = total ? `${whole(total)} requests` : "";
}
