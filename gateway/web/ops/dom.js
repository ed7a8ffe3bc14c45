// Elements with text in them; what comes from data is never HTML.

export const at = (id) => document.getElementById(id);

/** An element of a class, with a text or with children. */
export function make(name, className = "", ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A cell of a table. */
export function cell(content, className = "", title = "") {
  const element = make("td", className, content);
  if (title) element.title = title;
  return element;
}

/** A row that says that there are none, across the whole table. */
export function emptyRow(text, columns) {
  const only = cell(text, "none");
  only.colSpan = columns;
  return make("tr", "", only);
}

/** How a request ended, with its dot. */
export function statusMark(name, text, status) {
  const element = make(name, "status", make("span", "dot"), text);
  element.dataset.status = status;
  return element;
}
