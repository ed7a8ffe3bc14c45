// The table of recent requests.

import { clock, compact, money, whole } from "./format.js";

const body = document.querySelector("#recent tbody");
const note = document.querySelector("#recent-note");
let shown = "";

/** Show these rows; rows that are there already stay as they are, so that a selection survives. */
export function showRecent(rows) {
  const text = JSON.stringify(rows);
  if (text === shown) return;
  shown = text;
  const known = new Map([...body.rows].map((line) => [line.dataset.id, line]));
  body.replaceChildren(...rows.map((row) => known.get(row.request_id) ?? line(row)));
  note.textContent = rows.length ? `the last ${rows.length}` : "";
  if (!rows.length) body.append(nothing());
}

function line(row) {
  const element = document.createElement("tr");
  element.dataset.id = row.request_id;
  element.append(
    cell(clock(row.done_ms / 1000), "time"),
    identity(row),
    status(row),
    cell(row.model),
    cell(row.tenant),
    cell(row.source),
    cell(whole(row.prompt_tokens), "number", row.cached_tokens ? `${whole(row.cached_tokens)} of them cached` : ""),
    cell(whole(row.completion_tokens), "number"),
    cell(compact(row.queue_ms), "number"),
    cell(compact(row.ttft_ms), "number"),
    cell(compact(row.tpot_ms), "number"),
    cell(compact(row.total_ms / 1000), "number"),
    cell(money(row.cost, row.currency), "number"),
    cell(row.worker || "–", "mono"),
  );
  return element;
}

function cell(text, className = "", title = "") {
  const element = document.createElement("td");
  element.textContent = text;
  if (className) element.className = className;
  if (title) element.title = title;
  return element;
}

function identity(row) {
  const short = row.request_id.length > 16 ? `${row.request_id.slice(0, 6)}…${row.request_id.slice(-7)}` : row.request_id;
  return cell(short, "mono", row.request_id);
}

function status(row) {
  const element = cell("", "status");
  element.dataset.status = row.status;
  const dot = document.createElement("span");
  dot.className = "dot";
  element.append(dot, row.error_code || (row.status === "done" ? row.finish_reason || "done" : row.status));
  if (row.epoch > 1) element.append(` ·${row.epoch}`);
  element.title = row.epoch > 1 ? `${row.status}; run ${row.epoch} of it` : row.status;
  return element;
}

function nothing() {
  const element = document.createElement("tr");
  const only = cell("No request has ended within this range.", "none");
  only.colSpan = 14;
  element.append(only);
  return element;
}
