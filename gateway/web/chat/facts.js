// Figures below an answer.

import { make } from "../dom.js";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const rate = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const ENDS = {
  stop: "",
  length: "reached the length limit",
  cancelled: "stopped",
  tool_calls: "waits for a tool",
};

/** Return the spans of a turn's known figures: name and value. */
export function factSpans(turn) {
  const { facts } = turn;
  const found = [];
  if (facts.ttftMs !== undefined) found.push(["TTFT", `${whole.format(facts.ttftMs)} ms`]);
  if (facts.tokensPerS !== undefined) found.push(["", `${rate.format(facts.tokensPerS)} tokens/s`]);
  if (facts.numTokens !== undefined) found.push(["", counted(facts.numTokens, "token")]);
  if (turn.state !== "running") found.push(...endFacts(facts));
  return found.map(([name, value, title]) => {
    const fact = make("span", title ? { title } : {}, name ? `${name} ` : "");
    fact.append(make("b", {}, value));
    return fact;
  });
}

function endFacts({ promptTokens, cachedTokens, finishReason, session, numInterruptions }) {
  const found = [];
  if (cachedTokens > 0) {
    const title = `${whole.format(cachedTokens)} of ${counted(promptTokens, "prompt token")} came from the cache`;
    found.push(["", `${whole.format(cachedTokens)} cached`, title]);
  }
  if (session?.num_dropped > 0) {
    const title = "To fit the context window, the oldest messages were left out.";
    found.push(["", `${counted(session.num_dropped, "old message")} left out`, title]);
  }
  if (session?.num_summarised > 0) {
    const title = "To fit the context window, the oldest messages were replaced by a summary.";
    found.push(["", `${counted(session.num_summarised, "old message")} summarised`, title]);
  }
  if (numInterruptions > 0) {
    const title = "The connection was lost; the answer resumed where it had stopped.";
    found.push(["", numInterruptions === 1 ? "resumed once" : `resumed ${numInterruptions} times`, title]);
  }
  const end = ENDS[finishReason] ?? finishReason;
  if (end) found.push(["", end]);
  return found;
}

function counted(number, noun) {
  return `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
}
