// The list of conversations: at the side, or over the page where there is no room for it.

import { button, byId, icon, make } from "../dom.js";

const MORE = "M3 8h.01M8 8h.01M13 8h.01";
const narrow = matchMedia("(max-width: 60rem)");

/** Calls `onChoose(id)`, `onRename(id, title)` and `onDelete(id)`. */
export class Drawer {
  constructor({ onChoose, onRename, onDelete }) {
    Object.assign(this, { onChoose, onRename, onDelete });
    this.root = byId("drawer");
    byId("menu").addEventListener("click", () => this.open());
    byId("shade").addEventListener("click", () => this.close());
    byId("close-drawer").addEventListener("click", () => this.close());
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isOpen) {
        event.stopPropagation();
        this.close();
      }
    });
    narrow.addEventListener("change", () => this.settle(false));
    this.settle(false);
  }

  get isOpen() {
    return document.body.classList.contains("drawer-open");
  }

  open() {
    this.settle(true);
    byId("close-drawer").focus();
  }

  close() {
    if (!this.isOpen) return;
    this.settle(false);
    byId("menu").focus();
  }

  /** What is behind an open drawer, or in a closed one, cannot be reached. */
  settle(isOpen) {
    document.body.classList.toggle("drawer-open", isOpen && narrow.matches);
    this.root.inert = narrow.matches && !isOpen;
    byId("page").inert = narrow.matches && isOpen;
    byId("menu").setAttribute("aria-expanded", String(isOpen && narrow.matches));
  }

  /** `liveIds` are those whose answer goes on in the background. */
  show(sessions, currentId, liveIds) {
    const items = sessions.map((session) => {
      const item = this.item(session, session.id === currentId);
      item.classList.toggle("live", liveIds.has(session.id));
      return item;
    });
    byId("sessions").replaceChildren(...items);
    byId("no-sessions").hidden = items.length > 0;
  }

  item(session, isCurrent) {
    const { id, title } = session;
    const choose = button(title, () => this.choose(id), { class: "choose", title });
    if (isCurrent) choose.setAttribute("aria-current", "true");
    const menu = make(
      "span",
      { class: "menu" },
      button("Rename", () => this.rename(item, session), { class: "do" }),
      button("Delete", (pressed) => this.confirmDelete(pressed, id), { class: "do" }),
    );
    const more = button("", () => item.classList.toggle("opened"), {
      class: "more",
      "aria-label": `Rename or delete ${title}`,
    });
    more.append(icon(MORE));
    const item = make("li", { "data-session": id }, make("div", { class: "line" }, choose, more), menu);
    return item;
  }

  choose(id) {
    this.onChoose(id);
    this.close();
  }

  rename(item, { id, title }) {
    const field = make("input", { value: title, maxLength: 120, "aria-label": "Title of the conversation" });
    const form = make("form", { class: "line" }, field, make("button", { class: "do" }, "Save"));
    const save = () => this.onRename(id, field.value.trim() || title);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      save();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.onRename(id, title);
    });
    item.replaceChildren(form);
    field.select();
  }

  /** A second press within a moment deletes. */
  confirmDelete(pressed, id) {
    if (pressed.dataset.sure) {
      this.onDelete(id);
      return;
    }
    pressed.dataset.sure = "true";
    pressed.textContent = "Delete for good?";
    setTimeout(() => {
      delete pressed.dataset.sure;
      pressed.textContent = "Delete";
    }, 4_000);
  }
}
