// The loop of four tools of frameworks.py by the Vercel AI SDK, beside configured.mjs, the lines of
// docs/agents.md that make `model`. It streams, and prints the answer.
import { execSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { model } from "./configured.mjs";

const text = z.string();
const tools = {
  read_file: tool({
    description: "Read a file.",
    inputSchema: z.object({ path: text }),
    execute: ({ path }) => readFileSync(path, "utf8"),
  }),
  write_file: tool({
    description: "Write a file.",
    inputSchema: z.object({ path: text, text }),
    execute: (input) => writeFileSync(input.path, input.text) ?? "written",
  }),
  replace: tool({
    description: "Replace a text in a file.",
    inputSchema: z.object({ path: text, old: text, new: text }),
    execute: (input) => {
      const changed = readFileSync(input.path, "utf8").replace(input.old, input.new);
      return writeFileSync(input.path, changed) ?? "replaced";
    },
  }),
  shell: tool({
    description: "Run a command.",
    inputSchema: z.object({ command: text }),
    execute: ({ command }) => execSync(command, { encoding: "utf8" }),
  }),
};
const result = streamText({ model, tools, prompt: "Do it.", stopWhen: stepCountIs(6) });
console.log(await result.text);
