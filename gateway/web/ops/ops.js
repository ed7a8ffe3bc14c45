// Operations page: polls the saved queries and shows their rows.

import { KeyNeededError, RefusedError, save } from "./ask.js";
import { showAlerts } from "./alerts.js";
import { Board } from "./board.js";
import { makeFilters, offer, showFilters } from "./filters.js";
import { clock } from "./format.js";
import { askAll, asked } from "./questions.js";
import { makeRecent, showRecent, showRecentFilters } from "./recent.js";
import { makeRefusals, showRefusalFilter, showRefusals } from "./refusals.js";
import { makeRequest, showRequest } from "./request.js";
import { showRollouts } from "./rollouts.js";
import { makeTables, showTables } from "./tables.js";
import { showTotals } from "./totals.js";
import { makeUsage, showUsage } from "./usage.js";
import { CUSTOM, frameOf, hashOf, readView } from "./view.js";
import { byId } from "/static/dom.js";
import { askForKey } from "/static/key.js";

const RETRY_MS = 4_000;
const ALL_ROWS = 100_000;
const MOST_ROWS = 500;

let view = readView(location.hash);
let timer = 0;
let round = 0;
let asking = new AbortController();
let offered = null;
let lastSeen = null;

const board = new Board(
  (query, steps) => saveShown(query, steps),
  (from, to) => change({ range: CUSTOM, from, to }),
);

/** Save the rows of a query for the view, with `more` parameters. */
function saveShown(query, more = {}) {
  return saveFile(query, { ...asked(query, view, frameOf(view).bounds), ...more });
}

async function refresh() {
  clearTimeout(timer);
  const mine = ++round;
  // Cancel queries of another view, which would delay this one.
  asking.abort();
  asking = new AbortController();
  const frame = frameOf(view);
  let wait = frame.refresh;
  try {
    const rows = await askAll(view, frame, asking.signal);
    if (mine !== round) return;
    show(rows, frame);
    lastSeen = Date.now() / 1000;
    say(wait ? "live" : "still", wait ? "Live" : "Past range");
  } catch (error) {
    if (mine !== round) return;
    if (error instanceof KeyNeededError) return sayLocked(error);
    if (error instanceof RefusedError) return sayRefused(error);
    sayUnreachable(error);
    wait = RETRY_MS;
  }
  if (wait && !document.hidden) timer = setTimeout(refresh, wait);
}

function show(rows, frame) {
  const [totals] = rows.totals;
  board.show(rows, frame);
  showTotals(rows, frame, rows.before?.words);
  showAlerts(rows);
  showRollouts(rows);
  showTables(rows, addressOf);
  showUsage(rows, view, change);
  showRefusals(rows, frame);
  showRecent(rows.recent, frame, addressOf);
  if (rows.offered !== offered) {
    offered = rows.offered;
    offer(offered, view);
  }
  byId("empty").hidden = totals.requests > 0;
  byId("empty-words").textContent = frame.words + (view.tenant || view.model ? " for this choice of tenant and model" : "");
  document.body.classList.remove("stale");
}

const addressOf = (id) => hashOf({ ...view, request: id });

/** Change the view and add it to the browser's history. */
function change(part) {
  const next = hashOf({ ...view, ...part });
  if (next === hashOf(view)) showFilters(view, frameOf(view));
  else {
    history.pushState(null, "", next);
    follow();
  }
}

/** Show the view of the address. */
function follow() {
  const before = view;
  view = readView(location.hash);
  const { request: _, ...rest } = view;
  const isSame = Object.keys(rest).every((name) => view[name] === before[name]);
  void showRequest(view.request);
  if (isSame) return;
  showFilters(view, frameOf(view));
  showRecentFilters(view);
  showRefusalFilter(view);
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
    byId("problem").textContent = error.name === "TypeError" ? "The file is incomplete: the connection was lost. Try again." : error.message;
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
  complain("locked", "Needs a key", "Enter the API key of an administrator to see the figures of all tenants.");
  askForKey(byId("key"), message, () => {
    refresh();
    void showRequest(view.request);
  });
}

function sayRefused({ message }) {
  complain("refused", "Not shown", message);
}

function sayUnreachable(error) {
  const reason = error.name === "TimeoutError" ? "It does not respond." : `${error.message.replace(/\.$/, "")}.`;
  const since = lastSeen === null ? "No data has loaded yet." : `The page shows data from ${clock(lastSeen)}.`;
  complain("unreachable", "Unreachable", `Telemetry is unreachable. ${reason} ${since} Requests are still served and recorded. This page retries every few seconds.`);
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
makeRecent(change, () => saveShown("requests", { status: view.status, id: view.id }));
makeTables((query) => saveShown(query, query === "recent_refusals" ? { rows: MOST_ROWS } : {}));
makeUsage(change, (query) => saveShown(query, { rows: ALL_ROWS }));
makeRefusals(change);
makeRequest({ onClose: () => change({ request: "" }), filter: change, onLocked: sayLocked });
showFilters(view, frameOf(view));
showRecentFilters(view);
showRefusalFilter(view);
refresh();
void showRequest(view.request);
