// What this browser keeps of conversations, shared by its tabs.

const SESSIONS = "millrace.sessions";
const TURNS = "millrace.turns.";
const MOST_SESSIONS = 60;
const MOST_CHARACTERS = 250_000; // of one conversation

/**
 * Sessions are `{id, title, isRenamed, model, createdMs, usedMs, heldUntilMs}`: the gateway has the
 * conversation for sure until `heldUntilMs`. A turn is `{id, question, parts, state, owner, savedMs,
 * requestId, facts, error}`, its parts `{kind: "text", text}` or `{kind: "tool", callId, name,
 * arguments, ok, output, durationMs}`.
 */
export class Store {
  /** `onChange(sessionId)` tells of what another tab has changed; null: the list of sessions. */
  constructor(onChange) {
    addEventListener("storage", ({ key }) => {
      if (key === SESSIONS || key === null) onChange(null);
      else if (key.startsWith(TURNS)) onChange(key.slice(TURNS.length));
    });
  }

  /** The latest first. */
  sessions() {
    return read(SESSIONS).sort((a, b) => b.usedMs - a.usedMs);
  }

  session(id) {
    return this.sessions().find((session) => session.id === id) ?? null;
  }

  /** Add a session, or change fields of one. */
  putSession(id, changes) {
    const sessions = this.sessions();
    const known = sessions.find((session) => session.id === id);
    const nowMs = Date.now();
    const fresh = { id, title: "", isRenamed: false, model: "", createdMs: nowMs, usedMs: nowMs, heldUntilMs: 0 };
    const changed = { ...(known ?? fresh), ...changes };
    const rest = sessions.filter((session) => session.id !== id);
    for (const old of rest.splice(MOST_SESSIONS - 1)) localStorage.removeItem(TURNS + old.id);
    this.#write(SESSIONS, [changed, ...rest], id);
  }

  removeSession(id) {
    localStorage.removeItem(TURNS + id);
    this.#write(SESSIONS, this.sessions().filter((session) => session.id !== id), id);
  }

  turns(id) {
    return read(TURNS + id);
  }

  putTurns(id, turns) {
    let characters = 0;
    let from = turns.length;
    while (from > 0 && (characters += JSON.stringify(turns[from - 1]).length) <= MOST_CHARACTERS) from -= 1;
    // The newest is kept whatever its size.
    this.#write(TURNS + id, turns.slice(Math.min(from, Math.max(0, turns.length - 1))), id);
  }

  /** Add a turn at the end, or change the one that has its id. */
  putTurn(id, turn) {
    const turns = this.turns(id);
    const place = turns.findIndex((known) => known.id === turn.id);
    if (place < 0) turns.push(turn);
    else turns[place] = turn;
    this.putTurns(id, turns);
  }

  /** Write, and make room by forgetting what was said in the oldest conversations. */
  #write(key, value, id) {
    const text = JSON.stringify(value);
    const victims = this.sessions().filter((session) => session.id !== id);
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

function read(key) {
  const text = localStorage.getItem(key);
  if (text === null) return [];
  const value = JSON.parse(text);
  return Array.isArray(value) ? value : [];
}
