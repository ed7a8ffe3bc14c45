// Conversation: its turns, its running answer, and its copy at the gateway.

import { randomId } from "../generation.js";
import {
  fetchHistory,
  HistoryUnavailableError,
  isHeld,
  isSame,
  messagesOf,
  placeAfter,
  turnsOf,
} from "./history.js";
import { Recorder } from "./recorder.js";
import { newestLeaf, pathTo, versionsOf } from "./tree.js";

const HELD_MS = 50 * 60_000; // a little less than the gateway's hour
const USUAL = { temperature: 0 };
const ORPHAN_MS = 6_000;
const STATE_UNAVAILABLE = "state_unavailable";

/**
 * Conversation with at most one running answer, which it owns. `all` has every version of every
 * turn, `turns` the displayed turns. `catchUp()` loads changes of other browsers into the store.
 * `onTurns(turns)` is called after turns are added or removed, `onTurn(turn)` after a change of a
 * turn, `onEnd(turn)` when its answer is complete.
 */
export class Conversation {
  constructor({ id, client, store, owner, catchUp, onTurns, onTurn, onEnd }) {
    Object.assign(this, { id, client, store, owner, catchUp, onTurns, onTurn, onEnd });
    this.#read();
    this.current = null; // recorder of the running answer
    this.starting = null; // turn of the running answer
  }

  get isBusy() {
    return this.starting !== null || this.current !== null;
  }

  versions(turn) {
    return versionsOf(this.all, turn);
  }

  /**
   * Load the gateway's session after its saved chats (`isHere` resolves), and continue an unfinished
   * answer that no tab reads.
   */
  async open(isHere) {
    this.onTurns(this.turns);
    this.#adopt();
    await isHere;
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

  /**
   * Request an answer that follows the last displayed turn, or as another version of the turn
   * `inPlaceOf`. `options` are fields of the request; `system` is the system prompt, "" for none.
   */
  async ask(question, { system, ...options }, inPlaceOf = null) {
    if (this.isBusy) return;
    const nowMs = Date.now();
    const turn = {
      id: randomId(),
      parent: inPlaceOf ? inPlaceOf.parent : (this.turns.at(-1)?.id ?? null),
      question,
      parts: [],
      state: "running",
      owner: this.owner,
      askedMs: nowMs,
      savedMs: nowMs,
      requestId: "",
      hasSystem: Boolean(system),
      facts: {},
      error: null,
    };
    this.starting = turn;
    this.all = [...this.all, turn];
    this.#keepSession(question, options.model);
    this.store.putTurns(this.id, this.all);
    this.show(turn.id);
    const body = await this.#plan(turn, system);
    this.starting = null;
    if (turn.state !== "running") return;
    this.#run(turn, { ...options, ...body }, system);
  }

  stop() {
    if (this.current) this.current.generation.cancel();
    else if (this.starting) {
      Object.assign(this.starting, { state: "done", facts: { finishReason: "cancelled" } });
      this.#conclude(this.starting);
    }
  }

  /** Show the newest turns that follow a version of a turn. */
  choose(turn) {
    this.show(newestLeaf(this.all, turn));
  }

  /** Show the turns up to the one with the id `leaf`. */
  show(leaf) {
    this.#lead(leaf);
    if (this.store.session(this.id)) this.store.putSession(this.id, { leaf, isChanged: true });
    this.onTurns(this.turns);
  }

  /** Return the parameters: `{system, temperature, top_p, max_tokens, seed, stop}`. */
  setParameters(parameters) {
    this.parameters = parameters;
    if (this.store.session(this.id)) this.store.putSession(this.id, { parameters, isChanged: true });
  }

  /** Stop displaying the conversation. Its answer is still recorded until it is complete. */
  leave() {
    this.onTurns = this.onTurn = () => {};
  }

  /** Handle a change by another tab or browser. */
  changedElsewhere() {
    if (this.isBusy) return;
    this.#read();
    this.onTurns(this.turns);
  }

  #read() {
    this.all = this.store.turns(this.id);
    const { leaf, parameters } = this.store.session(this.id) ?? {};
    this.parameters = parameters ?? this.parameters ?? USUAL;
    this.#lead(this.all.some(({ id }) => id === leaf) ? leaf : this.all.at(-1)?.id);
  }

  #lead(leaf) {
    this.turns = pathTo(this.all, leaf);
  }

  /** Continue an answer where a closed tab stopped reading. */
  #adopt() {
    const turn = this.all.findLast(({ state }) => state === "running");
    if (!turn || this.isBusy) return;
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
    } else this.#fail(turn, { code: "lost", message: "The page was closed before the request was accepted." });
  }

  /**
   * Search the history for an answer that cannot be resumed; return true if the search has started.
   */
  #openAgain(turn) {
    const giveUp = () =>
      this.#fail(turn, { code: "lost", message: "The rest of this answer is no longer available." });
    fetchHistory(this.id).then((history) => {
      const last = history && turnsOf(history.messages).at(-1);
      if (last?.question !== turn.question) return giveUp();
      turn.parts = last.parts;
      turn.facts.session ??= {};
      return this.#finish(turn);
    }, giveUp);
    return true;
  }

  /** Return the turns that the gateway has, as far as this browser knows. */
  #heldTurns() {
    const leaf = this.store.session(this.id)?.heldLeaf;
    // Earlier versions of the page did not store `heldLeaf`: all turns were one path.
    const held = leaf === undefined ? this.all.filter((turn) => turn !== this.starting) : pathTo(this.all, leaf);
    return held.filter(isHeld);
  }

  /** Return the part of the conversation that the request must contain. */
  async #plan(turn, system) {
    await this.catchUp();
    const asked = [...systemMessages(system), { role: "user", content: turn.question }];
    const { heldUntilMs, heldSystem, numHeld } = this.store.session(this.id);
    const held = this.#heldTurns();
    const before = pathTo(this.all, turn.parent).filter(isHeld);
    const isWhole = before.length === held.length && before.every(({ id }, place) => held[place].id === id);
    // A system prompt in the request replaces the session's; an absent one does not.
    const mayStay = system || !heldSystem;
    if (mayStay && isWhole && (held.length === 0 || heldUntilMs > Date.now())) {
      // Turns added by another browser do not come before this question.
      const keep = held.length > 0 && numHeld ? { session_keep: numHeld } : {};
      return { session_id: this.id, ...keep, messages: asked };
    }
    if (mayStay) {
      try {
        const history = await fetchHistory(this.id);
        const place = history ? placeAfter(history, before, held.length) : -1;
        if (place >= 0) return { session_id: this.id, session_keep: place, messages: asked };
      } catch (error) {
        if (!(error instanceof HistoryUnavailableError)) throw error;
      }
    }
    return { session_id: this.id, session_keep: 0, messages: this.#wholeOf(turn, system) };
  }

  /** Return the conversation up to the question of a turn, for a gateway without a copy. */
  #wholeOf(turn, system) {
    const before = messagesOf(pathTo(this.all, turn.parent));
    return [...systemMessages(system), ...before, { role: "user", content: turn.question }];
  }

  #run(turn, body, system) {
    const begin = (listeners) => this.client.generate(body, listeners);
    this.#record(turn, begin, (error) => {
      if (error.code !== STATE_UNAVAILABLE || turn.requestId || !body.session_id) return false;
      // The gateway cannot store sessions now: send the whole conversation, and store it here.
      const { session_id: _id, session_keep: _keep, ...rest } = body;
      this.#run(turn, { ...rest, messages: this.#wholeOf(turn, system) }, system);
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
    this.#hold(Boolean(turn.facts.session), turn);
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
    if (this.store.session(this.id)) this.store.putSession(this.id, { isChanged: true });
    this.#takeOthers();
    this.onTurn(turn);
    this.onEnd(turn);
  }

  /** Load turns that other tabs have added. */
  #takeOthers() {
    const known = new Map(this.all.map((turn) => [turn.id, turn]));
    const stored = this.store.turns(this.id);
    const theirs = stored.filter((turn) => turn.owner !== this.owner || !known.has(turn.id));
    if (theirs.length === 0) return;
    for (const turn of theirs) known.set(turn.id, turn);
    this.all = [...known.values()];
    this.#lead(this.turns.at(-1)?.id);
    this.onTurns(this.turns);
  }

  #save(turn) {
    turn.savedMs = Date.now();
    if (this.store.session(this.id)) this.store.putTurn(this.id, turn);
  }

  /** Record whether the gateway has the conversation up to a turn. */
  #hold(isHere, turn = null) {
    if (!this.store.session(this.id)) return;
    const changes = { heldUntilMs: isHere ? Date.now() + HELD_MS : 0 };
    if (isHere && turn && isHeld(turn)) {
      changes.numHeld = this.#numHeldWith(turn);
      changes.heldLeaf = turn.id;
      changes.heldSystem = turn.hasSystem;
    }
    this.store.putSession(this.id, changes);
  }

  /**
   * Return the number of messages at the gateway including those of a turn; null if tools added
   * some.
   */
  #numHeldWith({ parts, facts, hasSystem }) {
    const numBefore = facts.session?.num_messages;
    if (numBefore === undefined || parts.some(({ kind }) => kind === "tool")) return null;
    const hadSystem = numBefore > 0 && this.store.session(this.id).heldSystem;
    return numBefore + (hasSystem && !hadSystem ? 1 : 0) + 2;
  }

  #keepSession(question, model) {
    const known = this.store.session(this.id);
    const changes = { usedMs: Date.now(), model, isChanged: true };
    if (!known?.title) changes.title = titleOf(question);
    if (!known) Object.assign(changes, { parameters: this.parameters, account: this.store.account });
    this.store.putSession(this.id, changes);
  }

  /**
   * Show the gateway's turns; where they differ from this browser's, show them as other versions.
   */
  #merge(history) {
    const kept = turnsOf(history.messages);
    const own = this.#heldTurns();
    // The oldest turns may be only in the gateway's summary.
    const numOlder = history.num_summarised > 0 ? Math.max(0, own.length - kept.length) : 0;
    let place = 0;
    while (place < kept.length && isSame(kept[place], own[numOlder + place])) place += 1;
    let parent = own[numOlder + place - 1]?.id ?? null;
    for (const { question, parts } of kept.slice(place)) {
      const known = versionsOf(this.all, { parent }).find((turn) => isSame({ question, parts }, turn));
      const fresh = { id: randomId(), parent, question, parts, state: "done", facts: {}, error: null };
      if (!known) this.all = [...this.all, { ...fresh, askedMs: Date.now() }];
      parent = (known ?? fresh).id;
    }
    const numHeld = history.num_summarised + history.messages.length;
    this.store.putSession(this.id, { heldLeaf: parent, numHeld });
    if (place === kept.length) return;
    this.store.putTurns(this.id, this.all);
    this.show(parent);
  }
}

function systemMessages(system) {
  return system ? [{ role: "system", content: system }] : [];
}

function titleOf(question) {
  const line = question.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}
