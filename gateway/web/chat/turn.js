// A question and its answer, as they are shown.

import { button, copyText, make } from "../dom.js";
import { AnswerView } from "./answer.js";
import { factSpans } from "./facts.js";
import { answerOf } from "./history.js";

const TICK_MS = 250;

/** `show` again after the turn has changed. Calls `onRetry(turn)` and `onEdit(turn, question)`. */
export class TurnView {
  constructor(turn, { onRetry, onEdit, isMine }) {
    this.turn = turn;
    this.onRetry = onRetry;
    this.onEdit = onEdit;
    this.isMine = isMine;
    this.answer = new AnswerView();
    this.asked = make("div", { class: "asked" }, turn.question);
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
    const facts = make("div", { class: "facts" }, this.figures, this.actions);
    this.body = make("div", { class: "answer" }, this.answer.root, this.status, this.trouble, facts);
    this.root = make("article", { class: "turn" }, this.question, this.body);
    this.show(turn);
  }

  /** At most once for each picture of the screen. */
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
    if (facts.isInterrupted) return "The connection is lost. The answer goes on when it is back";
    if (facts.queued !== undefined) {
      return facts.queued ? `Waiting, ${facts.queued} ahead` : "Next in line";
    }
    return "";
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

  /** The gateway has said when to try again. */
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

  /** Let go of what would tick on. */
  close() {
    clearInterval(this.countdown);
    cancelAnimationFrame(this.painting);
    this.root.remove();
  }
}
