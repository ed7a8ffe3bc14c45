// Table of recent requests, with its filters.

import { clock, compact, dateTime, day, money, whole } from "./format.js";
import { number, saidAs, statusMark, Table } from "./table.js";
import { STATUSES } from "./view.js";
import { byId, make } from "/static/dom.js";

const DAY_S = 86_400;
const SEARCH_MS = 300;
const COLUMNS = [
  { name: "At", of: when, kind: "time", title: (row) => dateTime(row.done_us / 1e6) },
  { name: "Request", of: identity, kind: "mono", title: (row) => row.request_id },
  { name: "Ended", of: status, title: statusTitle },
  { name: "Model", of: (row) => row.model, title: (row) => (row.route_reason ? `asked for ${row.model_requested}: ${row.route_reason}` : row.model) },
  { name: "Tenant", of: (row) => row.tenant, title: (row) => (row.user ? `${row.tenant}, user ${row.user}` : row.tenant) },
  { name: "Source", of: (row) => row.source },
  number("Prompt", (row) => whole(row.prompt_tokens), {
    unit: "tokens",
    title: (row) => (row.cached_tokens ? `${whole(row.cached_tokens)} of them cached` : ""),
  }),
  number("Output", (row) => whole(row.completion_tokens), { unit: "tokens" }),
  number("Queue", (row) => compact(row.queue_ms), { unit: "ms" }),
  number("TTFT", (row) => compact(row.ttft_ms), { unit: "ms" }),
  number("TPOT", (row) => compact(row.tpot_ms), { unit: "ms" }),
  number("Total", (row) => compact(row.total_ms / 1000), { unit: "s" }),
  number("Paid", (row) => money(row.cost, row.currency), { title: (row) => `${row.cost} ${row.currency}` }),
  number("Device", (row) => money(row.device_cost, row.currency), { title: (row) => `${row.device_cost} ${row.currency}` }),
];

const table = new Table("recent", COLUMNS, "No request of this kind has ended in this range.");
let shown = "";

/** Make the controls: `change(part)` is called with a choice, `save()` to export. */
export function makeRecent(change, save) {
  byId("status").append(...STATUSES.map((status) => new Option(status)));
  byId("status").addEventListener("change", () => change({ status: byId("status").value }));
  let timer = 0;
  byId("id").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => change({ id: byId("id").value.trim() }), SEARCH_MS);
  });
  byId("export").addEventListener("click", save);
}

/** Show the view in the controls. */
export function showRecentFilters(view) {
  byId("status").value = view.status;
  if (document.activeElement !== byId("id")) byId("id").value = view.id;
}

/**
 * Show rows. Existing rows keep their elements, so that a selection survives. `addressOf(id)`
 * returns the link to a request.
 */
export function showRecent(rows, { seconds }, addressOf) {
  const text = JSON.stringify([rows, addressOf("")]);
  if (text === shown) return;
  shown = text;
  table.show(rows, { seconds, addressOf });
  byId("recent-note").textContent = rows.length ? `the last ${rows.length}` : "";
}

function when(row, { seconds }) {
  const at_s = row.done_us / 1e6;
  return seconds > DAY_S ? `${day(at_s, seconds)} ${clock(at_s, false)}` : clock(at_s);
}

function identity({ request_id: id }, { addressOf }) {
  const label = id.length > 16 ? `${id.slice(0, 6)}…${id.slice(-7)}` : id;
  return make("a", { href: addressOf(id) }, ...saidAs(`Request ${id}`, label));
}

function status(row) {
  const text = row.error_code || (row.status === "done" ? row.finish_reason || "done" : row.status);
  const cell = statusMark("td", text, row.status);
  if (row.num_lives) cell.append(make("span", { class: "runs" }, `run ${row.num_lives + 1}`));
  return cell;
}

function statusTitle(row) {
  if (!row.num_lives) return row.status;
  return `${row.status}; continued on another worker ${row.num_lives > 1 ? `${row.num_lives} times` : "once"}`;
}
