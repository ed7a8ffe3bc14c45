// The WebSocket of the chat page: one connection that comes back by itself.

const FIRST_PAUSE_MS = 400;
const LONGEST_PAUSE_MS = 10_000;
const PING_MS = 20_000;
const PONG_WAIT_MS = 10_000;

/** Speaks `millrace.v1`. Tells `onState` "connecting", "open" or "lost", and `onMessage` the rest. */
export class Socket {
  constructor({ onState, onMessage }) {
    this.onState = onState;
    this.onMessage = onMessage;
    this.pauseMs = FIRST_PAUSE_MS;
    this.connect();
    addEventListener("online", () => this.hurry());
    document.addEventListener("visibilitychange", () => document.hidden || this.hurry());
  }

  get isOpen() {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  send(message) {
    this.socket.send(JSON.stringify(message));
  }

  connect() {
    clearTimeout(this.retry);
    const url = new URL("/v1/ws", location.href);
    url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url, "millrace.v1");
    this.socket = socket;
    socket.onopen = () => {
      this.pauseMs = FIRST_PAUSE_MS;
      this.watch(socket);
      this.onState("open");
    };
    socket.onmessage = (event) => {
      clearTimeout(this.silence);
      const message = JSON.parse(event.data);
      if (message.type !== "pong") this.onMessage(message);
    };
    socket.onclose = () => this.lost(socket);
  }

  lost(socket) {
    if (socket !== this.socket) return;
    clearInterval(this.pings);
    clearTimeout(this.silence);
    const pauseMs = this.pauseMs * (0.75 + Math.random() / 2);
    this.pauseMs = Math.min(this.pauseMs * 1.8, LONGEST_PAUSE_MS);
    this.retry = setTimeout(() => this.connect(), pauseMs);
    this.onState("lost");
  }

  /** A connection that died without a word is noticed by a ping that nobody answers. */
  watch(socket) {
    clearInterval(this.pings);
    this.pings = setInterval(() => {
      if (!this.isOpen) return;
      this.send({ type: "ping" });
      clearTimeout(this.silence);
      this.silence = setTimeout(() => {
        socket.onclose = null;
        socket.close();
        this.lost(socket);
      }, PONG_WAIT_MS);
    }, PING_MS);
  }

  hurry() {
    if (this.socket.readyState === WebSocket.CLOSED) this.connect();
  }
}
