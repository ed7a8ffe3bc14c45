// Sessions stored by the gateway.

import { fetchWithKey } from "../key.js";

const TIMEOUT_MS = 6_000;

/** Error: the gateway could not tell whether it has the conversation. */
export class HistoryUnavailableError extends Error {}

/**
 * Return the history (see schemas/sessions.py), null if the gateway has none. Throw
 * HistoryUnavailableError if it cannot tell.
 */
export async function fetchHistory(sessionId) {
  const answer = await call(sessionId, "GET");
  if (answer.status === 404) return null;
  if (!answer.ok) throw new HistoryUnavailableError(`The gateway answered ${answer.status}.`);
  return answer.json();
}

export async function deleteHistory(sessionId) {
  const answer = await call(sessionId, "DELETE");
  if (!answer.ok && answer.status !== 404) {
    throw new HistoryUnavailableError(`The gateway answered ${answer.status}.`);
  }
}

async function call(sessionId, method) {
  const address = `/v1/sessions/${encodeURIComponent(sessionId)}`;
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  try {
    return await fetchWithKey(address, { method, signal, headers: { accept: "application/json" } });
  } catch (error) {
    throw new HistoryUnavailableError(error.message);
  }
}

/**
 * Return the turns of a history: `{question, parts, at}`, where `at` is the index of the question.
 */
export function turnsOf(messages) {
  const turns = [];
  const calls = new Map();
  messages.forEach((message, at) => {
    if (message.role === "user") turns.push({ question: message.content ?? "", parts: [], at });
    const turn = turns.at(-1);
    if (!turn || message.role === "user" || message.role === "system") return;
    if (message.role === "tool") {
      const part = calls.get(message.tool_call_id);
      if (part) Object.assign(part, { output: message.content ?? "", ok: true });
      return;
    }
    if (message.content) turn.parts.push({ kind: "text", text: message.content });
    for (const call of message.tool_calls ?? []) {
      const part = { kind: "tool", callId: call.id, name: call.name, arguments: call.arguments };
      calls.set(call.id, part);
      turn.parts.push(part);
    }
  });
  return turns;
}

/** Return the text of a turn, without its tools. */
export function answerOf(turn) {
  return turn.parts
    .filter((part) => part.kind === "text")
    .map((part) => part.text)
    .join("");
}

/** Return whether the gateway stores the turn, too: it drops failed turns. */
export function isHeld(turn) {
  return turn.state === "done" && turn.parts.length > 0;
}

/** Return whether a turn equals the gateway's; the gateway may have more of a stopped answer. */
export function isSame(told, turn) {
  if (told.question !== turn?.question) return false;
  const [there, here] = [answerOf(told), answerOf(turn)];
  return there.startsWith(here) || here.startsWith(there);
}

/**
 * Return the number of the gateway's messages before a question that follows the turns `before`; -1
 * if the gateway's history does not begin with these turns. `numHeld` is the known number of turns:
 * the gateway does not list summarised turns.
 */
export function placeAfter(history, before, numHeld) {
  const kept = turnsOf(history.messages);
  const numOlder = history.num_summarised > 0 ? Math.max(0, numHeld - kept.length) : 0;
  const count = before.length - numOlder;
  if (count < 0) return -1;
  const isThere = before.slice(numOlder).every((turn, place) => kept[place] && isSame(kept[place], turn));
  return isThere ? history.num_summarised + (kept[count]?.at ?? history.messages.length) : -1;
}

/** Return the page's turns as messages, for a gateway that no longer has them. */
export function messagesOf(turns) {
  return turns
    .filter((turn) => isHeld(turn) && answerOf(turn))
    .flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: answerOf(turn) },
    ]);
}
