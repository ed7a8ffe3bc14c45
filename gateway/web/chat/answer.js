// Display of an answer: Markdown text and tool calls.

import { make } from "../dom.js";
import { Markdown } from "./markdown.js";

const LONGEST_SHOWN = 20_000;

/** View of a turn's parts. Call `show` again after they have grown. */
export class AnswerView {
  constructor() {
    this.root = make("div", { class: "said" });
    this.views = [];
  }

  show(parts) {
    if (parts.length < this.views.length) {
      this.views = [];
      this.root.replaceChildren();
    }
    parts.forEach((part, i) => {
      if (!this.views[i]) {
        this.views[i] = part.kind === "text" ? new TextView() : new ToolView();
        this.root.append(this.views[i].root);
      }
      this.views[i].show(part);
    });
  }
}

class TextView {
  constructor() {
    this.root = make("div", { class: "prose" });
    this.markdown = new Markdown(this.root);
    this.shown = "";
  }

  show({ text }) {
    if (text === this.shown) return;
    this.shown = text;
    this.markdown.show(text);
  }
}

/** Tool call: name and progress in one line, arguments and result when opened. */
class ToolView {
  constructor() {
    this.name = make("b");
    this.outcome = make("span", { class: "outcome" });
    this.arguments = make("pre", { tabIndex: 0 });
    this.output = make("pre", { tabIndex: 0 });
    this.result = make("div", {}, make("h3", {}, "Result"), this.output);
    this.root = make(
      "details",
      { class: "tool" },
      make("summary", {}, make("span", { class: "gear", "aria-hidden": "true" }), this.name, this.outcome),
      make("h3", {}, "Arguments"),
      this.arguments,
      this.result,
    );
  }

  show({ name, arguments: given, ok, output, durationMs }) {
    const state = ok === undefined ? "called" : ok ? "ok" : "failed";
    this.root.dataset.state = state;
    this.name.textContent = name || "tool";
    const took = durationMs === undefined ? "" : ` in ${Math.round(durationMs)} ms`;
    this.outcome.textContent = { called: "called", ok: `answered${took}`, failed: `failed${took}` }[state];
    this.arguments.textContent = pretty(given) || "none";
    this.result.hidden = output === undefined;
    this.output.textContent = pretty(output ?? "");
  }
}

/** Return JSON indented; return incomplete JSON and other text unchanged. */
function pretty(text) {
  const shown = text.length > LONGEST_SHOWN ? `${text.slice(0, LONGEST_SHOWN)}…` : text;
  if (!/^\s*[[{]/.test(shown)) return shown;
  try {
    return JSON.stringify(JSON.parse(shown), null, 2);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    return shown;
  }
}
