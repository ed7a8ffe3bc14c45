// Choice of a model.

import { byId } from "../dom.js";
import { fetchWithKey } from "../key.js";

const LAST = "millrace.model";
const RETRY_MS = 2_000;

/**
 * Model menu. `onLoad()` is called when the models are loaded, `onRefused(message)` when the gateway
 * needs another key, `onChange()` when the user has chosen. It retries while `isWanted()`.
 */
export class Models {
  constructor({ onLoad, onRefused, onChange, isWanted }) {
    Object.assign(this, { onLoad, onRefused, isWanted });
    this.select = byId("model");
    this.cards = [];
    this.select.addEventListener("change", () => {
      localStorage.setItem(LAST, this.select.value);
      onChange();
    });
  }

  get isReady() {
    return !this.select.disabled;
  }

  get name() {
    return this.select.value;
  }

  get card() {
    return this.cardOf(this.name);
  }

  /** Return the card of a model, or of an adapter's model. */
  cardOf(name) {
    return this.cards.find(({ id, adapters = [] }) => id === name || adapters.includes(name));
  }

  /** Choose a model, if it exists. */
  choose(name) {
    if (this.cards.some(({ id }) => id === name)) this.select.value = name;
  }

  forget() {
    this.select.disabled = true;
  }

  async load(lastUsed) {
    const answer = await fetchWithKey("/v1/models").catch(() => null);
    if (answer?.status === 401 || answer?.status === 403) {
      const { error } = await answer.json();
      this.onRefused(error.message);
      return;
    }
    if (!answer?.ok) {
      setTimeout(() => this.isWanted() && this.load(lastUsed), RETRY_MS);
      return;
    }
    const { data } = await answer.json();
    this.cards = data;
    const options = data.map(({ id, description }) => {
      const option = new Option(id, id);
      option.title = description ?? "";
      return option;
    });
    this.select.replaceChildren(...options);
    this.choose(lastUsed || localStorage.getItem(LAST));
    this.select.disabled = data.length === 0;
    this.onLoad();
  }
}
