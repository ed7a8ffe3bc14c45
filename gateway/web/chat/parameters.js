// Parameters of a conversation: system prompt and sampling.

import { byId, make } from "../dom.js";

const NUMBERS = {
  temperature: { least: 0, most: 2, usual: 1 },
  top_p: { least: 0, most: 1, usual: 1, isAbove: true },
  max_tokens: { least: 1, most: 10_000_000, isWhole: true, usual: "as many as fit" },
  seed: { least: 0, most: Number.MAX_SAFE_INTEGER, isWhole: true, usual: "drawn anew each time" },
};
const MOST_STOPS = 16;

/** Parameters dialog. `onChange(parameters)` is called with the fields that are not empty. */
export class Parameters {
  constructor({ onChange }) {
    this.dialog = byId("parameters");
    this.form = this.dialog.querySelector("form");
    this.onChange = onChange;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
    this.form.addEventListener("input", ({ target }) => target.name && this.check(target));
    byId("parameters-close").addEventListener("click", () => this.dialog.close());
    byId("parameters-reset").addEventListener("click", () => this.fill({}));
  }

  /** Open the dialog; `sampling_defaults` of the model's `card` are the placeholders. */
  open(parameters, card) {
    const window = card?.max_model_len;
    for (const [name, { usual }] of Object.entries(NUMBERS)) {
      const own = card?.sampling_defaults?.[name];
      const text = own === undefined || own === null ? usual : `${own} (of ${card.id})`;
      this.form.elements[name].placeholder = String(text);
    }
    this.mostTokens = window ?? NUMBERS.max_tokens.most;
    this.fill(parameters);
    this.dialog.showModal();
  }

  fill(parameters) {
    const { elements } = this.form;
    elements.system.value = parameters.system ?? "";
    for (const name of Object.keys(NUMBERS)) elements[name].value = parameters[name] ?? "";
    elements.stop.value = (parameters.stop ?? []).join("\n");
    for (const field of this.fields()) this.check(field);
  }

  fields() {
    return ["system", ...Object.keys(NUMBERS), "stop"].map((name) => this.form.elements[name]);
  }

  save() {
    const bad = this.fields().find((field) => !this.check(field));
    if (bad) {
      bad.focus();
      return;
    }
    const found = {};
    for (const field of this.fields()) {
      const text = field.value.trim();
      if (!text) continue;
      if (field.name in NUMBERS) found[field.name] = Number(text);
      else if (field.name === "stop") found.stop = stopsOf(field.value);
      else found.system = text;
    }
    this.dialog.close();
    this.onChange(found);
  }

  /** Show a field's error beside it; return true if its value is valid. */
  check(field) {
    const problem = this.problemOf(field);
    const place = byId(`${field.id}-problem`);
    if (!place) return true;
    if (place.textContent !== problem) place.textContent = problem;
    field.setAttribute("aria-invalid", String(problem !== ""));
    return problem === "";
  }

  problemOf({ name, value }) {
    const text = value.trim();
    if (!text) return "";
    if (name === "stop") {
      return stopsOf(value).length > MOST_STOPS ? `At most ${MOST_STOPS} lines.` : "";
    }
    if (!(name in NUMBERS)) return "";
    const { least, isWhole, isAbove } = NUMBERS[name];
    const most = name === "max_tokens" ? this.mostTokens : NUMBERS[name].most;
    const number = Number(text);
    const fits = number >= least && number <= most && !(isAbove && number === least);
    if (fits && (!isWhole || (Number.isInteger(number) && /^\d+$/.test(text)))) return "";
    const kind = isWhole ? "A whole number" : "A number";
    return isAbove ? `${kind} above ${least}, up to ${most}.` : `${kind} from ${least} to ${most}.`;
  }
}

const stopsOf = (text) => text.split("\n").filter((line) => line !== "");

/** Summarize the parameters that are set in the button's title. */
export function showSet({ system, stop, ...numbers }) {
  const words = Object.entries(numbers).map(([name, value]) => `${name} ${value}`);
  if (system) words.unshift("system prompt");
  if (stop) words.push(`${stop.length} stop ${stop.length === 1 ? "string" : "strings"}`);
  const opener = byId("parameters-button");
  opener.title = ["System prompt and parameters", words.join(", ")].filter(Boolean).join(": ");
  opener.classList.toggle("set", Boolean(system));
}

/** Quick choice of a temperature: common values and the current value. */
export class TemperaturePick {
  constructor(onChoose) {
    this.select = byId("temperature");
    this.select.addEventListener("change", () => {
      const { value } = this.select;
      onChoose(value === "" ? undefined : Number(value));
    });
  }

  show(temperature) {
    const value = temperature === undefined ? "" : String(temperature);
    this.select.querySelector("[data-own]")?.remove();
    if (![...this.select.options].some((option) => option.value === value)) {
      this.select.append(make("option", { value, "data-own": "" }, `Temperature ${value}`));
    }
    this.select.value = value;
  }
}
