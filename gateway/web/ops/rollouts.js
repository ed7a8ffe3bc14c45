// Rollouts: share of requests and results of each version.

import { ms, percent, whole } from "./format.js";
import { number, Table } from "./table.js";
import { byId, make } from "/static/dom.js";

const NAMES = { waiting: "Waiting for a worker", running: "Running", completed: "Completed", aborted: "Aborted" };
// Colours of alerts.
const STATES = { waiting: "pending", running: "pending", completed: "ok", aborted: "firing" };

const table = new Table(
  "rollouts",
  [
    { name: "Model", of: (row) => (row.first ? row.model : "") },
    { name: "State", of: stateOf },
    { name: "Version", of: (row) => row.version, kind: "mono" },
    number("Share", shareOf, { note: "Share of the requests for the model" }),
    number("Requests", (row) => (row.seen ? whole(row.seen.num_requests ?? 0) : "–"), { note: "Requests ended since the share changed" }),
    number("Errors", (row) => (row.seen ? percent(100 * (row.seen.error_rate ?? 0)) : "–")),
    number("TTFT p95", (row) => timeOf(row, "ttft_p95")),
    number("TPOT p95", (row) => timeOf(row, "tpot_p95")),
    { name: "Rollback rule or reason", of: (row) => (row.first ? row.reason || row.rule || "–" : ""), kind: "long" },
  ],
  "There has been no rollout.",
);

/**
 * Show the latest rollout of each model, the new version above the old one. Hide the panel if there
 * is none.
 */
export function showRollouts({ rollouts }) {
  byId("rollouts-panel").hidden = !rollouts.length;
  table.show(rollouts.flatMap(rowsOf));
}

function rowsOf({ rollout, figures }) {
  const seen = new Map(figures.map((one) => [one.version, one]));
  const share = rollout.percent ?? 0;
  const state = rollout.state ?? "waiting";
  const isDone = state === "completed";
  const shares = isDone ? [[rollout.stable, 100], [rollout.former, 0]] : [[rollout.candidate, share], [rollout.stable, 100 - share]];
  return shares
    .filter(([version]) => version)
    .map(([version, part], i) => ({ model: rollout.model, state, version, share: part, seen: seen.get(version), first: i === 0, rule: rollout.abort_if, reason: rollout.reason }));
}

function stateOf({ first, state }) {
  if (!first) return "";
  return make("td", { class: "alert-state", "data-state": STATES[state] }, make("span", { class: "dot", "aria-hidden": "true" }), NAMES[state]);
}

function shareOf({ share }) {
  return make("td", { class: "share" }, make("progress", { max: "100", value: String(share), "aria-hidden": "true" }), " ", percent(share));
}

function timeOf({ seen }, name) {
  const value = seen?.percentiles_ms?.[name];
  return value === undefined ? "–" : ms(value);
}
