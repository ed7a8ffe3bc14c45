// The chat page: a conversation over one WebSocket.

import { Socket } from "./socket.js";
import { Turn } from "./turn.js";

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
const STATES = { connecting: "Connecting", open: "Connected", lost: "Reconnecting" };

const byId = (id) => document.getElementById(id);
const [log, prompt, send, model, temperature, main] = [
  "log", "prompt", "send", "model", "temperature", "scroll",
].map(byId);

let turns = [];
let current = null; // { id, turn } while an answer streams
let numAsked = 0;
let follow = true;

const socket = new Socket({ onState: showState, onMessage: handle });

// Asking and stopping.

function ask(question, history = turns) {
  if (!question || !canSend()) return;
  const id = `g${++numAsked}`;
  const turn = new Turn(question, { onRetry: retry, onGrow: followText });
  const messages = history
    .filter((earlier) => earlier.isComplete)
    .flatMap((earlier) => [
      { role: "user", content: earlier.question },
      { role: "assistant", content: earlier.answer },
    ]);
  messages.push({ role: "user", content: question });
  turns = [...history, turn];
  current = { id, turn };
  log.append(turn.root);
  follow = true;
  socket.send({
    type: "generate",
    id,
    model: model.value,
    messages,
    temperature: Number(temperature.value),
  });
  refresh();
  followText();
}

function retry(turn) {
  if (!canSend()) return;
  const index = turns.indexOf(turn);
  for (const dropped of turns.slice(index)) dropped.root.remove();
  ask(turn.question, turns.slice(0, index));
  prompt.focus();
}

function stop() {
  if (current && socket.isOpen) socket.send({ type: "cancel", id: current.id });
}

function startAgain() {
  stop();
  current = null;
  turns = [];
  log.replaceChildren();
  refresh();
  prompt.focus();
}

// What the gateway says.

function handle(message) {
  if (!current || message.id !== current.id) return;
  const { turn } = current;
  switch (message.type) {
    case "queued":
      return turn.queued(message.position);
    case "started":
      return turn.started();
    case "delta":
      return turn.delta(message.text, message.num_tokens);
    case "done":
      turn.done(message.finish_reason, message.usage);
      return finish("Answer complete.");
    case "error":
      turn.failed(explain(message));
      return finish("The answer failed.");
  }
}

function explain({ code, message, retry_after_s: retryAfterS }) {
  if (code === "context_length_exceeded") {
    return `${message} A new chat starts with an empty context.`;
  }
  return retryAfterS > 1 ? `${message} (in about ${Math.ceil(retryAfterS)} s)` : message;
}

function finish(announcement) {
  current = null;
  byId("announcer").textContent = announcement;
  refresh();
}

// The state of the page.

function canSend() {
  return !current && socket.isOpen && !model.disabled;
}

function showState(state) {
  byId("connection").dataset.state = state;
  byId("connection-text").textContent = STATES[state];
  if (state === "lost" && current) {
    current.turn.failed("The connection was lost before the answer was complete.");
    finish("The connection was lost.");
  }
  if (state === "open" && model.disabled) loadModels();
  refresh();
}

function refresh() {
  const streaming = current !== null;
  document.body.classList.toggle("streaming", streaming);
  send.disabled = !streaming && !(canSend() && prompt.value.trim());
  send.setAttribute("aria-label", streaming ? "Stop" : "Send");
  byId("welcome").hidden = turns.length > 0;
  byId("new-chat").hidden = turns.length === 0;
  for (const example of document.querySelectorAll(".examples button")) {
    example.disabled = !canSend();
  }
  showLatest();
}

function followText() {
  if (follow) main.scrollTop = main.scrollHeight;
  showLatest();
}

function isAtEnd() {
  return main.scrollHeight - main.scrollTop - main.clientHeight < NEAR_THE_END_PX;
}

function showLatest() {
  byId("latest").hidden = turns.length === 0 || isAtEnd();
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

async function loadModels() {
  try {
    const answer = await fetch("/v1/models");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const { data } = await answer.json();
    model.replaceChildren(
      ...data.map(({ id, description }) => {
        const option = new Option(id, id);
        option.title = description;
        return option;
      }),
    );
    const wanted = localStorage.getItem("millrace.model");
    if (data.some(({ id }) => id === wanted)) model.value = wanted;
    model.disabled = data.length === 0;
    refresh();
  } catch {
    setTimeout(() => socket.isOpen && model.disabled && loadModels(), MODEL_RETRY_MS);
  }
}

// Hands and keys.

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (current) return stop();
  const question = prompt.value.trim();
  if (!question || !canSend()) return;
  prompt.value = "";
  fitPrompt();
  ask(question);
});

prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!current) byId("composer").requestSubmit();
  }
});

prompt.addEventListener("input", () => {
  fitPrompt();
  refresh();
});

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && current) {
    event.preventDefault();
    stop();
    prompt.focus();
  }
});

main.addEventListener("scroll", () => {
  follow = isAtEnd();
  showLatest();
});

byId("latest").addEventListener("click", () => {
  follow = true;
  followText();
  prompt.focus();
});

byId("new-chat").addEventListener("click", startAgain);
model.addEventListener("change", () => localStorage.setItem("millrace.model", model.value));

byId("examples").append(
  ...EXAMPLES.map((question) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = question;
    button.addEventListener("click", () => {
      ask(question);
      prompt.focus();
    });
    const item = document.createElement("li");
    item.append(button);
    return item;
  }),
);

refresh();
