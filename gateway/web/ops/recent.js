// The table of recent requests, with its filters.

import { at, cell, emptyRow, make, statusMark } from "./dom.js";
import { clock, compact, dateTime, day, money, whole } from "./format.js";
import { STATUSES } from "./view.js";

const COLUMNS = 14;
const DAY_S = 86_400;
const SEARCH_MS = 300;
const body = document.querySelector("#recent tbody");
let shown = "";

/** Make the controls: `change(part)` is called with what somebody chose, `save()` to export. */
export function makeRecent(change, save) {
  for (const status of STATUSES) {
    const option = make("option", "", status);
    option.value = status;
    at("status").append(option);
  }
  at("status").addEventListener("change", () => change({ status: at("status").value }));
  let timer = 0;
  at("id").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => change({ id: at("id").value.trim() }), SEARCH_MS);
  });
  at("export").addEventListener("click", save);
}

/** Have the controls say what the view is. */
export function showRecentFilters(view) {
  at("status").value = view.status;
  if (document.activeElement !== at("id")) at("id").value = view.id;
}

/** Show these rows; rows that are there already stay as they are, so that a selection survives.
 * `addressOf(id)` is where one request is looked at. */
export function showRecent(rows, { seconds }, addressOf) {
  const text = JSON.stringify([rows, addressOf("")]);
  if (text === shown) return;
  shown = text;
  body.replaceChildren(...rows.map((row) => line(row, seconds, addressOf)));
  at("recent-note").textContent = rows.length ? `the last ${rows.length}` : "";
  if (!rows.length) body.append(emptyRow("No request of this kind has ended in this range.", COLUMNS));
}

function line(row, seconds, addressOf) {
  const when = row.done_ms / 1000;
  const cached = row.cached_tokens ? `${whole(row.cached_tokens)} of them cached` : "";
  return make(
    "tr",
    "",
    cell(seconds > DAY_S ? `${day(when, seconds)} ${clock(when, false)}` : clock(when), "time", dateTime(when)),
    identity(row, addressOf),
    status(row),
    cell(row.model, "", row.route_reason ? `asked for ${row.model_requested}: ${row.route_reason}` : row.model),
    cell(row.tenant, "", row.user ? `${row.tenant}, user ${row.user}` : row.tenant),
    cell(row.source),
    cell(whole(row.prompt_tokens), "number", cached),
    cell(whole(row.completion_tokens), "number"),
    cell(compact(row.queue_ms), "number"),
    cell(compact(row.ttft_ms), "number"),
    cell(compact(row.tpot_ms), "number"),
    cell(compact(row.total_ms / 1000), "number"),
    cell(money(row.cost, row.currency), "number", `${row.cost} ${row.currency}`),
    cell(money(row.device_cost, row.currency), "number", `${row.device_cost} ${row.currency}`),
  );
}

function identity(row, addressOf) {
  const id = row.request_id;
  const link = make("a", "", id.length > 16 ? `${id.slice(0, 6)}…${id.slice(-7)}` : id);
  link.href = addressOf(id);
  link.setAttribute("aria-label", `Request ${id}`);
  return cell(link, "mono", id);
}

function status(row) {
  const text = row.error_code || (row.status === "done" ? row.finish_reason || "done" : row.status);
  const element = statusMark("td", text, row.status);
  if (row.num_lives) element.append(make("span", "runs", `run ${row.num_lives + 1}`));
  element.title = row.num_lives ? `${row.status}; it went on ${row.num_lives + 1 > 2 ? `${row.num_lives} times` : "once"} on another worker` : row.status;
  return element;
}
