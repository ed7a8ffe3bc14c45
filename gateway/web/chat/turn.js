// View of a question and its answer.

import { button, copyText, icon, make } from "../dom.js";
import { AnswerView } from "./answer.js";
import { factSpans } from "./facts.js";
import { answerOf } from "./history.js";

const TICK_MS = 250;
const LONG_LINES = 14;
const LONG_CHARACTERS = 1_200;
const EARLIER = "M10 3.5 5.5 8l4.5 4.5";
const LATER = "M6 3.5 10.5 8 6 12.5";
const whole = new Intl.NumberFormat("en");

/**
 * Call `show` again after a change of the turn. Calls `onRetry(turn)`, `onEdit(turn, question)` and
 * `onChoose(turn, step)` for another version. `waitsFor(turn)` returns the model without workers, or
 * "".
 */
export class TurnView {
  constructor(turn, { onRetry, onEdit, onChoose, isMine, waitsFor }) {
    Object.assign(this, { turn, onRetry, onEdit, onChoose, isMine, waitsFor });
    this.answer = new AnswerView();
    this.asked = make("div", { class: "asked" }, ...this.questionNodes(turn.question));
    this.versions = make("span", { class: "versions", hidden: true });
    this.question = make(
      "div",
      { class: "question" },
      this.asked,
      button("Edit", () => this.edit(), { class: "do", "aria-label": "Edit this question" }),
    );
    this.status = make("div", { class: "status", hidden: true });
    this.trouble = make("div", { class: "trouble", role: "alert", hidden: true });
    this.figures = make("span", { class: "figures" });
    this.actions = make("span", { class: "actions" });
    const deeds = make("span", { class: "deeds" }, this.versions, this.actions);
    const facts = make("div", { class: "facts" }, this.figures, deeds);
    this.body = make("div", { class: "answer" }, this.answer.root, this.status, this.trouble, facts);
    // A heading lets screen readers jump from turn to turn.
    const heading = make("h2", { class: "spoken" }, "Question");
    this.root = make("article", { class: "turn" }, heading, this.question, this.body);
    this.show(turn);
  }

  /** Render at most once per frame. */
  showSoon(turn, onShown) {
    this.turn = turn;
    this.painting ??= requestAnimationFrame(() => {
      this.show(this.turn);
      onShown();
    });
  }

  show(turn) {
    cancelAnimationFrame(this.painting);
    this.painting = undefined;
    this.turn = turn;
    const isRunning = turn.state === "running";
    this.body.setAttribute("aria-busy", String(isRunning));
    this.body.classList.toggle("failed", turn.state === "failed");
    this.answer.show(turn.parts);
    this.showStatus(isRunning ? this.statusText() : "");
    this.showTrouble(turn.state === "failed" ? turn.error : null);
    this.figures.replaceChildren(...factSpans(turn));
    if (this.actions.dataset.state !== turn.state) this.showActions(turn.state);
  }

  statusText() {
    const { facts } = this.turn;
    if (!this.isMine(this.turn)) return "Being answered in another tab";
    if (facts.isInterrupted) return "Connection lost. The answer continues after reconnecting";
    if (this.turn.parts.length > 0) return "";
    const place = facts.queued ? `${whole.format(facts.queued)} ahead` : "";
    const missing = this.waitsFor(this.turn);
    if (missing) {
      const also = place && ` (${place})`;
      return `No worker serves ${missing} now. The answer starts when a worker is available${also}`;
    }
    if (facts.queued === undefined) return "";
    const inSeconds = facts.etaS > 0 ? `, in about ${whole.format(Math.ceil(facts.etaS))} s` : "";
    return place ? `Waiting, ${place}${inSeconds}` : "Next in line";
  }

  /** Fold a long question until the user unfolds it. */
  questionNodes(question) {
    const numLines = question.split("\n").length;
    if (numLines <= LONG_LINES && question.length <= LONG_CHARACTERS) return [question];
    const words = make("div", { class: "folded" }, question);
    const size = numLines > LONG_LINES ? `${whole.format(numLines)} lines` : `${whole.format(question.length)} characters`;
    const toggle = button(`Show all ${size}`, () => {
      const isFolded = words.classList.toggle("folded");
      toggle.setAttribute("aria-expanded", String(!isFolded));
      toggle.textContent = isFolded ? `Show all ${size}` : "Show less";
    }, { class: "do", "aria-expanded": "false" });
    return [words, toggle];
  }

  /** Show the version's number, with buttons for the other versions. */
  showVersions(versions) {
    const place = versions.findIndex(({ id }) => id === this.turn.id);
    const words = `${place + 1}/${versions.length}`;
    this.versions.hidden = versions.length < 2;
    if (this.versions.dataset.shown === words) return;
    this.versions.dataset.shown = words;
    const step = (label, drawing, by) => {
      const isEnd = !versions[place + by];
      const made = button("", () => this.onChoose(this.turn, by), { class: "do", "aria-label": label, disabled: isEnd });
      made.append(icon(drawing));
      return made;
    };
    const shown = make("span", { class: "spoken" }, `Version ${place + 1} of ${versions.length}`);
    this.versions.replaceChildren(
      step("Earlier version", EARLIER, -1),
      make("span", { "aria-hidden": "true" }, words),
      shown,
      step("Later version", LATER, 1),
    );
  }

  /** Restore the focus that the previous version had. */
  focusVersions(step) {
    const [earlier, later] = this.versions.querySelectorAll("button");
    const [wanted, other] = step < 0 ? [earlier, later] : [later, earlier];
    (wanted?.disabled ? other : wanted)?.focus();
  }

  showStatus(text) {
    this.status.hidden = !text;
    this.status.textContent = text;
    this.status.classList.toggle("alarm", Boolean(this.turn.facts.isInterrupted) && text !== "");
  }

  showTrouble(error) {
    const message = error?.message ?? "";
    if (this.trouble.textContent !== message) this.trouble.textContent = message;
    this.trouble.hidden = !error;
  }

  showActions(state) {
    clearInterval(this.countdown);
    this.actions.dataset.state = state;
    this.actions.replaceChildren();
    if (state === "running") return;
    const text = answerOf(this.turn);
    if (text) {
      const copy = button("Copy", (pressed) => copyText(answerOf(this.turn), pressed), { class: "do" });
      this.actions.append(copy);
    }
    const retry = button("Retry", () => this.onRetry(this.turn), { class: "do" });
    this.actions.append(retry);
    if (this.turn.error?.retryAtMs > Date.now()) this.countDown(retry, this.turn.error.retryAtMs);
  }

  /** Count down to the retry time of the gateway. */
  countDown(retry, atMs) {
    const tick = () => {
      const leftS = Math.ceil((atMs - Date.now()) / 1e3);
      retry.disabled = leftS > 0;
      retry.textContent = leftS > 0 ? `Retry in ${leftS} s` : "Retry";
      if (leftS <= 0) clearInterval(this.countdown);
    };
    this.countdown = setInterval(tick, TICK_MS);
    tick();
  }

  edit() {
    const field = make("textarea", { value: this.turn.question, rows: 2, "aria-label": "Your question" });
    const close = () => {
      form.replaceWith(this.question);
      this.question.querySelector("button").focus();
    };
    const form = make(
      "form",
      { class: "editing" },
      field,
      make("div", {}, button("Cancel", close, { class: "quiet" }), make("button", { class: "strong" }, "Ask")),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const question = field.value.trim();
      if (question) this.onEdit(this.turn, question);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.question.replaceWith(form);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  /** Stop the timers. */
  close() {
    clearInterval(this.countdown);
    cancelAnimationFrame(this.painting);
    this.root.remove();
  }
}
