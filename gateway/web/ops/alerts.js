// Alerts and service level objectives.

import { bytes, clock, compact, dateTime, day, lasting, ms, percent, whole } from "./format.js";
import { number, Table } from "./table.js";
import { byId, make } from "/static/dom.js";

const DAY_S = 86_400;
const NAMES = { firing: "Firing", pending: "Pending", unknown: "Unknown", ok: "OK" };
const UNITS = {
  share: (value) => percent(100 * value),
  per_s: (value) => `${compact(value)} a second`,
  count: whole,
  s: lasting,
  bytes,
};
// Alerts that fire below their bound.
const LEAST = new Set(["MillraceStoreShort"]);

const ALERTS = [
  { name: "State", of: stateOf },
  { name: "Alert", of: (row) => row.name, kind: "mono", title: (row) => row.meaning },
  { name: "Of", of: (row) => row.subject || "all" },
  number("Value", valueOf, { title: (row) => row.detail }),
  number("Bound", boundOf),
  { name: "Since", of: since, title: (row) => (row.since_s === null ? "" : dateTime(row.since_s)) },
  { name: "What it means, and what to do", of: advice, kind: "long" },
];
const OBJECTIVES = [
  { name: "Model", of: (row) => row.model },
  number("Requests", (row) => whole(row.requests), { note: "Requests in the range, without cancelled ones" }),
  number("Within objectives", (row) => shareOf(row.attainment), { note: "Answered, and within both objectives" }),
  number("TTFT met", (row) => shareOf(row.requests ? row.ttft_met / row.requests : null)),
  number("TPOT met", (row) => shareOf(row.requests ? row.tpot_met / row.requests : null)),
  number("Burn rate", burn, { note: "Rate of error budget use in the range, relative to the allowed rate" }),
  number("Budget left", left, { note: "Share of the error budget of the whole window" }),
];

const wrong = new Table("alerts", ALERTS, "No alerts are firing.");
const passing = new Table("alerts-well", ALERTS, "No rules are OK.");
const objectives = new Table("slo", OBJECTIVES, "No request has ended in this window.");

/** Show the alerts, with passing rules apart, and the objectives' rows. The summary above them also
 * counts overspent error budgets and tenants whose requests exceeded their monthly budget. */
export function showAlerts({ alerts, budget, refusals }) {
  const overspent = budget.filter(({ budget_left }) => budget_left !== null && budget_left < 0);
  const tenants = new Set(refusals.filter(({ limit_reached }) => limit_reached === "monthly_budget").map(({ tenant }) => tenant));
  const count = (state) => alerts.filter((row) => row.state === state).length;
  const [firing, pending, unknown, ok] = ["firing", "pending", "unknown", "ok"].map(count);
  wrong.none = `No alerts are firing.${overspent.length ? ` The error budget of ${overspent.map(({ model }) => model).join(", ")} is overspent: see Objectives.` : ""}`;
  wrong.show(alerts.filter((row) => row.state !== "ok"));
  passing.show(alerts.filter((row) => row.state === "ok"));
  byId("alerts-well-count").textContent = `${ok} ${ok === 1 ? "rule" : "rules"} OK`;
  const parts = [
    [firing, "firing"],
    [pending, "pending"],
    [unknown, "unknown"],
    [overspent.length, overspent.length === 1 ? "error budget overspent" : "error budgets overspent"],
    [tenants.size, tenants.size === 1 ? "tenant over its monthly budget" : "tenants over their monthly budgets"],
  ].filter(([number]) => number);
  const text = parts.length ? parts.map(([number, word]) => `${number} ${word}`).join(", ") : "No alerts are firing";
  if (byId("alerts-note").textContent !== text) byId("alerts-note").textContent = text;
  byId("alerts-note").dataset.state = firing || overspent.length ? "firing" : parts.length ? "pending" : "ok";
  objectives.show(budget);
  const [first] = budget;
  byId("slo-note").textContent = first ? `${percent(100 * first.target)} with TTFT up to ${ms(first.ttft_ms)} and TPOT up to ${ms(first.tpot_ms)}, over ${lasting(first.window_s)}` : "";
}

function stateOf({ state, severity, for_s }) {
  const title = state === "pending" ? `The alert fires if its condition lasts for ${lasting(for_s)}` : "";
  const cell = make("td", { class: "alert-state", "data-state": state, title }, make("span", { class: "dot", "aria-hidden": "true" }), NAMES[state]);
  if (state === "firing") cell.append(" ", make("span", { class: "severity" }, severity));
  return cell;
}

function valueOf({ value, unit }) {
  return value === null ? "–" : UNITS[unit](value);
}

function boundOf({ name, value, bound, unit }) {
  if (value === null) return "–";
  return `${LEAST.has(name) ? "at least" : "up to"} ${UNITS[unit](bound)}`;
}

function since({ since_s }) {
  if (since_s === null) return "–";
  const age_s = Math.max(0, Date.now() / 1000 - since_s);
  return `${age_s > DAY_S ? `${day(since_s)}, ` : ""}${clock(since_s, false)}, for ${lasting(age_s)}`;
}

/** Render the meaning and advice of an alert; the Markdown text is from docs/monitoring.md. */
function advice({ state, meaning, advice: text, detail }) {
  const parts = text.replace(/\[([^\]]+)\]\([^)]+\)/g, "“$1” in the documentation").split("`");
  const said = parts.map((part, i) => (i % 2 ? make("code", {}, part) : part));
  return make("td", {}, make("b", {}, state === "unknown" ? "State unknown" : meaning), detail ? `: ${detail.replace(/\.$/, "")}` : "", ". ", ...said);
}

function shareOf(value) {
  return value === null ? "–" : percent(100 * value);
}

function burn({ burn_rate }) {
  if (burn_rate === null) return "–";
  return mark(`${compact(burn_rate)} ×`, burn_rate > 1 ? "over" : "within");
}

function left({ budget_left }) {
  if (budget_left === null) return "–";
  return mark(budget_left < 0 ? `overspent by ${percent(-100 * budget_left)}` : percent(100 * budget_left), budget_left < 0 ? "over" : "within");
}

function mark(text, state) {
  return make("span", { class: "budget", "data-budget": state }, text);
}
