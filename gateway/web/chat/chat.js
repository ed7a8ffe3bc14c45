// The chat page: conversations with a model over one connection.

import { byId } from "../dom.js";
import { randomId } from "../generation.js";
import { storedKey } from "../key.js";
import { Millrace } from "../millrace.js";
import { Attachments } from "./attachments.js";
import { Chats } from "./chats.js";
import { Conversation } from "./conversation.js";
import { Drawer } from "./drawer.js";
import { showExamples } from "./examples.js";
import { readExport, saveAs } from "./exports.js";
import { Following } from "./following.js";
import { deleteHistory } from "./history.js";
import { Models } from "./models.js";
import { Parameters, showSet, TemperaturePick } from "./parameters.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";
import { TurnView } from "./turn.js";
import { Workers } from "./workers.js";

const STATES = {
  connecting: "Connecting",
  open: "Connected",
  lost: "Reconnecting",
  unauthorized: "Needs a key",
  closed: "Closed",
};

const DEMO = "demo";

const [log, prompt, send] = ["log", "prompt", "send"].map(byId);
const touch = matchMedia("(pointer: coarse)");

let conversation = null;
let views = new Map(); // keys: ids of turns
const live = new Map(); // conversations with a running answer, by id

const owner = (sessionStorage["millrace.tab"] ??= randomId());
const store = new Store(changedElsewhere);
const chats = new Chats({
  store,
  onList: changedElsewhere,
  onChange: changedElsewhere,
  onPlace: (text) => (byId("kept").textContent = text),
});
const settings = new Settings({ onKey: useKey });
const drawer = new Drawer({
  onChoose: choose,
  onRename: rename,
  onDelete: forget,
  onExport: takeAlong,
  onSearch: () => chats.pullAll(),
  wordsOf: (id) => store.words(id),
});
const models = new Models({
  onLoad: useModels,
  onRefused: (message) => settings.open(message),
  onChange: useModel,
  isWanted: () => client.state === "open" && !models.isReady,
});
const workers = new Workers({ isWanted: isWaiting, onChange: showWaiting });
const parameters = new Parameters({ onChange: useParameters });
const temperature = new TemperaturePick((value) => {
  const { temperature: _old, ...rest } = conversation.parameters;
  useParameters(value === undefined ? rest : { ...rest, temperature: value });
});
const attachments = new Attachments({ onChange: refresh, model: () => models.name });
const following = new Following({
  isEmpty: () => conversation.turns.length === 0,
  onReturn: () => prompt.focus(),
});
const client = new Millrace({ token: storedKey(), onState: showState });

// Asking and stopping.

function ask(question, inPlaceOf = null) {
  if (!question || !canSend()) return;
  following.isOn = true;
  const options = { model: models.name, ...conversation.parameters };
  if (settings.tools.length) options.server_tools = settings.tools;
  history.replaceState(null, "", `#${conversation.id}`);
  conversation.ask(question, options, inPlaceOf);
  workers.look();
  showSessions();
  refresh();
}

function askInPlaceOf(turn, question) {
  if (!canSend()) return;
  ask(question, turn);
  prompt.focus();
}

function chooseVersion(turn, step) {
  const versions = conversation.versions(turn);
  const wanted = versions[versions.findIndex(({ id }) => id === turn.id) + step];
  if (!wanted) return;
  following.isOn = false;
  conversation.choose(wanted);
  chats.push(conversation.id);
  views.get(wanted.id)?.focusVersions(step);
}

function useParameters(found) {
  conversation.setParameters(found);
  chats.push(conversation.id);
  showParameters();
}

function showParameters() {
  temperature.show(conversation.parameters.temperature);
  showSet(conversation.parameters);
}

// Conversations.

/** Open a conversation. With `isLinked`, it may be missing in this browser. */
function open(id, isLinked = false) {
  if (conversation?.isBusy) live.set(conversation.id, conversation);
  else conversation?.leave();
  const known = live.get(id);
  for (const view of views.values()) view.close();
  views = new Map();
  following.isOn = true;
  conversation =
    known ??
    new Conversation({
      ...{ id, client, store, owner, onTurns: showTurns, onTurn: showTurn },
      catchUp: () => chats.catchUp(id),
      onEnd: (turn) => showEnd(id, turn),
    });
  if (known) showTurns(known.turns);
  else conversation.open(chats.pull(id, isLinked));
  models.choose(store.session(id)?.model);
  showParameters();
  showSessions();
  refresh();
}

function choose(id) {
  history.replaceState(null, "", `#${id}`);
  open(id);
  if (!touch.matches) prompt.focus();
}

function startAgain() {
  history.replaceState(null, "", location.pathname);
  open(randomId());
  prompt.focus();
}

function rename(id, title) {
  store.putSession(id, { title, isRenamed: true, isChanged: true });
  chats.push(id);
  showSessions();
}

async function forget(id) {
  (id === conversation.id ? conversation : live.get(id))?.stop();
  live.delete(id);
  store.removeSession(id);
  if (id === conversation.id) startAgain();
  showSessions();
  // If the gateway is unreachable, its copies expire later.
  const deletions = [deleteHistory(id), chats.delete(id)];
  await Promise.all(deletions).catch(({ message }) => announce(`Deleted here only. ${message}`));
}

async function takeAlong(id, kind) {
  await chats.pull(id);
  saveAs(kind, store.document(id));
}

async function bringBack(file) {
  const trouble = byId("import-trouble");
  trouble.hidden = true;
  try {
    const document = await readExport(file);
    const id = randomId();
    store.takeDocument(id, document, { isChanged: true, account: store.account });
    chats.push(id);
    choose(id);
  } catch (error) {
    trouble.textContent = error.message;
    trouble.hidden = false;
  }
}

function changedElsewhere(id) {
  if (id === null) {
    const { turns } = conversation;
    if (turns.length && !store.session(conversation.id)) startAgain();
  } else if (id === conversation.id) {
    conversation.changedElsewhere();
    showParameters();
  }
  showSessions();
}

function showSessions() {
  drawer.show(store.sessions(), conversation.id, new Set(live.keys()));
  const title = store.session(conversation.id)?.title;
  byId("heading").textContent = title || "Conversation";
  document.title = title ? `${title} · Millrace` : "Millrace";
}

// Turns.

function showTurns(turns) {
  if (turns !== conversation.turns) return;
  const ids = new Set(turns.map((turn) => turn.id));
  for (const [id, view] of views) {
    if (ids.has(id)) continue;
    view.close();
    views.delete(id);
  }
  turns.forEach((turn, place) => {
    let view = views.get(turn.id);
    if (view) view.show(turn);
    else {
      view = new TurnView(turn, {
        onRetry: (wanted) => askInPlaceOf(wanted, wanted.question),
        onEdit: askInPlaceOf,
        onChoose: chooseVersion,
        isMine: (wanted) => wanted.owner === owner,
        waitsFor,
      });
      views.set(turn.id, view);
    }
    view.showVersions(conversation.versions(turn));
    if (log.children[place] !== view.root) log.insertBefore(view.root, log.children[place] ?? null);
  });
  refresh();
  following.follow();
}

function showTurn(turn) {
  views.get(turn.id)?.showSoon(turn, () => following.follow());
  refresh();
}

function showEnd(conversationId, turn) {
  for (const [id, one] of live) if (!one.isBusy) live.delete(id);
  views.get(turn.id)?.show(turn);
  if (views.has(turn.id)) announce(turn.state === "failed" ? "The answer failed." : "Answer complete.");
  chats.push(conversationId);
  showSessions();
  refresh();
  following.follow();
}

// Waiting for a worker.

/** Return the model without workers that a turn waits for, or "". */
function waitsFor({ facts }) {
  const name = facts.model || models.name;
  return facts.hasStarted || isServed(name) ? "" : name;
}

function isServed(name) {
  const card = models.cardOf(name);
  return workers.serves(card?.id ?? name, !card?.engine);
}

/** Return true while the page needs to know which models have workers. */
function isWaiting() {
  const last = conversation.turns.at(-1);
  const isUnanswered = last?.state === "running" && last.parts.length === 0;
  return client.state === "open" && models.isReady && (isUnanswered || !isServed(models.name));
}

function showWaiting() {
  const isOut = models.isReady && !isServed(models.name);
  const text = isOut ? `No worker serves ${models.name} now. Your message waits until one does.` : "";
  byId("notice").textContent = text;
  byId("notice").hidden = !isOut;
  for (const turn of conversation.turns) if (turn.state === "running") views.get(turn.id)?.show(turn);
}

// The state of the page.

function canSend() {
  return !conversation.isBusy && client.state === "open" && models.isReady;
}

function hasQuestion() {
  return !attachments.isReading && (prompt.value.trim() !== "" || attachments.items.length > 0);
}

function showState(state, { error }) {
  byId("connection").dataset.state = state;
  byId("connection-text").textContent = STATES[state];
  if (state === "unauthorized") settings.open(error.message);
  if (state === "open" && !models.isReady) models.load(store.session(conversation.id)?.model);
  refresh();
}

async function useModels() {
  refresh();
  workers.look();
  await settings.load();
}

function useModel() {
  refresh();
  workers.look();
}

function useKey() {
  models.forget();
  client.token = storedKey();
  if (client.state === "open") models.load(store.session(conversation.id)?.model);
  chats.list();
}

function refresh() {
  const isBusy = conversation.isBusy;
  document.body.classList.toggle("streaming", isBusy);
  send.disabled = !isBusy && !(canSend() && hasQuestion());
  send.setAttribute("aria-label", isBusy ? "Stop" : "Send");
  const isEmpty = conversation.turns.length === 0;
  prompt.placeholder = hintOf(models);
  byId("welcome").hidden = !isEmpty;
  byId("about-demo").hidden = models.name !== DEMO;
  byId("heading").hidden = isEmpty;
  for (const id of ["new-chat", "new-chat-bar"]) byId(id).disabled = isEmpty;
  for (const example of document.querySelectorAll(".examples button")) {
    example.disabled = !canSend();
  }
  following.showLatest();
}

/** Return the hint of the message box. The demo model only knows about serving language models. */
function hintOf({ isReady, name }) {
  if (!isReady) return "Message";
  return name === DEMO ? "Ask about serving language models" : `Message ${name}`;
}

function announce(text) {
  byId("announcer").textContent = text;
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

// Mouse, touch and keyboard.

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (conversation.isBusy) {
    conversation.stop();
    return;
  }
  if (!hasQuestion() || !canSend()) return;
  const question = attachments.questionWith(prompt.value.trim());
  attachments.clear();
  prompt.value = "";
  fitPrompt();
  ask(question);
});

prompt.addEventListener("keydown", (event) => {
  // On touch screens, Enter starts a new line, and the round button sends.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch.matches) return;
  event.preventDefault();
  if (!conversation.isBusy) byId("composer").requestSubmit();
});

prompt.addEventListener("input", () => {
  fitPrompt();
  refresh();
});

addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !conversation.isBusy || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  conversation.stop();
  prompt.focus();
});

addEventListener("hashchange", () => open(location.hash.slice(1) || randomId(), true));

for (const id of ["new-chat", "new-chat-bar"]) {
  byId(id).addEventListener("click", () => {
    drawer.close();
    startAgain();
  });
}
byId("parameters-button").addEventListener("click", () => parameters.open(conversation.parameters, models.card));

prompt.addEventListener("paste", (event) => {
  if (attachments.takePaste(event.clipboardData)) event.preventDefault();
});

byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", ({ target }) => {
  if (target.files[0]) bringBack(target.files[0]);
  target.value = "";
});

document.addEventListener("visibilitychange", () => document.hidden || chats.catchUp(conversation.id));

showExamples((question) => {
  ask(question);
  prompt.focus();
});

const linked = location.hash.slice(1);
if (/^[\w-]{1,64}$/.test(linked)) open(linked, true);
else open(randomId());
