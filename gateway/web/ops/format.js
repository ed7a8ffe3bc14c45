// Formatting of numbers, money and times.

const NONE = "–";

/** Format with at most three significant digits, k and M; "–" for a missing value. */
export function compact(value) {
  if (!Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return `${digits(value / 1e9)}G`;
  if (size >= 1e6) return `${digits(value / 1e6)}M`;
  if (size >= 1e4) return `${digits(value / 1e3)}k`;
  return digits(value);
}

function digits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return trim(value.toFixed(1));
  return trim(value.toFixed(size >= 1 ? 2 : 3));
}

function trim(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** Format whole numbers with separators. */
export function whole(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en");
}

/** Format joules; "–" for an unmeasured value. */
export function joules(value) {
  return Number.isFinite(value) ? `${compact(value)} J` : NONE;
}

/** Format milliseconds; as seconds from 10 s on. */
export function ms(value) {
  if (!Number.isFinite(value)) return NONE;
  return value >= 10_000 ? `${compact(value / 1000)} s` : `${compact(value)} ms`;
}

/**
 * Format money with as many digits as a small amount needs, or with exactly `digits` after the
 * point. The amount may be exact text.
 */
export function money(value, currency, digits) {
  if (value === null || value === undefined || Number.isNaN(Number(value))) return NONE;
  const size = Math.abs(value);
  const needed = size === 0 || size >= 100 ? 2 : Math.min(9, Math.max(2, 2 - Math.floor(Math.log10(size))));
  const fraction = digits === 1 ? 2 : (digits ?? needed);
  try {
    return new Intl.NumberFormat("en", {
      style: "currency",
      currency: currency || "USD",
      minimumFractionDigits: digits === undefined ? 2 : fraction,
      maximumFractionDigits: fraction,
    }).format(value);
  } catch {
    return `${Number(value).toFixed(fraction)} ${currency}`;
  }
}

// Number of decimal places of money in the store.
const MONEY_DIGITS = 12;

/** Return `a + sign * b` exactly, for amounts that are text from the store. */
export function addMoney(a, b, sign = 1n) {
  const sum = units(a) + sign * units(b);
  const text = String(sum < 0n ? -sum : sum).padStart(MONEY_DIGITS + 1, "0");
  return trim(`${sum < 0n ? "-" : ""}${text.slice(0, -MONEY_DIGITS)}.${text.slice(-MONEY_DIGITS)}`);
}

/** Return an amount in the store's smallest unit, as an integer. */
function units(text) {
  const [, minus, wholes, fraction = ""] = /^(-?)(\d+)(?:\.(\d+))?$/.exec(text);
  const size = BigInt(wholes + fraction.padEnd(MONEY_DIGITS, "0").slice(0, MONEY_DIGITS));
  return minus ? -size : size;
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${compact(value)} %`;
}

/** Format a Unix time in seconds as a time of day, in the browser's time zone. */
export function clock(seconds, withSeconds = true) {
  // "hh:mm:ss" and a zone, independent of the locale.
  return new Date(seconds * 1000).toTimeString().slice(0, withSeconds ? 8 : 5);
}

/** Return the Unix time in seconds of a time from the store: UTC, with or without a zone. */
export function secondsOf(text) {
  return Date.parse(`${text.replace(" ", "T").replace(/Z$/, "")}Z`) / 1000;
}

export function isMidnight(seconds) {
  return clock(seconds, false) === "00:00";
}

const DAY_S = 86_400;

/** Return the parts of a date in English, in the browser's time zone. */
function dateParts(seconds) {
  const [weekday, month, number, year] = new Date(seconds * 1000).toDateString().split(" ");
  return { weekday, month, number: Number(number), year };
}

/** Format a day: its name in a range of about a week, day and month in a longer one. */
export function day(seconds, rangeSeconds = 0) {
  const { weekday, month, number } = dateParts(seconds);
  return rangeSeconds > 9 * DAY_S ? `${number} ${month}` : `${weekday} ${number}`;
}

/** Format a time for a range of that length. */
export function moment(seconds, rangeSeconds) {
  const long = rangeSeconds > DAY_S;
  return (long ? `${day(seconds, rangeSeconds)} ` : "") + clock(seconds, !long);
}

/** Format date and time to the second, in the browser's time zone. */
export function dateTime(seconds) {
  const { month, number, year } = dateParts(seconds);
  return `${number} ${month} ${year}, ${clock(seconds)}`;
}

/** Format bytes as GiB or MiB. */
export function bytes(value) {
  return value >= 2 ** 30 ? `${compact(value / 2 ** 30)} GiB` : `${compact(value / 2 ** 20)} MiB`;
}

/** Format microseconds as µs, ms, s or hours. */
export function span(us) {
  if (!Number.isFinite(us)) return NONE;
  if (us >= 7.2e9) return `${compact(us / 3.6e9)} h`;
  if (Math.abs(us) < 1_000) return `${Math.round(us)} µs`;
  return ms(us / 1000);
}

/** Format a duration in seconds, minutes, hours or days. */
export function lasting(seconds) {
  if (seconds >= 2 * DAY_S) return `${compact(seconds / DAY_S)} days`;
  if (seconds >= 7_200) return `${compact(seconds / 3_600)} h`;
  return seconds >= 120 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds)} s`;
}
