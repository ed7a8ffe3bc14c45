// Conversations stored in this browser, shared by its tabs.

import { answerOf } from "./history.js";
import { merged, newestLeaf, withParents } from "./tree.js";

const SESSIONS = "millrace.sessions";
const TURNS = "millrace.turns.";
const MOST_SESSIONS = 60;
const MOST_CHARACTERS = 250_000; // limit for one conversation
const FRESH = { title: "", isRenamed: false, model: "", heldUntilMs: 0, leaf: null, parameters: {} };
// Fields of a session that the gateway stores, too. The other fields are only in this browser.
const SHARED = ["title", "isRenamed", "model", "leaf", "heldLeaf", "heldSystem", "parameters"];

/**
 * Sessions are `{id, title, isRenamed, model, parameters, createdMs, usedMs, leaf}`, where `leaf` is
 * the last displayed turn. The gateway has the conversation up to the turn `heldLeaf`, after the
 * system prompt `heldSystem`, at least until `heldUntilMs`: `numHeld` messages (null: unknown).
 * With an `account` (id of a key, "" for none) the gateway saves the session as a chat; `revision`
 * is the saved revision, and `isChanged` means changes since.
 *
 * A turn is `{id, parent, question, parts, state, owner, askedMs, savedMs, requestId, facts, error}`,
 * its parts `{kind: "text", text}` or `{kind: "tool", callId, name, arguments, ok, output,
 * durationMs}`.
 */
export class Store {
  account = "";

  /** `onChange(sessionId)` reports a change by another tab; null means the list of sessions. */
  constructor(onChange) {
    addEventListener("storage", ({ key }) => {
      if (key === SESSIONS || key === null) onChange(null);
      else if (key.startsWith(TURNS)) onChange(key.slice(TURNS.length));
    });
  }

  /** Return the sessions of the account and of no account, latest first. */
  sessions() {
    return this.#all().filter(({ account }) => !account || account === this.account);
  }

  session(id) {
    return this.#all().find((session) => session.id === id) ?? null;
  }

  /** Add a session, or change fields of one. */
  putSession(id, changes) {
    const sessions = this.#all();
    const known = sessions.find((session) => session.id === id);
    const nowMs = Date.now();
    const changed = { ...(known ?? { ...FRESH, id, createdMs: nowMs, usedMs: nowMs }), ...changes };
    const rest = sessions.filter((session) => session.id !== id);
    for (const old of rest.splice(MOST_SESSIONS - 1)) localStorage.removeItem(TURNS + old.id);
    this.#write(SESSIONS, [changed, ...rest], id);
  }

  removeSession(id) {
    localStorage.removeItem(TURNS + id);
    this.#write(SESSIONS, this.#all().filter((session) => session.id !== id), id);
  }

  /** Return all versions of all turns. */
  turns(id) {
    return withParents(read(TURNS + id));
  }

  /** Store turns; drop the oldest beyond `MOST_CHARACTERS`, but keep the newest turn of any size. */
  putTurns(id, turns) {
    let characters = 0;
    let from = turns.length;
    while (from > 0 && (characters += JSON.stringify(turns[from - 1]).length) <= MOST_CHARACTERS) from -= 1;
    this.#write(TURNS + id, turns.slice(Math.min(from, Math.max(0, turns.length - 1))), id);
  }

  /** Append a turn, or replace the turn with its id. */
  putTurn(id, turn) {
    const turns = this.turns(id);
    const place = turns.findIndex((known) => known.id === turn.id);
    if (place < 0) turns.push(turn);
    else turns[place] = turn;
    this.putTurns(id, turns);
  }

  /** Return the document of a session and its turns, for the gateway or a file. */
  document(id) {
    const session = this.session(id);
    const shared = Object.fromEntries(SHARED.map((name) => [name, session[name]]));
    return { format: "millrace.chat", version: 1, ...shared, turns: this.turns(id) };
  }

  /** Merge such a document; keep turns that only this browser has. */
  takeDocument(id, { turns = [], ...shared }, changes = {}) {
    const known = this.session(id);
    const both = merged(this.turns(id), withParents(turns));
    const told = known?.isChanged ? {} : pick(shared);
    const leaf = (told.leaf ?? known?.leaf) || newestLeaf(both, both[0]);
    // The other browser may have continued the answer: read the state at the gateway.
    this.putSession(id, { ...told, leaf, heldUntilMs: 0, ...changes });
    this.putTurns(id, both);
  }

  /** Return the title and all text, for the search. */
  words(id) {
    const said = this.turns(id).map((turn) => `${turn.question}\n${answerOf(turn)}`);
    return said.join("\n");
  }

  #all() {
    return read(SESSIONS).sort((a, b) => b.usedMs - a.usedMs);
  }

  /** Write; if storage is full, drop the turns of the oldest conversations. */
  #write(key, value, id) {
    const text = JSON.stringify(value);
    const victims = this.#all().filter((session) => session.id !== id);
    for (;;) {
      try {
        localStorage.setItem(key, text);
        return;
      } catch (error) {
        if (error.name !== "QuotaExceededError" || victims.length === 0) throw error;
        localStorage.removeItem(TURNS + victims.pop().id);
      }
    }
  }
}

function pick(shared) {
  return Object.fromEntries(SHARED.filter((name) => name in shared).map((name) => [name, shared[name]]));
}

function read(key) {
  const text = localStorage.getItem(key);
  if (text === null) return [];
  const value = JSON.parse(text);
  return Array.isArray(value) ? value : [];
}
