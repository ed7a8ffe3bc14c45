// Money by currency: amounts of two currencies are never added.

/** Return the cost of requests and devices of a range: a row for each currency with costs, in
 * order; one row if there are none. `cost` and `device_cost` are exact, as text. */
export function moneyOf({ totals: [totals], devices }) {
  const idle = new Map();
  for (const { currency, idle_cost } of devices) idle.set(currency, (idle.get(currency) ?? 0) + idle_cost);
  const rows = totals.currencies.map((currency, i) => ({
    currency,
    cost: totals.costs[i],
    device_cost: totals.device_costs[i],
    requests: Number(totals.currency_requests[i]),
    completion_tokens: Number(totals.currency_completion_tokens[i]),
    device_us: Number(totals.currency_device_us[i]),
    idle_cost: idle.get(currency) ?? 0,
  }));
  for (const [currency, idle_cost] of idle) {
    if (!totals.currencies.includes(currency)) rows.push({ ...nothingOf(currency), idle_cost });
  }
  const priced = rows.filter((row) => Number(row.cost) > 0 || Number(row.device_cost) > 0 || row.idle_cost > 0);
  if (priced.length) return priced.sort((a, b) => (a.currency < b.currency ? -1 : 1));
  return [rows[0] ?? nothingOf("USD")];
}

/** Return the row of a currency without costs. */
export function nothingOf(currency) {
  return { currency, cost: "0", device_cost: "0", requests: 0, completion_tokens: 0, device_us: 0, idle_cost: 0 };
}
