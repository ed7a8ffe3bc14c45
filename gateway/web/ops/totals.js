// The figures of the whole range.

import { compact, joules, money, ms, percent, span, whole } from "./format.js";
import { byId, make } from "/static/dom.js";

/** Show the totals; `devices` are steps of what all devices did, whoever asked. */
export function showTotals(totals, devices, { seconds }) {
  const lost = totals.failed + totals.expired + totals.shed;
  const cached = totals.prompt_tokens ? percent((100 * totals.cached_tokens) / totals.prompt_tokens) : "none";
  const idle = devices.reduce((sum, row) => sum + row.idle_cost, 0);
  const parts = [`${whole(totals.failed)} failed`, `${whole(totals.shed)} shed`];
  if (totals.expired) parts.push(`${whole(totals.expired)} expired`);
  const others = totals.currencies.filter((one) => one !== totals.currency);
  const tiles = [
    { name: "Requests", value: whole(totals.requests), detail: `${compact(totals.requests / seconds)} per second, ${whole(totals.cancelled)} cancelled` },
    { name: "Not answered", value: whole(lost), detail: parts.join(", "), alarm: lost > 0 },
    { name: "TTFT", value: ms(totals.ttft_p50_ms), detail: `p95 ${ms(totals.ttft_p95_ms)} · p99 ${ms(totals.ttft_p99_ms)}`, title: "Time to first token, median" },
    { name: "TPOT", value: ms(totals.tpot_p50_ms), detail: `p95 ${ms(totals.tpot_p95_ms)} · p99 ${ms(totals.tpot_p99_ms)}`, title: "Time per output token, median" },
    { name: "Whole answer", value: ms(totals.e2e_p50_ms), detail: `p95 ${ms(totals.e2e_p95_ms)} · p99 ${ms(totals.e2e_p99_ms)}`, title: "From receipt to the end, median" },
    { name: "Output tokens", value: compact(totals.completion_tokens), detail: `${compact(totals.prompt_tokens)} in, ${cached} cached`, title: `${whole(totals.completion_tokens)} out, ${whole(totals.prompt_tokens)} in` },
    { name: "Tenants pay", value: money(totals.cost, totals.currency), detail: others.length ? `also in ${others.join(", ")}` : perMillion(totals.cost, totals), title: `Exactly ${totals.cost} ${totals.currency}` },
    { name: "Devices cost", value: money(totals.device_cost, totals.currency), detail: `${span(totals.device_us)} busy · ${totals.energy_j === null ? "" : `${joules(totals.energy_j)} · `}${money(idle, totals.currency)} idle`, title: `What requests' device time cost us, exactly ${totals.device_cost} ${totals.currency}; idle time of all devices apart` },
  ];
  byId("totals").replaceChildren(...tiles.map(tile));
}

function tile({ name, value, detail, alarm, title = detail }) {
  return make(
    "div",
    { class: alarm ? "tile alarm" : "tile", title },
    make("dt", {}, name),
    make("dd", { class: "value" }, value),
    make("dd", { class: "detail" }, detail),
  );
}

function perMillion(cost, { completion_tokens, currency }) {
  return completion_tokens ? `${money((1e6 * Number(cost)) / completion_tokens, currency)} per 1M output` : "nothing yet";
}
