// Conversations saved at the gateway, shared by all browsers with keys of one tenant.

import { fetchWithKey, storedKey } from "../key.js";

const MOST_LISTED = 60;
const MOST_ATTEMPTS = 4;
const PUSH_MS = 400;
const TIMEOUT_MS = 8_000;
// Reasons for keeping conversations in the browser only, by the gateway's error code.
const REASONS = {
  chats_need_key: "Kept in this browser only. Conversations are saved on the server when you use an API key.",
  state_unavailable: "Kept in this browser only: the server cannot save conversations now.",
  too_many_chats: "Kept in this browser only: the limit of saved conversations is reached. Delete some.",
  payload_too_large: "This conversation is too long to save on the server. It is kept in this browser.",
};
const UNKNOWN = "Kept in this browser only.";
const KEPT = "Saved on the server for your API key, and in this browser.";

/**
 * Synchronization of the store with the gateway. `onList(null)` is called when the list has changed,
 * `onChange(id)` when a conversation has changed, and `onPlace(text)` with the place of storage.
 */
export class Chats {
  #store;
  #say;
  #timers = new Map();
  #pushing = new Map();
  #isOn = false;
  #listed;

  constructor({ store, onList, onChange, onPlace }) {
    this.#store = store;
    this.#say = { onList, onChange, onPlace };
    store.account = accountOf(storedKey());
    this.list();
  }

  /** Load the gateway's list: at first, with another key, and when the user returns to the page. */
  list() {
    this.#listed = this.#list();
    return this.#listed;
  }

  async #list() {
    // Deferred, so that the caller has set up the objects that the callbacks use.
    await null;
    const account = accountOf(storedKey());
    if (account !== this.#store.account) {
      this.#store.account = account;
      this.#say.onList(null);
    }
    if (!account) return this.#off("chats_need_key");
    const { answer, body } = await this.#call(`?limit=${MOST_LISTED}`);
    if (!answer?.ok) return this.#off(body?.error?.code);
    this.#isOn = true;
    this.#say.onPlace(KEPT);
    this.#take(body);
    for (const { id, isChanged, account: owner } of this.#store.sessions()) {
      if (isChanged && owner) this.push(id);
    }
    return this.#say.onList(null);
  }

  /**
   * Fetch a conversation if the gateway has a newer revision. With `isLinked`, fetch it even if this
   * browser does not know it.
   */
  async pull(id, isLinked = false) {
    await this.#listed;
    const session = this.#store.session(id);
    const isNewer = session?.account && session.newest > (session.revision ?? 0);
    if (!this.#isOn || !(isNewer || (isLinked && !session))) return;
    const { answer, body } = await this.#call(`/${id}`);
    if (answer?.ok) this.#takeOne(id, body, { account: this.#store.account });
  }

  /** Load changes of other browsers. */
  async catchUp(id) {
    if (this.#isOn) await this.list();
    await this.pull(id);
  }

  /** Fetch all missing conversations, for the search. */
  async pullAll() {
    for (const { id } of this.#store.sessions()) await this.pull(id);
  }

  /** Save changed conversations after a short delay. */
  push(id) {
    if (!this.#isOn) return;
    clearTimeout(this.#timers.get(id));
    this.#timers.set(id, setTimeout(() => this.#pushNow(id), PUSH_MS));
  }

  async delete(id) {
    clearTimeout(this.#timers.get(id));
    await this.#pushing.get(id);
    if (!this.#isOn) return;
    const { answer } = await this.#call(`/${id}`, { method: "DELETE" });
    if (!answer?.ok && answer?.status !== 404) throw new Error("The copy on the server remains, because the gateway is unreachable.");
  }

  async #pushNow(id) {
    await this.#pushing.get(id);
    const pushing = this.#pushAll(id).finally(() => this.#pushing.delete(id));
    this.#pushing.set(id, pushing);
    await pushing;
  }

  /** Save a conversation. On a conflict, merge the newer revision of the gateway and send again. */
  async #pushAll(id) {
    for (let attempt = 0; attempt < MOST_ATTEMPTS; attempt += 1) {
      const session = this.#store.session(id);
      if (!session?.isChanged) return;
      this.#store.putSession(id, { isChanged: false, account: this.#store.account });
      const document = this.#store.document(id);
      const sent = { revision: session.revision ?? 0, title: session.title.slice(0, 200), document };
      const { answer, body } = await this.#call(`/${id}`, { method: "POST", body: JSON.stringify(sent) });
      if (!this.#store.session(id)) return;
      if (answer?.ok) {
        this.#store.putSession(id, { revision: body.revision, newest: body.revision });
        return;
      }
      this.#store.putSession(id, { isChanged: true });
      if (body?.error?.code !== "chat_changed") {
        this.#say.onPlace(REASONS[body?.error?.code] ?? UNKNOWN);
        return;
      }
      const found = await this.#call(`/${id}`);
      if (found.answer?.ok) this.#takeOne(id, found.body, { isChanged: true });
      // Deleted in another browser, but changed here since.
      else if (found.answer?.status === 404) this.#store.putSession(id, { revision: 0 });
      else return;
    }
  }

  #takeOne(id, { revision, document }, changes = {}) {
    this.#store.takeDocument(id, document, { revision, newest: revision, ...changes });
    this.#say.onChange(id);
  }

  /** Add the gateway's new conversations; forget deleted ones unless they changed here. */
  #take({ data, has_more: hasMore }) {
    const account = this.#store.account;
    const there = new Set(data.map(({ id }) => id));
    const oldestMs = hasMore ? data.at(-1).updated_at * 1e3 : 0;
    for (const { id, usedMs, revision, isChanged, account: owner } of this.#store.sessions()) {
      const isGone = owner && revision && !there.has(id) && !isChanged && usedMs >= oldestMs;
      if (isGone) this.#store.removeSession(id);
    }
    for (const { id, title, revision, updated_at: updatedS } of data) {
      const known = this.#store.session(id);
      if (known?.revision >= revision) continue;
      const usedMs = Math.max(updatedS * 1e3, known?.usedMs ?? 0);
      const changes = { account, newest: revision, usedMs };
      if (!known?.isChanged) changes.title = title;
      this.#store.putSession(id, changes);
    }
  }

  #off(code) {
    this.#isOn = false;
    this.#say.onPlace(REASONS[code] ?? UNKNOWN);
  }

  async #call(path, options = {}) {
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const headers = { "content-type": "application/json" };
    const answer = await fetchWithKey(`/v1/chats${path}`, { ...options, headers, signal }).catch(() => null);
    const body = await answer?.json().catch(() => null);
    return { answer, body };
  }
}

/** Return the public part of a key, its id at the gateway. */
function accountOf(key) {
  return /^mr-([^-]+)-/.exec(key)?.[1] ?? "";
}
