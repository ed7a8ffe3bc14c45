// Generation of the client in millrace.js: its state, independent of connections.

// Maximum number of consecutive requests for missing tokens.
const MOST_ASKED = 5;
const MOST_CHOICES = 128;

/** Return sixteen random bytes as hexadecimal digits. */
export function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Refusal or failure, with the gateway's stable code. */
export class MillraceError extends Error {
  /**
   * @param {string} code Stable code. The client adds "closed", "connection_lost" and "protocol_error".
   * @param {string} message
   * @param {{retryAfterS?: number, param?: string, requestId?: string}} [detail] `retryAfterS` is
   *   set if a retry may help, `param` names the invalid field.
   */
  constructor(code, message, { retryAfterS, param, requestId } = {}) {
    super(message);
    this.name = "MillraceError";
    this.code = code;
    this.retryAfterS = retryAfterS;
    this.param = param;
    this.requestId = requestId;
  }
}

/**
 * Callbacks for events, which the iterator returns, too. `onEvent` gets all events, including
 * `interrupted` and `resumed`, which the client adds.
 * @typedef {object} Listeners
 * @property {(event: object) => void} [onEvent]
 * @property {(text: string, event: object) => void} [onDelta]
 * @property {(call: ToolCall) => void} [onToolCall] At its start, and whenever its arguments grow.
 * @property {(step: object) => void} [onToolStep] The gateway has run one of its own tools.
 * @property {AbortSignal} [signal] Cancels the generation.
 */

/** @typedef {{callId: string, name: string, arguments: string}} ToolCall */

/** Progress of a choice: tokens, characters of text and of calls' arguments. */
class Place {
  constructor(index = 0, text = 0, calls = []) {
    this.index = index;
    this.text = text;
    this.calls = calls;
  }

  copy() {
    return new Place(this.index, this.text, [...this.calls]);
  }
}

/**
 * Received part of a choice. Text and calls follow the delta that counts their tokens, so a lost
 * connection may cut between them. Therefore the last delta is requested again, and its known part
 * is skipped.
 */
class Choice {
  text = "";
  calls = [];
  finishReason = null;
  numTokens = 0;
  #told = new Place();
  #beforeLast = new Place();

  startAt(index) {
    this.numTokens = index;
    this.#told = new Place(index);
    this.#beforeLast = new Place(index);
  }

  /** Prepare for a repetition from the last delta on; return its index. */
  rewind() {
    this.#told = this.#beforeLast.copy();
    return this.#told.index;
  }

  /** Return the new part of a delta, null if nothing is new, undefined if it does not fit. */
  addDelta(event) {
    const { index, num_tokens: numTokens } = event;
    const end = index + numTokens;
    if (index !== this.#told.index) return numTokens && end <= this.#told.index ? null : undefined;
    if (numTokens) this.#beforeLast = this.#told.copy();
    this.#told.index = end;
    const numFresh = Math.max(0, end - this.numTokens);
    this.numTokens += numFresh;
    const text = event.text.slice(Math.max(0, this.text.length - this.#told.text));
    this.#told.text += event.text.length;
    this.text += text;
    if (!numFresh && !text) return null;
    const fresh = { ...event, index: end - numFresh, num_tokens: numFresh, text };
    if (event.logprobs) fresh.logprobs = event.logprobs.slice(numTokens - numFresh);
    return fresh;
  }

  /** Return the call if it is new, else null. */
  addCall({ call: number, call_id: callId, name }) {
    if (this.calls.some((call) => call.callId === callId)) return null;
    const call = { callId, name, arguments: "", number };
    this.#told.calls[this.calls.push(call) - 1] = 0;
    return call;
  }

  /** Return the call and the new part of its arguments. */
  addArguments({ call: number, text }) {
    let place = this.calls.findLastIndex((call) => call.number === number);
    // The call started before the index at which a resume began.
    if (place < 0) place = this.calls.push({ callId: "", name: "", arguments: "", number }) - 1;
    const call = this.calls[place];
    const told = this.#told.calls[place] ?? 0;
    const fresh = text.slice(Math.max(0, call.arguments.length - told));
    this.#told.calls[place] = told + text.length;
    call.arguments += fresh;
    return [call, fresh];
  }
}

/**
 * Running answer. Iterate over it for its events, or await `done`: `{requestId, text, toolCalls,
 * steps, finishReason, usage, session, choices}`.
 *
 * Events are the protocol's messages without their `id`. Lost connections cause neither missing nor
 * repeated tokens.
 */
export class Generation {
  id = "";
  requestId = "";
  ended = false;
  isCancelled = false;
  #message;
  #listeners;
  #onCancel;
  #choices;
  #steps = [];
  #session = null;
  #events = [];
  #wake = [];
  #drawnKey = "";
  #wasSent = false;
  #isInterrupted = false;
  #isAttached = false;
  #numAsked = 0;
  #resolve;
  #reject;

  constructor(message, listeners, onCancel) {
    this.#message = message;
    this.#listeners = listeners;
    this.#onCancel = onCancel;
    const numChoices = Math.min(Math.max(1, message?.n ?? 1), MOST_CHOICES);
    this.#choices = Array.from({ length: numChoices }, () => new Choice());
    /** Resolves with the whole answer; rejects with a MillraceError. */
    this.done = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
    // An iterating caller gets the error there and need not await `done` too.
    this.settled = this.done.then(() => {}, () => {});
    const { signal } = listeners;
    if (signal?.aborted) this.cancelledHere();
    else signal?.addEventListener("abort", () => this.cancel(), { once: true });
  }

  /** Stop the answer. `done` resolves with the text so far and finishReason "cancelled". */
  cancel() {
    if (this.ended || this.isCancelled) return;
    this.isCancelled = true;
    this.#onCancel(this);
  }

  async *[Symbol.asyncIterator]() {
    for (let place = 0; ; ) {
      while (place < this.#events.length) yield this.#events[place++];
      if (this.ended) break;
      await new Promise((resolve) => this.#wake.push(resolve));
    }
    await this.done;
  }

  // Called by the client.

  /** Set an idempotency key unless the caller gave one, so that repeated sends run once. */
  drawKey() {
    if (this.#message.idempotency_key) return;
    this.#drawnKey = randomId();
    this.#message = { ...this.#message, idempotency_key: this.#drawnKey };
  }

  /**
   * Remove the generated key, unless the request was accepted; return true if a key was removed.
   */
  dropKey() {
    if (this.requestId || !this.#drawnKey) return false;
    this.#drawnKey = "";
    const { idempotency_key: _key, ...rest } = this.#message;
    this.#message = rest;
    return true;
  }

  /** Return whether the request may be sent again safely. */
  get maySendAgain() {
    return this.requestId !== "" || !this.#wasSent || Boolean(this.#message.idempotency_key);
  }

  /** Attach to a running request, from token `nextIndex` on: one index per choice. */
  adopt(requestId, nextIndex) {
    this.requestId = requestId;
    [nextIndex].flat().forEach((index, number) => this.#choiceOf(number).startAt(index));
  }

  /** Return whether the refusal was of a resume, which may be retried. */
  mayAskAgain() {
    return !this.#isAttached && this.requestId !== "" && ++this.#numAsked <= MOST_ASKED;
  }

  /** Return the message that starts or resumes the generation on a connection. */
  opening() {
    this.#isAttached = false;
    if (!this.requestId) {
      this.#wasSent = true;
      return { type: "generate", id: this.id, ...this.#message };
    }
    const indices = this.#choices.map((choice) => choice.rewind());
    const nextIndex = indices.length === 1 ? indices[0] : indices;
    return { type: "resume", id: this.id, request_id: this.requestId, next_index: nextIndex };
  }

  interrupted() {
    if (!this.#isInterrupted) this.#emit({ type: "interrupted" });
    this.#isInterrupted = true;
  }

  /** Process a message; return false if earlier tokens are missing and must be requested again. */
  take({ id: _id, ...event }) {
    const choice = this.#choiceOf(event.choice ?? 0);
    switch (event.type) {
      case "accepted":
        this.requestId = event.request_id;
        this.#isAttached = true;
        this.#session = event.session ?? this.#session;
        if (this.#isInterrupted) {
          this.#isInterrupted = false;
          this.#emit({ type: "resumed" });
        }
        break;
      case "delta":
        return this.#takeDelta(choice, event);
      case "tool_call": {
        const call = choice.addCall(event);
        if (!call) return true;
        this.#tell("onToolCall", publicCall(call));
        break;
      }
      case "tool_arguments": {
        const [call, text] = choice.addArguments(event);
        if (!text) return true;
        event.text = text;
        this.#tell("onToolCall", publicCall(call));
        break;
      }
      case "tool_step":
        if (this.#steps.some((step) => step.call_id === event.call_id)) return true;
        this.#steps.push(event);
        this.#tell("onToolStep", event);
        break;
      case "choice_done":
        if (choice.finishReason) return true;
        choice.finishReason = event.finish_reason;
        break;
      case "done":
        this.#finish(event.finish_reason, event.usage ?? null, event);
        return true;
    }
    this.#emit(event);
    return true;
  }

  fail(error) {
    if (this.ended) return;
    this.ended = true;
    this.#reject(error);
    this.#wakeAll();
  }

  /** Handle a cancel without a connected gateway. */
  cancelledHere() {
    this.#finish("cancelled", null, { type: "done", finish_reason: "cancelled" });
  }

  #choiceOf(number) {
    while (this.#choices.length <= number) this.#choices.push(new Choice());
    return this.#choices[number];
  }

  #takeDelta(choice, event) {
    const fresh = choice.addDelta(event);
    if (fresh === undefined) {
      if (++this.#numAsked <= MOST_ASKED) return false;
      this.fail(new MillraceError("protocol_error", "The gateway did not send all tokens."));
    } else if (fresh) {
      this.#numAsked = 0;
      this.#tell("onDelta", fresh.text, fresh);
      this.#emit(fresh);
    }
    return true;
  }

  #finish(finishReason, usage, event) {
    if (this.ended) return;
    this.ended = true;
    this.#choices[0].finishReason ??= finishReason;
    const choices = this.#choices.map((choice) => ({
      text: choice.text,
      toolCalls: choice.calls.map(publicCall),
      finishReason: choice.finishReason ?? finishReason,
    }));
    const [{ text, toolCalls }] = choices;
    const { requestId } = this;
    const [session, steps] = [this.#session, this.#steps];
    this.#emit(event);
    this.#resolve({ requestId, text, toolCalls, steps, finishReason, usage, session, choices });
    this.#wakeAll();
  }

  #emit(event) {
    this.#events.push(event);
    this.#tell("onEvent", event);
    this.#wakeAll();
  }

  /** Call a listener; report its exception and continue. */
  #tell(name, ...values) {
    try {
      this.#listeners[name]?.(...values);
    } catch (error) {
      reportError(error);
    }
  }

  #wakeAll() {
    for (const wake of this.#wake.splice(0)) wake();
  }
}

function publicCall({ callId, name, arguments: text }) {
  return { callId, name, arguments: text };
}
