// Records an answer as it comes: parts, figures and state of a turn.

const SAVE_MS = 1_000;

/**
 * Recorder of a generation: starts it by `begin(listeners)` and fills `turn`. `ended` resolves with
 * null, or with the error. `onSave` is called now and then, `onChange` on every change. `isTimed`:
 * the generation begins now, so its times are valid.
 */
export class Recorder {
  constructor(turn, begin, { isTimed, onChange, onSave }) {
    this.turn = turn;
    this.isTimed = isTimed;
    this.onChange = onChange;
    this.onSave = onSave;
    this.startedMs = performance.now();
    this.numTokens = 0;
    turn.facts = {};
    this.generation = begin({ onEvent: (event) => this.take(event) });
    this.ended = this.generation.done.then(
      (answer) => this.finish(answer),
      (error) => error,
    );
  }

  take(event) {
    const { turn } = this;
    switch (event.type) {
      case "accepted":
        turn.requestId = event.request_id;
        turn.facts.model = event.model;
        if (event.session) turn.facts.session = event.session;
        break;
      case "queued":
        turn.facts.queued = event.position;
        turn.facts.etaS = event.eta_s;
        break;
      case "started":
        delete turn.facts.queued;
        turn.facts.hasStarted = true;
        turn.facts.promptTokens = event.prompt_tokens;
        turn.facts.cachedTokens = event.cached_tokens ?? 0;
        break;
      case "interrupted":
        turn.facts.isInterrupted = true;
        turn.facts.numInterruptions = (turn.facts.numInterruptions ?? 0) + 1;
        break;
      case "resumed":
        turn.facts.isInterrupted = false;
        break;
      case "delta":
        this.addText(event);
        break;
      case "tool_call":
        this.callOf(event.call_id).name = event.name;
        this.lastCall = turn.parts.at(-1);
        break;
      case "tool_arguments":
        this.lastCall.arguments += event.text;
        break;
      case "tool_step":
        this.addStep(event);
        break;
      case "done":
        return;
    }
    this.onChange();
    this.saveSoon(event.type === "accepted");
  }

  addText({ text, num_tokens: numTokens }) {
    const nowMs = performance.now();
    this.firstMs ??= nowMs;
    this.firstTokens ??= numTokens;
    this.lastMs = nowMs;
    this.numTokens += numTokens;
    delete this.turn.facts.queued;
    this.measure();
    if (!text) return;
    const last = this.turn.parts.at(-1);
    if (last?.kind === "text") last.text += text;
    else this.turn.parts.push({ kind: "text", text });
  }

  callOf(callId) {
    const { parts } = this.turn;
    const known = parts.find((part) => part.callId === callId);
    if (known) return known;
    const part = { kind: "tool", callId, name: "", arguments: "" };
    parts.push(part);
    return part;
  }

  addStep({ call_id: callId, name, ok, output, duration_ms: durationMs, arguments: given }) {
    const part = this.callOf(callId);
    Object.assign(part, { name, ok, output, durationMs });
    if (given !== undefined) part.arguments = given;
  }

  measure() {
    const { facts } = this.turn;
    facts.numTokens = this.numTokens;
    if (!this.isTimed) return;
    facts.ttftMs = this.firstMs - this.startedMs;
    const spanS = (this.lastMs - this.firstMs) / 1e3;
    const numAfter = this.numTokens - this.firstTokens;
    if (numAfter > 0 && spanS > 0) facts.tokensPerS = numAfter / spanS;
  }

  finish({ finishReason, usage, session }) {
    const { facts } = this.turn;
    facts.finishReason = finishReason;
    delete facts.queued;
    if (session) facts.session = session;
    if (usage) {
      facts.numTokens = usage.completion_tokens;
      facts.promptTokens = usage.prompt_tokens;
      facts.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? facts.cachedTokens;
    }
    return null;
  }

  saveSoon(now) {
    const nowMs = performance.now();
    if (!now && nowMs - (this.savedMs ?? 0) < SAVE_MS) return;
    this.savedMs = nowMs;
    this.onSave();
  }
}
