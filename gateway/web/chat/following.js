// Scrolls to the end of a growing conversation, unless the user has scrolled away.

import { byId } from "../dom.js";

const NEAR_THE_END_PX = 80;

/** `isEmpty()` returns true if the conversation has no turns. */
export class Following {
  constructor({ isEmpty, onReturn }) {
    this.main = byId("scroll");
    this.isEmpty = isEmpty;
    this.isOn = true;
    this.main.addEventListener("scroll", () => {
      this.isOn = this.isAtEnd;
      this.showLatest();
    });
    // Content below the log may grow and shrink the visible area.
    new ResizeObserver(() => this.follow()).observe(this.main);
    byId("latest").addEventListener("click", () => {
      this.isOn = true;
      this.follow();
      onReturn();
    });
  }

  get isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.main;
    return scrollHeight - scrollTop - clientHeight < NEAR_THE_END_PX;
  }

  follow() {
    if (this.isOn && !this.isEmpty()) this.main.scrollTop = this.main.scrollHeight;
    this.showLatest();
  }

  showLatest() {
    byId("latest").hidden = this.isEmpty() || this.isAtEnd;
  }
}
