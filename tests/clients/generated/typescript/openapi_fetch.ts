// Calls the API with openapi-fetch and the types that openapi-typescript generates.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema";

type Chunk = components["schemas"]["ChatCompletionChunk"];

function given<T>({ data, error }: { data?: T; error?: unknown }): T {
  if (data === undefined) throw new Error(JSON.stringify(error));
  return data;
}

async function main(): Promise<void> {
  const client = createClient<paths, "application/json">({
    baseUrl: process.argv[2],
    headers: { Authorization: "Bearer none" },
  });
  const model = "echo";
  const messages: components["schemas"]["ChatCompletionRequest"]["messages"] = [
    { role: "user", content: "Hello there" },
  ];

  const whole = given(await client.POST("/v1/chat/completions", { body: { model, messages } }));
  const stream = given(
    await client.POST("/v1/chat/completions", {
      body: { model, messages, stream: true },
      parseAs: "stream",
    }),
  );
  let text = "";
  const decoder = new TextDecoder();
  for await (const bytes of stream as unknown as AsyncIterable<Uint8Array>) {
    text += decoder.decode(bytes, { stream: true });
  }
  let streamed = "";
  for (const line of text.split("\n")) {
    if (!line.startsWith("data: {")) continue;
    const chunk = JSON.parse(line.slice(6)) as Chunk;
    for (const choice of chunk.choices) streamed += choice.delta.content ?? "";
  }

  const tools: components["schemas"]["ChatCompletionRequestToolsItem"][] = [
    { function: { name: "look", parameters: { type: "object", properties: {} } } },
  ];
  given(
    await client.POST("/v1/chat/completions", {
      body: { model, messages, tools, tool_choice: "auto", stop: "!", temperature: 0.5 },
    }),
  );
  const models = given(await client.GET("/v1/models"));
  const vectors = given(await client.POST("/v1/embeddings", { body: { model, input: ["a", "b"] } }));
  const tokens = given(await client.POST("/tokenize", { body: { model, prompt: "abc" } }));
  const file = given(
    await client.POST("/v1/files", {
      body: { file: "{}", purpose: "batch" },
      bodySerializer: (body) => {
        const form = new FormData();
        form.append("file", new Blob([body.file]), "requests.jsonl");
        form.append("purpose", body.purpose);
        return form;
      },
    }),
  );
  const answer = given(
    await client.POST("/v1/responses", {
      body: { model, input: [{ role: "user", content: "Hello there" }] },
    }),
  );
  const item = answer.output[0];
  const part = item.type === "message" ? item.content[0] : undefined;
  const message = given(
    await client.POST("/v1/messages", {
      body: { model, max_tokens: 20, messages: [{ role: "user", content: "Hello there" }] },
    }),
  );
  const block = message.content[0];
  const batches = given(await client.GET("/v1/batches", { params: { query: { limit: 5 } } }));
  const refused = await client.POST("/v1/chat/completions", { body: { model: "absent", messages } });

  console.log(
    JSON.stringify({
      whole: whole.choices[0].message.content,
      streamed,
      models: models.data.map((card) => card.id),
      embeddings: vectors.data.length,
      tokens: tokens.count,
      file: file.bytes,
      response: part?.text,
      message: block.type === "text" ? block.text : undefined,
      batches: batches.data.length,
      refused: refused.error?.error.code,
    }),
  );
}

void main();
