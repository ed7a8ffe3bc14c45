// The controls above the figures: range, tenant, model.

import { at, make } from "./dom.js";
import { compact } from "./format.js";
import { CUSTOM, RANGES } from "./view.js";

/** Make the controls; `change(part)` is called with what of the view somebody chose. */
export function makeFilters(change) {
  const group = at("ranges");
  for (const { id, label } of [...RANGES, { id: CUSTOM, label: "Custom" }]) {
    const button = make("button", "", label);
    Object.assign(button, { type: "button", value: id });
    button.setAttribute("role", "radio");
    button.addEventListener("click", () => (id === CUSTOM ? openCustom() : change({ range: id })));
    group.append(button);
  }
  group.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const buttons = [...group.children];
    const next = buttons[(buttons.indexOf(document.activeElement) + move + buttons.length) % buttons.length];
    next.focus();
    if (next.value !== CUSTOM) change({ range: next.value });
  });
  at("custom").addEventListener("submit", (event) => {
    event.preventDefault();
    const from = Date.parse(at("from").value) / 1000;
    const to = Date.parse(at("to").value) / 1000;
    const why = !(from > 0) || !(to > 0) ? "Give both times." : to <= from ? "The end must be after the beginning." : "";
    at("custom-why").textContent = why;
    if (!why) change({ range: CUSTOM, from, to });
  });
  for (const name of ["tenant", "model"]) {
    at(name).addEventListener("change", () => change({ [name]: at(name).value }));
  }
  at("clear").addEventListener("click", () => change({ tenant: "", model: "" }));
}

function openCustom() {
  at("custom").hidden = false;
  mark(CUSTOM);
  at("from").focus();
}

function mark(id) {
  for (const button of at("ranges").children) {
    const mine = button.value === id;
    button.setAttribute("aria-checked", String(mine));
    button.tabIndex = mine ? 0 : -1;
  }
}

/** Have the controls say what the view is; times that nobody chose are those of the frame. */
export function showFilters(view, { bounds }) {
  mark(view.range);
  at("custom").hidden = view.range !== CUSTOM;
  at("custom-why").textContent = "";
  const now = Date.now() / 1000;
  at("from").value = local(bounds.from_s > 0 ? bounds.from_s : now + bounds.from_s);
  at("to").value = local(bounds.to_s > 0 ? bounds.to_s : now);
  for (const name of ["tenant", "model"]) {
    const select = at(name);
    if (view[name] && ![...select.options].some((option) => option.value === view[name])) select.append(choice(view[name], view[name]));
    select.value = view[name];
  }
  at("clear").hidden = !view.tenant && !view.model;
}

/** Offer the tenants and models that had requests in the range, and what is chosen anyway. */
export function offer(rows, view) {
  for (const [name, all] of [["tenant", "All tenants"], ["model", "All models"]]) {
    const select = at(name);
    if (document.activeElement === select) continue;
    const found = rows.filter((row) => row.kind === name && row.name !== "");
    const choices = found.map((row) => choice(row.name, `${row.name} (${compact(row.requests)})`));
    if (view[name] && !found.some((row) => row.name === view[name])) choices.push(choice(view[name], `${view[name]} (0)`));
    select.replaceChildren(choice("", all), ...choices);
    select.value = view[name];
  }
}

function choice(value, text) {
  const option = make("option", "", text);
  option.value = value;
  return option;
}

/** A Unix time as a field for date and time shows it, where the reader is. */
function local(seconds) {
  const date = new Date(seconds * 1000);
  const shifted = new Date(date.getTime() - date.getTimezoneOffset() * 60_000);
  return shifted.toISOString().slice(0, 16);
}
