// OpenAI's client for Node.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.BASE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "What is grep?" }];
const asked = { model, messages, temperature: 0, max_tokens: 24 };

const text = (await client.chat.completions.create(asked)).choices[0].message.content;
assert(text);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
  streamed += chunk.choices[0]?.delta.content ?? "";
assert.equal(streamed, text);

const input = { model, input: "What is grep?", temperature: 0, max_output_tokens: 24 };
assert.equal((await client.responses.create(input)).output_text, text);
streamed = "";
for await (const event of await client.responses.create({ ...input, stream: true }))
  if (event.type === "response.output_text.delta") streamed += event.delta;
assert.equal(streamed, text);

const begun = await client.chat.completions.create({ ...asked, max_tokens: 2000, stream: true });
for await (const _ of begun) { begun.controller.abort(); break; }
assert.equal((await client.chat.completions.create(asked)).choices[0].message.content, text);
