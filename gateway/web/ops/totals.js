// Figures of the whole range.

import { difference } from "./compare.js";
import { moneyOf, nothingOf } from "./currencies.js";
import { compact, joules, money, ms, percent, span, whole } from "./format.js";
import { byId, make } from "/static/dom.js";

const LESS = { better: "less" };
const TTFT = "Time to first token, median: from receipt to when the worker had it, of all requests";
const FIRST_BYTE = "First byte, median: from the request at the gateway to writing the first token";

/**
 * Show the totals. `rows` has rows by the names of their queries. `rows.before` has those of the
 * compared range, described by `words`, or null.
 */
export function showTotals(rows, { seconds }, words) {
  const figures = figuresOf(rows);
  const before = rows.before && figuresOf(rows.before);
  const { totals } = figures;
  const lost = figures.lost;
  const cached = totals.prompt_tokens ? percent((100 * totals.cached_tokens) / totals.prompt_tokens) : "none";
  const parts = [`${whole(totals.failed)} failed`, `${whole(totals.shed)} shed`];
  if (totals.expired) parts.push(`${whole(totals.expired)} expired`);
  const latency = (name, key, from, title) => ({
    name: `${name} p50`,
    value: ms(from[`${key}_p50_ms`]),
    detail: `p95 ${ms(from[`${key}_p95_ms`])} · p99 ${ms(from[`${key}_p99_ms`])}`,
    title,
    shown: ms,
    of: (one) => one.latencies[`${key}_p50_ms`],
    ...LESS,
  });
  const tiles = [
    { name: "Requests", value: whole(totals.requests), detail: `${compact(totals.requests / seconds)} per second, ${whole(totals.cancelled)} cancelled`, of: (one) => one.totals.requests },
    { name: "Not answered", value: whole(lost), detail: parts.join(", "), alarm: lost > 0, of: (one) => one.lost, ...LESS },
    { name: "Refused", value: whole(figures.refused), detail: figures.limited ? `${whole(figures.limited)} by a limit (429)` : "before they were accepted", alarm: figures.refused > 0, of: (one) => one.refused, ...LESS },
    latency("TTFT", "ttft", figures.latencies, TTFT),
    latency("First byte", "first_byte", figures.latencies, FIRST_BYTE),
    latency("TPOT", "tpot", figures.latencies, "Time per output token, median"),
    latency("Whole answer", "e2e", figures.latencies, "From receipt to the end, median"),
    { name: "Output tokens", value: compact(totals.completion_tokens), detail: `${compact(totals.prompt_tokens)} in, ${cached} cached${ahead(totals)}`, title: `${whole(totals.completion_tokens)} out, ${whole(totals.prompt_tokens)} in; ${whole(totals.accepted_tokens)} of the output were proposed by speculative decoding`, of: (one) => one.totals.completion_tokens },
    ...figures.money.flatMap((sums) => moneyTiles(sums, totals, figures.money.length > 1)),
  ];
  byId("totals").classList.toggle("wide", figures.money.length > 1);
  byId("totals").replaceChildren(...tiles.map((tile) => draw(tile, figures, before, words)));
}

/**
 * Return the tiles of a currency: cost for tenants and cost of devices. The energy is that of all
 * requests.
 */
function moneyTiles(sums, { energy_j }, isOneOfSeveral) {
  const { currency } = sums;
  const name = (what) => (isOneOfSeveral ? `${what}, ${currency}` : what);
  const shown = (value) => money(value, currency);
  const of = (figures) => figures.money.find((one) => one.currency === currency) ?? nothingOf(currency);
  const energy = energy_j === null || isOneOfSeveral ? "" : `${joules(energy_j)} · `;
  return [
    { name: name("Tenants pay"), value: shown(sums.cost), detail: perMillion(sums), title: `Exactly ${sums.cost} ${currency}, for ${whole(sums.requests)} requests`, of: (one) => of(one).cost, shown },
    { name: name("Devices cost"), value: shown(sums.device_cost), detail: `${span(sums.device_us)} busy · ${energy}${shown(sums.idle_cost)} idle`, title: `Cost of requests' device time, exactly ${sums.device_cost} ${currency}; idle time of all devices apart`, of: (one) => of(one).device_cost, shown },
  ];
}

/** Return the figures of the tiles. */
function figuresOf(rows) {
  const { totals: [totals], refusedOverTime, firstByte } = rows;
  const all = firstByte.find(({ model }) => model === "");
  return {
    totals,
    lost: totals.failed + totals.expired + totals.shed,
    refused: sum(refusedOverTime),
    limited: sum(refusedOverTime.filter(({ status }) => status === 429)),
    money: moneyOf(rows),
    latencies: { ...totals, first_byte_p50_ms: all?.first_byte_p50_ms, first_byte_p95_ms: all?.first_byte_p95_ms, first_byte_p99_ms: all?.first_byte_p99_ms },
  };
}

/** Return the share of output tokens accepted from speculative decoding. */
const ahead = ({ accepted_tokens, completion_tokens }) =>
  accepted_tokens ? `, ${percent((100 * accepted_tokens) / completion_tokens)} proposed ahead` : "";

const sum = (rows) => rows.reduce((until, row) => until + Number(row.refused), 0);

function draw({ name, value, detail, alarm, title = detail, of, shown = whole, better }, figures, before, words) {
  const delta = before && difference(of(figures), of(before), { better, shown, words });
  return make(
    "div",
    { class: alarm ? "tile alarm" : "tile", title },
    make("dt", {}, name),
    make("dd", { class: "value" }, value),
    delta,
    make("dd", { class: "detail" }, detail),
  );
}

function perMillion({ cost, completion_tokens, currency }) {
  return completion_tokens ? `${money((1e6 * Number(cost)) / completion_tokens, currency)} per 1M output` : "nothing yet";
}
