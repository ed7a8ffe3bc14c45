// Usage and spend by tenant, user, key, model or adapter.

import { saveButton } from "./chart.js";
import { addMoney, compact, money, percent, span, whole } from "./format.js";
import { number, Table } from "./table.js";
import { DIMENSIONS } from "./view.js";
import { button, byId } from "/static/dom.js";

const COLUMNS = {
  tenant: ["tenant"],
  user: ["tenant", "user"],
  key: ["tenant", "key_id"],
  model: ["model"],
  adapter: ["model", "adapter"],
};
const TITLES = { tenant: "Tenant", user: "User", key: "Key", key_id: "Key", model: "Model", adapter: "Adapter" };
const SUMMED = ["requests", "done", "prompt_tokens", "cached_tokens", "completion_tokens", "device_us"];
const FIGURES = [
  number("Requests", (row) => whole(row.requests), { sort: (row) => Number(row.requests), title: (row) => `${whole(row.done)} done` }),
  number("Prompt", (row) => compact(Number(row.prompt_tokens)), { unit: "tokens", sort: (row) => Number(row.prompt_tokens), title: (row) => whole(row.prompt_tokens) }),
  number("Cached", (row) => (Number(row.prompt_tokens) ? percent((100 * row.cached_tokens) / row.prompt_tokens) : "–"), { unit: "of them", sort: (row) => row.cached_tokens / Math.max(1, row.prompt_tokens), title: (row) => whole(row.cached_tokens) }),
  number("Output", (row) => compact(Number(row.completion_tokens)), { unit: "tokens", sort: (row) => Number(row.completion_tokens), title: (row) => whole(row.completion_tokens) }),
  number("Device time", (row) => span(Number(row.device_us)), { sort: (row) => Number(row.device_us) }),
  number("Devices cost", (row) => money(row.device_cost, row.currency), { sort: (row) => byCurrency(row, row.device_cost), title: (row) => `Exactly ${row.device_cost} ${row.currency}` }),
  number("Tenants pay", (row) => money(row.cost, row.currency), { sort: (row) => byCurrency(row, row.cost), title: (row) => `Exactly ${row.cost} ${row.currency}` }),
];

/** Sort key of amounts: it groups amounts by currency. */
function byCurrency({ currency }, amount) {
  return `${currency} ${Number(amount).toFixed(12).padStart(40, "0")}`;
}

let table = null;
let by = "";

/**
 * Make the switch and the button. `change(part)` is called with the choice, `save(query)` saves all
 * rows.
 */
export function makeUsage(change, save) {
  const group = byId("usage-by");
  for (const name of DIMENSIONS) group.append(button(TITLES[name], () => change({ by: name }), { value: name }));
  const head = group.closest(".head");
  head.append(saveButton("Usage and spend", () => save(`usage_by_${by}`)));
}

/** Show rows of the view's dimension by falling cost, with the sum of the whole range below. */
export function showUsage({ usage, usageSums }, view, change) {
  const chosen = view.by || DIMENSIONS[0];
  if (chosen !== by) {
    by = chosen;
    for (const one of byId("usage-by").children) one.setAttribute("aria-pressed", String(one.value === by));
    const names = COLUMNS[by].map((name) => nameColumn(name, change));
    table ??= new Table("usage", [], "No usage in this range.");
    table.describe([...names, ...FIGURES]);
  }
  const all = sumsOf(usageSums);
  const rest = all.map((sum) => restOf(sum, usage)).filter(({ requests }) => requests > 0);
  table.show(usage, null, usage.length ? [...rest, ...all] : []);
}

function nameColumn(name, change) {
  const isFilter = name === "tenant" || name === "model";
  const of = (row) => {
    if (row.label) return name === COLUMNS[by][0] ? row.label : "";
    if (!row[name]) return "–";
    return isFilter ? button(row[name], () => change({ [name]: row[name] }), { class: "link", title: `Show ${row[name]} alone` }) : row[name];
  };
  return { name: TITLES[name], of, sort: (row) => row[name] };
}

/** Return the sum of all rows of a currency. */
function sumsOf(rows) {
  const sums = new Map();
  for (const row of rows) sums.set(row.currency, added(sums.get(row.currency), row, 1n));
  return [...sums.values()].map((sum) => ({ ...sum, label: "All" }));
}

/** Return the difference between the sum and the displayed rows, which are limited. */
function restOf(sum, rows) {
  const rest = rows.filter(({ currency }) => currency === sum.currency).reduce((until, row) => added(until, row, -1n), sum);
  return { ...rest, label: "Others" };
}

function added(sum, row, sign) {
  const made = { currency: row.currency };
  for (const name of SUMMED) made[name] = Number(sum?.[name] ?? 0) + Number(sign) * Number(row[name]);
  for (const name of ["cost", "device_cost"]) made[name] = addMoney(sum?.[name] ?? "0", row[name], sign);
  return made;
}
