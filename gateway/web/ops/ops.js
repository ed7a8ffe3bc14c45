// The operations page: asks the saved queries again and again and shows what they answer.

import { ask, KeyNeededError, RefusedError, save } from "./ask.js";
import { Board } from "./board.js";
import { makeFilters, offer, showFilters } from "./filters.js";
import { clock } from "./format.js";
import { makeRecent, showRecent, showRecentFilters } from "./recent.js";
import { makeRequest, showRequest } from "./request.js";
import { makeTables, showTables } from "./tables.js";
import { showTotals } from "./totals.js";
import { CUSTOM, frameOf, hashOf, readView } from "./view.js";
import { byId } from "/static/dom.js";
import { askForKey } from "/static/key.js";

const RETRY_MS = 4_000;
const OFFER_MS = 30_000;
const RECENT_ROWS = 50;
const REFUSAL_ROWS = 50;
const OF_WORKERS = new Set(["workers", "unit_cost"]);

let view = readView(location.hash);
let timer = 0;
let round = 0;
let asking = new AbortController();
let offeredAt = 0;
let lastSeen = null;

const board = new Board(
  (query, steps) => saveFile(query, { ...asked(query), ...steps }),
  (from, to) => change({ range: CUSTOM, from, to }),
);

/** The parameters of a query for the view: workers serve all tenants. */
function asked(query) {
  const { bounds } = frameOf(view);
  const { tenant, model } = view;
  if (query === "workers_now") return { model };
  if (query === "refusals") return { ...bounds, tenant };
  if (query === "tenants_models") return bounds;
  return OF_WORKERS.has(query) ? { ...bounds, model } : { ...bounds, tenant, model };
}

async function refresh() {
  clearTimeout(timer);
  const mine = ++round;
  // What was asked for another view would keep this one waiting.
  asking.abort();
  asking = new AbortController();
  const frame = frameOf(view);
  let wait = frame.refresh;
  try {
    const rows = await askAll(frame, asking.signal);
    if (mine !== round) return;
    show(rows, frame);
    lastSeen = Date.now() / 1000;
    say(wait ? "live" : "still", wait ? "Live" : "A range that is over");
  } catch (error) {
    if (mine !== round) return;
    if (error instanceof KeyNeededError) return sayLocked(error);
    if (error instanceof RefusedError) return sayRefused(error);
    sayUnreachable(error);
    wait = RETRY_MS;
  }
  if (wait && !document.hidden) timer = setTimeout(refresh, wait);
}

async function askAll({ step, barStep }, signal) {
  const put = (query, more) => ask(query, { ...asked(query), ...more }, { signal });
  const fine = { step_s: step };
  const coarse = { step_s: barStep };
  const offerNow = Date.now() - offeredAt > OFFER_MS;
  const questions = {
    totals: put("totals"),
    traffic: put("traffic", fine),
    tokens: put("tokens", fine),
    latency: put("latency", fine),
    workers: put("workers", fine),
    devices: put("workers", coarse),
    cost: put("cost_by_model", coarse),
    interruptions: put("interruptions", coarse),
    unitCost: put("unit_cost"),
    errors: put("error_codes"),
    refusals: put("refusals", { rows: REFUSAL_ROWS }),
    workersNow: put("workers_now"),
    recent: put("recent_requests", { status: view.status, id: view.id, rows: RECENT_ROWS }),
    offered: offerNow ? put("tenants_models") : null,
  };
  const answers = await Promise.all(Object.values(questions));
  return Object.fromEntries(Object.keys(questions).map((name, i) => [name, answers[i]]));
}

function show(rows, frame) {
  const [totals] = rows.totals;
  board.show(rows, frame, totals.currency || board.currency);
  showTotals(totals, rows.devices, frame);
  showTables(rows, addressOf);
  showRecent(rows.recent, frame, addressOf);
  if (rows.offered) {
    offer(rows.offered, view);
    offeredAt = Date.now();
  }
  byId("empty").hidden = totals.requests > 0;
  byId("empty-words").textContent = frame.words + (view.tenant || view.model ? " for this choice of tenant and model" : "");
  document.body.classList.remove("stale");
}

const addressOf = (id) => hashOf({ ...view, request: id });

/** Look at something else; it becomes a step of the browser's history. */
function change(part) {
  const next = hashOf({ ...view, ...part });
  if (next === hashOf(view)) showFilters(view, frameOf(view));
  else {
    history.pushState(null, "", next);
    follow();
  }
}

/** Show what the address says. */
function follow() {
  const before = view;
  view = readView(location.hash);
  const { request: _, ...rest } = view;
  const isSame = Object.keys(rest).every((name) => view[name] === before[name]);
  void showRequest(view.request);
  if (isSame) return;
  if (view.range !== before.range || view.from !== before.from || view.to !== before.to) offeredAt = 0;
  showFilters(view, frameOf(view));
  showRecentFilters(view);
  refresh();
}

async function saveFile(query, params) {
  byId("problem").hidden = true;
  byId("saving").textContent = "Making the file…";
  try {
    await save(query, params);
    byId("saving").textContent = "Saved.";
  } catch (error) {
    byId("saving").textContent = "";
    if (error instanceof KeyNeededError) return sayLocked(error);
    byId("problem").textContent = error.name === "TypeError" ? "The file could not be made whole: the connection was lost. Try again." : error.message;
    byId("problem").hidden = false;
    byId("problem").scrollIntoView({ block: "nearest" });
  }
}

function say(state, text) {
  byId("state").dataset.state = state;
  if (byId("state-text").textContent !== text) byId("state-text").textContent = text;
  if (document.body.classList.contains("stale") || state === "paused") return;
  if (byId("problem").dataset.kind) byId("problem").hidden = true;
  delete byId("problem").dataset.kind;
}

function complain(kind, state, text) {
  byId("state").dataset.state = "unreachable";
  byId("state-text").textContent = state;
  byId("problem").dataset.kind = kind;
  byId("problem").textContent = text;
  byId("problem").hidden = false;
  document.body.classList.add("stale");
}

function sayLocked({ message }) {
  complain("locked", "Needs a key", "The figures of all tenants are shown for the key of an administrator.");
  askForKey(byId("key"), message, () => {
    refresh();
    void showRequest(view.request);
  });
}

function sayRefused({ message }) {
  complain("refused", "Not shown", message);
}

function sayUnreachable(error) {
  const reason = error.name === "TimeoutError" ? "It does not answer." : `${error.message.replace(/\.$/, "")}.`;
  const since = lastSeen === null ? "Nothing has been seen yet." : `What you see is from ${clock(lastSeen)}.`;
  complain("unreachable", "Unreachable", `Telemetry is unreachable. ${reason} ${since} Requests are served and recorded meanwhile; this page tries again every few seconds.`);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(timer);
    say("paused", "Paused");
  } else refresh();
});
window.addEventListener("popstate", follow);

byId("empty-curl").textContent = `curl ${location.origin}/v1/chat/completions \\
  -H 'Content-Type: application/json' \\
  -d '{"model": "demo", "messages": [{"role": "user", "content": "What is TTFT?"}]}'`;
makeFilters(change);
makeRecent(change, () => saveFile("requests", { ...asked("requests"), status: view.status, id: view.id }));
makeTables((query) => saveFile(query, asked(query)));
makeRequest({ onClose: () => change({ request: "" }), filter: change, onLocked: sayLocked });
showFilters(view, frameOf(view));
showRecentFilters(view);
refresh();
void showRequest(view.request);
