// Browser client of `/v1/ws`. Generations survive a lost connection.
//
//   import { Millrace } from "https://gateway.example/static/millrace.js";
//   const client = new Millrace({ url: "https://gateway.example", token: "mr-…" });
//   const answer = client.generate({ model: "demo", messages: [{ role: "user", content: "Hello" }] });
//   for await (const event of answer) if (event.type === "delta") show(event.text);
//   const { text, usage } = await answer.done;
//
// The client connects and reconnects automatically, and resumes every generation at the next token.
// docs/websocket.md describes the protocol.

import { Generation, MillraceError } from "./generation.js";

export { MillraceError };

const SUBPROTOCOL = "millrace.v1";
const GOING_AWAY_CODE = "draining";
const NO_STATE_CODE = "state_unavailable";
const BAD_KEY_CODE = "invalid_api_key";
const UNKNOWN = "The connection was lost before the gateway had accepted the request.";
const NO_KEY = "This gateway demands an API key.";
// Close codes. 1008: the key is missing or wrong. After 1000, a gateway may forget running
// generations; after a custom code it waits for the client to reconnect.
const POLICY_VIOLATION = 1008;
const FAREWELL = 1000;
const COMING_BACK = 4000;
const DEFAULT_TIMING = {
  firstPauseMs: 300,
  longestPauseMs: 15_000,
  growth: 1.8,
  connectWaitMs: 10_000,
  pingMs: 20_000,
  pongWaitMs: 8_000,
};

/**
 * State of the connection: "connecting" at first, "open", "lost" (the client retries),
 * "unauthorized" (the client waits for another token), "closed" (by `close`).
 * @typedef {"connecting" | "open" | "lost" | "unauthorized" | "closed"} State
 */

/** Client of one gateway: one connection at a time, any number of generations on it. */
export class Millrace {
  #url;
  #token;
  #onState;
  #timing;
  #state = "connecting";
  #socket = null; // connection of the generations
  #next = null; // a connection in progress
  #running = new Set();
  #byId = new Map();
  #orphans = []; // resume messages of generations to cancel after reconnecting
  #numIds = 0;
  #pauseMs;
  #retry = 0;
  #pings = 0;
  #silence = 0;
  #listening = new AbortController();

  /**
   * Connect immediately.
   * @param {object} [options]
   * @param {string | URL} [options.url] The gateway (http, https, ws or wss); by default the page's own origin.
   * @param {string} [options.token] API key, sent in the first message, never in the URL.
   * @param {(state: State, detail: {error?: MillraceError, retryMs?: number}) => void} [options.onState]
   * @param {Partial<typeof DEFAULT_TIMING>} [options.timing] Pauses and timeouts, in milliseconds.
   */
  constructor({ url, token = "", onState = () => {}, timing = {} } = {}) {
    this.#url = new URL("/v1/ws", new URL(url ?? "", globalThis.location?.href));
    this.#url.protocol = this.#url.protocol.replace("http", "ws");
    this.#token = token;
    this.#onState = onState;
    this.#timing = { ...DEFAULT_TIMING, ...timing };
    this.#pauseMs = this.#timing.firstPauseMs;
    const { signal } = this.#listening;
    globalThis.addEventListener?.("online", () => this.#hurry(), { signal });
    globalThis.document?.addEventListener(
      "visibilitychange",
      () => document.hidden || this.#hurry(),
      { signal },
    );
    this.#connect();
  }

  /** @returns {State} */
  get state() {
    return this.#state;
  }

  /** Set another key: reconnect with it, and resume the running generations. */
  set token(token) {
    if (this.#state === "closed" || (token === this.#token && this.#state === "open")) return;
    this.#token = token;
    this.#abandon(this.#next);
    this.#abandon(this.#socket);
    this.#next = this.#socket = null;
    this.#interrupt();
    this.#say("connecting");
    this.#connect();
  }

  /**
   * Start a generation now or after connecting. It runs once, even if the request is sent again on
   * another connection. If the gateway cannot guarantee that, a connection lost before acceptance
   * ends the generation with "connection_lost".
   * @param {object} request Fields of the protocol's `generate`: model, messages or prompt,
   *   session_id, temperature and so on.
   * @param {import("./generation.js").Listeners} [listeners]
   */
  generate(request, listeners = {}) {
    const generation = new Generation(request, listeners, (one) => this.#cancel(one));
    generation.drawKey();
    return this.#begin(generation);
  }

  /**
   * Resume a generation that was started elsewhere, such as before a reload of the page.
   * @param {string} requestId From `accepted`.
   * @param {import("./generation.js").Listeners & {nextIndex?: number}} [listeners]
   *   `nextIndex` is the index of the first token wanted.
   */
  resume(requestId, { nextIndex = 0, ...listeners } = {}) {
    const generation = new Generation(null, listeners, (one) => this.#cancel(one));
    generation.adopt(requestId, nextIndex);
    return this.#begin(generation);
  }

  /** Close permanently. Running generations are cancelled and rejected. */
  close() {
    this.#listening.abort();
    clearTimeout(this.#retry);
    if (this.#state === "open") for (const id of this.#byId.keys()) this.#sendCancel(id);
    this.#abandon(this.#next, FAREWELL);
    this.#abandon(this.#socket, FAREWELL);
    this.#next = this.#socket = null;
    for (const generation of [...this.#running]) {
      this.#end(generation, new MillraceError("closed", "The client was closed."));
    }
    this.#say("closed");
  }

  // Generations.

  #begin(generation) {
    if (this.#state === "closed") throw new MillraceError("closed", "The client was closed.");
    generation.settled.then(() => this.#forget(generation));
    if (generation.ended) return generation;
    this.#running.add(generation);
    if (this.#state === "open") this.#attach(generation);
    return generation;
  }

  /** Give a generation a new id on the current connection and request its missing tokens. */
  #attach(generation) {
    if (generation.id) this.#byId.delete(generation.id);
    generation.id = `m${++this.#numIds}`;
    this.#byId.set(generation.id, generation);
    this.#send(generation.opening());
    if (generation.isCancelled) this.#sendCancel(generation.id);
  }

  #cancel(generation) {
    if (this.#state === "open" && generation.id) this.#sendCancel(generation.id);
    else this.#cancelAway(generation);
  }

  /** End a generation locally, and cancel it at the gateway after reconnecting. */
  #cancelAway(generation) {
    if (generation.requestId) this.#orphans.push(generation.opening());
    generation.cancelledHere();
  }

  #sendCancel(id) {
    this.#send({ type: "cancel", id });
  }

  #end(generation, error) {
    this.#forget(generation);
    generation.fail(error);
  }

  #forget(generation) {
    this.#running.delete(generation);
    this.#byId.delete(generation.id);
  }

  // The connection.

  #connect() {
    clearTimeout(this.#retry);
    const socket = new WebSocket(this.#url, SUBPROTOCOL);
    this.#next = socket;
    const giveUp = setTimeout(() => this.#drop(socket), this.#timing.connectWaitMs);
    socket.onopen = () => {
      if (this.#token) socket.send(JSON.stringify({ type: "authenticate", token: this.#token }));
      else this.#opened(socket);
    };
    socket.onmessage = ({ data }) => this.#receive(socket, JSON.parse(data));
    socket.onclose = ({ code }) => this.#lost(socket, code);
    socket.settle = () => clearTimeout(giveUp);
  }

  /** Adopt the new connection: move all running generations to it, and drop the old one. */
  #opened(socket) {
    socket.settle();
    this.#next = null;
    this.#abandon(this.#socket);
    this.#socket = socket;
    this.#watch();
    this.#state = "open";
    for (const message of this.#orphans.splice(0)) {
      const id = `m${++this.#numIds}`;
      this.#send({ ...message, id });
      this.#sendCancel(id);
    }
    for (const generation of this.#running) this.#attach(generation);
    this.#onState("open", {});
  }

  #receive(socket, message) {
    if (socket === this.#next) {
      if (message.type === "authenticated") this.#opened(socket);
      else if (message.type === "error") {
        const error = errorOf(message);
        // The gateway cannot check the key now, or the key is wrong.
        if (error.retryAfterS !== undefined) this.#drop(socket);
        else this.#refused(socket, error);
      }
      return;
    }
    if (socket !== this.#socket) return;
    this.#heard();
    if (message.type === "going_away") {
      if (!this.#next) this.#later(() => this.#connect());
      return;
    }
    this.#pauseMs = this.#timing.firstPauseMs;
    const generation = this.#byId.get(message.id);
    if (generation) this.#deliver(generation, message);
    else if (message.type === "error" && message.id === undefined) {
      this.#onState(this.#state, { error: errorOf(message) });
    }
  }

  #deliver(generation, message) {
    if (message.type !== "error") {
      if (!generation.take(message)) this.#attach(generation);
      return;
    }
    const error = errorOf(message);
    if (error.code === GOING_AWAY_CODE) {
      // The gateway is shutting down: send the request to the next one.
      this.#detach(generation);
      if (!this.#next) this.#later(() => this.#connect());
    } else if (error.code === BAD_KEY_CODE) {
      this.#refused(this.#socket, error);
    } else if (error.code === NO_STATE_CODE && generation.dropKey()) {
      // The gateway cannot store idempotency keys now: send the request without one.
      this.#attach(generation);
    } else if (error.retryAfterS !== undefined && generation.mayAskAgain()) {
      // The request is running, but its stream is not available now.
      this.#detach(generation);
      setTimeout(() => this.#attachIfFree(generation), error.retryAfterS * 1e3);
    } else this.#end(generation, error);
  }

  #attachIfFree(generation) {
    const isWaiting = this.#running.has(generation) && !generation.id;
    if (isWaiting && this.#state === "open") this.#attach(generation);
  }

  #detach(generation) {
    this.#byId.delete(generation.id);
    generation.id = "";
  }

  #lost(socket, code) {
    if (socket !== this.#socket && socket !== this.#next) return;
    socket.settle();
    const isSpare = socket === this.#next && this.#socket !== null;
    if (socket === this.#next) this.#next = null;
    else {
      this.#socket = null;
      this.#stopWatching();
    }
    if (code === POLICY_VIOLATION) {
      this.#refused(socket, new MillraceError(BAD_KEY_CODE, NO_KEY));
    } else if (isSpare) {
      // Still on the old connection, whose gateway is shutting down.
      this.#later(() => this.#connect());
    } else {
      this.#interrupt();
      const retryMs = this.#next ? 0 : this.#later(() => this.#connect());
      this.#say("lost", { retryMs });
    }
  }

  /** Handle a wrong key: running generations wait for another. */
  #refused(socket, error) {
    socket.settle();
    this.#abandon(socket);
    if (this.#next === socket) this.#next = null;
    if (this.#socket === socket) this.#socket = null;
    clearTimeout(this.#retry);
    this.#interrupt();
    this.#say("unauthorized", { error });
  }

  #interrupt() {
    for (const generation of [...this.#running]) {
      this.#detach(generation);
      if (generation.isCancelled) this.#cancelAway(generation);
      else if (generation.maySendAgain) generation.interrupted();
      else this.#end(generation, new MillraceError("connection_lost", UNKNOWN, { retryAfterS: 0 }));
    }
  }

  #drop(socket) {
    this.#abandon(socket);
    this.#lost(socket, 1006);
  }

  #abandon(socket, code = COMING_BACK) {
    if (!socket) return;
    socket.settle();
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close(code);
    if (socket === this.#socket) this.#stopWatching();
  }

  /** Schedule the next attempt, with exponential backoff and jitter. */
  #later(attempt) {
    const pauseMs = this.#pauseMs * (0.5 + Math.random());
    this.#pauseMs = Math.min(this.#pauseMs * this.#timing.growth, this.#timing.longestPauseMs);
    clearTimeout(this.#retry);
    this.#retry = setTimeout(attempt, pauseMs);
    return pauseMs;
  }

  #hurry() {
    if (this.#state === "lost" && !this.#next) this.#connect();
    else if (this.#state === "open") this.#ping();
  }

  // An unanswered ping reveals a dead connection.

  #watch() {
    this.#stopWatching();
    this.#pings = setInterval(() => this.#ping(), this.#timing.pingMs);
  }

  #stopWatching() {
    clearInterval(this.#pings);
    this.#heard();
  }

  #ping() {
    const socket = this.#socket;
    if (!socket || this.#silence) return;
    this.#send({ type: "ping" });
    this.#silence = setTimeout(() => this.#drop(socket), this.#timing.pongWaitMs);
  }

  #heard() {
    clearTimeout(this.#silence);
    this.#silence = 0;
  }

  #send(message) {
    this.#socket.send(JSON.stringify(message));
  }

  #say(state, detail = {}) {
    this.#state = state;
    this.#onState(state, detail);
  }
}

function errorOf({ code, message, retry_after_s: retryAfterS, param, request_id: requestId }) {
  return new MillraceError(code, message, { retryAfterS, param, requestId });
}
