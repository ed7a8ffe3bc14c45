// Columns of the analytics store's tables, with type, meaning and unit. The rows come from a file of
// this version, without a key, and equal docs/tables.md.

import { Table } from "./table.js";
import { byId, make } from "/static/dom.js";

const table = new Table("columns", [
  { name: "Table", of: (row) => row.table, sort: (row) => row.table },
  { name: "Column", of: (row) => make("code", {}, row.column), sort: (row) => row.column },
  { name: "Type", of: (row) => row.type },
  { name: "Meaning", of: (row) => row.comment },
], "No table or column matches.");

let rows = [];

function show() {
  const words = byId("find").value.trim().toLowerCase().split(/\s+/);
  table.show(rows.filter((row) => words.every((word) => row.text.includes(word))));
}

try {
  const answer = await fetch("tables.json");
  if (!answer.ok) throw new Error(`the gateway answered ${answer.status}`);
  rows = (await answer.json()).map((row) => ({ ...row, text: [row.table, row.column, row.comment].join(" ").toLowerCase() }));
  byId("said").textContent = "Times are UTC. Query the views with the suffix _once: they have each row of their table once.";
  byId("find").addEventListener("input", show);
  show();
} catch (error) {
  byId("said").textContent = `The tables cannot be read now: ${error.message}. Reload this page.`;
}
