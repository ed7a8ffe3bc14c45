// A job as @msgpack/msgpack writes it: integers above 2^53 are float64, names of fields are texts.
import { encode } from "@msgpack/msgpack";

const job = {
  request_id: "from-js",
  model: "demo",
  reply: "local",
  store_result: true,
  deadline_ns: 4e18,
  adapter: null,
  messages: [{ role: "user", content: "hi", name: null }],
  tools: [
    {
      type: "function",
      function: { name: "f", description: null, parameters: { type: "object", properties: {} } },
    },
  ],
  tool_choice: "auto",
  max_completion_tokens: 60.0,
  logit_bias: { 5: 1.5 },
  seed: 2 ** 53,
};
process.stdout.write(encode(job));
