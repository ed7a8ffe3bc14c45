// Controls for range, tenant and model.

import { compact } from "./format.js";
import { COMPARISONS, CUSTOM, RANGES } from "./view.js";
import { button, byId } from "/static/dom.js";

/** Make the controls; `change(part)` is called with the changed part of the view. */
export function makeFilters(change) {
  const group = byId("ranges");
  for (const { id, label } of [...RANGES, { id: CUSTOM, label: "Custom" }]) {
    const choose = () => (id === CUSTOM ? openCustom() : change({ range: id }));
    group.append(button(label, choose, { value: id, role: "radio" }));
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
  byId("custom").addEventListener("submit", (event) => {
    event.preventDefault();
    const from = Date.parse(byId("from").value) / 1000;
    const to = Date.parse(byId("to").value) / 1000;
    const why = !(from > 0) || !(to > 0) ? "Enter both times." : to <= from ? "The end must be after the beginning." : "";
    byId("custom-why").textContent = why;
    if (!why) change({ range: CUSTOM, from, to });
  });
  byId("compare").append(...COMPARISONS.map(({ id, label }) => new Option(label, id)));
  for (const name of ["tenant", "model", "compare"]) {
    byId(name).addEventListener("change", () => change({ [name]: byId(name).value }));
  }
  byId("clear").addEventListener("click", () => change({ tenant: "", model: "" }));
}

function openCustom() {
  byId("custom").hidden = false;
  mark(CUSTOM);
  byId("from").focus();
}

function mark(id) {
  for (const button of byId("ranges").children) {
    const mine = button.value === id;
    button.setAttribute("aria-checked", String(mine));
    button.tabIndex = mine ? 0 : -1;
  }
}

/** Show the view in the controls. Without chosen times, show the bounds of the frame. */
export function showFilters(view, { bounds }) {
  mark(view.range);
  byId("custom").hidden = view.range !== CUSTOM;
  byId("custom-why").textContent = "";
  const now = Date.now() / 1000;
  byId("from").value = local(bounds.from_s > 0 ? bounds.from_s : now + bounds.from_s);
  byId("to").value = local(bounds.to_s > 0 ? bounds.to_s : now);
  for (const name of ["tenant", "model"]) {
    const select = byId(name);
    if (view[name] && ![...select.options].some((option) => option.value === view[name])) select.append(new Option(view[name]));
    select.value = view[name];
  }
  byId("compare").value = view.compare;
  byId("clear").hidden = !view.tenant && !view.model;
}

/** Offer the tenants and models with requests in the range, and the current choices. */
export function offer(rows, view) {
  for (const [name, all] of [["tenant", "All tenants"], ["model", "All models"]]) {
    const select = byId(name);
    if (document.activeElement === select) continue;
    const found = rows.filter((row) => row.kind === name && row.name !== "");
    const choices = found.map((row) => new Option(`${row.name} (${compact(row.requests)})`, row.name));
    if (view[name] && !found.some((row) => row.name === view[name])) choices.push(new Option(`${view[name]} (0)`, view[name]));
    select.replaceChildren(new Option(all, ""), ...choices);
    select.value = view[name];
  }
}

/** Return a Unix time as the value of a date and time field, in the browser's time zone. */
function local(seconds) {
  const date = new Date(seconds * 1000);
  const shifted = new Date(date.getTime() - date.getTimezoneOffset() * 60_000);
  return shifted.toISOString().slice(0, 16);
}
