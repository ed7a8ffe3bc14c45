// Whether a worker serves a model, asked of the gateway while somebody waits.

const POLL_MS = 2_000;
const TIMEOUT_MS = 4_000;

/** `onChange()` is called when `serves` may answer something else. */
export class Workers {
  #models = null; // of live workers; null: not known
  #timer = 0;
  #isWanted;

  /** `isWanted()` says whether to go on asking. */
  constructor({ isWanted, onChange }) {
    this.#isWanted = isWanted;
    this.onChange = onChange;
  }

  /** False if no worker does, true if one does or it is not known. A route leads to any model. */
  serves(model, isRoute) {
    if (!this.#models) return true;
    if (isRoute) return this.#models.length > 0;
    return this.#models.some((one) => model === one || model.startsWith(`${one}:`));
  }

  /** Ask now, and again as long as it is wanted. */
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
