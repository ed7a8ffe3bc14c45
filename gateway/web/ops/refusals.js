// Refused requests: over time, by kind, and the latest.

import { clock, dateTime, day, secondsOf, whole } from "./format.js";
import { number, statusMark, Table } from "./table.js";
import { button, byId, make } from "/static/dom.js";

const DAY_S = 86_400;
const SEARCH_MS = 300;
const MAX_REASONS = 6;

const tenant = { name: "Tenant", of: (row) => row.tenant || "–", title: (row) => (row.tenant ? "" : "Unknown tenant") };
const key = { name: "Key", of: (row) => row.api_key || "–", kind: "mono" };
const status = number("Status", (row) => (row.status ? String(row.status) : "–"));
const limit = { name: "Limit", of: (row) => row.limit_reached || "–" };
const endpoint = { name: "Endpoint", of: (row) => row.door };

let choose = () => {};
let shown = "";

const KINDS = [
  { name: "Reason", of: reason, sort: (row) => row.code || row.door },
  { ...status, sort: (row) => row.status },
  { ...limit, sort: (row) => row.limit_reached },
  { ...tenant, sort: (row) => row.tenant },
  { ...key, sort: (row) => row.api_key },
  endpoint,
  number("Requests", (row) => whole(row.refused), { sort: (row) => Number(row.refused) }),
  number("Latest", (row) => when(latestS(row)), { title: (row) => dateTime(latestS(row)), sort: latestS }),
];
const LATEST = [
  { name: "At", of: (row, { seconds }) => when(row.last_us / 1e6, seconds), kind: "time", title: (row) => dateTime(row.last_us / 1e6) },
  { name: "Reason", of: reason },
  status,
  limit,
  tenant,
  key,
  endpoint,
  number("Requests", (row) => whole(row.refused), { title: (row) => `within a second, at ${row.gateway}` }),
  { name: "Request ids", of: ids, kind: "mono" },
];

const kinds = new Table("refusals", KINDS, "No requests were refused in this range.");
const latest = new Table("recent-refusals", LATEST, "No refusals of this kind in this range.");

/** Make the search field of refusals; `change(part)` is called with its value. */
export function makeRefusals(change) {
  choose = change;
  let timer = 0;
  byId("refused").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => change({ refused: byId("refused").value.trim() }), SEARCH_MS);
  });
}

export function showRefusalFilter({ refused }) {
  if (document.activeElement !== byId("refused")) byId("refused").value = refused;
}

/** Show the tables. Existing rows keep their elements, so that a selection survives. */
export function showRefusals({ refusals, recentRefusals }, { seconds }) {
  const text = JSON.stringify([refusals, recentRefusals]);
  if (text === shown) return;
  shown = text;
  kinds.show(refusals);
  latest.show(recentRefusals, { seconds });
  const numRefused = refusals.reduce((sum, row) => sum + Number(row.refused), 0);
  byId("refusals-note").textContent = numRefused ? `${whole(numRefused)} requests` : "";
}

/**
 * Return rows `{t, reason: number …}` by time, and the series of a chart. The rarest reasons are
 * combined.
 */
export function reasonsOf(rows) {
  const sums = new Map();
  for (const row of rows) sums.set(nameOf(row), (sums.get(nameOf(row)) ?? 0) + Number(row.refused));
  const names = [...sums.keys()].sort((a, b) => sums.get(b) - sums.get(a));
  const drawn = names.slice(0, MAX_REASONS);
  const rest = names.length > MAX_REASONS ? drawn.at(-1) : null;
  const byTime = new Map();
  for (const row of rows) {
    const merged = byTime.get(row.t) ?? { t: row.t };
    const name = drawn.includes(nameOf(row)) ? nameOf(row) : rest;
    merged[name] = (merged[name] ?? 0) + Number(row.refused);
    byTime.set(row.t, merged);
  }
  const series = drawn.map((name) => ({ key: name, label: name === rest ? "others" : name }));
  return { rows: [...byTime.values()].sort((a, b) => a.t - b.t), series };
}

function nameOf({ status: number, reason: name }) {
  return number ? `${name} ${number}` : name;
}

function reason(row) {
  const text = row.code || row.door;
  const cell = statusMark("td", "", row.status < 500 ? "shed" : "failed");
  const find = row.limit_reached || row.code;
  cell.append(find ? button(text, () => choose({ refused: find }), { class: "link", title: `Show refusals for ${find}` }) : text);
  return cell;
}

function ids({ request_ids, refused }) {
  const more = Number(refused) - request_ids.length;
  const cell = make("td", { title: request_ids.join("\n") }, request_ids.join(" ") || "–");
  if (more > 0) cell.append(make("span", { class: "unit" }, `and ${whole(more)} more`));
  return cell;
}

function latestS({ last_at }) {
  return secondsOf(last_at);
}

function when(at_s, seconds = DAY_S + 1) {
  return seconds > DAY_S ? `${day(at_s)}, ${clock(at_s, false)}` : clock(at_s);
}
