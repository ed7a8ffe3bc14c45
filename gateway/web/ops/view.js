// View: range, filters and the open request. All are in the address after the "#", so that a link
// contains them and no server logs them.

export const RANGES = [
  { id: "15m", label: "15 min", words: "the last 15 minutes", seconds: 900, refresh: 2_000 },
  { id: "1h", label: "1 h", words: "the last hour", seconds: 3_600, refresh: 4_000 },
  { id: "6h", label: "6 h", words: "the last 6 hours", seconds: 21_600, refresh: 10_000 },
  { id: "24h", label: "24 h", words: "the last 24 hours", seconds: 86_400, refresh: 20_000 },
  { id: "7d", label: "7 d", words: "the last 7 days", seconds: 604_800, refresh: 60_000 },
  { id: "30d", label: "30 d", words: "the last 30 days", seconds: 2_592_000, refresh: 60_000 },
];
export const CUSTOM = "custom";
export const STATUSES = ["done", "cancelled", "expired", "shed", "failed"];

const DEFAULT = RANGES[0];
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 180, 300, 600, 720, 900, 1800, 3600, 5400, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800];
const MAX_POINTS = 120;
const MAX_BARS = 30;
const TEXTS = ["tenant", "model", "compare", "by", "refused", "status", "id", "request"];
// Ranges to compare with, and how long before they begin. null: directly before the range.
export const COMPARISONS = [
  { id: "previous", label: "the time before", shift: null },
  { id: "day", label: "a day before", shift: 86_400 },
  { id: "week", label: "a week before", shift: 604_800 },
];
// Groupings of the usage table; the first is the default.
export const DIMENSIONS = ["tenant", "user", "key", "model", "adapter"];

/** Return the view of an address; an invalid range becomes the last 15 minutes. */
export function readView(hash) {
  const asked = new URLSearchParams(hash.replace(/^#/, ""));
  const view = { range: DEFAULT.id, from: 0, to: 0 };
  for (const name of TEXTS) view[name] = asked.get(name) ?? "";
  if (!STATUSES.includes(view.status)) view.status = "";
  if (!DIMENSIONS.includes(view.by)) view.by = "";
  if (!COMPARISONS.some((one) => one.id === view.compare)) view.compare = "";
  const from = Date.parse(asked.get("from") ?? "") / 1000;
  const to = Date.parse(asked.get("to") ?? "") / 1000;
  if (from > 0 && to > from) Object.assign(view, { range: CUSTOM, from: Math.floor(from), to: Math.ceil(to) });
  else if (RANGES.some((one) => one.id === asked.get("range"))) view.range = asked.get("range");
  return view;
}

/** Return the address of a view, from its "#" on. */
export function hashOf(view) {
  const parts = new URLSearchParams();
  if (view.range === CUSTOM) {
    parts.set("from", iso(view.from));
    parts.set("to", iso(view.to));
  } else parts.set("range", view.range);
  for (const name of TEXTS) if (view[name]) parts.set(name, view[name]);
  return `#${parts.toString().replaceAll("%3A", ":")}`;
}

/** Format a UTC time to the second, or to the minute if it has no seconds. */
function iso(seconds) {
  return new Date(seconds * 1000).toISOString().replace(/(:00)?\.\d+Z$/, "Z");
}

/**
 * Return the frame of a view: `bounds` are parameters of every saved query, `step` (of lines) and
 * `barStep` (of bars) are in seconds, `refresh` is in ms, 0 for a range that is over.
 */
export function frameOf(view, now = Date.now() / 1000) {
  const known = RANGES.find((one) => one.id === view.range);
  if (known) {
    return { ...steps(known.seconds), bounds: { from_s: -known.seconds, to_s: 0 }, seconds: known.seconds, refresh: known.refresh, words: `within ${known.words}` };
  }
  const seconds = view.to - view.from;
  const refresh = view.to <= now ? 0 : Math.min(60_000, Math.max(2_000, Math.round(seconds / 4)));
  return { ...steps(seconds), bounds: { from_s: view.from, to_s: view.to }, seconds, refresh, words: "in this range" };
}

/**
 * Return the compared range: `bounds` as in a frame, `shift` in seconds, and `words`; null without a
 * comparison.
 */
export function comparedWith(view, { bounds, seconds }) {
  const known = COMPARISONS.find((one) => one.id === view.compare);
  if (!known) return null;
  const shift = known.shift ?? seconds;
  return { bounds: { from_s: bounds.from_s - shift, to_s: bounds.to_s - shift }, shift, words: known.label };
}

function steps(seconds) {
  const fitting = (most) => STEPS_S.find((step) => seconds / step <= most) ?? STEPS_S[STEPS_S.length - 1] * Math.ceil(seconds / most / STEPS_S[STEPS_S.length - 1]);
  return { step: fitting(MAX_POINTS), barStep: fitting(MAX_BARS) };
}
