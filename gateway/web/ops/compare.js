// Figures beside those of an earlier range.

import { compact } from "./format.js";
import { make } from "/static/dom.js";

/**
 * How far `now` is from `before`, as an arrow and percents, and in words for whom the page is read to:
 * `better` is "less" or "more" if one of them is, which has a colour and a word; `shown(value)` makes
 * text of a value. Nothing where there is nothing to compare.
 */
export function difference(now, before, { better, shown, words }) {
  const [value, former] = [asNumber(now), asNumber(before)];
  if (former === null || value === null) return null;
  const change = value - former;
  const tone = toneOf(change, better);
  const size = sizeOf(value, former);
  const sign = change > 0 ? "▲" : change < 0 ? "▼" : "=";
  const said = change === 0 ? "as much as" : `${change > 0 ? "more" : "less"} than`;
  const verdict = tone === "neutral" ? "" : `, which is ${tone}`;
  return make(
    "dd",
    { class: "delta", "data-tone": tone, title: `${shown(before)} ${words}` },
    make("span", { "aria-hidden": "true" }, change ? `${sign}${size || " from 0"}` : "= no change", tone === "neutral" ? null : make("span", { class: "tone" }, tone)),
    make("span", { class: "spoken" }, `${change ? size : ""} ${said} ${words}, ${shown(before)}${verdict}`),
  );
}

/** In percents; where those have too many digits, how many times as much. */
function sizeOf(value, former) {
  if (former === 0) return "";
  const percents = Math.abs((100 * (value - former)) / former);
  return percents < 1_000 ? ` ${compact(percents)} %` : ` × ${compact(value / former)}`;
}

function toneOf(change, better) {
  if (!better || change === 0) return "neutral";
  return change > 0 === (better === "more") ? "better" : "worse";
}

function asNumber(value) {
  return value === null || value === undefined || !Number.isFinite(Number(value)) ? null : Number(value);
}
