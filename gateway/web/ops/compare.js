// Comparison of figures with an earlier range.

import { compact } from "./format.js";
import { make } from "/static/dom.js";

/**
 * Return the change from `before` to `now` as an arrow and percentage, with words for screen
 * readers. `better` is "less", "more" or absent, and sets colour and word. `shown(value)` makes text
 * of a value. Without a comparison, return nothing.
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

/** Return the change in percent, or as a factor if the percentage is too long. */
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
