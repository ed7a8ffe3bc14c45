// One conversation: its turns, the answer that is on its way, and what the gateway keeps of it.

import { randomId } from "../generation.js";
import {
  fetchHistory,
  HistoryUnavailableError,
  isHeld,
  messagesOf,
  placeAfter,
  turnsOf,
} from "./history.js";
import { Recorder } from "./recorder.js";

const HELD_MS = 50 * 60_000; // a little less than the gateway's hour
const ORPHAN_MS = 6_000;
const STATE_UNAVAILABLE = "state_unavailable";

/**
 * Owns the running answer, of which there is at most one. `onTurns(turns)` is called when turns come
 * and go, `onTurn(turn)` when one has changed, `onEnd(turn)` when its answer is complete.
 */
export class Conversation {
  constructor({ id, client, store, owner, onTurns, onTurn, onEnd }) {
    Object.assign(this, { id, client, store, owner, onTurns, onTurn, onEnd });
    this.turns = store.turns(id);
    this.current = null; // the recorder of the running answer
    this.isStarting = false;
  }

  get isBusy() {
    return this.isStarting || this.current !== null;
  }

  /** Take in what the gateway keeps, and go on with an answer that nobody reads any more. */
  async open() {
    this.onTurns(this.turns);
    this.#adopt();
    if (!this.store.session(this.id)) return;
    try {
      const history = await fetchHistory(this.id);
      if (this.isBusy) return;
      this.#hold(history !== null);
      if (history) this.#merge(history);
    } catch (error) {
      if (!(error instanceof HistoryUnavailableError)) throw error;
      this.#hold(false);
    }
  }

  /** Ask for an answer that follows `before`: all turns, or the first of them. */
  async ask(question, options, before = this.turns) {
    if (this.isBusy) return;
    this.isStarting = true;
    const all = this.turns;
    const turn = {
      id: randomId(),
      question,
      parts: [],
      state: "running",
      owner: this.owner,
      savedMs: Date.now(),
      requestId: "",
      facts: {},
      error: null,
    };
    this.turns = [...before, turn];
    this.#keepSession(question, options.model);
    this.store.putTurns(this.id, this.turns);
    this.onTurns(this.turns);
    const body = await this.#plan(question, all, before);
    this.isStarting = false;
    if (turn.state !== "running") return;
    this.#run(turn, { ...options, ...body });
  }

  stop() {
    if (this.current) this.current.generation.cancel();
    else if (this.isStarting) {
      const turn = this.turns.at(-1);
      Object.assign(turn, { state: "done", facts: { finishReason: "cancelled" } });
      this.#conclude(turn);
    }
  }

  /** Part with it: the answer goes on, here, until it is complete. */
  leave() {
    this.onTurns = this.onTurn = () => {};
  }

  /** Another tab has changed it. */
  changedElsewhere() {
    if (this.isBusy) return;
    this.turns = this.store.turns(this.id);
    this.onTurns(this.turns);
  }

  /** Read on where a tab that was closed has stopped. */
  #adopt() {
    const turn = this.turns.at(-1);
    if (turn?.state !== "running" || this.isBusy) return;
    const isOrphan = turn.owner === this.owner || Date.now() - turn.savedMs > ORPHAN_MS;
    if (!isOrphan) {
      setTimeout(() => this.#adopt(), ORPHAN_MS);
      return;
    }
    turn.owner = this.owner;
    turn.parts = [];
    if (turn.requestId) {
      const begin = (listeners) => this.client.resume(turn.requestId, listeners);
      this.#record(turn, begin, () => this.#openAgain(turn));
    } else this.#fail(turn, { code: "lost", message: "The page was closed before it was accepted." });
  }

  /** An answer that cannot be had any more may be in the history; true if that is looked up. */
  #openAgain(turn) {
    this.turns = this.turns.filter((other) => other !== turn);
    fetchHistory(this.id).then(
      (history) => {
        const isKept = history && turnsOf(history.messages).at(-1)?.question === turn.question;
        if (isKept) this.#merge(history);
        else this.#giveUp(turn);
      },
      () => this.#giveUp(turn),
    );
    return true;
  }

  #giveUp(turn) {
    this.turns = [...this.turns, turn];
    this.#fail(turn, { code: "lost", message: "The rest of this answer is not there any more." });
  }

  /** What of the conversation has to be sent along. */
  async #plan(question, all, before) {
    const asked = { role: "user", content: question };
    const isCut = before.filter(isHeld).length < all.filter(isHeld).length;
    const session = this.store.session(this.id);
    if (!all.some(isHeld) || (!isCut && session.heldUntilMs > Date.now())) {
      return { session_id: this.id, messages: [asked] };
    }
    try {
      const history = await fetchHistory(this.id);
      const place = history ? placeAfter(history, all, before) : -1;
      if (place >= 0) return { session_id: this.id, session_keep: place, messages: [asked] };
    } catch (error) {
      if (!(error instanceof HistoryUnavailableError)) throw error;
    }
    return { session_id: this.id, session_keep: 0, messages: [...messagesOf(before), asked] };
  }

  #run(turn, body) {
    const begin = (listeners) => this.client.generate(body, listeners);
    this.#record(turn, begin, (error) => {
      if (error.code !== STATE_UNAVAILABLE || turn.requestId || !body.session_id) return false;
      // The gateway cannot keep conversations right now: it is sent as a whole, and kept here.
      const { session_id: _id, session_keep: _keep, ...rest } = body;
      const before = this.turns.slice(0, this.turns.indexOf(turn));
      const asked = { role: "user", content: turn.question };
      this.#run(turn, { ...rest, messages: [...messagesOf(before), asked] });
      return true;
    });
  }

  #record(turn, begin, recover = () => false) {
    this.current = new Recorder(turn, begin, {
      isTimed: turn.requestId === "",
      onChange: () => this.onTurn(turn),
      onSave: () => this.#save(turn),
    });
    this.current.ended.then((error) => {
      this.current = null;
      if (error && recover(error)) return;
      if (error) this.#fail(turn, error);
      else this.#finish(turn);
    });
  }

  #finish(turn) {
    turn.state = "done";
    this.#hold(Boolean(turn.facts.session));
    this.#conclude(turn);
  }

  #fail(turn, { code, message, retryAfterS }) {
    turn.state = "failed";
    const retryAtMs = retryAfterS === undefined ? 0 : Date.now() + retryAfterS * 1e3;
    turn.error = { code, message, retryAtMs };
    this.#conclude(turn);
  }

  #conclude(turn) {
    this.#save(turn);
    this.#takeOthers();
    this.onTurn(turn);
    this.onEnd(turn);
  }

  /** What other tabs have added meanwhile. */
  #takeOthers() {
    const known = new Map(this.turns.map((turn) => [turn.id, turn]));
    const stored = this.store.turns(this.id);
    const theirs = stored.filter((turn) => turn.owner !== this.owner || !known.has(turn.id));
    if (theirs.length === 0) return;
    for (const turn of theirs) known.set(turn.id, turn);
    this.turns = [...known.values()];
    this.onTurns(this.turns);
  }

  #save(turn) {
    turn.savedMs = Date.now();
    if (this.store.session(this.id)) this.store.putTurn(this.id, turn);
  }

  #hold(isHere) {
    if (!this.store.session(this.id)) return;
    this.store.putSession(this.id, { heldUntilMs: isHere ? Date.now() + HELD_MS : 0 });
  }

  #keepSession(question, model) {
    const known = this.store.session(this.id);
    const changes = { usedMs: Date.now(), model };
    if (!known?.title) changes.title = titleOf(question);
    this.store.putSession(this.id, changes);
  }

  /** Show what the gateway keeps, with what this browser knows besides. */
  #merge(history) {
    const kept = turnsOf(history.messages);
    const own = this.turns.filter(isHeld);
    const numOlder = Math.max(0, own.length - kept.length);
    const same = kept.every((turn, i) => turn.question === own[numOlder + i]?.question);
    if (same) return;
    const older = history.num_summarised > 0 ? own.slice(0, numOlder) : [];
    const byQuestion = new Map(own.map((turn) => [turn.question, turn]));
    this.turns = [
      ...older,
      ...kept.map(({ question, parts }) => {
        const known = byQuestion.get(question);
        return known ?? { id: randomId(), question, parts, state: "done", facts: {}, error: null };
      }),
    ];
    this.store.putTurns(this.id, this.turns);
    this.onTurns(this.turns);
  }
}

function titleOf(question) {
  const line = question.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}
