// Money of each currency by itself: amounts of two currencies are never added.

import { addMoney } from "./format.js";

const SUMMED = ["requests", "completion_tokens", "device_us"];

/** The currencies that there is money of, in their order; one of the rows, or USD, where there is none. */
export function currenciesOf({ cost, devices }) {
  const paid = cost.filter((row) => Number(row.cost) > 0 || Number(row.device_cost) > 0);
  const priced = devices.filter((row) => row.busy_cost + row.idle_cost > 0);
  const found = new Set([...paid, ...priced].map((row) => row.currency));
  if (found.size === 0) found.add(cost[0]?.currency ?? devices[0]?.currency ?? "USD");
  return [...found].sort();
}

/** What requests and devices of a range cost in a currency: exact `cost` and `device_cost` as text. */
export function moneyOf({ cost, devices }, currency) {
  const sums = { currency, cost: "0", device_cost: "0", idle_cost: 0, requests: 0, completion_tokens: 0, device_us: 0 };
  for (const row of cost.filter((one) => one.currency === currency)) {
    for (const name of ["cost", "device_cost"]) sums[name] = addMoney(sums[name], row[name]);
    for (const name of SUMMED) sums[name] += Number(row[name]);
  }
  for (const row of devices.filter((one) => one.currency === currency)) sums.idle_cost += row.idle_cost;
  return sums;
}
