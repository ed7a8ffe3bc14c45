// Polls the gateway for models with workers while a request waits.

const POLL_MS = 2_000;
const TIMEOUT_MS = 4_000;

/** Poller; `onChange()` is called when the result of `serves` may have changed. */
export class Workers {
  #models = null; // of live workers; null: not known
  #timer = 0;
  #isWanted;

  /** Poll while `isWanted()`. */
  constructor({ isWanted, onChange }) {
    this.#isWanted = isWanted;
    this.onChange = onChange;
  }

  /** Return false if no worker serves the model, true if one does or it is unknown. A route may use any model. */
  serves(model, isRoute) {
    if (!this.#models) return true;
    if (isRoute) return this.#models.length > 0;
    return this.#models.some((one) => model === one || model.startsWith(`${one}:`));
  }

  /** Poll now, and repeat while wanted. */
  async look() {
    clearTimeout(this.#timer);
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const answer = await fetch("/healthz", { signal }).catch(() => null);
    // 503 has a body, too: the gateway cannot accept requests.
    const { models = null } = (await answer?.json().catch(() => null)) ?? {};
    const isNew = JSON.stringify(models) !== JSON.stringify(this.#models);
    this.#models = models;
    if (isNew) this.onChange();
    clearTimeout(this.#timer);
    if (this.#isWanted()) this.#timer = setTimeout(() => this.look(), POLL_MS);
  }
}
