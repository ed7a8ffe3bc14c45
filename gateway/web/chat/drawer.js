// List of conversations: at the side, or over the page on narrow screens.

import { button, byId, copyText, icon, make } from "../dom.js";

const SNIPPET_BEFORE = 24;
const SNIPPET_CHARACTERS = 90;
const MORE = "M3 8h.01M8 8h.01M13 8h.01";
const narrow = matchMedia("(max-width: 60rem)");

/**
 * Calls `onChoose(id)`, `onRename(id, title)`, `onDelete(id)` and `onExport(id, kind)`.
 * `wordsOf(id)` returns the text of a conversation. `onSearch()` loads the conversations, and the
 * search waits for it.
 */
export class Drawer {
  constructor({ onChoose, onRename, onDelete, onExport, onSearch, wordsOf }) {
    Object.assign(this, { onChoose, onRename, onDelete, onExport, onSearch, wordsOf });
    this.search = byId("search");
    this.words = new Map(); // texts of conversations in lower case, for the search
    this.search.addEventListener("focus", async () => {
      await this.onSearch();
      this.words.clear();
      if (this.search.value) this.again();
    });
    this.search.addEventListener("input", () => this.again());
    this.search.addEventListener("keydown", (event) => this.searchKey(event));
    byId("sessions").addEventListener("keydown", (event) => this.listKey(event));
    addEventListener("keydown", (event) => {
      const isSearch = event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey);
      if (!isSearch || document.querySelector("dialog[open]")) return;
      event.preventDefault();
      this.settle(true);
      this.search.focus();
      this.search.select();
    });
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

  /** Make the page behind an open drawer, or a closed drawer, inert. */
  settle(isOpen) {
    document.body.classList.toggle("drawer-open", isOpen && narrow.matches);
    this.root.inert = narrow.matches && !isOpen;
    byId("page").inert = narrow.matches && isOpen;
    byId("menu").setAttribute("aria-expanded", String(isOpen && narrow.matches));
  }

  /** Show the list; `liveIds` are conversations with a running answer. */
  show(sessions, currentId, liveIds) {
    this.shown = [sessions, currentId, liveIds];
    const wanted = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = wanted.length ? sessions.filter((session) => this.has(session, wanted)) : sessions;
    const items = found.map((session) => {
      const item = this.item(session, session.id === currentId);
      item.classList.toggle("live", liveIds.has(session.id));
      const snippet = wanted.length ? this.snippet(session, wanted) : "";
      if (snippet) item.querySelector(".choose").append(make("small", {}, snippet));
      return item;
    });
    byId("sessions").replaceChildren(...items);
    byId("search").hidden = sessions.length === 0;
    byId("no-sessions").hidden = items.length > 0;
    byId("no-sessions").textContent = wanted.length ? "Nothing found." : "Your conversations appear here.";
    byId("found").textContent = wanted.length ? `${items.length} found` : "";
  }

  again() {
    if (this.shown) this.show(...this.shown);
  }

  /** Return whether all words are in its title or text. */
  has(session, wanted) {
    const text = `${session.title}\n${this.textOf(session.id)}`.toLowerCase();
    return wanted.every((word) => text.includes(word));
  }

  textOf(id) {
    if (!this.words.has(id)) this.words.set(id, this.wordsOf(id));
    return this.words.get(id);
  }

  /** Return the text around the first word, if it is not in the title. */
  snippet({ id, title }, wanted) {
    const missing = wanted.find((word) => !title.toLowerCase().includes(word));
    if (!missing) return "";
    const text = this.textOf(id).replace(/\s+/g, " ");
    const from = Math.max(0, text.toLowerCase().indexOf(missing) - SNIPPET_BEFORE);
    return `${from > 0 ? "…" : ""}${text.slice(from, from + SNIPPET_CHARACTERS)}`;
  }

  searchKey(event) {
    const first = byId("sessions").querySelector(".choose");
    if (event.key === "Escape" && this.search.value) {
      event.stopPropagation();
      this.search.value = "";
      this.again();
    } else if (event.key === "ArrowDown" || event.key === "Enter") {
      event.preventDefault();
      if (event.key === "Enter") first?.click();
      else first?.focus();
    }
  }

  /** Move through the list by arrow keys. */
  listKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const entries = [...byId("sessions").querySelectorAll(".choose")];
    const place = entries.indexOf(document.activeElement);
    if (!step || place < 0) return;
    event.preventDefault();
    (entries[place + step] ?? (step < 0 ? this.search : entries[place])).focus();
  }

  item(session, isCurrent) {
    const { id, title, account } = session;
    const choose = button(title, () => this.choose(id), { class: "choose", title });
    if (isCurrent) choose.setAttribute("aria-current", "true");
    const menu = make(
      "span",
      { class: "menu" },
      button("Rename", () => this.rename(item, session), { class: "do" }),
      button("Markdown", () => this.onExport(id, "markdown"), { class: "do", "aria-label": `Save ${title} as Markdown` }),
      button("JSON", () => this.onExport(id, "json"), { class: "do", "aria-label": `Save ${title} as JSON` }),
      // Links work only for conversations that the gateway saves for the tenant.
      account ? this.linkButton(session) : null,
      button("Delete", (pressed) => this.confirmDelete(pressed, id), { class: "do" }),
    );
    const more = button("", () => more.setAttribute("aria-expanded", String(item.classList.toggle("opened"))), {
      class: "more",
      "aria-expanded": "false",
      "aria-label": `More for ${title}`,
    });
    more.append(icon(MORE));
    const item = make("li", { "data-session": id }, make("div", { class: "line" }, choose, more), menu);
    return item;
  }

  linkButton({ id, title }) {
    const copy = (pressed) => copyText(`${location.origin}/#${id}`, pressed);
    return button("Link", copy, {
      class: "do",
      "aria-label": `Copy the link to ${title}`,
      title: "Opens for anyone with an API key of the same tenant",
    });
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

  /** Delete on a second press within a moment. */
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
