// One question and its answer, as it is shown.

const milliseconds = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const rates = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

const ENDS = { stop: "", length: "reached the length limit", cancelled: "stopped" };

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Shows the question at once and the answer as it comes. All text is text, never markup. */
export class Turn {
  constructor(question, { onRetry, onGrow }) {
    this.question = question;
    this.answer = "";
    this.numTokens = 0;
    this.isComplete = false;
    this.onRetry = onRetry;
    this.onGrow = onGrow;
    this.pending = "";

    this.root = element("article", "turn");
    this.root.append(element("div", "asked", question));
    this.body = element("div", "answer");
    this.body.setAttribute("aria-busy", "true");
    this.said = element("div", "said");
    this.text = document.createTextNode("");
    this.said.append(this.text);
    this.waiting = element("div", "waiting hidden");
    this.facts = element("div", "facts");
    this.body.append(this.said, this.waiting, this.facts);
    this.root.append(this.body);
    this.startedMs = performance.now();
  }

  queued(position) {
    this.waiting.classList.remove("hidden");
    this.waiting.textContent = position ? `Waiting, ${position} ahead` : "Next in line";
  }

  started() {
    this.waiting.classList.add("hidden");
  }

  delta(text, numTokens) {
    const nowMs = performance.now();
    this.firstMs ??= nowMs;
    this.lastMs = nowMs;
    this.firstBatch ??= numTokens;
    this.numTokens += numTokens;
    this.answer += text;
    this.pending += text;
    this.painting ??= requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.painting = undefined;
    this.started();
    this.text.appendData(this.pending);
    this.pending = "";
    this.showFacts();
    this.onGrow();
  }

  done(finishReason, usage) {
    this.numTokens = usage?.completion_tokens ?? this.numTokens;
    this.isComplete = this.answer !== "";
    this.end(ENDS[finishReason] ?? finishReason);
  }

  failed(message) {
    this.body.classList.add("failed");
    const trouble = element("div", "trouble", message);
    trouble.setAttribute("role", "alert");
    this.facts.before(trouble);
    this.end("");
  }

  end(remark) {
    cancelAnimationFrame(this.painting);
    this.paint();
    this.waiting.classList.add("hidden");
    this.body.setAttribute("aria-busy", "false");
    this.showFacts(remark);
    if (this.answer) this.addAction("Copy", (button) => this.copy(button));
    this.addAction("Ask again", () => this.onRetry(this));
    this.onGrow();
  }

  showFacts(remark = "") {
    const facts = [];
    if (this.firstMs !== undefined) {
      facts.push(["TTFT", `${milliseconds.format(this.firstMs - this.startedMs)} ms`]);
      const spanS = (this.lastMs - this.firstMs) / 1000;
      const numAfter = this.numTokens - this.firstBatch;
      if (numAfter > 0 && spanS > 0) facts.push(["", `${rates.format(numAfter / spanS)} tokens/s`]);
      facts.push(["", `${this.numTokens} ${this.numTokens === 1 ? "token" : "tokens"}`]);
    }
    if (remark) facts.push(["", remark]);
    this.facts.replaceChildren(
      ...facts.map(([name, value]) => {
        const fact = element("span", "", name ? `${name} ` : "");
        fact.append(element("b", "", value));
        return fact;
      }),
    );
  }

  addAction(label, action) {
    const button = element("button", "do", label);
    button.type = "button";
    button.addEventListener("click", () => action(button));
    this.facts.append(button);
  }

  async copy(button) {
    try {
      await navigator.clipboard.writeText(this.answer);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1600);
  }
}
