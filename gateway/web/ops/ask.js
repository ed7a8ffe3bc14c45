// Saved queries at the gateway: rows and files.

import { exactNumber } from "./integers.js";
import { make } from "/static/dom.js";
import { fetchWithKey } from "/static/key.js";

const TIMEOUT_MS = 15_000;
// Telemetry has a time limit for each query, so do not run all at once.
const MAX_AT_ONCE = 3;

/** Error: the gateway requires an administrator's key. */
export class KeyNeededError extends Error {}

/** Refusal of the query itself: a retry fails the same way. */
export class RefusedError extends Error {}

let numAsked = 0;
const waiting = [];

/** Return the rows of a saved query. At most `MAX_AT_ONCE` queries run at a time. An `urgent` query,
 * such as after a click, goes to the front of the waiting queries. Aborting `signal` cancels the
 * query. */
export async function ask(name, params, { signal, urgent = false } = {}) {
  if (numAsked < MAX_AT_ONCE) numAsked += 1;
  else await new Promise((resolve) => { if (urgent) waiting.unshift(resolve); else waiting.push(resolve); });
  try {
    return await rowsOf(name, params, signal);
  } finally {
    if (waiting.length) waiting.shift()();
    else numAsked -= 1;
  }
}

async function rowsOf(name, params, signal) {
  const late = AbortSignal.timeout(TIMEOUT_MS);
  const answer = await send(name, params, "application/json", signal ? AbortSignal.any([late, signal]) : late);
  return (await answer.json()).map(withNumbers);
}

// Example: 2026-11-01T08:30:00.123456Z. Date keeps only milliseconds.
const TIME = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.(\d+))?Z$/;

/**
 * Return a row with numbers instead of text for integers and times: `t` in seconds, `done_at` as
 * `done_us`.
 */
function withNumbers(row) {
  for (const [name, value] of Object.entries(row)) {
    row[name] = exactNumber(name, value);
    const time = typeof value === "string" && (name === "t" || name === "at" || name.endsWith("_at")) ? TIME.exec(value) : null;
    if (time === null) continue;
    const seconds = Date.parse(`${value.slice(0, 19)}Z`) / 1000;
    if (name === "t") row.t = seconds;
    else row[`${name.slice(0, -2)}${name === "at" ? "at_us" : "us"}`] = seconds * 1e6 + Number((time[1] ?? "").padEnd(6, "0").slice(0, 6));
  }
  return row;
}

/** Save the rows of a saved query as a file. `requests` saves all requests of a range. */
export async function save(name, params) {
  const answer = await send(`${name}.csv`, params, "text/csv");
  const address = URL.createObjectURL(await answer.blob());
  make("a", { href: address, download: `millrace-${name}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

async function send(path, params, accept, signal) {
  const answer = await fetchWithKey(`api/${path}?${new URLSearchParams(params)}`, { headers: { accept }, signal });
  if (answer.ok) return answer;
  const text = await answer.json().then((body) => body.error?.message, () => "");
  if (answer.status === 401 || answer.status === 403) throw new KeyNeededError(text);
  if (answer.status < 500 && answer.status !== 429) throw new RefusedError(text || `The gateway answered ${answer.status}.`);
  throw new Error(text || `the gateway answered ${answer.status}`);
}
