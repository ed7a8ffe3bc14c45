// API key of this browser, and requests with it. The key is never part of an address.

const NAME = "millrace.key";

/** Return the key, or "". It is stored until the tab closes, or longer if the user chose so. */
export function storedKey() {
  return sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME) ?? "";
}

export function isRemembered() {
  return localStorage.getItem(NAME) !== null;
}

export function storeKey(key, remember) {
  sessionStorage.removeItem(NAME);
  localStorage.removeItem(NAME);
  if (key) (remember ? localStorage : sessionStorage).setItem(NAME, key);
}

/** `fetch` with the key, if there is one. */
export function fetchWithKey(address, options = {}) {
  const headers = new Headers(options.headers);
  const key = storedKey();
  if (key) headers.set("authorization", `Bearer ${key}`);
  return fetch(address, { ...options, headers });
}

/**
 * Ask for a key in the form of a dialog, show the reason, and call `onKey` with the new key. An open
 * dialog stays unchanged.
 */
export function askForKey(dialog, reason, onKey) {
  const [field, remember, why] = ["[name=key]", "[name=remember]", ".why"].map((selector) =>
    dialog.querySelector(selector),
  );
  why.textContent = reason;
  if (dialog.open) return;
  field.value = storedKey();
  remember.checked = isRemembered();
  dialog.querySelector("form").onsubmit = (event) => {
    event.preventDefault();
    storeKey(field.value.trim(), remember.checked);
    dialog.close();
    onKey();
  };
  for (const cancel of dialog.querySelectorAll("[data-close]")) {
    cancel.onclick = () => dialog.close();
  }
  dialog.showModal();
}
