// Request details: timeline, usage, cost and delivery.

import { KeyNeededError, ask } from "./ask.js";
import { clock, compact, dateTime, joules, money, ms, percent, span, whole } from "./format.js";
import { phasesOf, sumOf } from "./phases.js";
import { statusMark } from "./table.js";
import { button, byId, copyText, make } from "/static/dom.js";

const dialog = byId("request");
const body = byId("request-body");
let open = "";

let locked = () => {};

/**
 * Make the sheet. `onClose` is called when the user closes it, `filter(part)` with a chosen filter,
 * and `onLocked(error)` when the gateway requires a key.
 */
export function makeRequest({ onClose, filter, onLocked }) {
  locked = onLocked;
  dialog.addEventListener("close", () => {
    if (open) onClose();
  });
  dialog.addEventListener("click", ({ target }) => {
    if (target === dialog) dialog.close();
    const link = target.closest("[data-filter]");
    if (!link) return;
    open = "";
    dialog.close();
    filter({ request: "", [link.dataset.filter]: link.value });
  });
  byId("request-close").addEventListener("click", () => dialog.close());
  byId("request-copy").addEventListener("click", ({ target }) => copyText(location.href, target));
}

/** Show a request by its id, or none for "". */
export async function showRequest(id) {
  if (id === open && dialog.open === Boolean(id)) return;
  open = id;
  if (!id) {
    dialog.close();
    return;
  }
  byId("request-id").textContent = id;
  byId("request-status").replaceChildren();
  body.replaceChildren(make("p", { class: "quiet-note" }, "Loading…"));
  if (!dialog.open) dialog.showModal();
  try {
    const questions = ["request_details", "request_timeline"];
    const [details, events] = await Promise.all(questions.map((name) => ask(name, { id }, { urgent: true })));
    if (open !== id) return;
    if (details.length) draw(details[0], events);
    else body.replaceChildren(await notAccepted(id));
  } catch (error) {
    if (open !== id) return;
    body.replaceChildren(make("p", { class: "notice" }, `The request cannot be shown. ${error.message}`));
    if (error instanceof KeyNeededError) {
      open = "";
      dialog.close();
      locked(error);
    }
  }
}

/** Show an id without an ended request: the request may have been refused. */
async function notAccepted(id) {
  const [refusal] = await ask("refusal_details", { id }, { urgent: true });
  if (!refusal) return missing();
  byId("request-status").replaceChildren(statusMark("span", refusal.code, refusal.status < 500 ? "shed" : "failed"));
  return make(
    "div",
    { class: "missing" },
    make("p", {}, refusal.limit_reached ? `The request was refused because it exceeds the limit ${refusal.limit_reached}.` : "The request was refused before it was accepted."),
    group("Refusal", [
      ["Status", String(refusal.status)],
      ["Error code", refusal.code],
      ["Limit", refusal.limit_reached],
      ["Tenant", refusal.tenant || "unknown"],
      ["Key", refusal.api_key],
      ["Endpoint", refusal.door],
      ["Gateway", refusal.gateway],
      ["At", dateTime(refusal.last_us / 1e6)],
      ["Equal refusals in the same second", whole(refusal.refused)],
    ]),
  );
}

function missing() {
  return make(
    "div",
    { class: "missing" },
    make("p", {}, "No request with this id has ended."),
    make("p", { class: "quiet-note" }, "The request may still be running. It appears here a second after its end. Records are kept for 400 days."),
  );
}

function draw(request, events) {
  const begun = events[0]?.at_us ?? 0;
  const phases = phasesOf(events);
  byId("request-status").replaceChildren(statusMark("span", request.error_code || request.status, request.status));
  body.replaceChildren(
    make("p", { class: "facts" }, ...facts(request)),
    bar(phases),
    sums(phases),
    timeline(events, begun),
    make("div", { class: "groups" }, ...groups(request)),
  );
}

function facts(request) {
  const model = request.model_served || request.model_requested;
  const filterBy = (name, value) =>
    make("button", { type: "button", class: "fact link", title: `Show all requests of ${name} ${value}`, "data-filter": name, value }, value);
  return [
    filterBy("tenant", request.tenant),
    filterBy("model", model),
    make("span", { class: "fact" }, `${request.tier} tier`),
    make("span", { class: "fact" }, `by ${request.source}`),
    make("span", { class: "fact" }, dateTime(request.done_us / 1e6)),
  ];
}

/** Draw phases to scale, with a minimum width; the list below names them. */
function bar(phases) {
  const parts = phases.map(({ kind, label, us }) => {
    const part = make("span", { class: `phase ${kind}`, title: `${label}: ${span(us)}` });
    part.style.flexGrow = Math.max(us, 1);
    return part;
  });
  return make("div", { class: "phases", "aria-hidden": "true" }, ...parts);
}

function sums(phases) {
  const kinds = [["queued", "waiting"], ["prefill", "prefill"], ["decode", "decode"], ["earlier", "earlier runs"]];
  const list = make("dl", { class: "sums" });
  for (const [kind, label] of kinds) {
    const us = sumOf(phases, kind);
    if (us > 0) list.append(make("div", { class: "key" }, make("dt", {}, make("span", { class: `swatch ${kind}` }), label), make("dd", {}, span(us))));
  }
  return list;
}

function timeline(events, begun) {
  const list = make("ol", { class: "timeline", "aria-label": "Timeline" });
  const isMoved = events.some(({ event }) => event === "interrupted");
  const hasParts = events.some((event) => event.choice || event.round || event.attempt);
  for (const event of events) {
    const exactly = `${dateTime(event.at_us / 1e6)}, UTC ${new Date(event.at_us / 1000).toISOString().slice(11, 23)}`;
    const offset = make("span", { class: "offset", title: exactly }, event.at_us === begun ? clock(begun / 1e6) : `+${span(event.at_us - begun)}`);
    const { title, detail: place } = wordsOf(event, isMoved);
    const detail = [hasParts ? partOf(event) : "", place].filter(Boolean).join(", ");
    const item = make("li", { class: `event ${event.event}` }, offset, make("span", { class: "what" }, title), detail ? make("span", { class: "where" }, detail) : null);
    list.append(item);
  }
  return list;
}

/** Return the generation of an event if the request has several; "" for the request itself. */
function partOf({ event, choice, round, attempt }) {
  if (["received", "first_byte", "delivered"].includes(event)) return "";
  return [`choice ${choice}`, round ? `round ${round}` : "", attempt ? `attempt ${attempt}` : ""].filter(Boolean).join(", ");
}

function wordsOf({ event, run, place, detail, device_us }, isMoved) {
  const where = place ? `on ${place}` : "";
  switch (event) {
    case "received": return { title: "Received, queued", detail: `by ${detail}` };
    case "dispatched": return { title: "Dispatched", detail: place ? `to ${place}, epoch ${run}` : "" };
    case "started": return { title: "Prefill", detail: where };
    case "interrupted": return { title: "Interrupted", detail: `${where}, epoch ${run}; ${device_us ? `${span(device_us)} of the device` : "device time unknown"}` };
    case "first_token": return { title: isMoved ? "First token of this run" : "First token", detail: "decode begins" };
    case "ended": return { title: detail === "done" ? "Done" : `Ended: ${detail}`, detail: where };
    case "first_byte": return { title: "First byte to the client", detail: `by ${place}` };
    case "delivered": return { title: "Delivery over", detail: detail ? `${detail}, by ${place}` : `by ${place}` };
    default: return { title: event, detail: place };
  }
}

function groups(request) {
  const { currency } = request;
  const margin = Number(request.cost) - Number(request.device_cost);
  const made = [
    group("Tokens", [
      ["Prompt", whole(request.prompt_tokens)],
      ["of them cached", request.prompt_tokens ? `${whole(request.cached_tokens)} (${percent((100 * request.cached_tokens) / request.prompt_tokens)})` : "0"],
      ...pulls(request),
      ["Output", whole(request.completion_tokens)],
      ["Proposed ahead", `${whole(request.accepted_tokens)} of ${whole(request.proposed_tokens)} came`],
      ["Finish reason", request.finish_reason || "–"],
    ]),
    group("Latency", [
      ["Queue", ms(request.queue_ms)],
      ["TTFT", ms(request.ttft_ms)],
      ["TPOT", ms(request.tpot_ms)],
      ["Whole answer", ms(request.total_ms)],
    ]),
    group("Cost", [
      ["Tenant pays", exact(request.cost, currency)],
      ["Device cost", exact(request.device_cost, currency)],
      ["Device time", request.num_devices > 1 ? `${span(request.device_us)}, of ${request.num_devices} devices` : span(request.device_us)],
      ["Energy", joules(request.energy_j)],
      ["Left over", money(margin, currency)],
      ["Prices", request.price_version || "–"],
    ]),
  ];
  if (request.is_delivered) {
    made.push(group("Delivery", [
      ["Before receipt", ms(request.intake_ms)],
      ["First byte", request.first_byte_ms ? ms(request.intake_ms + request.first_byte_ms) : "–"],
      ["Tokens", whole(request.tokens_delivered)],
      ["Longest gap", ms(request.longest_gap_ms)],
      ["Stalls", request.num_stalls ? `${whole(request.num_stalls)}, ${ms(request.stalled_ms)}` : "none"],
      ["Resumes", whole(request.num_resumes)],
      ["Replays", whole(request.num_replays)],
    ]));
  }
  made.push(group("About", [
    ["Worker", request.worker || "–"],
    ["Adapter", request.adapter],
    ["API key", request.key_id],
    ["Metadata", Object.entries(request.metadata).map(([key, value]) => `${key}: ${value}`).join(", ")],
    ["Asked for", request.model_requested === request.model_served ? "" : request.model_requested],
    ["Chosen because", request.route_reason],
    ["Generations", request.num_generations > 1 ? whole(request.num_generations) : ""],
    ["Batch", request.batch_id],
    ["Runs", request.num_lives ? compact(request.num_lives + 1) : ""],
    ["Preemptions", request.num_preemptions ? whole(request.num_preemptions) : ""],
    ["User", request.user],
    ["Session", request.session],
    ["Trace", request.trace_id],
  ]));
  return made;
}

/** Return the tokens pulled from other workers' KV caches, in order of attempts. */
function pulls({ pull_sources, pull_tokens }) {
  return pull_sources.map((source, i) => ["Pulled", `${whole(pull_tokens[i])} from ${source}`]);
}

/** Return a list of names and values, without empty values. */
function group(title, rows) {
  const list = make("dl");
  for (const [name, value] of rows) if (value) list.append(make("dt", {}, name), make("dd", {}, value));
  return make("section", { class: "group" }, make("h3", {}, title), list);
}

function exact(amount, currency) {
  return make("span", { title: `Exactly ${amount} ${currency}` }, money(amount, currency));
}
