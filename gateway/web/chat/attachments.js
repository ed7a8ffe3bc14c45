// Attachments: files and long pastes, sent as text under their names.

import { button, byId, icon, make } from "../dom.js";
import { fetchWithKey } from "../key.js";

const CROSS = "M4 4l8 8M12 4l-8 8";
const MOST_BYTES = 1_000_000;
const MOST_CHARACTERS = 100_000; // used if the gateway cannot count tokens
const LONG_PASTE_LINES = 40;
const LONG_PASTE_CHARACTERS = 4_000;
const LARGEST_SHARE = 0.75; // share of the model's window, to leave room for question and answer
const LANGUAGES = {
  cs: "csharp", h: "c", hpp: "cpp", js: "javascript", kt: "kotlin", md: "markdown", mjs: "javascript",
  py: "python", rb: "ruby", rs: "rust", sh: "bash", ts: "typescript", txt: "", yml: "yaml",
};
const whole = new Intl.NumberFormat("en");

/**
 * `onChange()` is called after a change of the attachments. `model()` names the model for token
 * counts.
 */
export class Attachments {
  constructor({ onChange, model }) {
    Object.assign(this, { onChange, model });
    this.items = [];
    this.numReading = 0;
    this.list = byId("attachments");
    this.trouble = byId("attach-trouble");
    const picker = byId("attach-file");
    byId("attach").addEventListener("click", () => picker.click());
    picker.addEventListener("change", () => {
      this.addFiles([...picker.files]);
      picker.value = "";
    });
    this.#acceptDrops();
  }

  get isReading() {
    return this.numReading > 0;
  }

  /** Attach a pasted file or long text; return true if it was attached. */
  takePaste(data) {
    if (data.files.length > 0) {
      this.addFiles([...data.files]);
      return true;
    }
    const text = data.getData("text/plain");
    const numLines = text.split("\n").length;
    if (numLines <= LONG_PASTE_LINES && text.length <= LONG_PASTE_CHARACTERS) return false;
    this.#add("pasted.txt", () => text);
    return true;
  }

  addFiles(files) {
    for (const file of files) this.#add(file.name, () => textOf(file));
  }

  /** Return the question with the attachments in front of it. */
  questionWith(text) {
    return [...this.items.map(blockOf), text].filter(Boolean).join("\n\n");
  }

  clear() {
    this.items = [];
    this.#say("");
    this.#show();
  }

  async #add(name, read) {
    this.numReading += 1;
    this.#say("");
    this.onChange();
    try {
      const text = await read();
      const item = { name: this.#nameFor(name), text, numTokens: null };
      await this.#measure(item);
      this.items.push(item);
    } catch (error) {
      if (!(error instanceof UnfitError)) throw error;
      this.#say(`${name} ${error.message}`);
    } finally {
      this.numReading -= 1;
      this.#show();
    }
  }

  /** Throw UnfitError if the model cannot read this with the other attachments. */
  async #measure(item) {
    const counted = await countTokens(this.model(), item.text);
    const others = this.items.reduce((sum, { numTokens, text }) => sum + (numTokens ?? text.length / 4), 0);
    if (!counted) {
      if (item.text.length > MOST_CHARACTERS) {
        throw new UnfitError(`is too long: ${whole.format(item.text.length)} characters, of at most ${whole.format(MOST_CHARACTERS)}.`);
      }
      return;
    }
    item.numTokens = counted.count;
    const most = Math.floor(counted.max_model_len * LARGEST_SHARE);
    if (counted.max_model_len && others + counted.count > most) {
      const also = others ? " with the files already attached" : "";
      throw new UnfitError(
        `is too long${also}: ${whole.format(Math.ceil(others + counted.count))} tokens; ${this.model()} has room for ${whole.format(most)}.`,
      );
    }
  }

  #nameFor(name) {
    const taken = new Set(this.items.map((item) => item.name));
    let free = name;
    for (let number = 2; taken.has(free); number += 1) free = name.replace(/(\.[^.]*)?$/, `-${number}$1`);
    return free;
  }

  #say(text) {
    this.trouble.textContent = text;
    this.trouble.hidden = text === "";
  }

  #show() {
    this.list.hidden = this.items.length === 0;
    this.list.replaceChildren(...this.items.map((item) => this.#chip(item)));
    this.onChange();
  }

  #chip(item) {
    const { name, text, numTokens } = item;
    const lines = text.split("\n").length;
    const size = numTokens === null ? `${whole.format(lines)} lines` : `${whole.format(numTokens)} tokens`;
    const remove = button("", () => {
      this.items = this.items.filter((other) => other !== item);
      this.#say("");
      this.#show();
      byId("prompt").focus();
    }, { class: "remove", "aria-label": `Remove ${name}` });
    remove.append(icon(CROSS));
    return make("li", { title: text.slice(0, 400) }, make("b", {}, name), ` ${size}`, remove);
  }

  #acceptDrops() {
    const page = byId("page");
    const hasFiles = (event) => event.dataTransfer.types.includes("Files");
    page.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      page.classList.add("dropping");
    });
    page.addEventListener("dragleave", (event) => {
      if (!page.contains(event.relatedTarget)) page.classList.remove("dropping");
    });
    page.addEventListener("drop", (event) => {
      page.classList.remove("dropping");
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.addFiles([...event.dataTransfer.files]);
      byId("prompt").focus();
    });
  }
}

/** Error: the file cannot be attached. The message follows the file's name. */
class UnfitError extends Error {}

async function textOf(file) {
  if (file.size > MOST_BYTES) {
    throw new UnfitError(`is too large: ${whole.format(file.size)} bytes, of at most ${whole.format(MOST_BYTES)}.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new UnfitError("is not text in UTF-8, or cannot be read. Only text can be attached.");
  }
  if (text.includes("\0")) throw new UnfitError("is a binary file. Only text can be attached.");
  if (!text.trim()) throw new UnfitError("is empty.");
  return text.replaceAll("\r\n", "\n");
}

/** Return `{count, max_model_len}`, or null without an answer of the gateway. */
async function countTokens(model, prompt) {
  const options = {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ model, prompt }),
  };
  const answer = await fetchWithKey("/v1/tokenize", options).catch(() => null);
  return answer?.ok ? answer.json() : null;
}

/** Return the text in a code fence longer than any fence in the text. */
function blockOf({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  const extension = /\.([A-Za-z0-9]+)$/.exec(name)?.[1].toLowerCase() ?? "";
  return `${name}\n${fence}${LANGUAGES[extension] ?? extension}\n${text.replace(/\n$/, "")}\n${fence}`;
}
