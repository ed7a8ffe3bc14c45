// Columns of 64-bit integers. Answers have them as text, as JSON numbers are exact only up to 2^53.

const COLUMNS = new Set([
  "accepted_tokens", "busy_us", "cached_tokens", "cancelled", "charged_us", "completion_tokens",
  "computed_tokens", "deliveries", "device_memory_bytes", "device_memory_total_bytes", "device_us",
  "done", "done_us", "energy_requests", "expired", "failed", "idle_us", "met", "moved", "moves",
  "num_earlier_runs", "num_lives", "other", "preemptions", "prompt_tokens", "proposed_tokens",
  "pulled_tokens", "refused", "replays", "requests", "resumed", "resumes", "served_tokens", "shed",
  "since_s", "stalled", "stalls", "tenants", "tokens", "tokens_delivered", "tpot_met", "ttft_met",
  "window_met", "window_requests", "window_s", "workers",
]);

/** Return the value of a column; listed columns become numbers if the number is exact. */
export function exactNumber(name, value) {
  if (typeof value !== "string" || !COLUMNS.has(name)) return value;
  const number = Number(value);
  return Number.isSafeInteger(number) ? number : value;
}
