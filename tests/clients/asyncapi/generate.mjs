// Parses an AsyncAPI document with the official parser and makes classes of it with Modelina.
// generate.mjs DOCUMENT FOLDER: prints what the parser says and the names of the classes as JSON.

import fs from "node:fs";
import { Parser } from "@asyncapi/parser";
import {
  GoFileGenerator,
  JavaFileGenerator,
  PythonFileGenerator,
  TypeScriptFileGenerator,
} from "@asyncapi/modelina";

const [, , file, folder] = process.argv;
const text = fs.readFileSync(file, "utf8");
const { document, diagnostics } = await new Parser().parse(text);
const said = diagnostics.map(({ severity, code, message }) => ({ severity, code, message }));
const messages = document ? document.allMessages().all().map((one) => one.name()) : [];

const generators = {
  go: [new GoFileGenerator(), { packageName: "millrace" }],
  java: [new JavaFileGenerator({ collectionType: "List" }), { packageName: "millrace" }],
  python: [new PythonFileGenerator(), {}],
  typescript: [new TypeScriptFileGenerator({ modelType: "interface" }), { exportType: "named" }],
};
const names = {};
for (const [language, [generator, options]] of Object.entries(generators)) {
  const target = `${folder}/${language}/millrace`;
  const models = await generator.generateToFiles(JSON.parse(text), target, options);
  names[language] = models.map((one) => one.modelName).filter(Boolean);
}
console.log(JSON.stringify({ said, messages, names }));
