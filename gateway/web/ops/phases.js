// Phases of a request, from the events of its timeline.

const WAITS = { received: "Queued", interrupted: "Waiting again", dispatched: "On its way to the worker" };

/**
 * Phases `{kind, label, us}` from the first event to the end, in order. `kind` is "queued",
 * "prefill", "decode" or "earlier": an attempt that another one continued.
 */
export function phasesOf(events) {
  const own = events.filter(({ event }) => event !== "first_byte" && event !== "delivered");
  const interrupted = new Set(own.filter(({ event }) => event === "interrupted").map(({ run }) => run));
  const phases = [];
  for (let i = 0; i + 1 < own.length; i += 1) {
    const { event, run, place, at_us } = own[i];
    const us = own[i + 1].at_us - at_us;
    if (event === "ended") break;
    if (us <= 0) continue;
    if (event === "started" && interrupted.has(run)) phases.push({ kind: "earlier", label: `Run on ${place}`, us });
    else if (event === "started") phases.push({ kind: "prefill", label: "Prefill", us });
    else if (event === "first_token") phases.push({ kind: "decode", label: "Decode", us });
    else phases.push({ kind: "queued", label: WAITS[event] ?? event, us });
  }
  return phases;
}

/** Return the time of all phases of a kind, in µs. */
export function sumOf(phases, kind) {
  return phases.reduce((sum, phase) => (phase.kind === kind ? sum + phase.us : sum), 0);
}
