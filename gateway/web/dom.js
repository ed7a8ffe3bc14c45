// Creation of elements in one call. Strings become text nodes, never markup.

export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

/**
 * Return an element with properties and children. `class`, `data-…`, `aria-…` and `role` become
 * attributes.
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class" || name === "role" || name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function button(label, action, properties = {}) {
  const made = make("button", { type: "button", ...properties }, label);
  made.addEventListener("click", () => action(made));
  return made;
}

/** Return a line drawing of 16 by 16 units. */
export function icon(path) {
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", "0 0 16 16");
  drawing.setAttribute("class", "icon");
  drawing.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", path);
  drawing.append(line);
  return drawing;
}

/** Copy text to the clipboard and confirm it on the button for a moment. */
export async function copyText(text, pressed) {
  const label = pressed.textContent;
  pressed.textContent = (await wasCopied(text)) ? "Copied" : "Not allowed";
  setTimeout(() => (pressed.textContent = label), 1_600);
}

async function wasCopied(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  // Plain HTTP has no clipboard API; the old command still works there.
  const field = make("textarea", { value: text, class: "spoken", readOnly: true });
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  return copied;
}
