// Settings: API key, theme, and tools that the model may use.

import { byId, make } from "../dom.js";
import { askForKey, fetchWithKey } from "../key.js";

const THEME = "millrace.theme"; // theme.js reads it
const TOOLS = "millrace.tools";

/** Calls `onKey()` after the user has entered another key. */
export class Settings {
  constructor({ onKey }) {
    this.onKey = onKey;
    this.names = [];
    const theme = byId("theme");
    theme.value = localStorage.getItem(THEME) ?? "";
    theme.addEventListener("change", () => {
      if (theme.value) localStorage.setItem(THEME, theme.value);
      else localStorage.removeItem(THEME);
      dispatchEvent(new StorageEvent("storage", { key: THEME }));
    });
    byId("settings-button").addEventListener("click", () => this.open(""));
  }

  open(reason) {
    askForKey(byId("settings"), reason, this.onKey);
  }

  /** Return the gateway's tools that are switched on. */
  get tools() {
    const wanted = JSON.parse(localStorage.getItem(TOOLS) ?? "[]");
    return this.names.filter((name) => wanted.includes(name));
  }

  /** Show the tools; hide them if the gateway does not answer. */
  async load() {
    const answer = await fetchWithKey("/v1/tools").catch(() => null);
    const { data = [] } = answer?.ok ? await answer.json() : {};
    this.names = data.map(({ name }) => name);
    byId("tools").replaceChildren(...data.map((tool) => this.line(tool)));
    byId("tools-field").hidden = data.length === 0;
  }

  line({ name, description }) {
    const box = make("input", { type: "checkbox", checked: this.tools.includes(name) });
    box.addEventListener("change", () => {
      const others = this.tools.filter((tool) => tool !== name);
      localStorage.setItem(TOOLS, JSON.stringify(box.checked ? [...others, name] : others));
    });
    const words = make("span", {}, make("b", {}, name), ` ${description ?? ""}`);
    return make("label", { class: "check" }, box, words);
  }
}
