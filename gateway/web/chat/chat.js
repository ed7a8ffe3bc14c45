// The chat page: conversations with a model over one connection.

import { button, byId, make } from "../dom.js";
import { randomId } from "../generation.js";
import { fetchWithKey, storedKey } from "../key.js";
import { Millrace } from "../millrace.js";
import { Conversation } from "./conversation.js";
import { Drawer } from "./drawer.js";
import { deleteHistory } from "./history.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";
import { TurnView } from "./turn.js";

const EXAMPLES = [
  "What's time to first token?",
  "How does continuous batching work?",
  "What happens when a worker dies?",
  "How does paged attention work?",
  "How do I publish a job?",
  "What does Millrace promise?",
];
const NEAR_THE_END_PX = 80;
const MODEL_RETRY_MS = 2_000;
const ANOTHER_TEMPERATURE = 0.7;
const STATES = {
  connecting: "Connecting",
  open: "Connected",
  lost: "Reconnecting",
  unauthorized: "Needs a key",
  closed: "Closed",
};

const [log, prompt, send, model, temperature, main] = [
  "log", "prompt", "send", "model", "temperature", "scroll",
].map(byId);
const touch = matchMedia("(pointer: coarse)");

const owner = (sessionStorage["millrace.tab"] ??= randomId());
const store = new Store(changedElsewhere);
const settings = new Settings({ onKey: useKey });
const drawer = new Drawer({ onChoose: choose, onRename: rename, onDelete: forget });
const client = new Millrace({ token: storedKey(), onState: showState });
const live = new Map(); // conversations whose answer goes on, by id

let conversation = null;
let views = new Map(); // by the turn's id
let follow = true;

// Asking and stopping.

function ask(question, before) {
  if (!question || !canSend()) return;
  follow = true;
  const options = { model: model.value, temperature: Number(temperature.value) };
  if (settings.tools.length) options.server_tools = settings.tools;
  // Another answer to the same question has to be left some freedom.
  if (before) options.temperature = Math.max(options.temperature, ANOTHER_TEMPERATURE);
  history.replaceState(null, "", `#${conversation.id}`);
  conversation.ask(question, options, before);
  showSessions();
  refresh();
}

function askInPlaceOf(turn, question) {
  if (!canSend()) return;
  ask(question, conversation.turns.slice(0, conversation.turns.indexOf(turn)));
  prompt.focus();
}

// Conversations.

function open(id) {
  if (conversation?.isBusy) live.set(conversation.id, conversation);
  else conversation?.leave();
  const known = live.get(id);
  for (const view of views.values()) view.close();
  views = new Map();
  follow = true;
  conversation =
    known ??
    new Conversation({ id, client, store, owner, onTurns: showTurns, onTurn: showTurn, onEnd: showEnd });
  if (known) showTurns(known.turns);
  else conversation.open();
  const { model: lastModel } = store.session(id) ?? {};
  if ([...model.options].some((option) => option.value === lastModel)) model.value = lastModel;
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
  store.putSession(id, { title, isRenamed: true });
  showSessions();
}

async function forget(id) {
  (id === conversation.id ? conversation : live.get(id))?.stop();
  live.delete(id);
  store.removeSession(id);
  if (id === conversation.id) startAgain();
  showSessions();
  // If the gateway cannot be asked, its copy expires by itself.
  await deleteHistory(id).catch(({ message }) => announce(`Deleted here only. ${message}`));
}

function changedElsewhere(id) {
  if (id === null) {
    const { turns } = conversation;
    if (turns.length && !store.session(conversation.id)) startAgain();
    showSessions();
  } else if (id === conversation.id) conversation.changedElsewhere();
}

function showSessions() {
  drawer.show(store.sessions(), conversation.id, new Set(live.keys()));
  const title = store.session(conversation.id)?.title;
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
        isMine: (wanted) => wanted.owner === owner,
      });
      views.set(turn.id, view);
    }
    if (log.children[place] !== view.root) log.insertBefore(view.root, log.children[place] ?? null);
  });
  refresh();
  followText();
}

function showTurn(turn) {
  views.get(turn.id)?.showSoon(turn, followText);
  refresh();
}

function showEnd(turn) {
  for (const [id, one] of live) if (!one.isBusy) live.delete(id);
  views.get(turn.id)?.show(turn);
  if (views.has(turn.id)) announce(turn.state === "failed" ? "The answer failed." : "Answer complete.");
  showSessions();
  refresh();
  followText();
}

// The state of the page.

function canSend() {
  return !conversation.isBusy && client.state === "open" && !model.disabled;
}

function showState(state, { error }) {
  byId("connection").dataset.state = state;
  byId("connection-text").textContent = STATES[state];
  if (state === "unauthorized") settings.open(error.message);
  if (state === "open" && model.disabled) loadModels();
  refresh();
}

function useKey() {
  model.disabled = true;
  client.token = storedKey();
  if (client.state === "open") loadModels();
}

function refresh() {
  const isBusy = conversation.isBusy;
  document.body.classList.toggle("streaming", isBusy);
  send.disabled = !isBusy && !(canSend() && prompt.value.trim());
  send.setAttribute("aria-label", isBusy ? "Stop" : "Send");
  const isEmpty = conversation.turns.length === 0;
  byId("welcome").hidden = !isEmpty;
  for (const id of ["new-chat", "new-chat-bar"]) byId(id).disabled = isEmpty;
  for (const example of document.querySelectorAll(".examples button")) {
    example.disabled = !canSend();
  }
  showLatest();
}

function announce(text) {
  byId("announcer").textContent = text;
}

function followText() {
  if (follow && views.size > 0) main.scrollTop = main.scrollHeight;
  showLatest();
}

function isAtEnd() {
  return main.scrollHeight - main.scrollTop - main.clientHeight < NEAR_THE_END_PX;
}

function showLatest() {
  byId("latest").hidden = conversation.turns.length === 0 || isAtEnd();
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

async function loadModels() {
  const answer = await fetchWithKey("/v1/models").catch(() => null);
  if (answer?.status === 401 || answer?.status === 403) {
    const { error } = await answer.json();
    settings.open(error.message);
    return;
  }
  if (!answer?.ok) {
    setTimeout(() => client.state === "open" && model.disabled && loadModels(), MODEL_RETRY_MS);
    return;
  }
  const { data } = await answer.json();
  const options = data.map(({ id, description }) => {
    const option = new Option(id, id);
    option.title = description ?? "";
    return option;
  });
  model.replaceChildren(...options);
  const wanted = store.session(conversation.id)?.model || localStorage.getItem("millrace.model");
  if (data.some(({ id }) => id === wanted)) model.value = wanted;
  model.disabled = data.length === 0;
  refresh();
  await settings.load();
}

// Hands and keys.

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (conversation.isBusy) {
    conversation.stop();
    return;
  }
  const question = prompt.value.trim();
  if (!question || !canSend()) return;
  prompt.value = "";
  fitPrompt();
  ask(question);
});

prompt.addEventListener("keydown", (event) => {
  // On glass, Enter makes a line, and the round button sends.
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

addEventListener("hashchange", () => open(location.hash.slice(1) || randomId()));

main.addEventListener("scroll", () => {
  follow = isAtEnd();
  showLatest();
});

byId("latest").addEventListener("click", () => {
  follow = true;
  followText();
  prompt.focus();
});

for (const id of ["new-chat", "new-chat-bar"]) {
  byId(id).addEventListener("click", () => {
    drawer.close();
    startAgain();
  });
}
model.addEventListener("change", () => localStorage.setItem("millrace.model", model.value));

byId("examples").append(
  ...EXAMPLES.map((question) => {
    const example = button(question, () => {
      ask(question);
      prompt.focus();
    });
    return make("li", {}, example);
  }),
);

const linked = location.hash.slice(1);
open(/^[\w-]{1,64}$/.test(linked) ? linked : randomId());
